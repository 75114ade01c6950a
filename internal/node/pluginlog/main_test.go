package pluginlog

import (
	"cmp"
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// roleVariable is the role of this binary when one of its tests runs it again.
const roleVariable = "PLUGINLOG_TEST_ROLE"

func TestMain(m *testing.M) {
	roles := map[string]func(){"writer": playWriter, "talker": playTalker}
	if play := roles[os.Getenv(roleVariable)]; play != nil {
		play()
		return
	}
	m.Run()
}

// playTalker is a plugin that logs more than a pipe holds and goes on with its work whatever becomes of its stderr.
func playTalker() {
	l := open(options{Stderr: os.Stderr})
	for i := range 100 {
		l.Logger().Info("talking", "number", i, "text", strings.Repeat("x", 4096))
	}
	l.Close()
	_, _ = os.Stdout.WriteString("went on to the end")
}

// inMountNamespace runs the calling test again in a mount namespace of its own. It returns true there, and false in the
// parent when the child has passed.
func inMountNamespace(t *testing.T) bool {
	t.Helper()
	return netnstest.Inside(t, func(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS} })
}

// mountTmpfs mounts a file system of the given size, in a namespace made by inMountNamespace.
func mountTmpfs(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	check.OK(t, syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+size), "mounting tmpfs")
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	return dir
}

// clock always has the same time, in a zone that is not UTC.
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
	case <-time.After(agenttest.Generous):
		t.Fatal("Close hangs")
	}
}

// decode reads a line as the JSON object it must be.
func decode(t *testing.T, line string) map[string]any {
	t.Helper()
	var record map[string]any
	check.OK(t, json.Unmarshal([]byte(line), &record), "line", line)
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

// options are a log's. The defaults are no run directory, level info, and the usual timeout and clock.
type options struct {
	Stderr  io.Writer
	RunDir  string
	Level   Level
	Scope   string
	Now     func() time.Time
	Timeout time.Duration
}

// open makes a log and configures it.
func open(o options) *Log {
	l := New(cmp.Or(o.Stderr, io.Discard), o.Scope)
	l.Timeout = cmp.Or(o.Timeout, l.Timeout)
	if o.Now != nil {
		l.now = o.Now
	}
	l.Configure(o.RunDir, o.Level)
	return l
}

// logged returns the text on stderr after Close.
func logged(t *testing.T, o options, log func(*slog.Logger)) string {
	t.Helper()
	var stderr agenttest.Buffer
	o.Stderr, o.Now, o.Timeout = &stderr, clock, agenttest.Generous
	l := open(o)
	log(l.Logger())
	closeLog(t, l)
	return stderr.String()
}

// place is a run directory with an agent, and a stderr.
type place struct {
	*agent

	stderr agenttest.Buffer
}

func newPlace(t *testing.T) *place {
	t.Helper()
	return &place{agent: startAgent(t)}
}

// open makes a log whose stderr is the place's.
func (p *place) open(o options) *Log {
	o.Stderr, o.Timeout = &p.stderr, agenttest.Generous
	return open(o)
}

// want compares the messages of stderr and of the two other sinks, which have a request and a file only if there are any.
func (p *place) want(t *testing.T, stderr, others string) {
	t.Helper()
	got := map[string]string{
		"stderr": strings.Join(messages(t, p.stderr.String()), " "),
		"file":   "", "agent": "",
	}
	if content, err := os.ReadFile(filepath.Join(p.dir, fileName)); err == nil {
		got["file"] = strings.Join(messages(t, string(content)), " ") + "."
	}
	for _, r := range p.all() {
		got["agent"] += strings.Join(messages(t, strings.Join(r.lines, "")), " ") + "."
	}
	if others != "" {
		others += "."
	}
	check.Diff(t, "result", map[string]string{"stderr": stderr, "file": others, "agent": others}, got)
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	check.OK(t, err)
	return string(content)
}

func put(t *testing.T, dir, name, content string) {
	t.Helper()
	check.OK(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
}
