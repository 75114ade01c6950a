package hack

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// publishing is a tree with hack/publish.sh, a dist/, and programs that write down how they are called, and which account they find.
func publishing(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	const recorder = "#!/bin/bash\necho \"${0##*/} $*\" >>calls\n"
	for name, text := range map[string]string{
		"hack/release.sh":             recorder + "[[ $* != *--verify* || $HUB != other ]] || { echo refused; exit 1; }\ncat \"${DOCKER_CONFIG:-/nonexistent}/config.json\" >>accounts 2>/dev/null || true\n",
		"bin/gh":                      recorder,
		"dist/RELEASE_NOTES.md":       "notes",
		"dist/provenance.intoto.json": `{"tag": "v0.2.0"}, {"tag": "v0.2.0-rc.1"}`,
		"dist/istio-cni-0.2.0.tgz":    "chart",
		"dist/image/index.json":       "{}",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"publish.sh", "lib.sh"} {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "hack", name), text, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestPublish(t *testing.T) {
	t.Parallel()
	const create = "gh release create v0.2.0 --verify-tag --title v0.2.0 --notes-file dist/RELEASE_NOTES.md "
	const files = "dist/RELEASE_NOTES.md dist/istio-cni-0.2.0.tgz dist/provenance.intoto.json\n"
	for name, c := range map[string]struct {
		args            []string
		env             []string
		calls, accounts string
		says            string // without an error
		fails           string
	}{
		"publish": {
			env:      []string{"VERSION=v0.2.0", "HUB=hub.example:5000/mesh", "HUB_USERNAME=jane", "HUB_PASSWORD=s:cret"},
			calls:    "release.sh --verify dist\nrelease.sh --push dist\nrelease.sh --sign dist\n" + create + files,
			accounts: strings.Repeat(`{"auths": {"hub.example:5000": {"auth": "amFuZTpzOmNyZXQ="}}}`+"\n", 2),
		},
		"a prerelease": {
			env:   []string{"VERSION=v0.2.0-rc.1", "HUB=hub.example/mesh"},
			calls: "release.sh --verify dist\nrelease.sh --push dist\nrelease.sh --sign dist\n" + strings.ReplaceAll(create, "v0.2.0", "v0.2.0-rc.1") + "--prerelease " + files,
		},
		"dry run": {
			args:  []string{"--dry-run"},
			env:   []string{"VERSION=v0.2.0", "HUB_USERNAME=jane", "HUB_PASSWORD=s:cret"},
			calls: "release.sh --verify dist\nrelease.sh --dry-run --push dist\nrelease.sh --dry-run --sign dist\n",
			says:  "would run: " + create + files,
		},
		"not verified": {env: []string{"VERSION=v0.2.0", "HUB=other"}, calls: "release.sh --verify dist\n", fails: "refused"},
		"a snapshot": {
			env: []string{"VERSION=v0.3.0", "HUB=hub.example/mesh"}, calls: "release.sh --verify dist\n", fails: "dist/ is a snapshot",
		},
		"no hub":     {env: []string{"VERSION=v0.2.0"}, fails: "HUB is not set"},
		"no version": {env: []string{"HUB=hub.example/mesh"}, fails: "VERSION is not set"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := publishing(t)
			env := append([]string{"VERSION=", "HUB=", "HUB_PASSWORD=", "DOCKER_CONFIG=", "PATH=" + dir + "/bin:" + os.Getenv("PATH")}, c.env...)
			out, err := run(t, env, filepath.Join(dir, "hack/publish.sh"), c.args...)
			if (err != nil) != (c.fails != "") || !strings.Contains(out, c.fails) || !strings.Contains(out, c.says) {
				t.Errorf("error %v, output:\n%s", err, out)
			}
			for file, want := range map[string]string{"calls": c.calls, "accounts": c.accounts} {
				text, _ := os.ReadFile(filepath.Join(dir, file)) // no file: not called
				if diff := cmp.Diff(want, string(text)); diff != "" {
					t.Errorf("%s, -want +have:\n%s", file, diff)
				}
			}
		})
	}
}
