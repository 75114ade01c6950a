// Package hack tests properties of the scripts that no run of theirs shows.
package hack

import (
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
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
	if err != nil {
		t.Fatal(err)
	}
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
