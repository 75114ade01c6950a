// Package hack tests properties of the scripts that no run of theirs shows.
package hack

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// run runs a command in the root of the repository.
func run(t *testing.T, env []string, name string, args ...string) (out string, err error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir = ".."
	cmd.Env = append(os.Environ(), env...)
	text, err := cmd.CombinedOutput()
	return string(text), err
}

// TestMakeListsEveryTarget: "make" without a target lists all targets.
func TestMakeListsEveryTarget(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../Makefile")
	check.OK(t, err)
	var want, have []string
	for _, target := range regexp.MustCompile(`(?m)^([^\s:.#=]+):`).FindAllStringSubmatch(string(text), -1) {
		want = append(want, target[1])
	}
	out, err := run(t, []string{"MAKEFLAGS="}, "make", "--no-print-directory")
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for line := range strings.Lines(out) {
		have = append(have, strings.Fields(line)[0])
	}
	if diff := cmp.Diff(want, have); diff != "" || !slices.Contains(have, "e2e") {
		t.Errorf("targets, -Makefile +listed:\n%s", diff)
	}
}

// TestEndToEndTestsOfNothingFail: a pattern that matches no package is an error, before anything is installed or
// built.
func TestEndToEndTestsOfNothingFail(t *testing.T) {
	t.Parallel()
	for pattern, want := range map[string]string{
		"./nothing":             "PKG=./nothing names no package of e2e/",
		"./nothing/...":         "PKG=./nothing/... names no package of e2e/",
		"./images/...":          "PKG=./images/... names no package of e2e/ that has tests",
		"./taint ./nothing/...": "PKG=./nothing/... names no package of e2e/",
	} {
		t.Run(pattern, func(t *testing.T) {
			t.Parallel()
			out, err := run(t, []string{"PKG=" + pattern}, "hack/e2e.sh")
			if err == nil || !strings.Contains(out, want) {
				t.Errorf("error %v, want one with %q:\n%s", err, want, out)
			}
		})
	}
}

// TestAProgramIsLaidInLargeBlocks: the build writes a program anew, so that it has no more page faults than a file that is written at
// once. How few these are depends on the kernel and its file system.
func TestAProgramIsLaidInLargeBlocks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	linked, laid := filepath.Join(dir, "linked"), filepath.Join(dir, "laid")
	content := bytes.Repeat([]byte("istio-cni"), 1<<20)
	check.OK(t, os.WriteFile(linked, nil, 0o600))
	// As the linker: through a mapping.
	file, err := os.OpenFile(linked, os.O_RDWR, 0)
	check.OK(t, err)
	mapped, err := func() ([]byte, error) {
		if failed := file.Truncate(int64(len(content))); failed != nil {
			return nil, failed
		}
		return unix.Mmap(int(file.Fd()), 0, len(content), unix.PROT_WRITE, unix.MAP_SHARED)
	}()
	check.OK(t, err)
	copy(mapped, content)
	check.OK(t, errors.Join(unix.Munmap(mapped), file.Close()))
	if out, err := run(t, nil, "bash", "-c", ". hack/lib.sh && lay $0 $1", linked, laid); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if got, err := os.ReadFile(laid); err != nil || !bytes.Equal(got, content) {
		t.Errorf("the content differs, error %v", err)
	}
	if info, err := os.Stat(laid); err != nil || info.Mode() != 0o755 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	whole := filepath.Join(dir, "whole")
	check.OK(t, os.WriteFile(whole, content, 0o600))
	before, got, want := hostfstest.PageFaults(t, linked, unix.MADV_NORMAL), hostfstest.PageFaults(t, laid, unix.MADV_NORMAL),
		hostfstest.PageFaults(t, whole, unix.MADV_NORMAL)
	t.Logf("page faults: %d as linked, %d as laid, %d written at once", before, got, want)
	if got > want+want/4+8 {
		t.Errorf("%d page faults, want about %d", got, want)
	}
}

// aTree is a git repository with what hack/release.sh reads before it builds anything.
func aTree(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	text := `mkdir -p "$0/docs" && cp -R hack/*.sh "$0" && mkdir "$0/hack" && mv "$0"/*.sh "$0/hack" && cp go.mod "$0" && cd "$0" &&
		printf '# Changelog\n\n## [Unreleased]\n\n- x\n\n## [1.2.0] - 2026-01-01\n\n- y\n' >docs/changelog.md && echo bin >.gitignore &&
		git init -q && git add . && git -c user.name=a -c user.email=a@b commit -qm one &&
		git -c user.name=a -c user.email=a@b commit -qm two --allow-empty`
	if out, err := run(t, nil, "sh", "-c", text, dir); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return dir
}

// TestReleasesThatAreRefused: before anything is built.
func TestReleasesThatAreRefused(t *testing.T) {
	t.Parallel()
	tree := aTree(t)
	for _, c := range []struct{ name, before, args, want string }{
		{"no version", "", "", "want a version"},
		{"no v", "", "1.2.0", "want v and a semantic version"},
		{"two numbers", "", "v1.2", "want v and a semantic version"},
		{"zero in front", "", "v1.02.0", "want v and a semantic version"},
		{"zero in front of a prerelease", "", "v1.2.0-rc.01", "want v and a semantic version"},
		{"build metadata", "", "v1.2.0+a", "without +"},
		{"too long", "", "v1.2.0-" + strings.Repeat("a", 128), "longer than the 128"},
		{"an unknown option", "", "--force v1.2.0", "unknown option --force"},
		{"changes", "echo >>go.mod", "v1.2.0", "uncommitted changes"},
		{"a new file", "touch new", "v1.2.0", "uncommitted changes"},
		{"a tag of another commit", "git tag v1.2.0 HEAD~1", "v1.2.0", "the tag v1.2.0 is commit"},
		{"a tag, and changes", "git tag v1.2.0; touch new", "--dirty v1.2.0", "there is a tag v1.2.0, and the tree has"},
		{"no tag", "", "--tagged v1.2.0", "there is no tag v1.2.0"},
		{"a tag without a section", "git tag v1.3.0", "v1.3.0", "no section ## [1.3.0]"},
		{"a registry with a scheme", "export HUB=https://x", "v1.2.0", "HUB is https://x"},
		{"another Go", "mkdir hack/release; echo toolchain go1.99.0 >hack/release/go.mod; git add .; " +
			"git -c user.name=a -c user.email=a@b commit -qm three; export GOPROXY=off", "v1.2.0", "built with go1.99.0 alone"},
	} {
		t.Run(c.name, func(t *testing.T) {
			text := `set -e; rm -rf "$0.copy"; cp -R "$0" "$0.copy"; cd "$0.copy"; ` + c.before + "\n" + "hack/release.sh " + c.args
			out, err := run(t, []string{"HUB="}, "sh", "-c", text, tree)
			if err == nil || !strings.Contains(out, c.want) {
				t.Errorf("error %v, want one with %q:\n%s", err, c.want, out)
			}
		})
	}
}

// TestVariablesOfMakeAreText: neither make nor a shell runs what is in them.
func TestVariablesOfMakeAreText(t *testing.T) {
	t.Parallel()
	for _, value := range []string{`x"; touch FILE; "`, `$(shell touch FILE)`, `$$(touch FILE)`, "`touch FILE`"} {
		file := t.TempDir() + "/made"
		for _, name := range []string{"VERSION", "FLAGS", "HUB"} {
			set := name + "=" + strings.ReplaceAll(value, "FILE", file)
			for _, args := range [][]string{{"release", "VERSION=", set}, {"--environment-overrides", "release", "VERSION="}} {
				out, err := run(t, []string{"MAKEFLAGS=", set}, "make", args...)
				if err == nil {
					t.Errorf("%s: no error:\n%s", set, out)
				}
				if _, err := os.Stat(file); err == nil {
					t.Fatalf("make %q ran it:\n%s", args, out)
				}
			}
		}
	}
}

// TestWhatKilledReleasesLeaveIsRemoved: but not what a running one has.
func TestWhatKilledReleasesLeaveIsRemoved(t *testing.T) {
	t.Parallel()
	text := `cd "$0" && mkdir -p bin/dist.OldOne bin/dist.4194305.x bin/dist.$$.y; hack/release.sh none 2>/dev/null; ls bin; echo $$`
	out, err := run(t, []string{"HUB="}, "sh", "-c", text, aTree(t))
	left, pid, _ := strings.Cut(strings.TrimSpace(out), "\n")
	if err != nil || left != "dist."+pid+".y" {
		t.Errorf("error %v, left:\n%s", err, out)
	}
}
