package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Media types of the OCI image specification 1.1.
const (
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar+gzip"
	typeEmpty    = "application/vnd.oci.empty.v1+json"
)

// descriptor references a blob.
type descriptor struct {
	MediaType    string            `json:"mediaType"`
	Digest       string            `json:"digest"`
	Size         int               `json:"size"`
	Platform     *platform         `json:"platform,omitempty"`
	ArtifactType string            `json:"artifactType,omitempty"`
	Annotations  map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

// manifest is that of an image, or of an artifact with a subject.
type manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	ArtifactType  string       `json:"artifactType,omitempty"`
	Config        descriptor   `json:"config"`
	Layers        []descriptor `json:"layers"`
	Subject       *descriptor  `json:"subject,omitempty"`
}

type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Manifests     []descriptor `json:"manifests"`
}

// layout is an OCI image layout: its files by name.
type layout map[string][]byte

func newLayout() layout {
	return layout{"oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`)}
}

// add stores a blob by digest.
func (l layout) add(mediaType string, content []byte) descriptor {
	sum := sha256.Sum256(content)
	digest := hex.EncodeToString(sum[:])
	l["blobs/sha256/"+digest] = content
	return descriptor{MediaType: mediaType, Digest: "sha256:" + digest, Size: len(content)}
}

// addJSON stores a value as a JSON blob.
func (l layout) addJSON(mediaType string, value any) (descriptor, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return descriptor{}, fmt.Errorf("writing %s: %w", mediaType, err)
	}
	return l.add(mediaType, text), nil
}

// tar packs the files in the order of their names.
func (l layout) tar(at time.Time) ([]byte, error) {
	var a archive
	for _, dir := range []string{"blobs", "blobs/sha256"} {
		a.add(tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755, ModTime: at}, nil)
	}
	for _, name := range slices.Sorted(maps.Keys(l)) {
		a.add(tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, ModTime: at}, l[name])
	}
	return a.close()
}

// archive builds a tar file. Close returns the first error.
type archive struct {
	buffer bytes.Buffer
	writer *tar.Writer
	err    error
}

func (a *archive) add(h tar.Header, content []byte) {
	if a.writer == nil {
		a.writer = tar.NewWriter(&a.buffer)
	}
	if a.err != nil {
		return
	}
	h.Size, h.Format = int64(len(content)), tar.FormatPAX
	if a.err = a.writer.WriteHeader(&h); a.err == nil {
		_, a.err = a.writer.Write(content)
	}
	if a.err != nil {
		a.err = fmt.Errorf("packing %q: %w", strings.TrimSuffix(h.Name, "/"), a.err)
	}
}

func (a *archive) close() ([]byte, error) {
	if a.err != nil {
		return nil, a.err
	}
	if err := a.writer.Close(); err != nil {
		return nil, fmt.Errorf("packing: %w", err)
	}
	return a.buffer.Bytes(), nil
}
