package main

import (
	"bytes"
	"compress/gzip"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// order is the input of pack: either programs or files.
type order struct {
	// programs are the builds of this module's program, one per architecture (GOARCH).
	programs inputs
	// files make an image of any other programs, for tests, for this machine's architecture. The first is the entrypoint.
	files inputs
	// name is REGISTRY/PATH:TAG.
	name string
	// created is the timestamp of the image and its files.
	created time.Time
}

// pack returns the layout's index, whose one entry is the index of the architectures. Each program must be a Go program for its
// architecture.
func pack(o order) (v1.ImageIndex, error) {
	tag, err := name.NewTag(o.name, name.StrictValidation)
	if err != nil {
		return nil, fmt.Errorf("name of the image: want REGISTRY/PATH:TAG: %w", err)
	}
	if (len(o.programs) == 0) == (len(o.files) == 0) {
		return nil, errors.New("want programs or files to pack, and not both")
	}
	images, err := ours(o, tag.TagStr())
	if len(o.files) > 0 {
		images, err = others(o)
	}
	if err != nil {
		return nil, err
	}
	annotations := map[string]string{
		label + "ref.name": tag.TagStr(),
		// containerd imports the image under this name.
		"io.containerd.image.name": o.name,
	}
	whole := mutate.IndexAddendum{Add: images, Descriptor: v1.Descriptor{Annotations: annotations}}
	return mutate.AppendManifests(empty.Index, whole), nil
}

// ours returns an index of an image for each architecture.
func ours(o order, tag string) (v1.ImageIndex, error) {
	var images v1.ImageIndex = empty.Index
	known := map[string]bool{}
	for _, from := range o.programs {
		if known[from.name] {
			return nil, fmt.Errorf("there are two programs for %s", from.name)
		}
		known[from.name] = true
		made, err := one(from, tag, o.created)
		if err != nil {
			return nil, fmt.Errorf("packing for %s: %w", from.name, err)
		}
		images = mutate.AppendManifests(images, made)
	}
	return images, nil
}

// others returns an index of one image, of files.
func others(o order) (v1.ImageIndex, error) {
	var entries []entry
	for _, f := range o.files {
		content, err := os.ReadFile(f.file)
		if err != nil {
			return nil, fmt.Errorf("reading a program: %w", err)
		}
		path, absolute := strings.CutPrefix(f.name, "/")
		if !absolute {
			return nil, fmt.Errorf("%q is no path in the image: want /PATH=FILE", f.name)
		}
		entries = append(entries, entry{name: path, mode: 0o755, content: content})
	}
	made, err := image(entries, runtime.GOARCH, o.created, v1.Config{
		Env: []string{"PATH=/usr/local/bin:/bin"}, Entrypoint: []string{o.files[0].name},
	})
	return mutate.AppendManifests(empty.Index, made), err
}

// one returns the image of one architecture.
func one(from input, tag string, at time.Time) (mutate.IndexAddendum, error) {
	built, err := buildinfo.ReadFile(from.file)
	if err != nil {
		return mutate.IndexAddendum{}, fmt.Errorf("reading the build information: %w", err)
	}
	if arch := setting(built, "GOARCH"); arch != from.name || setting(built, "GOOS") != "linux" {
		return mutate.IndexAddendum{}, fmt.Errorf("%q is a program for %s/%s", from.file, setting(built, "GOOS"), arch)
	}
	content, err := os.ReadFile(from.file)
	if err != nil {
		return mutate.IndexAddendum{}, fmt.Errorf("reading the program: %w", err)
	}
	entries := []entry{{name: programPath, mode: 0o755, content: content}}
	for _, link := range links() {
		entries = append(entries, entry{name: link, mode: 0o777, to: "/" + programPath})
	}
	// Like Istio's image: the default command is the agent, as root, because root owns the node's directories.
	return image(entries, from.name, at, v1.Config{
		User:       "0:0",
		Env:        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/cni/bin"},
		Cmd:        []string{"install-cni"},
		WorkingDir: "/opt/cni/bin",
		Labels:     about(built, tag, at),
	})
}

// image returns an image of one layer.
func image(entries []entry, arch string, at time.Time, config v1.Config) (out mutate.IndexAddendum, err error) {
	files, err := archive(entries, at)
	if err != nil {
		return out, err
	}
	opener := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(files)), nil }
	layer, err := tarball.LayerFromOpener(opener, tarball.WithMediaType(types.OCILayer),
		tarball.WithCompressionLevel(gzip.BestCompression), tarball.WithCompressedCaching)
	if err != nil {
		return out, fmt.Errorf("compressing: %w", err)
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	base, err = mutate.ConfigFile(base, &v1.ConfigFile{
		Created: v1.Time{Time: at}, Architecture: arch, OS: "linux", Config: config, RootFS: v1.RootFS{Type: "layers"},
	})
	if err != nil {
		return out, fmt.Errorf("configuring: %w", err)
	}
	out.Add, err = mutate.Append(base, mutate.Addendum{
		Layer: layer, History: v1.History{Created: v1.Time{Time: at}, CreatedBy: "hack/image.sh"},
	})
	out.Platform = &v1.Platform{Architecture: arch, OS: "linux"}
	return out, err
}

// programPath is the program's path. The agent copies it from there to the node.
const programPath = "opt/cni/bin/istio-cni"

// links are the names of the roles in images of Istio: /usr/local/bin today, /opt/cni/bin until 1.9, /opt/local/bin
// from 1.10 to 1.17.
func links() []string {
	return []string{
		"opt/cni/bin/istio-cni-repair", "opt/cni/bin/istio-cni-taint", "opt/cni/bin/istio-iptables",
		"opt/local/bin/istio-cni-taint",
		"usr/local/bin/install-cni", "usr/local/bin/istio-cni", "usr/local/bin/istio-cni-repair",
		"usr/local/bin/istio-cni-taint", "usr/local/bin/istio-iptables",
	}
}

// label is the prefix of the standard labels and annotations of images.
const label = "org.opencontainers.image."

// about returns the image's standard labels.
func about(built *debug.BuildInfo, tag string, at time.Time) map[string]string {
	return map[string]string{
		label + "title":       "istio-cni",
		label + "description": "Redirects the traffic of Istio sidecar pods: CNI plugin, node agent and taint controller.",
		label + "source":      "https://" + built.Main.Path,
		label + "licenses":    "Apache-2.0",
		label + "version":     tag,
		label + "revision":    setting(built, "vcs.revision"),
		label + "created":     at.Format(time.RFC3339),
	}
}

func setting(built *debug.BuildInfo, key string) string {
	for _, s := range built.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}
