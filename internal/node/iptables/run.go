package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
)

// lockWait makes legacy tools wait for their lock (seconds) instead of failing at once.
const lockWait = "--wait=30"

// run starts one program with stdin as its standard input. Its environment has only PATH, limited to the absolute
// directories of the host's path: an empty or relative entry would be relative to the working directory.
func (t Tool) run(ctx context.Context, program, stdin string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...) //nolint:gosec // a tool found on the node's path; arguments are ours
	cmd.Env = []string{"PATH=" + strings.Join(t.host.directories(), string(filepath.ListSeparator))}
	// A tool must not continue after this process was killed and another one has taken over.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if t.host.Held != nil {
		cmd.ExtraFiles = []*os.File{t.host.Held}
	}
	if t.host.Lock != "" {
		cmd.Env = append(cmd.Env, "XTABLES_LOCKFILE="+t.host.Lock)
	}
	stdout, stderr := capped{most: maxBytes, refuse: true}, capped{most: maxMessage}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	t.host.started++
	err := cmd.Run()
	switch {
	case stdout.full:
		return "", fmt.Errorf("running %s: %w", filepath.Base(program), overBudget())
	case err != nil:
		return "", explain(ctx, filepath.Base(program), stdin, stderr.String(), err)
	}
	return stdout.String(), nil
}

// maxMessage bounds a tool's message.
const maxMessage = 4 << 10

// capped keeps the first bytes of its input. It drops the rest, or returns an error, which ends a program that keeps
// writing. The buffer is not embedded because io.Copy would use its ReadFrom.
type capped struct {
	text   bytes.Buffer
	most   int
	refuse bool
	full   bool
}

// String returns the kept bytes.
func (c *capped) String() string { return c.text.String() }

// Write keeps bytes up to the limit.
func (c *capped) Write(p []byte) (int, error) {
	n := min(len(p), c.most-c.text.Len())
	_, _ = c.text.Write(p[:n])
	if c.full = c.full || n < len(p); c.full && c.refuse {
		return n, io.ErrShortWrite
	}
	return len(p), nil
}

// explain turns a failed run into an error with the tool's message, the line that the message names, and a hint.
func explain(ctx context.Context, name, stdin, stderr string, err error) error {
	if ctxErr := context.Cause(ctx); ctxErr != nil {
		return fmt.Errorf("running %s: %w", name, ctxErr)
	}
	message := strings.TrimSpace(strings.Join(strings.Fields(stderr), " "))
	text := fmt.Sprintf("running %s: %s", name, message)
	if line := lineOf(message, stdin); line != "" {
		text += fmt.Sprintf(" (the line is %q)", line)
	}
	if hint := hintFor(message); hint != "" {
		text += "; " + hint
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) && message != "" {
		return fmt.Errorf("%s [%w]", text, err)
	}
	return fmt.Errorf("%s: %w", strings.TrimSuffix(text, ": "), err)
}

// lineOf finds the input line whose number is in the tool's message.
func lineOf(message, stdin string) string {
	// Compiled on use: a global pattern would slow down every start of the program.
	m := regexp.MustCompile(`line:? ?(\d+)`).FindStringSubmatch(message)
	if m == nil {
		return ""
	}
	n, err := strconv.Atoi(m[1])
	lines := strings.Split(stdin, "\n")
	if err != nil || n < 1 || n > len(lines) {
		return ""
	}
	return lines[n-1]
}

// hintFor returns the usual cause of a tool's message.
func hintFor(message string) string {
	hints := []struct{ part, hint string }{
		{"Permission denied", "this needs CAP_NET_ADMIN in the namespace"},
		{"Operation not permitted", "this needs CAP_NET_ADMIN in the namespace"},
		{"xtables lock", "another iptables holds the lock"},
		{"No chain/target/match", "the node's kernel lacks a netfilter module for this rule (xt_owner, xt_REDIRECT, xt_TPROXY, …)"},
		{"Invalid argument", "in a pod with hostUsers: false the kernel refuses rules that match the owner of traffic; use the " +
			"backend native, which auto selects there"},
		{"Extension", "the node's kernel lacks the netfilter module of that extension"},
		{"Table does not exist", "the node's kernel lacks that table; load the module iptable_nat, iptable_mangle or iptable_raw"},
		{"do you need to insmod", "the node's kernel lacks that table; load the module iptable_nat, iptable_mangle or iptable_raw"},
	}
	for _, h := range hints {
		if strings.Contains(message, h.part) {
			return h.hint
		}
	}
	return ""
}
