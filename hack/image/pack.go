package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path"
	"regexp"
	"runtime"
	"runtime/debug"
	"strings"
	"time"
)

// typeList is the media type of the software bill of materials.
const typeList = "application/vnd.cyclonedx+json"

// program is the program built for one architecture (GOARCH), and its software bill of materials, if there is one.
type program struct{ Architecture, Path, List string }

// file is a file in an image, and its source.
type file struct{ Path, Source string }

// order is the input of pack: either Programs or Files.
type order struct {
	// Programs are the builds of this module's program, one per architecture.
	Programs []program
	// Files make an image of any other programs, for tests, for this machine's architecture. The first is the
	// entrypoint.
	Files []file
	// Name is REGISTRY/PATH:TAG.
	Name string
	// Created is the timestamp of the image and its files.
	Created time.Time
}

// packed is the packed image.
type packed struct {
	layout layout
	// Digest is that of the index, which references all architectures.
	Digest string
}

var imageName = regexp.MustCompile(`^[a-z0-9.:-]+(?:/[a-z0-9._-]+)+:([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})$`)

// pack builds the layout. Each program must be a Go program for its architecture.
func pack(o order) (packed, error) {
	tag := imageName.FindStringSubmatch(o.Name)
	if tag == nil {
		return packed{}, fmt.Errorf("name %q of the image: want REGISTRY/PATH:TAG", o.Name)
	}
	if (len(o.Programs) == 0) == (len(o.Files) == 0) {
		return packed{}, errors.New("want programs or files to pack, and not both")
	}
	out := packed{layout: newLayout()}
	images, attached, err := out.ours(o, tag[1])
	if len(o.Files) > 0 {
		images, err = out.others(o)
	}
	if err != nil {
		return packed{}, err
	}
	whole, err := out.layout.addJSON(typeIndex, index{SchemaVersion: 2, MediaType: typeIndex, Manifests: images})
	if err != nil {
		return packed{}, err
	}
	out.Digest = whole.Digest
	whole.Annotations = map[string]string{
		"org.opencontainers.image.ref.name": tag[1],
		// containerd imports the image under this name.
		"io.containerd.image.name": o.Name,
	}
	list := index{SchemaVersion: 2, MediaType: typeIndex, Manifests: append([]descriptor{whole}, attached...)}
	text, err := out.layout.addJSON(typeIndex, list)
	if err != nil {
		return packed{}, err
	}
	// index.json is a file of the layout and not a blob.
	blob := "blobs/sha256/" + text.Digest[len("sha256:"):]
	out.layout["index.json"] = out.layout[blob]
	delete(out.layout, blob)
	return out, nil
}

// ours adds an image for each architecture, and its bill of materials.
func (p packed) ours(o order, tag string) (images, attached []descriptor, err error) {
	known := map[string]bool{}
	for _, from := range o.Programs {
		if known[from.Architecture] {
			return nil, nil, fmt.Errorf("there are two programs for %s", from.Architecture)
		}
		known[from.Architecture] = true
		made, err := p.one(from, tag, o.Created)
		if err != nil {
			return nil, nil, fmt.Errorf("packing for %s: %w", from.Architecture, err)
		}
		images = append(images, made)
		if from.List == "" {
			continue
		}
		text, err := os.ReadFile(from.List)
		if err != nil {
			return nil, nil, fmt.Errorf("reading the bill of materials: %w", err)
		}
		list, err := p.attach(text, made)
		if err != nil {
			return nil, nil, err
		}
		attached = append(attached, list)
	}
	return images, attached, nil
}

// others adds an image of Files.
func (p packed) others(o order) ([]descriptor, error) {
	var entries []entry
	for _, f := range o.Files {
		content, err := os.ReadFile(f.Source)
		if err != nil {
			return nil, fmt.Errorf("reading a program: %w", err)
		}
		entries = append(entries, entry{name: strings.TrimPrefix(f.Path, "/"), content: content})
	}
	made, err := p.image(entries, runtime.GOARCH, configRun{
		Env: []string{"PATH=/usr/local/bin:/bin"}, Entrypoint: []string{o.Files[0].Path},
	}, o.Created)
	return []descriptor{made}, err
}

// one adds the image of one architecture.
func (p packed) one(from program, tag string, at time.Time) (descriptor, error) {
	built, err := buildinfo.ReadFile(from.Path)
	if err != nil {
		return descriptor{}, fmt.Errorf("reading the build information: %w", err)
	}
	if arch := setting(built, "GOARCH"); arch != from.Architecture || setting(built, "GOOS") != "linux" {
		return descriptor{}, fmt.Errorf("%q is a program for %s/%s", from.Path, setting(built, "GOOS"), arch)
	}
	content, err := os.ReadFile(from.Path)
	if err != nil {
		return descriptor{}, fmt.Errorf("reading the program: %w", err)
	}
	// As in Istio's image the default command is the agent, as root, because root owns the node's directories.
	return p.image(fileSystem(content), from.Architecture, configRun{
		User:       "0:0",
		Env:        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/cni/bin"},
		Cmd:        []string{"install-cni"},
		WorkingDir: "/opt/cni/bin",
		Labels:     about(built, tag, at),
	}, at)
}

// config is an image configuration.
type config struct {
	Created      time.Time     `json:"created"`
	Architecture string        `json:"architecture"`
	OS           string        `json:"os"`
	Config       configRun     `json:"config"`
	RootFS       configRootFS  `json:"rootfs"`
	History      []configEntry `json:"history"`
}

type configRun struct {
	User       string            `json:",omitempty"`
	Env        []string          `json:",omitempty"`
	Entrypoint []string          `json:",omitempty"`
	Cmd        []string          `json:",omitempty"`
	WorkingDir string            `json:",omitempty"`
	Labels     map[string]string `json:",omitempty"`
}

type configRootFS struct {
	Type    string   `json:"type"`
	DiffIDs []string `json:"diff_ids"`
}

type configEntry struct {
	Created   time.Time `json:"created"`
	CreatedBy string    `json:"created_by"`
}

// image adds layer, configuration and manifest.
func (p packed) image(entries []entry, arch string, run configRun, at time.Time) (descriptor, error) {
	files, err := layer(entries, at)
	if err != nil {
		return descriptor{}, err
	}
	sum := sha256.Sum256(files)
	pressed, err := compress(files)
	if err != nil {
		return descriptor{}, err
	}
	settings, err := p.layout.addJSON(typeConfig, config{
		Created: at, Architecture: arch, OS: "linux", Config: run,
		RootFS:  configRootFS{Type: "layers", DiffIDs: []string{"sha256:" + hex.EncodeToString(sum[:])}},
		History: []configEntry{{Created: at, CreatedBy: "hack/image.sh"}},
	})
	if err != nil {
		return descriptor{}, err
	}
	made, err := p.layout.addJSON(typeManifest, manifest{
		SchemaVersion: 2, MediaType: typeManifest, Config: settings, Layers: []descriptor{p.layout.add(typeLayer, pressed)},
	})
	made.Platform = &platform{Architecture: arch, OS: "linux"}
	return made, err
}

// attach adds a bill of materials as an artifact with the image as its subject (OCI distribution 1.1).
func (p packed) attach(list []byte, image descriptor) (descriptor, error) {
	made, err := p.layout.addJSON(typeManifest, manifest{
		SchemaVersion: 2, MediaType: typeManifest, ArtifactType: typeList,
		Config: p.layout.add(typeEmpty, []byte("{}")), Layers: []descriptor{p.layout.add(typeList, list)}, Subject: &image,
	})
	made.ArtifactType = typeList
	return made, err
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

// fileSystem returns the entries of our image.
func fileSystem(content []byte) []entry {
	out := []entry{{name: programPath, content: content}}
	for _, name := range links() {
		out = append(out, entry{name: name, to: "/" + programPath})
	}
	return out
}

// entry is a program in an image, or a symbolic link to one.
type entry struct {
	name    string
	content []byte
	to      string
}

// layer packs entries and their parent directories, all owned by root and with the same time.
func layer(entries []entry, at time.Time) ([]byte, error) {
	var a archive
	known := map[string]bool{".": true}
	var mkdir func(dir string)
	mkdir = func(dir string) {
		if !known[dir] {
			known[dir] = true
			mkdir(path.Dir(dir))
			a.add(tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755, ModTime: at}, nil)
		}
	}
	for _, e := range entries {
		mkdir(path.Dir(e.name))
		if e.to != "" {
			a.add(tar.Header{Typeflag: tar.TypeSymlink, Name: e.name, Linkname: e.to, Mode: 0o777, ModTime: at}, nil)
		} else {
			a.add(tar.Header{Typeflag: tar.TypeReg, Name: e.name, Mode: 0o755, ModTime: at}, e.content)
		}
	}
	return a.close()
}

// compress omits name and time from the gzip header, so that the result is reproducible.
func compress(content []byte) ([]byte, error) {
	var out bytes.Buffer
	writer, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err != nil {
		return nil, fmt.Errorf("compressing: %w", err)
	}
	if _, err := writer.Write(content); err != nil {
		return nil, fmt.Errorf("compressing: %w", err)
	}
	if err := writer.Close(); err != nil {
		return nil, fmt.Errorf("compressing: %w", err)
	}
	return out.Bytes(), nil
}

// about returns the image's standard labels.
func about(built *debug.BuildInfo, tag string, at time.Time) map[string]string {
	const label = "org.opencontainers.image."
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
