package pluginlog

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const (
	writers     = 50 // processes
	invocations = 20 // of each
	batch       = 10 // records of each invocation
)

// playWriter is a series of plugin invocations in one process. Each record is equally long.
func playWriter() {
	limit, err := strconv.ParseInt(os.Getenv("LIMIT"), 10, 64)
	if err != nil {
		panic(err)
	}
	for i := range invocations {
		l := New(Options{RunDir: os.Getenv("DIR"), Patience: time.Hour})
		l.file.limit = limit
		for n := range batch {
			l.Logger().Info("record", "writer", os.Getenv("WRITER"), "number", fmt.Sprintf("%06d", i*batch+n))
		}
		l.Close()
	}
}

// runWriters has all writers write at the same time, each file limited to the given part of all they write.
func runWriters(t *testing.T, dir string, part float64) (limit int64) {
	t.Helper()
	l := New(Options{})
	one := encode(clock(), LevelInfo, "", "record", []field{
		{"writer", quote("00")}, {"number", quote("000000")},
	})
	l.Close()
	limit = int64(part * float64(len(one)*writers*invocations*batch))
	var running []*exec.Cmd
	var said [writers]bytes.Buffer
	for i := range writers {
		cmd := child(t, "writer", "DIR="+dir, "WRITER="+fmt.Sprintf("%02d", i), fmt.Sprintf("LIMIT=%d", limit))
		cmd.Stderr = &said[i]
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		running = append(running, cmd)
	}
	for i, cmd := range running {
		if err := cmd.Wait(); err != nil || said[i].Len() > 0 {
			t.Errorf("writer %d: %v %s", i, err, said[i].String())
		}
	}
	return limit
}

// written returns the numbers of the records each writer has in the directory's log files, backup first.
func written(t *testing.T, dir string) map[string][]int {
	t.Helper()
	numbers := make(map[string][]int)
	for _, path := range append(backups(t, dir), fileName) {
		content := readFile(t, filepath.Join(dir, path))
		t.Logf("%s: %d bytes", path, len(content))
		if !strings.HasSuffix(content, "\n") {
			t.Errorf("%s ends within a line", path)
		}
		for line := range strings.Lines(content) {
			record := decode(t, line)
			n, err := strconv.Atoi(record["number"].(string))
			if err != nil {
				t.Fatal(err)
			}
			writer := record["writer"].(string)
			numbers[writer] = append(numbers[writer], n)
		}
	}
	return numbers
}

func backups(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if _, ok := backupTime(e.Name()); ok {
			names = append(names, e.Name())
		}
	}
	return names
}

func TestManyProcessesLoseNothingOverOneRotation(t *testing.T) {
	dir := t.TempDir()
	runWriters(t, dir, 0.6) // so that a second rotation is impossible
	numbers := written(t, dir)
	if got := len(backups(t, dir)); got != 1 {
		t.Errorf("%d backups, want one", got)
	}
	if len(numbers) != writers {
		t.Errorf("%d writers, want %d", len(numbers), writers)
	}
	for writer, got := range numbers {
		slices.Sort(got) // an invocation may have had the backup open while another wrote to the new file
		if diff := cmp.Diff(series(0, invocations*batch), got); diff != "" {
			t.Errorf("writer %s (-want +got):\n%s", writer, diff)
		}
	}
}

func TestManyProcessesAndManyRotationsLoseOnlyTheOldest(t *testing.T) {
	dir := t.TempDir()
	limit := runWriters(t, dir, 0.05)
	numbers := written(t, dir)
	kept := backups(t, dir)
	if len(kept) != 1 {
		t.Fatalf("backups are %q, want one", kept)
	}
	info, err := os.Stat(filepath.Join(dir, kept[0]))
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() < limit-limit/10 {
		t.Errorf("backup was made at %d bytes of %d", info.Size(), limit)
	}
	for writer, got := range numbers {
		slices.Sort(got)
		if diff := cmp.Diff(series(invocations*batch-len(got), invocations*batch), got); diff != "" {
			t.Errorf("writer %s has not the last of its records (-want +got):\n%s", writer, diff)
		}
	}
}

func series(from, to int) []int {
	var numbers []int
	for n := from; n < to; n++ {
		numbers = append(numbers, n)
	}
	return numbers
}

func TestRotation(t *testing.T) {
	now := clock()
	stamp := func(age time.Duration) string {
		return backupStart + now.Add(-age).UTC().Format(backupLayout) + backupEnd
	}
	const fresh, made = "istio-cni-2026-05-04T02-02-01.000.log", "istio-cni-2026-05-04T03-02-01.000.log"
	if stamp(time.Hour) != fresh || stamp(0) != made {
		t.Fatal("names of backups are wrong")
	}
	foreign := []string{"istio-cni-kubeconfig", "istio-cni-.log", "istio-cni-2020-01-01.log", fresh + ".gz", "other.log"}
	for _, c := range []struct {
		name  string
		have  map[string]string
		write string
		want  map[string]string
	}{
		{"file_is_made", nil, "new\n", map[string]string{fileName: "new\n"}},
		{
			"file_grows_to_its_limit",
			map[string]string{fileName: "123456\n"},
			"89\n",
			map[string]string{fileName: "123456\n89\n"},
		},
		{
			"full_file_becomes_the_only_backup",
			map[string]string{fileName: "1234567\n", fresh: "old\n", stamp(2 * time.Hour): "older\n"},
			"90\n",
			map[string]string{fileName: "90\n", made: "1234567\n"},
		},
		{
			"lines_longer_than_the_limit_have_a_file_of_their_own",
			map[string]string{fileName: "1\n"},
			"1234567890\n",
			map[string]string{fileName: "1234567890\n", made: "1\n"},
		},
		{
			"empty_file_is_not_rotated",
			map[string]string{fileName: ""},
			"1234567890\n",
			map[string]string{fileName: "1234567890\n"},
		},
		{
			"backups_live_two_days",
			map[string]string{fresh: "a\n", stamp(47 * time.Hour): "b\n", stamp(48*time.Hour + time.Millisecond): "c\n"},
			"n\n",
			map[string]string{fileName: "n\n", fresh: "a\n", stamp(47 * time.Hour): "b\n"},
		},
		{
			"rotation_within_one_millisecond_replaces_the_backup",
			map[string]string{fileName: "1234567\n", made: "old\n"},
			"90\n",
			map[string]string{fileName: "90\n", made: "1234567\n"},
		},
		{
			"clock_that_went_back_does_not_cost_the_new_backup",
			map[string]string{fileName: "1234567\n", stamp(-time.Hour): "old\n"},
			"90\n",
			map[string]string{fileName: "90\n", made: "1234567\n"},
		},
		{
			"torn_line_is_ended",
			map[string]string{fileName: "12\n34"},
			"5\n",
			map[string]string{fileName: "12\n34\n5\n"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			for _, name := range foreign {
				put(t, dir, name, "foreign")
			}
			for name, content := range c.have {
				put(t, dir, name, content)
			}
			if err := (rollingFile{limit: 10, now: clock}).write(dir, []byte(c.write)); err != nil {
				t.Fatal(err)
			}
			got := make(map[string]string)
			entries, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range entries {
				got[e.Name()] = readFile(t, filepath.Join(dir, e.Name()))
			}
			for _, name := range foreign {
				if got[name] != "foreign" {
					t.Errorf("file %q was touched", name)
				}
				delete(got, name)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func put(t *testing.T, dir, name, content string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestDocumentedLimits(t *testing.T) {
	l := New(Options{})
	if l.file.limit != 10*1024*1024 || maxBackupAge != 2*24*time.Hour || maxKept != 256*1024 {
		t.Error("a documented limit has changed")
	}
}

func TestWhileAnotherRotatesTheFileGrows(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, fileName, "1234567\n")
	other, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	if err := syscall.Flock(int(other.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if err := (rollingFile{limit: 10, now: clock}).write(dir, []byte("90\n")); err != nil {
		t.Fatal(err)
	}
	if got := readFile(t, filepath.Join(dir, fileName)); got != "1234567\n90\n" || len(backups(t, dir)) != 0 {
		t.Errorf("file is %q, backups are %q", got, backups(t, dir))
	}
}

func TestFileRotatedByAnotherIsNotRotatedAgain(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, fileName, "full\n")
	full, err := os.Stat(filepath.Join(dir, fileName))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, fileName), filepath.Join(dir, "istio-cni-2026-05-04T00-00-00.000.log")); err != nil {
		t.Fatal(err)
	}
	put(t, dir, fileName, "new\n")
	rollingFile{limit: 10, now: clock}.rotate(dir, full)
	if got := backups(t, dir); len(got) != 1 || readFile(t, filepath.Join(dir, got[0])) != "full\n" {
		t.Errorf("backups are %q", got)
	}
}

func TestFileIsReadableByRootOnly(t *testing.T) {
	dir := t.TempDir()
	l := New(Options{RunDir: dir, Patience: generous})
	l.Logger().Info("a")
	closeLog(t, l)
	info, err := os.Stat(filepath.Join(dir, fileName))
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode() != 0o600 {
		t.Errorf("mode is %v", info.Mode())
	}
}

func TestMissingRunDirIsNeitherMadeNorComplainedOf(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "missing")
	var stderr bytes.Buffer
	l := New(Options{Stderr: &stderr, RunDir: dir, Patience: generous})
	l.Logger().Info("a")
	closeLog(t, l)
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("run directory: %v", err)
	}
	if diff := cmp.Diff([]string{"a"}, messages(t, stderr.String())); diff != "" {
		t.Errorf("stderr (-want +got):\n%s", diff)
	}
}

func TestFullDiskTearsOneRecordAtMost(t *testing.T) {
	if !inMountNamespace(t) {
		return
	}
	dir := mountTmpfs(t, "32k")
	put(t, dir, "filler", strings.Repeat("x", 12<<10))
	invoke := func(msg string) string {
		var stderr bytes.Buffer
		l := New(Options{Stderr: &stderr, RunDir: dir, Patience: generous})
		for range 100 {
			l.Logger().Info(msg, "text", strings.Repeat("x", 300)) //nolint:sloglint // to tell the invocations apart
		}
		closeLog(t, l)
		return stderr.String()
	}
	for range 2 {
		if said := invoke("full"); !strings.Contains(said, "no space left on device") {
			t.Errorf("stderr does not tell of the full disk: %q", said[len(said)-200:])
		}
	}
	if err := os.Remove(filepath.Join(dir, "filler")); err != nil {
		t.Fatal(err)
	}
	small := New(Options{RunDir: dir, Patience: generous})
	small.Logger().Info("room again")
	closeLog(t, small)
	var torn int
	lines := strings.Split(strings.TrimSuffix(readFile(t, filepath.Join(dir, fileName)), "\n"), "\n")
	for _, line := range lines {
		if !json.Valid([]byte(line)) {
			torn++
		}
	}
	if torn != 1 || !strings.Contains(lines[len(lines)-1], "room again") {
		t.Errorf("%d torn of %d lines, the last is %q", torn, len(lines), lines[len(lines)-1])
	}
}

func TestReadOnlyRunDirIsToldOnStderr(t *testing.T) {
	if !inMountNamespace(t) {
		return
	}
	dir := mountTmpfs(t, "32k")
	put(t, dir, "istio-cni-2020-01-01T00-00-00.000.log", "old")
	if err := syscall.Mount("", dir, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	l := New(Options{Stderr: &stderr, RunDir: dir, Patience: generous})
	l.Logger().Info("a")
	closeLog(t, l)
	if got := stderr.String(); len(messages(t, got)) != 2 || !strings.Contains(got, "read-only file system") {
		t.Errorf("stderr has %q", got)
	}
}

func TestOddRunDirsHurtNobody(t *testing.T) {
	for name, prepare := range map[string]func(t *testing.T) string{
		"a_file":     func(t *testing.T) string { t.Helper(); put(t, t.TempDir(), "x", ""); return os.Args[0] },
		"no_name":    func(t *testing.T) string { t.Helper(); return "a\x00b" },
		"a_long_one": func(t *testing.T) string { t.Helper(); return "/" + strings.Repeat("x/", 3000) },
		"the_log_is_a_directory": func(t *testing.T) string {
			t.Helper()
			dir := t.TempDir()
			if err := os.Mkdir(filepath.Join(dir, fileName), 0o700); err != nil {
				t.Fatal(err)
			}
			return dir
		},
		"the_log_is_a_full_device": func(t *testing.T) string {
			t.Helper()
			dir := t.TempDir()
			if err := os.Symlink("/dev/full", filepath.Join(dir, fileName)); err != nil {
				t.Fatal(err)
			}
			return dir
		},
	} {
		t.Run(name, func(t *testing.T) {
			var stderr bytes.Buffer
			l := New(Options{Stderr: &stderr, RunDir: prepare(t), Patience: generous})
			l.Logger().Info("a")
			closeLog(t, l)
			if got := stderr.String(); !strings.Contains(got, "log sink failed") {
				t.Errorf("stderr has %q", got)
			}
		})
	}
}

func TestHangingFileIsLeftBehind(t *testing.T) {
	agent := startAgent(t)
	pipe := filepath.Join(agent.dir, fileName) // a pipe that nobody reads is as patient as a dead NFS server
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	var stderr syncBuffer
	l := New(Options{Stderr: &stderr, RunDir: agent.dir, Patience: time.Second})
	const records = 200
	for range records {
		l.Logger().Info("record", "text", strings.Repeat("x", 1000))
	}
	closeLog(t, l)
	eventually(t, "stderr tells of the file", func() bool {
		return strings.Contains(stderr.String(), fileName+`","error":"context deadline exceeded"`)
	})
	if got := len(agent.only(t).lines); got != records {
		t.Errorf("agent has %d records", got)
	}
	eventually(t, "only the file's goroutine is left", func() bool { return len(leftBehind()) == 1 })
	if left := leftBehind(); !strings.Contains(left[0], "pluginlog.rollingFile") {
		t.Errorf("left behind: %s", left[0])
	}
	reader, err := os.OpenFile(pipe, os.O_RDONLY|syscall.O_NONBLOCK, fs.FileMode(0))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = reader.Close() }()
	go func() { _, _ = new(bytes.Buffer).ReadFrom(reader) }()
	eventually(t, "no goroutine is left", func() bool { return len(leftBehind()) == 0 })
}
