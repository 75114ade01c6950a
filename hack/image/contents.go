package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/url"
	"runtime/debug"
	"slices"
	"strings"
)

// typeList is the media type of the software bill of materials.
const typeList = "application/vnd.cyclonedx+json"

// document is a software bill of materials in CycloneDX 1.5.
type document struct {
	Format       string       `json:"bomFormat"`
	Version      string       `json:"specVersion"`
	Serial       string       `json:"serialNumber"`
	Number       int          `json:"version"`
	Metadata     metadata     `json:"metadata"`
	Components   []component  `json:"components"`
	Dependencies []dependency `json:"dependencies"`
}

type metadata struct {
	Component component `json:"component"`
}

type component struct {
	Type       string     `json:"type"`
	Ref        string     `json:"bom-ref"`
	Name       string     `json:"name"`
	Version    string     `json:"version"`
	URL        string     `json:"purl"`
	Hashes     []hash     `json:"hashes,omitempty"`
	Properties []property `json:"properties,omitempty"`
}

type hash struct {
	Algorithm string `json:"alg"`
	Content   string `json:"content"`
}

type property struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

type dependency struct {
	Ref string   `json:"ref"`
	On  []string `json:"dependsOn"`
}

// contents lists the modules of a program from its build information ("go version -m"). It has no timestamp, so that
// the same program yields the same text.
func contents(built *debug.BuildInfo, program []byte) ([]byte, error) {
	sum := sha256.Sum256(program)
	main := module(built.Main, "application")
	main.Hashes = []hash{{"SHA-256", hex.EncodeToString(sum[:])}}
	for _, s := range built.Settings {
		main.Properties = append(main.Properties, property{"go:build:" + s.Key, s.Value})
	}
	version, _, _ := strings.Cut(strings.TrimPrefix(built.GoVersion, "go"), " ")
	parts := []component{module(debug.Module{Path: "stdlib", Version: version}, "library")}
	for _, dep := range built.Deps {
		if dep.Replace != nil {
			dep = dep.Replace
		}
		parts = append(parts, module(*dep, "library"))
	}
	slices.SortFunc(parts, func(a, b component) int { return strings.Compare(a.Ref, b.Ref) })
	on := make([]string, 0, len(parts))
	for _, part := range parts {
		on = append(on, part.Ref)
	}
	text, err := json.MarshalIndent(document{
		Format: "CycloneDX", Version: "1.5", Number: 1, Serial: serial(sum),
		Metadata: metadata{main}, Components: parts, Dependencies: []dependency{{main.Ref, on}},
	}, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("writing the list of contents: %w", err)
	}
	return append(text, '\n'), nil
}

// module returns a Go module as a component with its package URL.
func module(m debug.Module, kind string) component {
	where := "pkg:golang/" + m.Path + "@" + url.QueryEscape(m.Version)
	return component{Type: kind, Ref: where, Name: m.Path, Version: m.Version, URL: where}
}

// serial returns a UUID derived from the program's hash.
func serial(sum [sha256.Size]byte) string {
	id := [16]byte(sum[:16])
	id[6], id[8] = id[6]&0x0f|0x80, id[8]&0x3f|0x80
	return fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}
