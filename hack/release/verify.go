package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// found is a release that is verified.
type found struct {
	dir, version, revision, hub string
	sums                        map[string]string
}

// verify checks a release from the outside. All faults are found, unless the files are not those of CHECKSUMS.
func verify(ctx context.Context, o options, out io.Writer) error {
	sums, err := checkSums(o.Dir)
	if err != nil {
		return err
	}
	s, err := readProvenance(o.Dir)
	if err != nil {
		return err
	}
	p := s.Predicate.Definition.External
	if o.Version != "" && p.Version != o.Version {
		return fmt.Errorf("%s: is of version %s, not %s", provenanceFile, p.Version, o.Version)
	}
	if o.Hub != "" && p.Hub != o.Hub {
		return fmt.Errorf("%s: was built for the registry %q, not %q", provenanceFile, p.Hub, o.Hub)
	}
	if p.Version == "" {
		return fmt.Errorf("%s: names no version", provenanceFile)
	}
	f := found{o.Dir, p.Version, s.revision(), p.Hub, sums}
	faults := []error{checkStatement(s, assets(sums)), f.names()}
	for _, check := range []func(context.Context) []error{f.programs, f.image, f.chart, f.plugin, f.boms} {
		faults = append(faults, check(ctx)...)
	}
	if err = errors.Join(faults...); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s: %d files of release %s, commit %s\n", o.Dir, len(assets(sums))+1, f.version, f.revision)
	return err //nolint:wrapcheck // of writing to stdout
}

// checkSums compares CHECKSUMS with the files, and returns the digests of all. It names each file that differs.
func checkSums(dir string) (map[string]string, error) {
	text, err := os.ReadFile(filepath.Join(dir, checksumsFile)) //nolint:gosec // of the release
	if err != nil {
		return nil, fmt.Errorf("reading the checksums: %w", err)
	}
	want, err := parseChecksums(string(text))
	if err != nil {
		return nil, err
	}
	have, err := digests(dir)
	if err != nil {
		return nil, err
	}
	var faults []error
	for _, name := range sorted(want) {
		switch have[name] {
		case want[name]:
		case "":
			faults = append(faults, fmt.Errorf("%s is missing", name))
		default:
			faults = append(faults, fmt.Errorf("%s is not the file of %s", name, checksumsFile))
		}
	}
	for _, name := range sorted(assets(have)) {
		if want[name] == "" {
			faults = append(faults, fmt.Errorf("%s is not in %s", name, checksumsFile))
		}
	}
	return have, errors.Join(faults...)
}

// names expects the files of a release of this version, and no other outside of the layouts.
func (f found) names() error {
	var faults []error
	want := wanted(f.version)
	for _, name := range want {
		if f.sums[name] == "" && name != checksumsFile {
			faults = append(faults, fmt.Errorf("%s is missing", name))
		}
	}
	for _, name := range sorted(f.sums) {
		if !slices.Contains(want, name) && !strings.HasPrefix(name, imageDir+"/") && !strings.HasPrefix(name, chartDir+"/") {
			faults = append(faults, fmt.Errorf("%s is no file of release %s", name, f.version))
		}
	}
	if notes, err := f.read(notesFile); err == nil && !strings.HasPrefix(string(notes), "# istio-cni "+f.version+"\n") {
		faults = append(faults, fmt.Errorf("%s is not headed %q", notesFile, "# istio-cni "+f.version))
	}
	if text, err := f.read(manifestFile); err == nil && !strings.Contains(string(text), fmt.Sprintf("image: %q\n", f.imageName())) {
		faults = append(faults, fmt.Errorf("%s has another image than %s", manifestFile, f.imageName()))
	}
	return errors.Join(faults...)
}

// imageName is the image of chart and manifest; "localhost" is each node itself.
func (f found) imageName() string {
	return cmp.Or(f.hub, "localhost/istio-cni") + "/install-cni:" + number(f.version)
}

func (f found) path(name string) string { return filepath.Join(f.dir, name) }

func (f found) read(name string) ([]byte, error) {
	text, err := os.ReadFile(f.path(name))
	if err != nil {
		return nil, fmt.Errorf("reading the release: %w", err)
	}
	return text, nil
}

// named adds the file's name to an error.
func named(name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", name, err)
}

// boms checks the bill of materials of each program.
func (f found) boms(context.Context) []error {
	var faults []error
	check := func(name string, program []byte, err error) {
		var text []byte
		if err == nil {
			text, err = f.read(name)
		}
		if err == nil {
			err = checkBOM(text, f.version, program)
		}
		faults = append(faults, named(name, err))
	}
	for _, arch := range architectures() {
		program, err := f.read(programFile(arch))
		check(bomFile(programFile(arch)), program, err)
	}
	for _, platform := range pluginPlatforms() {
		program, err := f.pluginProgram(platform)
		check(bomFile(pluginFile(platform)), program, err)
	}
	return faults
}
