package main

import (
	"bytes"
	"regexp"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/role/fleet"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestHelp_NodeAndKubectl: each command has the same flags on a node and in the kubectl plugin, which needs no cluster to show them.
// Only the network namespaces and the variables of a node are missing in the plugin.
func TestHelp_NodeAndKubectl(t *testing.T) {
	t.Parallel()
	ofNode := regexp.MustCompile(`(?m)^   --(pid|netns) .*\n +.*\n|, \$[A-Z_]+`)
	for _, command := range []string{"pods", "why", "trace", "decisions", "doctor", "bundle"} {
		flags := map[string]string{}
		for name, run := range map[string]func(applet.Call) int{
			"node":    func(c applet.Call) int { return program().Run("istio-cni", c) },
			"kubectl": func(c applet.Call) int { return fleet.Run(c, nil) },
		} {
			var out bytes.Buffer
			code := run(applet.Call{
				Args: []string{command, "--help"}, Stdout: &out, Stderr: &out, Getenv: func(string) (string, bool) { return "", false },
			})
			_, after, _ := strings.Cut(out.String(), "\nFLAGS:\n")
			flags[name], _, _ = strings.Cut(after, "\n\n")
			flags[name] = strings.TrimSuffix(flags[name], "\n") + "\n"
			if code != applet.ExitOK || !strings.Contains(flags[name], "   --") {
				t.Errorf("%s of %s: exit code %d: %s", command, name, code, out.String())
			}
		}
		check.Diff(t, command, ofNode.ReplaceAllString(flags["node"], ""), flags["kubectl"])
	}
}
