package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestDemo: it prints what the README shows; no command that the demo prints can change the node, if it is pasted; lines fit into 80 columns; no name stays.
func TestDemo(t *testing.T) {
	program := chaintest.Program(t)
	demo := chaintest.BuildPackage(t, filepath.Join(t.TempDir(), "demo"), "github.com/meshcni/istio-cni/hack/demo")
	const alone = `mkdir -p "$0" && mount -t tmpfs tmpfs "$0" && "$@" && ls "$0"`
	text, err := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-c", alone, netns.NamedDir, demo, program).CombinedOutput()
	check.OK(t, err)
	readme, err := os.ReadFile("../../README.md")
	check.OK(t, err)
	_, shown, _ := strings.Cut(string(readme), "```console\n")
	shown, _, _ = strings.Cut(shown, "```\n")
	if shown == "" || !strings.Contains(string(text), shown) {
		t.Errorf("the demo does not print what the README shows:\n%s", shown)
	}
	commands := 0
	for line := range strings.Lines(string(text)) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
			t.Errorf("%d columns: %s", n, line)
		}
		if command, is := strings.CutPrefix(line, "$ "); is {
			if commands++; !strings.HasPrefix(command, "istio-cni why --netns ") && !strings.HasPrefix(command, "ip netns exec ") {
				t.Errorf("a command that names no namespace: %s", command)
			}
		}
	}
	if commands < 5 || !strings.HasSuffix(string(text), "\nnext: docs/quickstart.md\n") {
		t.Errorf("%d commands:\n%s", commands, text)
	}
}

func TestMain(m *testing.M) { chaintest.Main(m) }
