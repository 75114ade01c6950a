package main

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// The files of a release beside those with a name of architecture or version.
const (
	checksumsFile  = "CHECKSUMS"
	provenanceFile = "provenance.intoto.json"
	manifestFile   = "istio-cni.yaml"
	krewFile       = "kubectl-istio_cni.yaml"
	notesFile      = "RELEASE_NOTES.md"
	imageDir       = "image"
	chartDir       = "chart"
	// signatureFile is made after CHECKSUMS, from it.
	signatureFile = "CHECKSUMS.sigstore.json"
)

// module is the module of the program, and source its repository.
const (
	module = "github.com/meshcni/istio-cni"
	source = "https://" + module
)

// architectures are those of the image.
func architectures() []string { return []string{"amd64", "arm64", "ppc64le", "s390x"} }

// pluginPlatforms are those of the kubectl plugin.
func pluginPlatforms() []string {
	return []string{"darwin-amd64", "darwin-arm64", "linux-amd64", "linux-arm64", "windows-amd64", "windows-arm64"}
}

func programFile(arch string) string    { return "istio-cni-linux-" + arch }
func pluginFile(platform string) string { return "kubectl-istio_cni-" + platform + ".tar.gz" }
func bomFile(program string) string     { return strings.TrimSuffix(program, ".tar.gz") + ".cdx.json" }
func imageFile(number string) string    { return "istio-cni-image-" + number + ".tar" }
func chartFile(number string) string    { return "istio-cni-" + number + ".tgz" }
func chartTar(number string) string     { return "istio-cni-chart-" + number + ".tar" }

// number is a version as charts and image tags have it.
func number(version string) string { return strings.TrimPrefix(version, "v") }

// wanted returns the files of a release outside of the layouts of image and chart.
func wanted(version string) []string {
	n := number(version)
	out := []string{checksumsFile, provenanceFile, manifestFile, krewFile, notesFile, imageFile(n), chartFile(n), chartTar(n)}
	for _, arch := range architectures() {
		out = append(out, programFile(arch), bomFile(programFile(arch)))
	}
	for _, platform := range pluginPlatforms() {
		out = append(out, pluginFile(platform), bomFile(pluginFile(platform)))
	}
	return out
}

// digests returns the SHA-256 of each file below a directory but CHECKSUMS and its signature.
func digests(dir string) (map[string]string, error) {
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, file)
		if err != nil || name == checksumsFile || name == signatureFile {
			return err
		}
		if !d.Type().IsRegular() {
			return fmt.Errorf("%s is no regular file", name)
		}
		out[filepath.ToSlash(name)], err = digest(file)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading the files of the release: %w", err)
	}
	return out, nil
}

// assets returns the digests of the files that a release on GitHub has: all but the layouts, whose tars it has.
func assets(sums map[string]string) map[string]string {
	out := maps.Clone(sums)
	maps.DeleteFunc(out, func(name, _ string) bool { return strings.Contains(name, "/") })
	return out
}

func digest(file string) (string, error) {
	f, err := os.Open(file) //nolint:gosec // of the release
	if err != nil {
		return "", err //nolint:wrapcheck // has the name
	}
	defer func() { _ = f.Close() }()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", fmt.Errorf("reading %s: %w", file, err)
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// checksums formats digests as sha256sum does.
func checksums(sums map[string]string) string {
	var out strings.Builder
	for _, name := range sorted(sums) {
		fmt.Fprintf(&out, "%s  %s\n", sums[name], name)
	}
	return out.String()
}

// parseChecksums is the inverse of checksums.
func parseChecksums(text string) (map[string]string, error) {
	out := map[string]string{}
	for line := range strings.Lines(text) {
		sum, name, found := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		if !found || len(sum) != 2*sha256.Size || path.Clean(name) != name || path.IsAbs(name) || strings.HasPrefix(name, "..") {
			return nil, fmt.Errorf("%s: line %q is not of sha256sum", checksumsFile, line)
		}
		if _, twice := out[name]; twice {
			return nil, fmt.Errorf("%s: %s is there twice", checksumsFile, name)
		}
		out[name] = sum
	}
	return out, nil
}

func sorted(m map[string]string) []string {
	out := make([]string, 0, len(m))
	for name := range m {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// writeFile writes a file of the release.
func writeFile(file string, content []byte) error {
	if err := os.WriteFile(file, content, 0o644); err != nil { //nolint:gosec,forbidigo // for everybody; nobody reads it yet
		return fmt.Errorf("writing: %w", err)
	}
	return nil
}
