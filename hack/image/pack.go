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
	"regexp"
	"runtime/debug"
	"time"
)

// program is the program built for one architecture, in Go's word for it.
type program struct{ Architecture, Path string }

// order says what to pack.
type order struct {
	Programs []program
	// Name is REGISTRY/PATH:TAG.
	Name string
	// Created is the time of everything in the image.
	Created time.Time
}

// packed is the image.
type packed struct {
	layout layout
	// Digest is that of the index, by which all architectures are pulled.
	Digest string
	// Lists are what the programs are made of, by architecture.
	Lists map[string][]byte
}

var imageName = regexp.MustCompile(`^[a-z0-9.:-]+(?:/[a-z0-9._-]+)+:([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})$`)

// pack makes the layout. Every program has to be one that Go built for the architecture it is said to be for.
func pack(o order) (packed, error) {
	tag := imageName.FindStringSubmatch(o.Name)
	if tag == nil {
		return packed{}, fmt.Errorf("name %q of the image: want REGISTRY/PATH:TAG", o.Name)
	}
	if len(o.Programs) == 0 {
		return packed{}, errors.New("there is no program to pack")
	}
	out := packed{layout: newLayout(), Lists: map[string][]byte{}}
	var images, attached []descriptor
	for _, p := range o.Programs {
		if _, twice := out.Lists[p.Architecture]; twice {
			return packed{}, fmt.Errorf("there are two programs for %s", p.Architecture)
		}
		made, list, err := out.one(p, tag[1], o.Created)
		if err != nil {
			return packed{}, fmt.Errorf("packing for %s: %w", p.Architecture, err)
		}
		images, attached = append(images, made), append(attached, list)
	}
	whole, err := out.layout.addJSON(typeIndex, index{SchemaVersion: 2, MediaType: typeIndex, Manifests: images})
	if err != nil {
		return packed{}, err
	}
	out.Digest = whole.Digest
	whole.Annotations = map[string]string{
		"org.opencontainers.image.ref.name": tag[1],
		// containerd imports it under this name.
		"io.containerd.image.name": o.Name,
	}
	list := index{SchemaVersion: 2, MediaType: typeIndex, Manifests: append([]descriptor{whole}, attached...)}
	text, err := out.layout.addJSON(typeIndex, list)
	if err != nil {
		return packed{}, err
	}
	// The layout's own list is a file with a name, and no blob.
	blob := "blobs/sha256/" + text.Digest[len("sha256:"):]
	out.layout["index.json"] = out.layout[blob]
	delete(out.layout, blob)
	return out, nil
}

// one adds the image of one architecture and the list of what is in it.
func (p packed) one(from program, tag string, at time.Time) (image, attached descriptor, err error) {
	built, err := buildinfo.ReadFile(from.Path)
	if err != nil {
		return descriptor{}, descriptor{}, fmt.Errorf("reading what the program is made of: %w", err)
	}
	if arch := setting(built, "GOARCH"); arch != from.Architecture || setting(built, "GOOS") != "linux" {
		return descriptor{}, descriptor{}, fmt.Errorf("%q is a program for %s/%s", from.Path, setting(built, "GOOS"), arch)
	}
	content, err := os.ReadFile(from.Path)
	if err != nil {
		return descriptor{}, descriptor{}, fmt.Errorf("reading the program: %w", err)
	}
	if image, err = p.image(content, from.Architecture, about(built, tag, at), at); err != nil {
		return descriptor{}, descriptor{}, err
	}
	if p.Lists[from.Architecture], err = contents(built, content); err != nil {
		return descriptor{}, descriptor{}, err
	}
	attached, err = p.attach(p.Lists[from.Architecture], image)
	image.Platform = &platform{Architecture: from.Architecture, OS: "linux"}
	return image, attached, err
}

// config is an image's configuration.
type config struct {
	Created      time.Time     `json:"created"`
	Architecture string        `json:"architecture"`
	OS           string        `json:"os"`
	Config       configRun     `json:"config"`
	RootFS       configRootFS  `json:"rootfs"`
	History      []configEntry `json:"history"`
}

type configRun struct {
	User       string
	Env        []string
	Cmd        []string
	WorkingDir string
	Labels     map[string]string
}

type configRootFS struct {
	Type    string   `json:"type"`
	DiffIDs []string `json:"diff_ids"`
}

type configEntry struct {
	Created   time.Time `json:"created"`
	CreatedBy string    `json:"created_by"`
}

// image adds layer, configuration and manifest. As in Istio's image the agent runs by default, as root, for the node's
// directories are root's.
func (p packed) image(content []byte, arch string, labels map[string]string, at time.Time) (descriptor, error) {
	files, err := fileSystem(content, at)
	if err != nil {
		return descriptor{}, err
	}
	sum := sha256.Sum256(files)
	pressed, err := compress(files)
	if err != nil {
		return descriptor{}, err
	}
	settings, err := p.layout.addJSON(typeConfig, config{
		Created: at, Architecture: arch, OS: "linux",
		Config: configRun{
			User:       "0:0",
			Env:        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/cni/bin"},
			Cmd:        []string{"install-cni"},
			WorkingDir: "/opt/cni/bin",
			Labels:     labels,
		},
		RootFS:  configRootFS{Type: "layers", DiffIDs: []string{"sha256:" + hex.EncodeToString(sum[:])}},
		History: []configEntry{{Created: at, CreatedBy: "hack/image.sh"}},
	})
	if err != nil {
		return descriptor{}, err
	}
	return p.layout.addJSON(typeManifest, manifest{
		SchemaVersion: 2, MediaType: typeManifest, Config: settings, Layers: []descriptor{p.layout.add(typeLayer, pressed)},
	})
}

// attach adds a list of contents as an artifact whose subject is the image, as the OCI distribution 1.1 has it.
func (p packed) attach(list []byte, image descriptor) (descriptor, error) {
	made, err := p.layout.addJSON(typeManifest, manifest{
		SchemaVersion: 2, MediaType: typeManifest, ArtifactType: typeList,
		Config: p.layout.add(typeEmpty, []byte("{}")), Layers: []descriptor{p.layout.add(typeList, list)}, Subject: &image,
	})
	made.ArtifactType = typeList
	return made, err
}

// programPath is where the program is. The agent copies it from there to the node.
const programPath = "opt/cni/bin/istio-cni"

// links are the names of the roles, where images of Istio have had them: /usr/local/bin today, /opt/cni/bin until 1.9,
// /opt/local/bin from 1.10 to 1.17.
func links() []string {
	return []string{
		"opt/cni/bin/istio-cni-repair", "opt/cni/bin/istio-cni-taint", "opt/cni/bin/istio-iptables",
		"opt/local/bin/istio-cni-taint",
		"usr/local/bin/install-cni", "usr/local/bin/istio-cni", "usr/local/bin/istio-cni-repair",
		"usr/local/bin/istio-cni-taint", "usr/local/bin/istio-iptables",
	}
}

// fileSystem is the one layer: everything is root's, and has the same time.
func fileSystem(content []byte, at time.Time) ([]byte, error) {
	var a archive
	for _, dir := range []string{
		"opt", "opt/cni", "opt/cni/bin", "opt/local", "opt/local/bin", "usr", "usr/local", "usr/local/bin",
	} {
		a.add(tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755, ModTime: at}, nil)
	}
	a.add(tar.Header{Typeflag: tar.TypeReg, Name: programPath, Mode: 0o755, ModTime: at}, content)
	for _, name := range links() {
		a.add(tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: "/" + programPath, Mode: 0o777, ModTime: at}, nil)
	}
	return a.close()
}

// compress leaves name and time out of gzip's header, which would make two packings differ.
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

// about are the labels that people look for.
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
