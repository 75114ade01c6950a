package pages_test

import (
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/hack/pages"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestRun has each way in which a page can be wrong.
func TestRun(t *testing.T) {
	t.Parallel()
	const sh, console = "<!-- test: host -->\n```sh\n", "<!-- test: host -->\n```console\n"
	for _, tt := range []struct{ name, page, fault string }{
		{"all is well", sh + "cd /\nX=1\n```\n" + console + "$ echo $X; pwd\n1\n/\n$ false # exit 1\n$ (exit 3)\n$ echo $?\n3\n```\n", ""},
		{"a failure within a block", sh + "true\nfalse\ntrue\n```\n", "line 2 of the block: exit status 1"},
		{"a failure within a pipe", sh + "false | cat\n```\n", "exit status 1"},
		{"another output", console + "$ echo one\ntwo\n```\n", "the page shows\ntwo\nand the command prints\none"},
		{"less than the page shows", console + "$ echo one\none\ntwo\n```\n", "the page shows"},
		{"on stderr, too", console + "$ echo one >&2\n```\n", "the page shows\nand the command prints\none"},
		{"a failure that the page does not tell", console + "$ false\n```\n", "exit status 1, and the page claims 0"},
		{"no failure, and the page tells one", console + "$ true # exit 3\n```\n", "exit status 0, and the page claims 3"},
		{"a failure as it should be", sh + "(exit 3)   # exit 3: some\ntrue\n```\n", ""},
		{"another failure", sh + "(exit 2)   # exit 3\n```\n", "line 1 of the block"},
		{"no failure where one should be", sh + "true   # exit 3: some\n```\n", "line 1 of the block"},
		{"another status", console + "$ (exit 2)\n$ echo $?\n3\n```\n", "exit status 2, and the page claims 3"},
		{"any text", console + "$ echo one two; echo three; echo four\none …\n...\nfour\n```\n", ""},
		{"several lines", console + "$ echo \\\n  one\none\n# no command\n```\n", "the page shows"},
		{"what varies", console + "$ echo 2026-11-23T00:00:01Z 12s\n2020-01-01T11:11:11.123Z    1m5s\n```\n", ""},
		{"a comment as output", console + "# echo '# IPv4: x'\n# IPv4: x\n```\n", ""},
		{"the background", sh + "sleep 60 &\n```\n", ""},
		{"until Ctrl-C", sh + "sleep 60   # until Ctrl-C: the rest\n```\n", ""},
		{"not even until then", sh + "false # until Ctrl-C\n```\n", "exit status 1"},
		{"unknown command", sh + "no-such-command\n```\n", "status 127"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			shell := pages.Shell{Start: []string{"bash"}, Dir: "/"}
			results, err := shell.Run(t.Context(), t.TempDir(), pages.Parse("x.md", tt.page).Blocks)
			check.OK(t, err)
			var faults strings.Builder
			for _, r := range results {
				faults.WriteString(r.Fault)
			}
			if got := faults.String(); !strings.Contains(got, tt.fault) || tt.fault == "" && got != "" || len(results) == 0 {
				t.Errorf("faults %q, want %q, of %+v", got, tt.fault, results)
			}
		})
	}
}
