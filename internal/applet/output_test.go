package applet_test

import (
	"bytes"
	"io"
	"log/slog"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// TestApplet_PrintableOutput: untrusted text in the output or the log of a role has no control characters. Both handlers of
// log/slog leave DEL unescaped, and the JSON handler also unprintable characters outside ASCII.
func TestApplet_PrintableOutput(t *testing.T) {
	const hostile = "a\x1b[2J\u009b2J\x7f\u202e\u200b\xff\rb"
	noEnvironment := func(string) (string, bool) { return "", false }
	for name, show := range map[string]func(io.Writer){
		"print": func(w io.Writer) { _, _ = io.WriteString(w, hostile+"\n") },
		"text log": func(w io.Writer) {
			slog.New(slog.NewTextHandler(w, nil)).Info(hostile, "\x7f", "\x7f", "k", hostile)
		},
		"JSON log": func(w io.Writer) { slog.New(slog.NewJSONHandler(w, nil)).Info(hostile, hostile, hostile) },
	} {
		var stdout, stderr bytes.Buffer
		role := applet.Role{Name: "r", Run: func(c applet.Call) int { show(c.Stdout); show(c.Stderr); return 0 }}
		call := applet.Call{Args: []string{"r"}, Stdout: &stdout, Stderr: &stderr, Getenv: noEnvironment}
		applet.Program{Name: "p", Roles: []applet.Role{role}}.Run("p", call)
		for _, out := range []string{stdout.String(), stderr.String()} {
			line, ended := strings.CutSuffix(out, "\n")
			if !ended || strings.ContainsFunc(line, func(r rune) bool { return !printable.Is(r) }) || !strings.Contains(line, "b") {
				t.Errorf("%s: %q", name, out)
			}
		}
		role.Protocol = true
		stdout.Reset()
		applet.Program{Name: "p", Roles: []applet.Role{role}}.Run("p", call)
		if name == "print" && stdout.String() != hostile+"\n" {
			t.Errorf("the output of a protocol is changed: %q", stdout.String())
		}
	}
}
