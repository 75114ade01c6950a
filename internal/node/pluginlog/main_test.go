package pluginlog

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// roleVariable tells this binary, run again by one of its tests, which plugin process to play.
const roleVariable = "PLUGINLOG_TEST_ROLE"

// generous is how long a test waits for what must not take long before it calls it hung.
const generous = 30 * time.Second

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleVariable); role {
	case "", "namespace":
		os.Exit(m.Run())
	case "writer":
		playWriter()
	case "talker":
		playTalker()
	default:
		fmt.Fprintf(os.Stderr, "no role %q\n", role)
		os.Exit(2)
	}
}

// playTalker is a plugin that logs more than a pipe holds and goes on with its work whatever becomes of its stderr.
func playTalker() {
	l := New(Options{Stderr: os.Stderr})
	for i := range 100 {
		l.Logger().Info("talking", "number", i, "text", strings.Repeat("x", 4096))
	}
	l.Close()
	_, _ = os.Stdout.WriteString("went on to the end")
}

// child returns a command that runs this binary again in a role.
func child(t *testing.T, role string, environment ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe)
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.Env = append(cmd.Env, environment...)
	return cmd
}

// inMountNamespace runs the calling test again in a mount namespace of its own. It returns true there, and false in the
// parent when the child has passed.
func inMountNamespace(t *testing.T) bool {
	t.Helper()
	if os.Getenv(roleVariable) == "namespace" {
		return true
	}
	cmd := child(t, "namespace")
	cmd.Args = append(cmd.Args, "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Fatalf("in a mount namespace: %v\n%s", err, out)
	}
	return false
}

// mountTmpfs mounts a file system of the given size, in a namespace made by inMountNamespace.
func mountTmpfs(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatalf("mounting tmpfs: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	return dir
}

// runDir makes a directory whose name is short enough for a socket in it.
func runDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "run") //nolint:usetesting // a socket's path is 108 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// clock always tells the same time, in a zone that is not UTC.
func clock() time.Time {
	return time.Date(2026, 5, 4, 5, 2, 1, 1_000, time.FixedZone("", 2*60*60))
}

// closeLog fails the test if Close hangs.
func closeLog(t *testing.T, l *Log) {
	t.Helper()
	began := time.Now()
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.Close()
	}()
	select {
	case <-done:
		t.Logf("Close took %v", time.Since(began))
	case <-time.After(generous):
		t.Fatal("Close hangs")
	}
}

// syncBuffer is a stderr that may still be written to after Close.
type syncBuffer struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all.String()
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for limit := time.Now().Add(generous); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("never: %s", what)
		}
	}
}

// decode reads a line as the JSON object it must be.
func decode(t *testing.T, line string) map[string]any {
	t.Helper()
	var record map[string]any
	if err := json.Unmarshal([]byte(line), &record); err != nil {
		t.Fatalf("line %q: %v", line, err)
	}
	return record
}

// messages returns the messages of the lines.
func messages(t *testing.T, lines string) []string {
	t.Helper()
	var msgs []string
	for line := range strings.Lines(lines) {
		msgs = append(msgs, decode(t, line)["msg"].(string))
	}
	return msgs
}

// logAt logs at a level of this package.
func logAt(l *Log, level Level, msg string, args ...any) {
	l.Logger().Log(context.Background(), slog.Level(level), msg, args...) //nolint:sloglint // the caller has the constant
}
