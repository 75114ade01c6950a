package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const imageForTests = "registry.example/mesh/install-cni:1.2.3"

// built returns small programs for two architectures, by architecture.
var built = sync.OnceValues(func() (map[string]string, error) {
	dir, err := os.MkdirTemp("", "image")
	if err != nil {
		return nil, err
	}
	for name, text := range map[string]string{
		"go.mod": "module example.com/nothing\n\ngo 1.26\n", "main.go": "package main\n\nfunc main() {}\n", "list": "{}",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			return nil, err
		}
	}
	out := map[string]string{}
	for _, arch := range []string{"amd64", "arm64"} {
		out[arch] = filepath.Join(dir, arch)
		build := exec.Command("go", "build", "-trimpath", "-o", out[arch], ".")
		build.Dir, build.Env = dir, append(os.Environ(), "GOOS=linux", "GOARCH="+arch, "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off")
		if text, err := build.CombinedOutput(); err != nil {
			return nil, errors.Join(err, errors.New(string(text)))
		}
	}
	return out, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if paths, err := built(); err == nil {
		_ = os.RemoveAll(filepath.Dir(paths["amd64"]))
	}
	os.Exit(code)
}

func anOrder(t *testing.T) order {
	t.Helper()
	paths, err := built()
	if err != nil {
		t.Fatal(err)
	}
	o := order{Name: imageForTests, Created: time.Unix(1_700_000_000, 0).UTC()}
	for _, arch := range slices.Sorted(maps.Keys(paths)) {
		o.Programs = append(o.Programs, program{arch, paths[arch], filepath.Join(filepath.Dir(paths[arch]), "list")})
	}
	return o
}

// standard is the packed anOrder, which several tests share and none changes.
var standard struct {
	once   sync.Once
	packed packed
	err    error
}

func standardImage(t *testing.T) packed {
	t.Helper()
	standard.once.Do(func() { standard.packed, standard.err = pack(anOrder(t)) })
	if standard.err != nil {
		t.Fatal(standard.err)
	}
	return standard.packed
}

func mustPack(t *testing.T, o order) packed {
	t.Helper()
	p, err := pack(o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// blob returns the content of a descriptor, and checks its size and digest.
func blob(t *testing.T, l layout, d descriptor) []byte {
	t.Helper()
	content, found := l["blobs/sha256/"+strings.TrimPrefix(d.Digest, "sha256:")]
	sum := sha256.Sum256(content)
	if !found || len(content) != d.Size || d.Digest != "sha256:"+hex.EncodeToString(sum[:]) {
		t.Fatalf("blob of %+v: found %t, %d bytes", d, found, len(content))
	}
	return content
}

func decode[T any](t *testing.T, text []byte) T {
	t.Helper()
	var out T
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&out); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return out
}

// TestTheLayoutIsWhole follows every descriptor from index.json and finds each blob exactly once.
func TestTheLayoutIsWhole(t *testing.T) {
	t.Parallel()
	o, p := anOrder(t), standardImage(t)
	seen := map[string]bool{"oci-layout": true, "index.json": true}
	follow := func(d descriptor) []byte {
		seen["blobs/sha256/"+strings.TrimPrefix(d.Digest, "sha256:")] = true
		return blob(t, p.layout, d)
	}
	list := decode[index](t, p.layout["index.json"])
	if len(list.Manifests) != 1+len(o.Programs) || list.Manifests[0].Digest != p.Digest {
		t.Fatalf("list %+v", list)
	}
	names := list.Manifests[0].Annotations
	if names["io.containerd.image.name"] != o.Name || names["org.opencontainers.image.ref.name"] != "1.2.3" {
		t.Errorf("names %v", names)
	}
	images := decode[index](t, follow(list.Manifests[0])).Manifests
	if len(images) != len(o.Programs) {
		t.Fatalf("images %+v", images)
	}
	for i, d := range images {
		if *d.Platform != (platform{Architecture: o.Programs[i].Architecture, OS: "linux"}) {
			t.Errorf("image %d is for %+v", i, d.Platform)
		}
		m := decode[manifest](t, follow(d))
		follow(m.Config)
		follow(m.Layers[0])

		artifact := decode[manifest](t, follow(list.Manifests[1+i]))
		if artifact.Subject.Digest != d.Digest || artifact.Subject.Size != d.Size || artifact.ArtifactType != typeList {
			t.Errorf("attached to %s: %+v", d.Digest, artifact)
		}
		follow(artifact.Config)
		if want, err := os.ReadFile(o.Programs[i].List); err != nil || !bytes.Equal(follow(artifact.Layers[0]), want) {
			t.Errorf("another list is attached than is given, error %v", err)
		}
	}
	if diff := cmp.Diff(slices.Sorted(maps.Keys(seen)), slices.Sorted(maps.Keys(p.layout))); diff != "" {
		t.Errorf("-followed +there:\n%s", diff)
	}
}

// TestTheImageIsLikeTheReferences checks the configuration and files of each architecture.
func TestTheImageIsLikeTheReferences(t *testing.T) {
	t.Parallel()
	o, p := anOrder(t), standardImage(t)
	list := decode[index](t, p.layout["index.json"])
	for i, d := range decode[index](t, blob(t, p.layout, list.Manifests[0])).Manifests {
		m := decode[manifest](t, blob(t, p.layout, d))
		c := decode[config](t, blob(t, p.layout, m.Config))
		if c.Architecture != o.Programs[i].Architecture || c.OS != "linux" || !c.Created.Equal(o.Created) ||
			c.Config.User != "0:0" || !slices.Equal(c.Config.Cmd, []string{"install-cni"}) || c.Config.WorkingDir != "/opt/cni/bin" ||
			len(c.Config.Env) != 1 || !strings.HasSuffix(c.Config.Env[0], ":/opt/cni/bin") {
			t.Errorf("configuration %+v", c)
		}
		labels := c.Config.Labels
		if labels["org.opencontainers.image.version"] != "1.2.3" || labels["org.opencontainers.image.licenses"] == "" {
			t.Errorf("labels %v", c.Config.Labels)
		}
		unpacked := unpress(t, blob(t, p.layout, m.Layers[0]))
		sum := sha256.Sum256(unpacked)
		if want := []string{"sha256:" + hex.EncodeToString(sum[:])}; !slices.Equal(c.RootFS.DiffIDs, want) {
			t.Errorf("diff ids %q, want %q", c.RootFS.DiffIDs, want)
		}
		checkFiles(t, unpacked, o.Programs[i], o.Created)
	}
}

func unpress(t *testing.T, pressed []byte) []byte {
	t.Helper()
	reader, err := gzip.NewReader(bytes.NewReader(pressed))
	if err != nil {
		t.Fatal(err)
	}
	content, err := io.ReadAll(reader)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// checkFiles expects one program, links to it, and their parent directories, each before its entries.
func checkFiles(t *testing.T, archive []byte, p program, at time.Time) {
	t.Helper()
	want, err := os.ReadFile(p.Path)
	if err != nil {
		t.Fatal(err)
	}
	known, found := map[string]bool{".": true}, []string{}
	for reader := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := reader.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		name := path.Clean(h.Name)
		if !known[path.Dir(name)] || h.Uid != 0 || h.Gid != 0 || !h.ModTime.Equal(at) {
			t.Errorf("entry %+v", h)
		}
		switch h.Typeflag {
		case tar.TypeDir:
			known[name] = true
		case tar.TypeSymlink:
			found = append(found, name)
			if h.Linkname != "/"+programPath {
				t.Errorf("%s leads to %s", name, h.Linkname)
			}
		case tar.TypeReg:
			have, err := io.ReadAll(reader)
			if err != nil || name != programPath || h.Mode != 0o755 || !bytes.Equal(have, want) {
				t.Errorf("file %s, mode %o, error %v", name, h.Mode, err)
			}
		default:
			t.Errorf("entry %+v", h)
		}
	}
	if diff := cmp.Diff(links(), found); diff != "" {
		t.Errorf("links, -want +have:\n%s", diff)
	}
	for _, role := range []string{"install-cni", "istio-iptables", "istio-cni-taint", "istio-cni-repair"} {
		if !slices.Contains(found, "usr/local/bin/"+role) {
			t.Errorf("no %s in PATH", role)
		}
	}
}

// TestAnImageOfFiles: the files have the given paths, and the first one is the entrypoint.
func TestAnImageOfFiles(t *testing.T) {
	t.Parallel()
	o := anOrder(t)
	o.Files = []file{{"/usr/local/bin/first", o.Programs[0].Path}, {"/second", o.Programs[1].Path}}
	programs := o.Programs
	o.Programs = nil
	p := mustPack(t, o)
	list := decode[index](t, p.layout["index.json"])
	all := decode[index](t, blob(t, p.layout, list.Manifests[0])).Manifests
	if len(list.Manifests) != 1 || len(all) != 1 || *all[0].Platform != (platform{Architecture: runtime.GOARCH, OS: "linux"}) {
		t.Fatalf("images %+v in %+v", all, list)
	}
	m := decode[manifest](t, blob(t, p.layout, all[0]))
	if c := decode[config](t, blob(t, p.layout, m.Config)).Config; !slices.Equal(c.Entrypoint, []string{"/usr/local/bin/first"}) || c.Cmd != nil {
		t.Errorf("configuration %+v", c)
	}
	found := map[string]int64{}
	for reader := tar.NewReader(bytes.NewReader(unpress(t, blob(t, p.layout, m.Layers[0])))); ; {
		h, err := reader.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		found[h.Name] = h.Size
	}
	want := map[string]int64{"usr/": 0, "usr/local/": 0, "usr/local/bin/": 0}
	for i, name := range []string{"usr/local/bin/first", "second"} {
		info, err := os.Stat(programs[i].Path)
		if err != nil {
			t.Fatal(err)
		}
		want[name] = info.Size()
	}
	if diff := cmp.Diff(want, found); diff != "" {
		t.Errorf("files, -want +have:\n%s", diff)
	}
}

// TestTheSameInputGivesTheSameBytes: paths and modification times of the programs have no effect.
func TestTheSameInputGivesTheSameBytes(t *testing.T) {
	t.Parallel()
	first := anOrder(t)
	second := first
	second.Programs = nil
	for _, p := range first.Programs {
		content, err := os.ReadFile(p.Path)
		if err != nil {
			t.Fatal(err)
		}
		elsewhere := filepath.Join(t.TempDir(), "other-name")
		if err := os.WriteFile(elsewhere, content, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(elsewhere, time.Unix(1, 0), time.Unix(2, 0)); err != nil {
			t.Fatal(err)
		}
		second.Programs = append(second.Programs, program{p.Architecture, elsewhere, p.List})
	}
	files := func(o order) map[string]string {
		dir := t.TempDir()
		p := mustPack(t, o)
		if err := p.write(dir, "istio-cni.tar", o.Created); err != nil {
			t.Fatal(err)
		}
		out := map[string]string{"digest": p.Digest}
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			content, err := os.ReadFile(filepath.Join(dir, e.Name()))
			if err != nil {
				t.Fatal(err)
			}
			sum := sha256.Sum256(content)
			out[e.Name()] = hex.EncodeToString(sum[:])
		}
		return out
	}
	before := files(first)
	if diff := cmp.Diff(before, files(second)); diff != "" || len(before) != 2 {
		t.Errorf("files %v, -first +second:\n%s", before, diff)
	}
	second.Created = second.Created.Add(time.Second)
	if after := files(second); after["digest"] == before["digest"] || after["istio-cni.tar"] == before["istio-cni.tar"] {
		t.Error("another time yields the same image")
	}
}

func TestInvalidInput(t *testing.T) {
	t.Parallel()
	good := anOrder(t)
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("#!/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(*order)
		want   string
	}{
		"no tag":             {func(o *order) { o.Name = "registry.example/x" }, "want REGISTRY/PATH:TAG"},
		"no path":            {func(o *order) { o.Name = "x:1" }, "want REGISTRY/PATH:TAG"},
		"no program":         {func(o *order) { o.Programs = nil }, "want programs or files"},
		"programs and files": {func(o *order) { o.Files = []file{{"/x", text}} }, "not both"},
		"no such file":       {func(o *order) { o.Programs, o.Files = nil, []file{{"/x", "/nonexistent"}} }, "no such file"},
		"no file":            {func(o *order) { o.Programs[0].Path = "/nonexistent" }, "no such file"},
		"no list":            {func(o *order) { o.Programs[0].List = "/nonexistent" }, "bill of materials"},
		"no Go program":      {func(o *order) { o.Programs[0].Path = text }, "reading the build information"},
		"wrong architecture": {func(o *order) { o.Programs[0].Path = o.Programs[1].Path }, "is a program for linux/"},
		"the same twice":     {func(o *order) { o.Programs[1] = o.Programs[0] }, "two programs"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := good
			o.Programs = slices.Clone(good.Programs)
			c.change(&o)
			if _, err := pack(o); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q in it", err, c.want)
			}
		})
	}
	var out, problems bytes.Buffer
	for _, args := range [][]string{{"--program", "amd64"}, {"--file", "x=y"}, {"--file", "/x"}, {"--bogus"}, {}} {
		if err := run(args, &out, &problems); err == nil {
			t.Errorf("%q was taken", args)
		}
	}
}

// TestTheDockerfileMakesTheSame compares the Dockerfile's text with the packed image.
func TestTheDockerfileMakesTheSame(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	loop := regexp.MustCompile(`(?s)for link in(.*?); do`).FindStringSubmatch(string(text))
	if loop == nil {
		t.Fatal("no links in the Dockerfile")
	}
	have := strings.Fields(strings.ReplaceAll(loop[1], "\\\n", " "))
	if diff := cmp.Diff(links(), have); diff != "" {
		t.Errorf("links, -here +Dockerfile:\n%s", diff)
	}
	p := standardImage(t)
	list := decode[index](t, p.layout["index.json"])
	first := decode[index](t, blob(t, p.layout, list.Manifests[0])).Manifests[0]
	c := decode[config](t, blob(t, p.layout, decode[manifest](t, blob(t, p.layout, first)).Config)).Config
	wanted := []string{
		"FROM scratch", "USER " + c.User, "WORKDIR " + c.WorkingDir, `CMD ["` + c.Cmd[0] + `"]`, "ENV " + c.Env[0],
		"ln -s /" + programPath + " ", "-o /rootfs/" + programPath + " ",
	}
	for label, value := range c.Labels {
		switch strings.TrimPrefix(label, "org.opencontainers.image.") {
		case "title", "description", "licenses":
			wanted = append(wanted, label+`="`+value+`"`)
		}
	}
	for _, want := range wanted {
		if !strings.Contains(string(text), want) {
			t.Errorf("the Dockerfile has no %q", want)
		}
	}
}
