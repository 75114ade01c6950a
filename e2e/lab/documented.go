package lab

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/e2e/pages"
)

// Documented are the commands of the pages that a package runs one by one: the commands in blocks with its name.
type Documented struct {
	runner string
	ran    map[string]bool
}

// Commands returns a runner's commands.
func Commands(runner string) *Documented {
	return &Documented{runner: runner, ran: map[string]bool{}}
}

// all are the commands, with those on several lines as one.
func (d *Documented) all() (found []string, err error) {
	all, err := pages.Read(repository())
	for _, blocks := range pages.Of(all, d.runner) {
		for _, b := range blocks {
			text := strings.NewReplacer("\\\n", " ", "|\n", "| ").Replace(strings.TrimSpace(b.Text))
			for command := range strings.SplitSeq(text, "\n") {
				command, _, _ = strings.Cut(command, " #")
				found = append(found, strings.TrimSpace(command))
			}
		}
	}
	return found, err
}

// Find returns the one command that has all these words.
func (d *Documented) Find(t Test, words ...string) string {
	t.Helper()
	all, err := d.all()
	t.Must(err)
	found := slices.DeleteFunc(all, func(command string) bool {
		have := strings.Fields(command)
		return slices.ContainsFunc(words, func(word string) bool { return !slices.Contains(have, word) })
	})
	if len(found) != 1 {
		t.Fatalf("the pages have for %q the commands %q", words, found)
	}
	d.ran[found[0]] = true
	return found[0]
}

// Main runs the tests of a package. It fails if they have left out a command, unless they were a part of them only.
func (d *Documented) Main(m *testing.M) (status int) {
	status = m.Run()
	if status != 0 || flag.Lookup("test.run").Value.String() != "" {
		return status
	}
	all, err := d.all()
	if err != nil || len(all) == 0 {
		fmt.Fprintln(os.Stderr, "no page has commands of", d.runner, err)
		return 1
	}
	for _, command := range all {
		if !d.ran[command] {
			fmt.Fprintln(os.Stderr, "no test runs this command of the pages:", command)
			status = 1
		}
	}
	return status
}

// Bash runs a command of the pages with more arguments in a directory, which gets the chart as a checkout has it. The programs are
// kubectl, and the programs in the reference's directory.
func (l *Lab) Bash(dir, programs, command string, more ...string) {
	l.Helper()
	if err := os.Symlink(filepath.Join(repository(), "manifests"), filepath.Join(dir, "manifests")); err != nil && !os.IsExist(err) {
		l.Fatal(err)
	}
	bash := exec.CommandContext(l.Context(), "bash", "-eo", "pipefail", "-c", strings.Join(append([]string{command}, more...), " "))
	bash.Dir = dir
	home := filepath.Join(l.Dir(), "home")
	bash.Env = append(os.Environ(), "PATH="+l.bin+":"+programs+":"+os.Getenv("PATH"), "KUBECONFIG="+l.Kubeconfig(), "HUB="+OursHub, "TAG="+OursTag,
		"HOME="+home, "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
	text, err := bash.CombinedOutput()
	l.Step("%s\n%s", command, text)
	l.Must(err)
}
