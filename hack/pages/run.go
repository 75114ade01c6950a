package pages

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
)

// Shell runs the commands of a page in one bash, so that variables and the directory last from block to block.
//
// Commands have to succeed; one with the comment "# exit 3" behind it, to exit with that status. A command of a console has to
// print what the page shows, see Same, and "echo $?" may show its status, too. One with the comment "# until Ctrl-C" is ended after
// 5 s.
type Shell struct {
	// Start is a command that runs bash, with what goes before it.
	Start []string
	Env   []string
	Dir   string
	// Setup are commands that are run before the first block, and are no part of the page.
	Setup string
	// Varies are texts that differ from run to run besides those that Same knows.
	Varies []*regexp.Regexp
}

// Result is what a command printed, and how it ended. The status is -1 if it did not end.
type Result struct {
	Block   Block
	Command Command
	Output  string
	Status  int
	// Fault is what is wrong, or "".
	Fault string
}

// Run runs blocks in a directory for its own files. The error is about the shell itself.
func (s Shell) Run(ctx context.Context, own string, blocks []Block) ([]Result, error) {
	var results []Result
	var script strings.Builder
	script.WriteString("set -eo pipefail\n" + s.Setup + "\nset +eo pipefail\n" + ended(0))
	for _, b := range blocks {
		commands, err := b.Commands()
		if err != nil {
			return nil, err
		}
		for _, c := range commands {
			results = append(results, Result{Block: b, Command: c, Status: -1})
			file := filepath.Join(own, strconv.Itoa(len(results)))
			if err := os.WriteFile(file, []byte(c.script(b.Language)), 0o600); err != nil {
				return nil, err
			}
			script.WriteString(b.script(file) + ended(len(results)))
		}
	}
	text, err := s.bash(ctx, own, script.String())
	if err != nil {
		return nil, err
	}
	parts := mark.Split(text, -1)
	marks := mark.FindAllStringSubmatch(text, -1)
	if len(marks) == 0 {
		return nil, fmt.Errorf("the commands before the first block failed:\n%s", text)
	}
	for i := range results {
		if i+1 < len(parts) {
			results[i].Output = parts[i+1]
		}
		if i+1 < len(marks) {
			results[i].Status, _ = strconv.Atoi(marks[i+1][1])
		}
	}
	s.judge(results)
	return results, nil
}

var (
	// endless is a command that a person ends, as the comment behind it says.
	endless = regexp.MustCompile(`(?m)^(.*\S)\s+# until Ctrl-C.*$`)
	// fails is one that fails, with the status in the comment.
	fails = regexp.MustCompile(`(?m)^(.*\S)\s+# exit (\d+)\b.*$`)
)

// script is the command as it is run: an endless one ends after a while, and a command in a block of sh may fail where the page says so.
func (c Command) script(language string) string {
	text := endless.ReplaceAllString(c.Text, "timeout --signal=INT 5 $1 || [[ $$? -eq 124 ]]")
	if language == "sh" {
		text = fails.ReplaceAllString(text, "status=0; { $1; } || status=$$?; [[ $$status -eq $2 ]]")
	}
	return text
}

// mark ends the output of a command, with its status.
var mark = regexp.MustCompile(`\n\x01\d+ (\d+)\n`)

func ended(number int) string {
	return fmt.Sprintf("last=$?; printf '\\n\\001%d %%s\\n' $last\n", number)
}

// script has one command run, by a name of its own in messages.
func (b Block) script(file string) string {
	if b.Language == "sh" {
		return fmt.Sprintf("set -eEo pipefail; trap 'echo \"line $LINENO of the block: exit status $?\"' ERR\n. %s </dev/null; trap - ERR; set +eEo pipefail; true\n", file)
	}
	return fmt.Sprintf("(exit $last); . %s </dev/null\n", file)
}

// bash runs a script and returns its output. What it leaves in the background ends with it.
func (s Shell) bash(ctx context.Context, own, script string) (string, error) {
	path := filepath.Join(own, "script")
	if err := os.WriteFile(path, []byte(script), 0o600); err != nil {
		return "", err
	}
	// A file, because a process in the background keeps a pipe open.
	out, err := os.Create(filepath.Join(own, "output"))
	if err != nil {
		return "", err
	}
	defer out.Close() //nolint:errcheck // it is read below
	command := exec.CommandContext(ctx, s.Start[0], append(s.Start[1:], path)...)
	command.Dir, command.Env = s.Dir, s.Env
	command.Stdout, command.Stderr = out, out
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	group := func() error { return syscall.Kill(-command.Process.Pid, syscall.SIGKILL) }
	command.Cancel = group
	if err = command.Start(); err != nil {
		return "", err
	}
	_ = command.Wait() // the marks in the output tell
	_ = group()
	text, err := os.ReadFile(out.Name())
	return string(text), err
}

func (s Shell) judge(results []Result) {
	for i := range results {
		r := &results[i]
		var next *Result
		if i+1 < len(results) {
			next = &results[i+1]
		}
		switch {
		case r.Status < 0:
			r.Fault = "it failed, or did not end in time:\n" + r.Output
			return // what follows was not run
		case r.Block.Language == "sh":
		case r.Status != r.Command.expects(next):
			r.Fault = fmt.Sprintf("exit status %d, and the page claims %d:\n%s", r.Status, r.Command.expects(next), r.Output)
		case !Same(r.Command.Output, r.Output, s.Varies...):
			r.Fault = fmt.Sprintf("the page shows\n%sand the command prints\n%s", r.Command.Output, r.Output)
		}
	}
}

// expects is the status that the page claims.
func (c Command) expects(next *Result) int {
	claim := "0"
	if m := fails.FindStringSubmatch(c.Text); m != nil {
		claim = m[2]
	} else if next != nil && strings.TrimSpace(next.Command.Text) == "echo $?" {
		claim = strings.TrimSpace(next.Command.Output)
	}
	n, err := strconv.Atoi(claim)
	if err != nil {
		return -1
	}
	return n
}

// varying differ from run to run: times, ages, digests, the release of the kernel.
var varying = []*regexp.Regexp{
	regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z|\b\d{8}T\d{6}Z\b|\b\d\d:\d\d:\d\d(\.\d+)?\b`),
	regexp.MustCompile(`\b(\d+(\.\d+)?(ms|µs|[dhms]))+\b`),
	regexp.MustCompile(`\b[0-9a-f]{40,64}\b`),
	regexp.MustCompile(`\bkernel \S+`),
}

var (
	blank = regexp.MustCompile(`\s+`)
	dots  = regexp.MustCompile(`(?m)^\s*\.\.\.\s*$`)
)

// Same reports whether a command printed what the page shows. Blanks and ends of lines do not count; in the page "…", or "..." as
// a line, stands for any text; what varies is equal.
func Same(page, printed string, varies ...*regexp.Regexp) bool {
	page = dots.ReplaceAllString(page, "…")
	for _, v := range append(varies, varying...) {
		page, printed = v.ReplaceAllString(page, "~"), v.ReplaceAllString(printed, "~")
	}
	page, printed = blank.ReplaceAllString(page, ""), blank.ReplaceAllString(printed, "")
	parts := strings.Split(page, "…")
	for i, part := range parts {
		parts[i] = regexp.QuoteMeta(part)
	}
	return regexp.MustCompile(`(?s)\A` + strings.Join(parts, ".*") + `\z`).MatchString(printed)
}
