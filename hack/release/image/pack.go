package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"runtime"
	"strings"
	"testing/fstest"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

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

// pack returns the layout's index, whose one entry is the index of the architectures, and the entry's digest. Programs are the builds of
// this module's program, by GOARCH. Files make an image of other programs, for tests, for this machine's architecture.
func pack(programs, files inputs, tag name.Tag, at time.Time) (v1.ImageIndex, v1.Hash, error) {
	var images v1.ImageIndex = empty.Index
	for _, from := range programs {
		made, err := ours(from, tag.TagStr(), at)
		if err != nil {
			return nil, v1.Hash{}, fmt.Errorf("packing for %s: %w", from.name, err)
		}
		images = mutate.AppendManifests(images, made)
	}
	if len(files) > 0 {
		made, err := others(files, at)
		if err != nil {
			return nil, v1.Hash{}, fmt.Errorf("packing: %w", err)
		}
		images = mutate.AppendManifests(images, made)
	}
	// containerd imports the image under the second name.
	names := map[string]string{label + "ref.name": tag.TagStr(), "io.containerd.image.name": tag.String()}
	whole := mutate.IndexAddendum{Add: images, Descriptor: v1.Descriptor{Annotations: names}}
	digest, err := images.Digest()
	return mutate.AppendManifests(empty.Index, whole), digest, err
}

// ours returns the image of one architecture.
func ours(from input, tag string, at time.Time) (out mutate.IndexAddendum, err error) {
	built, err := buildinfo.ReadFile(from.file)
	if err != nil {
		return out, fmt.Errorf("reading the build information: %w", err)
	}
	settings := map[string]string{}
	for _, s := range built.Settings {
		settings[s.Key] = s.Value
	}
	if settings["GOARCH"] != from.name || settings["GOOS"] != "linux" {
		return out, fmt.Errorf("%q is a program for %s/%s", from.file, settings["GOOS"], settings["GOARCH"])
	}
	content, err := os.ReadFile(from.file)
	if err != nil {
		return out, err
	}
	files := fstest.MapFS{programPath: {Data: content, Mode: 0o755}}
	for _, link := range links() {
		files[link] = &fstest.MapFile{Data: []byte("/" + programPath), Mode: fs.ModeSymlink | 0o777}
	}
	// Like Istio's image: the default command is the agent, as root, because root owns the node's directories.
	return image(files, from.name, at, v1.Config{
		User:       "0:0",
		Env:        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/cni/bin"},
		Cmd:        []string{"install-cni"},
		WorkingDir: "/opt/cni/bin",
		Labels: map[string]string{
			label + "title":       "istio-cni",
			label + "description": "Redirects the traffic of Istio sidecar pods: CNI plugin, node agent and taint controller.",
			label + "source":      "https://" + built.Main.Path,
			label + "licenses":    "Apache-2.0",
			label + "version":     tag,
			label + "revision":    settings["vcs.revision"],
			label + "created":     at.Format(time.RFC3339),
		},
	})
}

// others returns an image of files.
func others(from inputs, at time.Time) (out mutate.IndexAddendum, err error) {
	files := fstest.MapFS{}
	for _, f := range from {
		content, err := os.ReadFile(f.file)
		if err != nil {
			return out, err
		}
		files[strings.TrimPrefix(f.name, "/")] = &fstest.MapFile{Data: content, Mode: 0o755}
	}
	config := v1.Config{Env: []string{"PATH=/usr/local/bin:/bin"}, Entrypoint: []string{from[0].name}}
	return image(files, runtime.GOARCH, at, config)
}

// image returns an image of one layer.
func image(files fstest.MapFS, arch string, at time.Time, config v1.Config) (out mutate.IndexAddendum, err error) {
	content, err := archive(files, at)
	if err != nil {
		return out, err
	}
	opener := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil }
	layer, err := tarball.LayerFromOpener(opener, tarball.WithMediaType(types.OCILayer),
		tarball.WithCompressionLevel(gzip.DefaultCompression), tarball.WithCompressedCaching)
	if err != nil {
		return out, err
	}
	created := v1.Time{Time: at}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	base, err = mutate.ConfigFile(base, &v1.ConfigFile{
		Created: created, Architecture: arch, OS: "linux", Config: config, RootFS: v1.RootFS{Type: "layers"},
	})
	if err != nil {
		return out, err
	}
	out.Platform = &v1.Platform{Architecture: arch, OS: "linux"}
	out.Add, err = mutate.Append(base, mutate.Addendum{Layer: layer, History: v1.History{Created: created, CreatedBy: "hack/image.sh"}})
	return out, err
}

// archive packs files and their parent directories into a tar, all owned by root and with the same time.
func archive(files fstest.MapFS, at time.Time) ([]byte, error) {
	all := maps.Clone(files)
	for name := range files {
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			all[dir] = &fstest.MapFile{Mode: fs.ModeDir | 0o755}
		}
	}
	for _, file := range all {
		file.ModTime = at
	}
	var out bytes.Buffer
	writer := tar.NewWriter(&out)
	err := errors.Join(writer.AddFS(all), writer.Close())
	return out.Bytes(), err
}
