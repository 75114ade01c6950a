package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

// built is a directory with a small program for each of two architectures, named like these.
var built string

func TestMain(m *testing.M) {
	built = must(os.MkdirTemp("", "image"))
	defer func() { _ = os.RemoveAll(built) }()
	for name, text := range map[string]string{"go.mod": "module example.com/nothing\n\ngo 1.26\n", "main.go": "package main\n\nfunc main() {}\n"} {
		must(0, os.WriteFile(filepath.Join(built, name), []byte(text), 0o600))
	}
	for _, arch := range []string{"amd64", "arm64"} {
		build := exec.CommandContext(context.Background(), "go", "build", "-trimpath", "-o", arch, ".")
		build.Dir, build.Env = built, append(os.Environ(), "GOOS=linux", "GOARCH="+arch, "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off")
		must(build.CombinedOutput())
	}
	m.Run()
}

// packed writes an image, and returns the layout's index and the index of the architectures, read from the tar.
func packed(t *testing.T, args ...string) (all, whole v1.ImageIndex) {
	t.Helper()
	dir := t.TempDir()
	args = append(args, "--name", "registry.example/mesh/install-cni:1.2.3", "--created", "1700000000", "--out", dir, "--tar", "a.tar")
	if err := run(args, io.Discard, io.Discard); err != nil {
		t.Fatal(err)
	}
	must(exec.CommandContext(t.Context(), "tar", "-C", dir, "-xf", filepath.Join(dir, "a.tar")).CombinedOutput())
	all = must(layout.ImageIndexFromPath(dir))
	if err := validate.Index(all); err != nil {
		t.Error(err)
	}
	return all, must(all.ImageIndex(must(all.IndexManifest()).Manifests[0].Digest))
}

// imageOf returns the image of an architecture, and its configuration.
func imageOf(t *testing.T, whole v1.ImageIndex, arch string) (v1.Image, *v1.ConfigFile) {
	t.Helper()
	for _, d := range must(whole.IndexManifest()).Manifests {
		image := must(whole.Image(d.Digest))
		config := must(image.ConfigFile())
		if d.Platform.OS == "linux" && d.Platform.Architecture == arch && d.Platform.Equals(*config.Platform()) {
			return image, config
		}
	}
	t.Fatalf("no image for %s: %+v", arch, must(whole.IndexManifest()))
	return nil, nil
}

// checkFiles expects mode, name, and size or target of each entry. All are root's, with the image's time.
func checkFiles(t *testing.T, image v1.Image, want ...string) {
	t.Helper()
	var have []string
	reader := tar.NewReader(mutate.Extract(image))
	h, err := reader.Next()
	for ; err == nil; h, err = reader.Next() {
		if h.Uid != 0 || h.Gid != 0 || h.ModTime.Unix() != 1_700_000_000 {
			t.Errorf("%+v", h)
		}
		have = append(have, strings.TrimSpace(fmt.Sprintf("%s %s %d %s", h.FileInfo().Mode(), h.Name, h.Size, h.Linkname)))
	}
	if diff := cmp.Diff(want, have); diff != "" || !errors.Is(err, io.EOF) {
		t.Errorf("error %v, files, -want +have:\n%s", err, diff)
	}
}

// program is an entry of checkFiles.
func program(name, file string) string {
	return fmt.Sprintf("-rwxr-xr-x %s %d", name, must(os.Stat(file)).Size())
}

// TestRun_Programs: each architecture has the program, and links to it with the names of the roles.
func TestRun_Programs(t *testing.T) {
	t.Parallel()
	all, whole := packed(t, "--program", "amd64="+built+"/amd64", "--program", "arm64="+built+"/arm64")
	names := map[string]string{"io.containerd.image.name": "registry.example/mesh/install-cni:1.2.3", label + "ref.name": "1.2.3"}
	if diff := cmp.Diff(names, must(all.IndexManifest()).Manifests[0].Annotations); diff != "" {
		t.Errorf("annotations -want +have:\n%s", diff)
	}
	for _, arch := range []string{"amd64", "arm64"} {
		image, config := imageOf(t, whole, arch)
		want := v1.Config{
			User: "0:0", Cmd: []string{"install-cni"}, WorkingDir: "/opt/cni/bin",
			Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/cni/bin"},
			Labels: map[string]string{
				label + "title": "istio-cni", label + "version": "1.2.3", label + "licenses": "Apache-2.0",
				label + "description": "Redirects the traffic of Istio sidecar pods: CNI plugin, node agent and taint controller.",
				label + "source":      "https://example.com/nothing", label + "revision": "", label + "created": "2023-11-14T22:13:20Z",
			},
		}
		if diff := cmp.Diff(want, config.Config); diff != "" || config.Created.Unix() != 1_700_000_000 {
			t.Errorf("created %v, -want +have:\n%s", config.Created, diff)
		}
		var entries []string
		for name := range strings.FieldsSeq(`opt/ opt/cni/ opt/cni/bin/ opt/cni/bin/istio-cni opt/cni/bin/istio-cni-repair
			opt/cni/bin/istio-cni-taint opt/cni/bin/istio-iptables opt/local/ opt/local/bin/ opt/local/bin/istio-cni-taint
			usr/ usr/local/ usr/local/bin/ usr/local/bin/install-cni usr/local/bin/istio-cni usr/local/bin/istio-cni-repair
			usr/local/bin/istio-cni-taint usr/local/bin/istio-iptables`) {
			entry := "Lrwxrwxrwx " + name + " 0 /opt/cni/bin/istio-cni"
			if dir, is := strings.CutSuffix(name, "/"); is {
				entry = "drwxr-xr-x " + dir + " 0"
			} else if name == "opt/cni/bin/istio-cni" {
				entry = program(name, built+"/"+arch)
			}
			entries = append(entries, entry)
		}
		checkFiles(t, image, entries...)
	}
}

// TestRun_Files: the files have the given paths, and the first one is the entrypoint.
func TestRun_Files(t *testing.T) {
	t.Parallel()
	_, whole := packed(t, "--file", "/second/first="+built+"/amd64", "--file", "/other="+built+"/arm64")
	image, config := imageOf(t, whole, runtime.GOARCH)
	want := v1.Config{Entrypoint: []string{"/second/first"}, Env: []string{"PATH=/usr/local/bin:/bin"}}
	if diff := cmp.Diff(want, config.Config); diff != "" {
		t.Errorf("-want +have:\n%s", diff)
	}
	checkFiles(t, image, program("other", built+"/arm64"), "drwxr-xr-x second 0", program("second/first", built+"/amd64"))
}

// TestRun_SameBytes: path and modification time of a program have no effect, the image's time has.
func TestRun_SameBytes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	other := filepath.Join(dir, "other")
	must(0, os.WriteFile(other, must(os.ReadFile(built+"/amd64")), 0o600))
	must(0, os.Chtimes(other, time.Unix(1, 0), time.Unix(2, 0)))
	written := func(program, created string) string {
		args := []string{"--program", "amd64=" + program, "--created", created, "--name", "x.example/y:1", "--out", dir, "--tar", "a.tar"}
		must(0, run(args, io.Discard, io.Discard))
		return string(must(os.ReadFile(filepath.Join(dir, "a.tar"))))
	}
	first := written(built+"/amd64", "1")
	if first != written(other, "1") || first == written(other, "2") {
		t.Error("path or time of the program has an effect, or the image's time has none")
	}
}

func TestRun_InvalidInput(t *testing.T) {
	t.Parallel()
	for want, args := range map[string][]string{
		"REGISTRY/PATH:TAG":        {"--name", "registry.example/x"},
		"want programs or files":   {},
		"not both":                 {"--program", "amd64=x", "--file", "/x=x"},
		"want NAME=FILE":           {"--program", "amd64"},
		"no such file":             {"--program", "amd64=/nonexistent"},
		"the build information":    {"--program", "amd64=image_test.go"},
		"is a program for linux/":  {"--program", "amd64=" + built + "/arm64"},
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
	text := string(must(os.ReadFile("../../../Dockerfile")))
	loop := regexp.MustCompile(`(?s)for link in(.*?); do`).FindStringSubmatch(text)
	if diff := cmp.Diff(links(), strings.Fields(strings.ReplaceAll(loop[1], "\\\n", " "))); diff != "" {
		t.Errorf("links, -here +Dockerfile:\n%s", diff)
	}
	_, whole := packed(t, "--program", "amd64="+built+"/amd64")
	_, config := imageOf(t, whole, "amd64")
	c := config.Config
	wanted := []string{
		"FROM scratch", "USER " + c.User, "WORKDIR " + c.WorkingDir, `CMD ["` + c.Cmd[0] + `"]`, "ENV " + c.Env[0],
		"ln -s /" + programPath + " ", "-o /rootfs/" + programPath + " ",
	}
	for _, name := range []string{"title", "description", "licenses"} {
		wanted = append(wanted, label+name+`="`+c.Labels[label+name]+`"`)
	}
	for _, want := range wanted {
		if !strings.Contains(text, want) {
			t.Errorf("the Dockerfile has no %q", want)
		}
	}
}
