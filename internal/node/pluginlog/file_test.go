package pluginlog

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	check.OK(t, err)
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func backups(t *testing.T, dir string) []string {
	t.Helper()
	return slices.DeleteFunc(names(t, dir), func(name string) bool {
		_, err := time.Parse(backupName, name)
		return err != nil
	})
}

// TestFile_ManyWriters: many rotations lose only the oldest records. For the lock of a file, two files that are open in one process
// are like two processes.
func TestFile_ManyWriters(t *testing.T) {
	const writers, invocations, batch, limit = 50, 20, 10, 16 << 10
	dir := t.TempDir()
	var running sync.WaitGroup
	for writer := range writers {
		running.Go(func() {
			for i := range invocations {
				var lines []byte
				for n := range batch {
					lines = fmt.Appendf(lines, "{\"writer\":%d,\"number\":%d}\n", writer, i*batch+n)
				}
				check.OK(t, appendFile(filepath.Join(dir, fileName), lines, limit, time.Now()))
			}
		})
	}
	running.Wait()
	kept := backups(t, dir)
	if len(kept) != 1 {
		t.Fatalf("backups are %q, want one", kept)
	}
	backup := readFile(t, filepath.Join(dir, kept[0]))
	if len(backup) < limit-limit/10 {
		t.Errorf("backup was made at %d bytes of %d", len(backup), limit)
	}
	numbers := map[any][]any{}
	for line := range strings.Lines(backup + readFile(t, filepath.Join(dir, fileName))) {
		record := decode(t, line)
		numbers[record["writer"]] = append(numbers[record["writer"]], record["number"])
	}
	for writer, got := range numbers {
		for i, number := range got {
			if first := invocations*batch - len(got); number != float64(first+i) {
				t.Errorf("writer %v has not all from %d on, in order: %v", writer, first, got)
				break
			}
		}
	}
}

func TestFile_Rotation(t *testing.T) {
	now := clock()
	stamp := func(age time.Duration) string {
		return now.Add(-age).UTC().Format(backupName)
	}
	const fresh, made = "istio-cni-2026-05-04T02-02-01.000.log", "istio-cni-2026-05-04T03-02-01.000.log"
	if stamp(time.Hour) != fresh || stamp(0) != made {
		t.Fatal("names of backups are wrong")
	}
	foreign := []string{"istio-cni-kubeconfig", "istio-cni-.log", "istio-cni-2020-01-01.log", fresh + ".gz", "other.log"}
	type files map[string]string // content by name
	for _, c := range []struct {
		name  string
		have  files
		write string
		want  files
	}{
		{"file_is_made", nil, "new\n", files{fileName: "new\n"}},
		{"file_grows_to_its_limit", files{fileName: "123456\n"}, "89\n", files{fileName: "123456\n89\n"}},
		{
			"full_file_becomes_the_only_backup",
			files{fileName: "1234567\n", fresh: "old\n", stamp(2 * time.Hour): "older\n"},
			"90\n",
			files{fileName: "90\n", made: "1234567\n"},
		},
		{
			"lines_longer_than_the_limit_have_a_file_of_their_own",
			files{fileName: "1\n"},
			"1234567890\n",
			files{fileName: "1234567890\n", made: "1\n"},
		},
		{"empty_file_is_not_rotated", files{fileName: ""}, "1234567890\n", files{fileName: "1234567890\n"}},
		{
			"backups_live_two_days",
			files{fresh: "a\n", stamp(47 * time.Hour): "b\n", stamp(48*time.Hour + time.Millisecond): "c\n"},
			"n\n",
			files{fileName: "n\n", fresh: "a\n", stamp(47 * time.Hour): "b\n"},
		},
		{
			"rotation_within_one_millisecond_replaces_the_backup",
			files{fileName: "1234567\n", made: "old\n"},
			"90\n",
			files{fileName: "90\n", made: "1234567\n"},
		},
		{
			"clock_that_went_back_does_not_cost_the_new_backup",
			files{fileName: "1234567\n", stamp(-time.Hour): "old\n"},
			"90\n",
			files{fileName: "90\n", made: "1234567\n"},
		},
		{"torn_line_is_ended", files{fileName: "12\n34"}, "5\n", files{fileName: "12\n34\n5\n"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			for _, name := range foreign {
				put(t, dir, name, "foreign")
			}
			for name, content := range c.have {
				put(t, dir, name, content)
			}
			check.OK(t, appendFile(filepath.Join(dir, fileName), []byte(c.write), 10, clock()))
			got := files{}
			for _, name := range names(t, dir) {
				got[name] = readFile(t, filepath.Join(dir, name))
			}
			for _, name := range foreign {
				if got[name] != "foreign" {
					t.Errorf("file %q was touched", name)
				}
				delete(got, name)
			}
			check.Diff(t, "result", c.want, got)
		})
	}
}

func TestFile_OddRunDirs(t *testing.T) {
	if !inMountNamespace(t) {
		return
	}
	for name, c := range map[string]struct {
		prepare func(dir string) (string, error)
		warning string // empty for no warning
	}{
		"missing":                {func(dir string) (string, error) { return filepath.Join(dir, "missing"), nil }, ""},
		"a_file":                 {func(string) (string, error) { return os.Args[0], nil }, "not a directory"},
		"no_name":                {func(string) (string, error) { return "a\x00b", nil }, "log sink failed"},
		"a_long_one":             {func(string) (string, error) { return "/" + strings.Repeat("x/", 3000), nil }, "name too long"},
		"the_log_is_a_directory": {func(dir string) (string, error) { return dir, os.Mkdir(filepath.Join(dir, fileName), 0o700) }, "is a directory"},
		"the_log_is_a_full_device": {
			func(dir string) (string, error) { return dir, os.Symlink("/dev/full", filepath.Join(dir, fileName)) }, "no space left",
		},
		"read_only": {func(string) (string, error) {
			dir := mountTmpfs(t, "32k")
			put(t, dir, "istio-cni-2020-01-01T00-00-00.000.log", "old")
			return dir, syscall.Mount("", dir, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, "")
		}, "read-only file system"},
	} {
		t.Run(name, func(t *testing.T) {
			dir, err := c.prepare(t.TempDir())
			check.OK(t, err)
			got := logged(t, options{RunDir: dir}, func(log *slog.Logger) { log.Info("a") })
			warnings := strings.Count(got, "log sink failed")
			if (warnings > 0) != (c.warning != "") || warnings > 1 && name == "read_only" || !strings.Contains(got, c.warning) {
				t.Errorf("stderr has %q", got)
			}
			if _, err := os.Stat(dir); name == "missing" && !os.IsNotExist(err) {
				t.Errorf("run directory: %v", err)
			}
		})
	}
}

func TestFile_Hangs(t *testing.T) {
	for name, hang := range map[string]func(path string) (release func() error, err error){
		"never_read": func(pipe string) (func() error, error) { // a pipe without a reader blocks like a dead NFS server
			return func() error {
				reader, err := os.OpenFile(pipe, os.O_RDONLY|syscall.O_NONBLOCK, 0)
				if err == nil {
					go func() { _, _ = io.Copy(io.Discard, reader) }()
				}
				return err
			}, syscall.Mkfifo(pipe, 0o600)
		},
		"locked_by_a_process_that_hangs": func(path string) (func() error, error) {
			file, err := os.Create(path)
			if err == nil {
				err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX)
			}
			return func() error { return file.Close() }, err
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			release, err := hang(filepath.Join(p.dir, fileName))
			check.OK(t, err)
			l := open(options{Stderr: &p.stderr, RunDir: p.dir, Timeout: time.Second})
			const records = 200
			for range records {
				l.Logger().Info("record", "text", strings.Repeat("x", 1000))
			}
			closeLog(t, l)
			agenttest.Eventually(t, "stderr has a warning about the file", func() bool {
				return strings.Contains(p.stderr.String(), fileName+`","error":"context deadline exceeded"`)
			})
			check.Equal(t, len(p.only(t)), records, "agent has")
			agenttest.Eventually(t, "only the file's goroutine is left", func() bool {
				left := leftBehind()
				return len(left) == 1 && strings.Contains(left[0], "pluginlog.appendFile")
			})
			check.OK(t, release())
			agenttest.Eventually(t, "no goroutine is left", func() bool { return len(leftBehind()) == 0 })
		})
	}
}

// roleVariable is set when a test runs this binary again, as a plugin.
const roleVariable = "PLUGINLOG_TEST_TALKER"

func TestMain(m *testing.M) {
	if os.Getenv(roleVariable) != "" {
		playTalker()
		return
	}
	m.Run()
}

// playTalker is a plugin that logs more than a pipe holds and continues its work even if stderr fails.
func playTalker() {
	l := open(options{Stderr: os.Stderr})
	for i := range 100 {
		l.Logger().Info("talking", "number", i, "text", strings.Repeat("x", 4096))
	}
	l.Close()
	_, _ = os.Stdout.WriteString("went on to the end")
}

// inMountNamespace runs the calling test again in its own mount namespace. It returns true there, and false in the
// parent when the child has passed.
func inMountNamespace(t *testing.T) bool {
	t.Helper()
	return netnstest.Inside(t, func(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS} })
}

// mountTmpfs mounts a file system of the given size in a namespace made by inMountNamespace.
func mountTmpfs(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	check.OK(t, syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+size), "mounting tmpfs")
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	return dir
}

// clock always returns the same time, in a zone other than UTC.
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

// decode reads a line, which must be a JSON object.
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

// options are the options of a log. The defaults are no run directory, level info, and the usual timeout and clock.
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

// open makes a log that writes to the place's stderr.
func (p *place) open(o options) *Log {
	o.Stderr, o.Timeout = &p.stderr, agenttest.Generous
	return open(o)
}

// want compares the messages on stderr and in the two other sinks. Without messages there must be no request and no file.
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
		got["agent"] += strings.Join(messages(t, strings.Join(r, "")), " ") + "."
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
