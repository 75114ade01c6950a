package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strconv"
	"time"
)

// Types of the provenance: in-toto's statement with SLSA's predicate of version 1.
const (
	statementType = "https://in-toto.io/Statement/v1"
	predicateType = "https://slsa.dev/provenance/v1"
	// buildType is what hack/release.sh does; its parameters are those of parameters.
	buildType = source + "/tree/main/hack/release.sh"
)

type statement struct {
	Type          string    `json:"_type"`
	Subject       []subject `json:"subject"`
	PredicateType string    `json:"predicateType"`
	Predicate     predicate `json:"predicate"`
}

type subject struct {
	Name   string            `json:"name"`
	Digest map[string]string `json:"digest"`
}

type predicate struct {
	Definition definition `json:"buildDefinition"`
	Run        runDetails `json:"runDetails"`
}

type definition struct {
	Type         string       `json:"buildType"`
	External     parameters   `json:"externalParameters"`
	Internal     internals    `json:"internalParameters"`
	Dependencies []dependency `json:"resolvedDependencies"`
}

// parameters are what who builds can choose.
type parameters struct {
	Version string `json:"version"`
	Hub     string `json:"hub"`
	// Tag is the git tag; without one it is a snapshot.
	Tag string `json:"tag,omitempty"`
}

type internals struct {
	// Epoch is the time of everything in the release.
	Epoch string `json:"SOURCE_DATE_EPOCH"`
	Dirty bool   `json:"dirty"`
}

type dependency struct {
	URI    string            `json:"uri"`
	Digest map[string]string `json:"digest,omitempty"`
}

type runDetails struct {
	Builder struct {
		ID string `json:"id"`
	} `json:"builder"`
}

// provenance states what the files were made of. Modules are in the bills of materials.
func provenance(o options, sums map[string]string) statement {
	out := statement{Type: statementType, PredicateType: predicateType}
	for _, file := range sorted(sums) {
		out.Subject = append(out.Subject, subject{file, map[string]string{"sha256": sums[file]}})
	}
	repository := "git+" + source
	if o.Tag != "" {
		repository += "@refs/tags/" + o.Tag
	}
	out.Predicate.Definition = definition{
		Type: buildType, External: parameters{o.Version, o.Hub, o.Tag},
		Internal: internals{strconv.FormatInt(o.Created.Unix(), 10), o.Dirty},
		Dependencies: []dependency{
			{repository, map[string]string{"gitCommit": o.Revision}},
			{"pkg:generic/go@" + runtime.Version(), nil},
		},
	}
	out.Predicate.Run.Builder.ID = o.Builder
	return out
}

func readProvenance(dir string) (statement, error) {
	text, err := os.ReadFile(filepath.Join(dir, provenanceFile)) //nolint:gosec // of the release
	if err != nil {
		return statement{}, fmt.Errorf("reading the provenance: %w", err)
	}
	var out statement
	if err := json.Unmarshal(text, &out); err != nil {
		return statement{}, fmt.Errorf("%s: %w", provenanceFile, err)
	}
	p := out.Predicate
	if out.Type != statementType || out.PredicateType != predicateType || p.Definition.Type != buildType ||
		p.Run.Builder.ID == "" || len(p.Definition.Dependencies) == 0 || p.Definition.Dependencies[0].Digest["gitCommit"] == "" {
		return statement{}, fmt.Errorf("%s is no SLSA provenance of this project", provenanceFile)
	}
	return out, nil
}

// checkStatement expects the statement that provenance makes of the files of CHECKSUMS.
func checkStatement(s statement, sums map[string]string) error {
	want := maps.Clone(sums)
	delete(want, provenanceFile)
	p := s.Predicate.Definition
	seconds, err := strconv.ParseInt(p.Internal.Epoch, 10, 64)
	if err != nil {
		return fmt.Errorf("%s: reading SOURCE_DATE_EPOCH: %w", provenanceFile, err)
	}
	if p.External.Tag != "" && (p.External.Tag != p.External.Version || p.Internal.Dirty) {
		return fmt.Errorf("%s: tag %s is not that of version %s, or its tree was changed", provenanceFile, p.External.Tag, p.External.Version)
	}
	built := provenance(options{
		Version: p.External.Version, Hub: p.External.Hub, Tag: p.External.Tag, Created: time.Unix(seconds, 0), Dirty: p.Internal.Dirty,
		Revision: s.revision(), Builder: s.Predicate.Run.Builder.ID,
	}, want)
	for i, one := range built.Subject {
		if i >= len(s.Subject) || !reflect.DeepEqual(s.Subject[i], one) {
			return fmt.Errorf("%s: the file %s, or its digest, is not that of %s", provenanceFile, one.Name, checksumsFile)
		}
	}
	built.Predicate.Definition.Dependencies[1] = p.Dependencies[len(p.Dependencies)-1] // the Go of this program may be another one
	if !reflect.DeepEqual(s, built) {
		return fmt.Errorf("%s: has more than the files and the source of this release", provenanceFile)
	}
	return nil
}

// revision is the git commit.
func (s statement) revision() string {
	return s.Predicate.Definition.Dependencies[0].Digest["gitCommit"]
}
