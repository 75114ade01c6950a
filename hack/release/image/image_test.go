package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// built returns a directory with a small program for each of two architectures.
var built = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "image")
	for name, text := range map[string]string{"go.mod": "module example.com/nothing\n\ngo 1.26\n", "main.go": "package main\n\nfunc main() {}\n"} {
		err = errors.Join(err, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	for _, arch := range []string{"amd64", "arm64"} {
		build := exec.Command("go", "build", "-trimpath", "-o", arch, ".")
		build.Dir, build.Env = dir, append(os.Environ(), "GOOS=linux", "GOARCH="+arch, "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off")
		err = errors.Join(err, build.Run())
	}
	return dir, err
})

func TestMain(m *testing.M) {
	code := m.Run()
	if dir, err := built(); err == nil {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}

func program(t *testing.T, arch string) string {
	t.Helper()
	dir, err := built()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, arch)
}

// packed writes an image of programs or files, reads it from the tar, and returns the descriptor of the index of architectures, the
// index, and its images.
func packed(t *testing.T, args ...string) (head v1.Descriptor, index []v1.Descriptor, images []v1.Image) {
	t.Helper()
	dir := t.TempDir()
	args = append(args, "--name", "registry.example/mesh/install-cni:1.2.3", "--created", "1700000000", "--out", dir, "--tar", "a.tar")
	if err := run(args, io.Discard, io.Discard); err != nil {
		t.Fatal(err)
	}
	if err := exec.CommandContext(t.Context(), "tar", "-C", dir, "-xf", filepath.Join(dir, "a.tar")).Run(); err != nil {
		t.Fatal(err)
	}
	all, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	list, err := all.IndexManifest()
	if invalid := validate.Index(all); err != nil || invalid != nil || len(list.Manifests) != 1 {
		t.Fatalf("%+v, errors %v, %v", list, err, invalid)
	}
	whole, err := all.ImageIndex(list.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := whole.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range manifest.Manifests {
		image, err := whole.Image(d.Digest)
		if err != nil {
			t.Fatal(err)
		}
		images = append(images, image)
	}
	return list.Manifests[0], manifest.Manifests, images
}

func configOf(t *testing.T, image v1.Image) *v1.ConfigFile {
	t.Helper()
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	return config
}

// checkFiles expects kind, mode, name, and size or target of each entry of the one layer. All are root's, of the image's time.
func checkFiles(t *testing.T, image v1.Image, want ...string) {
	t.Helper()
	var have []string
	all := mutate.Extract(image)
	for reader := tar.NewReader(all); ; {
		h, err := reader.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || h.ModTime.Unix() != 1_700_000_000 {
			t.Errorf("%+v", h)
		}
		have = append(have, strings.TrimSpace(fmt.Sprintf("%c %o %s %d %s", h.Typeflag, h.Mode, h.Name, h.Size, h.Linkname)))
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("files, -want +have:\n%s", diff)
	}
}

// line is the line of checkFiles for a program.
func line(t *testing.T, name, file string) string {
	t.Helper()
	info, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("0 755 %s %d", name, info.Size())
}

// TestRun_Programs: each architecture has the program, and links to it with the names of the roles.
func TestRun_Programs(t *testing.T) {
	t.Parallel()
	head, index, images := packed(t, "--program", "amd64="+program(t, "amd64"), "--program", "arm64="+program(t, "arm64"))
	names := map[string]string{
		"io.containerd.image.name":          "registry.example/mesh/install-cni:1.2.3",
		"org.opencontainers.image.ref.name": "1.2.3",
	}
	if diff := cmp.Diff(names, head.Annotations); diff != "" || len(images) != 2 {
		t.Errorf("%d images, annotations -want +have:\n%s", len(images), diff)
	}
	for i, arch := range []string{"amd64", "arm64"} {
		config := configOf(t, images[i])
		if p := index[i].Platform; p.OS != "linux" || p.Architecture != arch || !p.Equals(*config.Platform()) || config.Created.Unix() != 1_700_000_000 {
			t.Errorf("platform %v, configuration %+v", p, config)
		}
		want := v1.Config{
			User: "0:0", Cmd: []string{"install-cni"}, WorkingDir: "/opt/cni/bin",
			Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/cni/bin"},
			Labels: map[string]string{
				label + "title": "istio-cni", label + "version": "1.2.3", label + "licenses": "Apache-2.0",
				label + "description": "Redirects the traffic of Istio sidecar pods: CNI plugin, node agent and taint controller.",
				label + "source":      "https://example.com/nothing", label + "revision": "", label + "created": "2023-11-14T22:13:20Z",
			},
		}
		if diff := cmp.Diff(want, config.Config); diff != "" {
			t.Errorf("-want +have:\n%s", diff)
		}
		entries := []string{"5 755 opt 0", "5 755 opt/cni 0", "5 755 opt/cni/bin 0", line(t, "opt/cni/bin/istio-cni", program(t, arch))}
		for name := range strings.FieldsSeq(`opt/cni/bin/istio-cni-repair opt/cni/bin/istio-cni-taint opt/cni/bin/istio-iptables
			opt/local/ opt/local/bin/ opt/local/bin/istio-cni-taint usr/ usr/local/ usr/local/bin/ usr/local/bin/install-cni
			usr/local/bin/istio-cni usr/local/bin/istio-cni-repair usr/local/bin/istio-cni-taint usr/local/bin/istio-iptables`) {
			entry := "2 777 " + name + " 0 /opt/cni/bin/istio-cni"
			if dir, is := strings.CutSuffix(name, "/"); is {
				entry = "5 755 " + dir + " 0"
			}
			entries = append(entries, entry)
		}
		checkFiles(t, images[i], entries...)
	}
}

// TestRun_Files: the files have the given paths, and the first one is the entrypoint.
func TestRun_Files(t *testing.T) {
	t.Parallel()
	amd64, arm64 := program(t, "amd64"), program(t, "arm64")
	_, index, images := packed(t, "--file", "/bin/first="+amd64, "--file", "/second="+arm64)
	config := configOf(t, images[0]).Config
	if diff := cmp.Diff(v1.Config{Entrypoint: []string{"/bin/first"}, Env: []string{"PATH=/usr/local/bin:/bin"}}, config); diff != "" {
		t.Errorf("-want +have:\n%s", diff)
	}
	if len(index) != 1 || index[0].Platform.Architecture != runtime.GOARCH {
		t.Errorf("%+v", index)
	}
	checkFiles(t, images[0], "5 755 bin 0", line(t, "bin/first", amd64), line(t, "second", arm64))
}

// TestRun_SameBytes: path and modification time of a program have no effect, the image's time has.
func TestRun_SameBytes(t *testing.T) {
	t.Parallel()
	content, err := os.ReadFile(program(t, "amd64"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	other := filepath.Join(dir, "other")
	if err := errors.Join(os.WriteFile(other, content, 0o600), os.Chtimes(other, time.Unix(1, 0), time.Unix(2, 0))); err != nil {
		t.Fatal(err)
	}
	written := func(program, created string) []byte {
		args := []string{"--program", "amd64=" + program, "--created", created, "--name", "x.example/y:1", "--out", dir, "--tar", "a.tar"}
		if err := run(args, io.Discard, io.Discard); err != nil {
			t.Fatal(err)
		}
		content, err := os.ReadFile(filepath.Join(dir, "a.tar"))
		if err != nil {
			t.Fatal(err)
		}
		return content
	}
	first := written(program(t, "amd64"), "1")
	if !bytes.Equal(first, written(other, "1")) {
		t.Error("path or time of the program have an effect")
	}
	if bytes.Equal(first, written(program(t, "amd64"), "2")) {
		t.Error("the image's time has no effect")
	}
}

func TestRun_InvalidInput(t *testing.T) {
	t.Parallel()
	file := program(t, "amd64")
	good := "amd64=" + file
	for want, args := range map[string][]string{
		"want REGISTRY/PATH:TAG":   {"--program", good, "--name", "registry.example/x"},
		"want programs or files":   {},
		"not both":                 {"--program", good, "--file", "/x=" + file},
		"want /PATH=FILE":          {"--file", "x=" + file},
		"want NAME=FILE":           {"--program", "amd64"},
		"no such file":             {"--program", "amd64=/nonexistent"},
		"the build information":    {"--program", "amd64=image_test.go"},
		"is a program for linux/":  {"--program", "amd64=" + program(t, "arm64")},
		"two programs for amd64":   {"--program", good, "--program", good},
		"flag provided but not de": {"--bogus"},
	} {
		err := run(append([]string{"--name", "x.example/y:1", "--out", t.TempDir()}, args...), io.Discard, io.Discard)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q in it", args, err, want)
		}
	}
}

// TestDockerfile_SameImage compares the Dockerfile's text with the packed image.
func TestDockerfile_SameImage(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	loop := regexp.MustCompile(`(?s)for link in(.*?); do`).FindStringSubmatch(string(text))
	if loop == nil {
		t.Fatal("no links in the Dockerfile")
	}
	if diff := cmp.Diff(links(), strings.Fields(strings.ReplaceAll(loop[1], "\\\n", " "))); diff != "" {
		t.Errorf("links, -here +Dockerfile:\n%s", diff)
	}
	_, _, images := packed(t, "--program", "amd64="+program(t, "amd64"))
	c := configOf(t, images[0]).Config
	wanted := []string{
		"FROM scratch", "USER " + c.User, "WORKDIR " + c.WorkingDir, `CMD ["` + c.Cmd[0] + `"]`, "ENV " + c.Env[0],
		"ln -s /" + programPath + " ", "-o /rootfs/" + programPath + " ",
	}
	for _, name := range []string{"title", "description", "licenses"} {
		wanted = append(wanted, label+name+`="`+c.Labels[label+name]+`"`)
	}
	for _, want := range wanted {
		if !strings.Contains(string(text), want) {
			t.Errorf("the Dockerfile has no %q", want)
		}
	}
}
