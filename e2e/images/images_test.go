package images_test

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/meshcni/istio-cni/e2e/images"
)

// entries reads an archive: contents of files, targets of links, "/" for directories; and the names in their order.
func entries(t *testing.T, text []byte) (contents map[string]string, order []string) {
	t.Helper()
	contents = map[string]string{}
	reader := tar.NewReader(bytes.NewReader(text))
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return contents, order
		}
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(reader)
		if err != nil {
			t.Fatal(err)
		}
		order = append(order, header.Name)
		switch header.Typeflag {
		case tar.TypeDir:
			contents[header.Name] = "/"
		case tar.TypeSymlink:
			contents[header.Name] = "-> " + header.Linkname
		default:
			contents[header.Name] = string(body)
		}
	}
}

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	source := filepath.Join(dir, "program")
	if err := os.WriteFile(source, []byte("\x7fELF"), 0o755); err != nil {
		t.Fatal(err)
	}
	image := images.Image{
		Name: "localhost/x:y", Entrypoint: []string{"/opt/x/program"},
		Files: []images.File{{Source: source, Path: "/opt/x/program", Links: []string{"/bin/other"}}},
	}
	var texts [][]byte
	for _, name := range []string{"a.tar", "b.tar"} {
		to := filepath.Join(dir, name)
		if err := images.Write(to, image); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(to)
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, text)
	}
	if !bytes.Equal(texts[0], texts[1]) {
		t.Error("the same image has other bytes")
	}
	outer, _ := entries(t, texts[0])
	var manifest []struct {
		Config           string
		RepoTags, Layers []string
	}
	if err := json.Unmarshal([]byte(outer["manifest.json"]), &manifest); err != nil {
		t.Fatal(err)
	}
	if len(manifest) != 1 || !slices.Equal(manifest[0].RepoTags, []string{"localhost/x:y"}) || len(manifest[0].Layers) != 1 {
		t.Fatalf("manifest %+v", manifest)
	}
	var config struct {
		Config struct{ Entrypoint []string }
		Rootfs struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	if err := json.Unmarshal([]byte(outer[manifest[0].Config]), &config); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(config.Config.Entrypoint, image.Entrypoint) || "sha256:"+manifest[0].Layers[0] != config.Rootfs.DiffIDs[0]+".tar" {
		t.Errorf("config %+v of layers %q", config, manifest[0].Layers)
	}
	layer, order := entries(t, []byte(outer[manifest[0].Layers[0]]))
	for name, want := range map[string]string{
		"opt/x/program": "\x7fELF", "bin/other": "-> /opt/x/program", "opt/": "/", "opt/x/": "/", "tmp/": "/", "proc/": "/",
	} {
		if layer[name] != want {
			t.Errorf("%s is %q, want %q", name, layer[name], want)
		}
	}
	if slices.Index(order, "opt/") > slices.Index(order, "opt/x/") || slices.Index(order, "opt/x/") > slices.Index(order, "opt/x/program") {
		t.Errorf("a directory comes after what is in it: %q", order)
	}
}

func TestAMissingFileIsNamed(t *testing.T) {
	image := images.Image{Name: "n", Files: []images.File{{Source: "/nonexistent", Path: "/x"}}}
	err := images.Write(filepath.Join(t.TempDir(), "x.tar"), image)
	if err == nil || !bytes.Contains([]byte(err.Error()), []byte(`image "n"`)) || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}
