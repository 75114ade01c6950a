package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io/fs"
	"path"
	"time"
)

// entry is a file of an archive, or a symbolic link.
type entry struct {
	name    string
	mode    int64
	content []byte
	to      string
}

// read returns the files of a directory, sorted by name.
func read(dir fs.FS) (out []entry, err error) {
	err = fs.WalkDir(dir, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := fs.ReadFile(dir, name)
		out = append(out, entry{name: name, mode: 0o644, content: content})
		return err
	})
	return out, err
}

// archive packs entries behind their parent directories into a tar, all owned by root and with the same time.
func archive(entries []entry, at time.Time) ([]byte, error) {
	var out bytes.Buffer
	writer := tar.NewWriter(&out)
	known := map[string]bool{".": true}
	var add func(h tar.Header, content []byte) error
	add = func(h tar.Header, content []byte) error {
		if dir := path.Dir(path.Clean(h.Name)); !known[dir] {
			known[dir] = true
			if err := add(tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755}, nil); err != nil {
				return err
			}
		}
		h.Size, h.ModTime, h.Format = int64(len(content)), at, tar.FormatPAX
		if err := writer.WriteHeader(&h); err != nil {
			return fmt.Errorf("packing %q: %w", h.Name, err)
		}
		_, err := writer.Write(content)
		return err
	}
	for _, e := range entries {
		kind := byte(tar.TypeReg)
		if e.to != "" {
			kind = tar.TypeSymlink
		}
		if err := add(tar.Header{Typeflag: kind, Name: e.name, Linkname: e.to, Mode: e.mode}, e.content); err != nil {
			return nil, err
		}
	}
	err := writer.Close()
	return out.Bytes(), err
}
