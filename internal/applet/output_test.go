package applet_test

import (
	"bytes"
	"io"
	"log/slog"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestApplet_PrintableOutput: untrusted text in the output or the log of a role has no control characters: both handlers of log/slog leave
// some of them unescaped. The output of a protocol is unchanged.
func TestApplet_PrintableOutput(t *testing.T) {
	const hostile = "a\x1b[2J\u009b2J\x7f\u202e\u200b\xff\rb"
	for _, protocol := range []bool{false, true} {
		var stdout, stderr bytes.Buffer
		role := applet.Role{Name: "r", Protocol: protocol, Run: func(c applet.Call) int {
			slog.New(slog.NewTextHandler(c.Stderr, nil)).Info(hostile, "\x7f", hostile)
			slog.New(slog.NewJSONHandler(c.Stderr, nil)).Info(hostile, hostile, hostile)
			return c.End(check.Err(io.WriteString(c.Stdout, hostile)))
		}}
		call := applet.Call{Args: []string{"r"}, Stdout: &stdout, Stderr: &stderr, Getenv: func(string) (string, bool) { return "", false }}
		applet.Program{Name: "p", Roles: []applet.Role{role}}.Run("p", call)
		safe := !strings.ContainsFunc(stdout.String()+stderr.String(), func(r rune) bool { return !printable.Is(r) && r != '\n' })
		if safe == protocol || protocol && stdout.String() != hostile || strings.Count(stderr.String(), "b") < 4 {
			t.Errorf("protocol %t: %q, %q", protocol, stdout.String(), stderr.String())
		}
	}
}
