package main

import (
	"bytes"
	"context"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	helm "helm.sh/helm/v3/pkg/registry"
)

// aRelease returns a copy of a release with its parameters. Files are linked, so a test replaces them.
func aRelease(t *testing.T) options {
	t.Helper()
	from := os.Getenv("RELEASE_DIST")
	if from == "" {
		t.Fatal(`RELEASE_DIST names no release: "hack/release.sh --check" builds one and runs this test`)
	}
	dir := filepath.Join(filepath.Dir(from), "bin", "test-"+strings.ReplaceAll(t.Name(), "/", "-"))
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if out, err := exec.CommandContext(t.Context(), "sh", "-c", `rm -rf "$1" && cp -al "$0" "$1"`, from, dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	s, err := readProvenance(dir)
	if err != nil {
		t.Fatal(err)
	}
	d := s.Predicate.Definition
	return options{
		Dir: dir, Version: d.External.Version, Hub: d.External.Hub, Tag: d.External.Tag, Revision: s.revision(),
		Builder: s.Predicate.Run.Builder.ID, Created: time.Unix(0, 0),
	}
}

// replace changes a file.
func replace(t *testing.T, o options, name string, change func([]byte) []byte) {
	t.Helper()
	file := filepath.Join(o.Dir, name)
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	content = change(bytes.Clone(content))
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, content, 0o755); err != nil {
		t.Fatal(err)
	}
}

func flip(at int) func([]byte) []byte {
	return func(b []byte) []byte { b[at%len(b)] ^= 1; return b }
}

func swap(old, replacement string) func([]byte) []byte {
	return func(b []byte) []byte { return bytes.ReplaceAll(b, []byte(old), []byte(replacement)) }
}

// copyOver makes one file another's copy.
func copyOver(t *testing.T, o options, to, from string) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(o.Dir, from))
	if err != nil {
		t.Fatal(err)
	}
	replace(t, o, to, func([]byte) []byte { return content })
}

func add(t *testing.T, o options, name string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(o.Dir, name), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, o options, name string) {
	t.Helper()
	if err := os.Remove(filepath.Join(o.Dir, name)); err != nil {
		t.Fatal(err)
	}
}

// aBlob returns a blob of a layout.
func aBlob(t *testing.T, o options, dir string) string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(o.Dir, dir, "blobs/sha256/*"))
	if err != nil || len(all) == 0 {
		t.Fatalf("no blobs, %v", err)
	}
	return dir + "/blobs/sha256/" + filepath.Base(all[0])
}

func TestAWholeReleaseIsValid(t *testing.T) {
	o := aRelease(t)
	var out bytes.Buffer
	if err := verify(t.Context(), o, &out); err != nil || !strings.Contains(out.String(), o.Version) {
		t.Errorf("%v: %s", err, &out)
	}
}

// TestAChangedReleaseIsRefused changes one thing. The error names the file.
func TestAChangedReleaseIsRefused(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(t *testing.T, o options) (file string)
	}{
		{"a byte of a program", func(t *testing.T, o options) string {
			replace(t, o, programFile("arm64"), flip(1<<20))
			return programFile("arm64")
		}},
		{"a byte of a blob", func(t *testing.T, o options) string {
			blob := aBlob(t, o, imageDir)
			replace(t, o, blob, flip(0))
			return blob
		}},
		{"a file is missing", func(t *testing.T, o options) string {
			remove(t, o, krewFile)
			return krewFile
		}},
		{"one more file", func(t *testing.T, o options) string {
			add(t, o, "more")
			return "more"
		}},
		{"one more blob", func(t *testing.T, o options) string {
			add(t, o, imageDir+"/blobs/sha256/0")
			return imageDir + "/blobs/sha256/0"
		}},
		{"a checksum", func(t *testing.T, o options) string {
			replace(t, o, checksumsFile, flip(0))
			return checksumsFile
		}},
		{"a path that leaves the directory", func(t *testing.T, o options) string {
			replace(t, o, checksumsFile, swap("  "+notesFile, "  ../"+notesFile))
			return checksumsFile
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			o := aRelease(t)
			file := c.change(t, o)
			if err := verify(t.Context(), o, io.Discard); err == nil || !strings.Contains(err.Error(), file) {
				t.Errorf("error %v does not name %s", err, file)
			}
		})
	}
}

// TestAChangedReleaseWithItsChecksumsIsRefused changes one thing, and writes provenance and CHECKSUMS again.
func TestAChangedReleaseWithItsChecksumsIsRefused(t *testing.T) {
	n := func(o options) string { return number(o.Version) }
	for _, c := range []struct {
		name   string
		change func(t *testing.T, o *options) (want string)
	}{
		{"version", func(_ *testing.T, o *options) string {
			o.Version = "v9.9.9"
			return "has another version than v9.9.9"
		}},
		{"registry", func(_ *testing.T, o *options) string {
			o.Hub = "elsewhere/mesh"
			return manifestFile + " has another image than elsewhere/mesh/install-cni:"
		}},
		{"revision", func(_ *testing.T, o *options) string {
			o.Revision = strings.Repeat("0", 40)
			return programFile("amd64") + ": is a build of"
		}},
		{"another architecture", func(t *testing.T, o *options) string {
			copyOver(t, *o, programFile("s390x"), programFile("amd64"))
			return programFile("s390x") + ": is a program of EM_X86_64"
		}},
		{"no program", func(t *testing.T, o *options) string {
			copyOver(t, *o, programFile("ppc64le"), notesFile)
			return programFile("ppc64le") + ": is no program"
		}},
		{"the image's program", func(t *testing.T, o *options) string {
			replace(t, *o, programFile("arm64"), func(b []byte) []byte { return append(b, 0) })
			return "image, arm64: has other files than the program " + programFile("arm64")
		}},
		{"a file is missing", func(t *testing.T, o *options) string {
			remove(t, *o, manifestFile)
			return manifestFile + " is missing"
		}},
		{"one more file", func(t *testing.T, o *options) string {
			add(t, *o, "more")
			return "more is no file of release"
		}},
		{"one more blob", func(t *testing.T, o *options) string {
			add(t, *o, chartDir+"/blobs/sha256/0")
			return "chart/blobs/sha256/0 is referenced by nothing"
		}},
		{"a blob", func(t *testing.T, o *options) string {
			blob := aBlob(t, *o, imageDir)
			replace(t, *o, blob, flip(0))
			return blob + " has another digest"
		}},
		{"the image's tar", func(t *testing.T, o *options) string {
			replace(t, *o, imageFile(n(*o)), swap("imageLayoutVersion", "imageLayoutversion"))
			return imageFile(n(*o)) + ": oci-layout differs"
		}},
		{"the chart's tar", func(t *testing.T, o *options) string {
			replace(t, *o, chartTar(n(*o)), swap("imageLayoutVersion", "imageLayoutversion"))
			return chartTar(n(*o)) + ": oci-layout differs"
		}},
		{"the image's tag", func(t *testing.T, o *options) string {
			replace(t, *o, imageDir+"/index.json", swap(`ref.name":"`+n(*o), `ref.name":"latest`))
			return "image/index.json: the tag is"
		}},
		{"the chart", func(t *testing.T, o *options) string {
			replace(t, *o, chartFile(n(*o)), flip(100))
			return chartFile(n(*o))
		}},
		{"the chart's layout", func(t *testing.T, o *options) string {
			replace(t, *o, chartDir+"/index.json", swap(n(*o), "9.9.9"))
			return "chart: has other manifests than one with tag"
		}},
		{"the plugin's version", func(t *testing.T, o *options) string {
			replace(t, *o, krewFile, swap("version: "+o.Version, "version: v9.9.9"))
			return krewFile + ": is of version v9.9.9"
		}},
		{"the plugin's digest", func(t *testing.T, o *options) string {
			replace(t, *o, krewFile, swap("sha256: ", "sha256: 0"))
			return krewFile + ": uri or sha256 is not that of kubectl-istio_cni-linux-amd64.tar.gz"
		}},
		{"another system's plugin", func(t *testing.T, o *options) string {
			copyOver(t, *o, pluginFile("darwin-arm64"), pluginFile("linux-arm64"))
			return pluginFile("darwin-arm64") + ": is a build of"
		}},
		{"a license", func(t *testing.T, o *options) string {
			name := bomFile(programFile("amd64"))
			replace(t, *o, name, swap(`"id": "Apache-2.0"`, `"id": ""`))
			return name + ": component"
		}},
		{"a license that nobody read", func(t *testing.T, o *options) string {
			name := bomFile(pluginFile("linux-amd64"))
			replace(t, *o, name, swap(`"id": "Apache-2.0"`, `"id": "Nonsense-1.0"`))
			return name + ": component"
		}},
		{"a component", func(t *testing.T, o *options) string {
			name := bomFile(programFile("amd64"))
			replace(t, *o, name, swap(`"name": "github.com/vishvananda/netns"`, `"name": "github.com/vishvananda/other"`))
			return name + `: component "github.com/vishvananda/other"`
		}},
		{"another program's list", func(t *testing.T, o *options) string {
			copyOver(t, *o, bomFile(programFile("arm64")), bomFile(programFile("amd64")))
			return bomFile(programFile("arm64")) + ": is of another program"
		}},
		{"the notes", func(t *testing.T, o *options) string {
			replace(t, *o, notesFile, swap(o.Version, "v0.0.1"))
			return notesFile + " is not headed"
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			o := aRelease(t)
			want := c.change(t, &o)
			if err := os.Remove(filepath.Join(o.Dir, provenanceFile)); err != nil {
				t.Fatal(err)
			}
			if err := os.Remove(filepath.Join(o.Dir, checksumsFile)); err != nil {
				t.Fatal(err)
			}
			if err := seal(o); err != nil {
				t.Fatal(err)
			}
			if err := verify(t.Context(), o, io.Discard); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("want %q in error %v", want, err)
			}
		})
	}
}

// TestTheProvenanceIsOfTheRelease: any other statement than that of the files is an error.
func TestTheProvenanceIsOfTheRelease(t *testing.T) {
	sums := map[string]string{"a": "1", "b": "2"}
	o := options{Version: "v1.2.3", Tag: "v1.2.3", Revision: "c", Builder: "https://b", Created: time.Unix(1, 0)}
	if err := checkStatement(provenance(o, sums), sums); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*statement){
		"a subject less": func(s *statement) { s.Subject = s.Subject[1:] },
		"a digest":       func(s *statement) { s.Subject[0].Digest["sha256"] = "3" },
		"no digest":      func(s *statement) { s.Subject = append(s.Subject, subject{Name: "c"}) },
		"a subject more": func(s *statement) { s.Subject = append(s.Subject, subject{"c", map[string]string{"sha256": "3"}}) },
		"the tag":        func(s *statement) { s.Predicate.Definition.External.Tag = "v9.9.9" },
		"a changed tree": func(s *statement) { s.Predicate.Definition.Internal.Dirty = true },
		"the epoch":      func(s *statement) { s.Predicate.Definition.Internal.Epoch = "" },
		"the source":     func(s *statement) { s.Predicate.Definition.Dependencies[0].URI = "git+https://elsewhere" },
	} {
		changed := provenance(o, sums)
		change(&changed)
		if err := checkStatement(changed, sums); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// aRegistry returns a registry on loopback.
func aRegistry(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0)), registry.WithReferrersSupport(true)))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

// TestWhatIsPushedIsWhatIsPulled pushes to a registry, and pulls by digest, and the chart as Helm does.
func TestWhatIsPushedIsWhatIsPulled(t *testing.T) {
	o := aRelease(t)
	o.Hub = aRegistry(t) + "/mesh"
	var out bytes.Buffer
	for range 2 { // pushing twice is no error
		out.Reset()
		if err := push(t.Context(), o, &out); err != nil {
			t.Fatal(err)
		}
	}
	f := found{dir: o.Dir}
	for line := range strings.SplitSeq(strings.TrimSpace(out.String()), "\n") {
		ref, sum, _ := strings.Cut(strings.TrimPrefix(line, "pushed "), "@sha256:")
		tag, err := name.NewTag(ref)
		if err != nil {
			t.Fatal(err)
		}
		pulled, err := remote.Get(tag.Digest("sha256:" + sum))
		if err != nil {
			t.Fatal(err)
		}
		dir := imageDir
		if strings.Contains(ref, "/charts/") {
			dir = chartDir
		}
		want, err := f.read(dir + "/blobs/sha256/" + sum)
		if err != nil || !bytes.Equal(pulled.Manifest, want) {
			t.Errorf("%s: other bytes than in %s, error %v", ref, dir, err)
		}
		if tagged, err := remote.Head(tag); err != nil || tagged.Digest.Hex != sum {
			t.Errorf("%s: tag %v, error %v", ref, tagged, err)
		}
	}
	checkList(t, o)
	client, err := helm.NewClient(helm.ClientOptPlainHTTP(), helm.ClientOptWriter(io.Discard))
	if err != nil {
		t.Fatal(err)
	}
	chart, err := client.Pull(o.Hub + "/charts/cni:" + number(o.Version))
	if err != nil {
		t.Fatal(err)
	}
	if want, err := f.read(chartFile(number(o.Version))); err != nil || !bytes.Equal(chart.Chart.Data, want) {
		t.Errorf("another chart is pulled, error %v", err)
	}
}

// checkList expects the bill of materials as the image's referrer.
func checkList(t *testing.T, o options) {
	t.Helper()
	repository, err := name.NewRepository(o.Hub + "/install-cni")
	if err != nil {
		t.Fatal(err)
	}
	images, err := remote.Index(repository.Tag(number(o.Version)))
	if err != nil {
		t.Fatal(err)
	}
	list, err := images.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range list.Manifests {
		lists, err := remote.Referrers(repository.Digest(d.Digest.String()))
		if err != nil {
			t.Fatal(err)
		}
		if m, err := lists.IndexManifest(); err != nil || len(m.Manifests) != 1 {
			t.Errorf("%v: %+v refer to it, error %v", d.Platform, m, err)
		}
	}
}

// TestATagIsNotMoved: a tag with another digest stays, and nothing is pushed beside it.
func TestATagIsNotMoved(t *testing.T) {
	for repository, beside := range map[string]string{"install-cni": "charts/cni", "charts/cni": "install-cni"} {
		t.Run(filepath.Base(repository), func(t *testing.T) {
			o := aRelease(t)
			o.Hub = aRegistry(t) + "/mesh"
			tag, err := name.NewTag(o.Hub + "/" + repository + ":" + number(o.Version))
			if err != nil {
				t.Fatal(err)
			}
			other, err := random.Image(10, 1)
			if err != nil {
				t.Fatal(err)
			}
			if err = remote.Write(tag, other); err != nil {
				t.Fatal(err)
			}
			before, err := remote.Head(tag)
			if err != nil {
				t.Fatal(err)
			}
			if err := push(t.Context(), o, io.Discard); err == nil || !strings.Contains(err.Error(), "the tag exists") {
				t.Errorf("error %v", err)
			}
			if after, err := remote.Head(tag); err != nil || after.Digest != before.Digest {
				t.Errorf("the tag was moved to %v, error %v", after, err)
			}
			if _, err := remote.Head(tag.Registry.Repo("mesh", beside).Tag(number(o.Version))); err == nil {
				t.Errorf("%s was pushed", beside)
			}
		})
	}
}

// TestADryRunConnectsToNothing also shows the commands that sign.
func TestADryRunConnectsToNothing(t *testing.T) {
	o := aRelease(t)
	o.Hub, o.DryRun, o.Out = "localhost:1/mesh", true, filepath.Join(t.TempDir(), "predicate.json")
	var out bytes.Buffer
	if err := push(context.Background(), o, &out); err != nil {
		t.Fatal(err)
	}
	if err := sign(o, &out); err != nil {
		t.Fatal(err)
	}
	var have []string
	for line := range strings.Lines(out.String()) {
		words := strings.Fields(line)
		repository, _, _ := strings.Cut(words[len(words)-1], "@")
		have = append(have, words[0]+" "+words[1]+" "+repository)
	}
	n := number(o.Version)
	want := []string{
		"would push localhost:1/mesh/install-cni:" + n, "would push localhost:1/mesh/charts/cni:" + n,
		"cosign sign-blob " + filepath.Join(o.Dir, checksumsFile),
		"cosign sign localhost:1/mesh/install-cni", "cosign attest localhost:1/mesh/install-cni",
		"cosign sign localhost:1/mesh/charts/cni", "cosign attest localhost:1/mesh/charts/cni",
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("-want +have:\n%s", diff)
	}
	if text, err := os.ReadFile(o.Out); err != nil || !bytes.Contains(text, []byte(`"buildDefinition"`)) {
		t.Errorf("predicate %s, error %v", text, err)
	}
	o.Hub = ""
	if err := push(context.Background(), o, io.Discard); err == nil || !strings.Contains(err.Error(), "HUB is not set") {
		t.Errorf("error %v", err)
	}
}
