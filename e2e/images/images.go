// Package images makes container images of static programs, without a registry or a daemon.
//
// It promises archives in the format of "docker save" with one layer, which containerd imports, and the same bytes for the
// same files. An image has the files named and nothing else: no shell, no libraries; what is linked to must be in it.
// It never pulls anything.
//
// Start reading at Write. box is the program of test images that are not ours.
package images

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path"
	"runtime"
	"strings"
)

// Image is one to be made.
type Image struct {
	// Name is what pods ask for, with a tag: localhost/box:e2e.
	Name       string
	Entrypoint []string
	Files      []File
}

// File is a program of the image.
type File struct {
	// Source is its path here, Path that in the image.
	Source, Path string
	// Links are paths of symbolic links to it.
	Links []string
}

// Write makes the archive of an image.
func Write(to string, image Image) error {
	layer, err := image.layer()
	if err != nil {
		return fmt.Errorf("making image %q: %w", image.Name, err)
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Entrypoint": image.Entrypoint, "Env": []string{"PATH=/usr/local/bin:/bin"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + sum(layer)}},
	})
	if err != nil {
		return fmt.Errorf("making image %q: %w", image.Name, err)
	}
	manifest, err := json.Marshal([]map[string]any{{
		"Config": sum(config) + ".json", "RepoTags": []string{image.Name}, "Layers": []string{sum(layer) + ".tar"},
	}})
	if err != nil {
		return fmt.Errorf("making image %q: %w", image.Name, err)
	}
	var out archive
	out.open()
	out.file(sum(config)+".json", 0o644, config)
	out.file(sum(layer)+".tar", 0o644, layer)
	out.file("manifest.json", 0o644, manifest)
	text, err := out.bytes()
	if err == nil {
		err = os.WriteFile(to, text, 0o644)
	}
	if err != nil {
		return fmt.Errorf("writing image %q: %w", image.Name, err)
	}
	return nil
}

func sum(text []byte) string {
	hash := sha256.Sum256(text)
	return hex.EncodeToString(hash[:])
}

// layer has the files, and what a runtime mounts over.
func (i Image) layer() ([]byte, error) {
	var a archive
	a.open()
	for _, dir := range []string{"dev", "etc", "proc", "sys", "tmp", "run"} {
		a.dir(dir)
	}
	a.file("etc/passwd", 0o644, []byte("root:x:0:0:root:/:/none\nnonroot:x:65532:65532:nonroot:/:/none\n"))
	for _, f := range i.Files {
		text, err := os.ReadFile(f.Source)
		if err != nil {
			return nil, err
		}
		a.file(strings.TrimPrefix(f.Path, "/"), 0o755, text)
		for _, link := range f.Links {
			a.link(strings.TrimPrefix(link, "/"), f.Path)
		}
	}
	return a.bytes()
}

// archive is a tar archive. The first problem is remembered, and nothing is done after it.
type archive struct {
	out  bytes.Buffer
	tar  *tar.Writer
	dirs map[string]bool
	err  error
}

func (a *archive) open() { a.tar, a.dirs = tar.NewWriter(&a.out), map[string]bool{} }

func (a *archive) entry(header *tar.Header, text []byte) {
	if a.err != nil {
		return
	}
	if a.err = a.tar.WriteHeader(header); a.err == nil {
		_, a.err = io.Copy(a.tar, bytes.NewReader(text))
	}
}

// dir makes those above as well, once.
func (a *archive) dir(name string) {
	if name == "." || a.dirs[name] {
		return
	}
	a.dir(path.Dir(name))
	a.dirs[name] = true
	mode := int64(0o755)
	if name == "tmp" {
		mode = 0o1777
	}
	a.entry(&tar.Header{Name: name + "/", Typeflag: tar.TypeDir, Mode: mode}, nil)
}

func (a *archive) file(name string, mode int64, text []byte) {
	a.dir(path.Dir(name))
	a.entry(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode, Size: int64(len(text))}, text)
}

func (a *archive) link(name, to string) {
	a.dir(path.Dir(name))
	a.entry(&tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to, Mode: 0o777}, nil)
}

func (a *archive) bytes() ([]byte, error) {
	if a.err == nil {
		a.err = a.tar.Close()
	}
	return a.out.Bytes(), a.err
}
