package hostfs_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestCopy(t *testing.T) {
	onEachFS(t, func(t *testing.T, dir string) {
		umask(t, 0o077)
		from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
		put(t, from, big)
		for _, c := range []struct {
			name  string
			spoil op
		}{
			{"missing", each()},
			{"other content of the same size", write(to, strings.ToUpper(big))},
			{"shorter", write(to, big[1:])},
			{"empty", write(to, "")},
			{"a link to the right content", each(rename(to, to+"2"), symlink(to+"2", to))},
			{"a pipe", each(remove(to), func() error { return syscall.Mkfifo(to, 0o755) })},
			{"another owner", each(write(to, "old"), func() error { return os.Chown(to, 12, 34) })},
			{"not executable", chmod(to, 0o644)},
			{"set user id", chmod(to, fs.ModeSetuid|0o755)},
		} {
			t.Run(c.name, func(t *testing.T) {
				check.OK(t, c.spoil())
				for _, want := range []bool{false, true} {
					if ok, err := new(hostfs.Comparisons).Identical(from, to, 0o755); ok != want || err != nil {
						t.Errorf("identical %v, error %v", ok, err)
					}
					check.OK(t, hostfs.Disk{}.Copy(from, to, 0o755))
				}
				var stat syscall.Stat_t
				check.OK(t, syscall.Lstat(to, &stat))
				if content(to) != big || stat.Mode != syscall.S_IFREG|0o755 || stat.Uid != 0 || stat.Gid != 0 {
					t.Errorf("%d bytes, %+v", stat.Size, stat)
				}
			})
		}
		check.Diff(t, "result", []string{"from", "to", "to2"}, names(t, dir))
	})
}

func TestComparisons_EveryChange(t *testing.T) {
	onEachFS(t, func(t *testing.T, dir string) {
		compared := &hostfs.Comparisons{}
		from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
		old := time.Now().Add(-time.Hour)
		for _, step := range []struct {
			file, text string
			same       bool
		}{{from, "aaaa", false}, {to, "aaaa", true}, {to, "bbbb", false}, {to, "aaaa", true}, {from, "bbbb", false}} {
			put(t, step.file, step.text) // at once: within one step of the clock
			check.OK(t, os.Chtimes(step.file, old, old))
			for range 2 {
				if same, err := compared.Identical(from, to, 0o644); same != step.same || err != nil {
					t.Errorf("%q in %s: identical %v, error %v", step.text, step.file, same, err)
				}
			}
		}
	})
}

// Comparisons trusts only a ctime that is some seconds old. No process can set the ctime.
func TestComparisons_QuietFileIsReadOnce(t *testing.T) {
	dir := t.TempDir()
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
	put(t, from, big)
	put(t, to, big)
	compared := &hostfs.Comparisons{}
	read := func() (bytes int) {
		t.Helper()
		before := hostfstest.BytesRead(t)
		if same, err := compared.Identical(from, to, 0o644); !same || err != nil {
			t.Fatal(same, err)
		}
		return hostfstest.BytesRead(t) - before
	}
	agenttest.Eventually(t, "not read each time", func() bool { return read() <= len(big)/2 })
	put(t, to, strings.ToUpper(big))
	if same, err := compared.Identical(from, to, 0o644); same || err != nil {
		t.Errorf("identical %v, error %v", same, err)
	}
}

func TestCopy_OverRunningProgram(t *testing.T) {
	onEachFS(t, func(t *testing.T, dir string) {
		path, fresh := filepath.Join(dir, "cat"), filepath.Join(dir, "new")
		check.OK(t, hostfs.Disk{}.Copy("/bin/cat", path, 0o755))
		var output bytes.Buffer
		running := exec.CommandContext(t.Context(), path)
		running.Stdout = &output
		input, err := running.StdinPipe()
		check.OK(t, err)
		check.OK(t, running.Start())
		if file, busy := os.OpenFile(path, os.O_WRONLY, 0); !errors.Is(busy, syscall.ETXTBSY) {
			_ = file.Close()
			t.Fatalf("writing to the running program: error %v, so this test shows nothing", busy)
		}
		put(t, fresh, "#!/bin/sh\necho new\n")
		check.OK(t, hostfs.Disk{}.Copy(fresh, path, 0o755))
		_, err = io.WriteString(input, "done")
		check.OK(t, errors.Join(err, input.Close(), running.Wait()))
		check.Equal(t, output.String(), "done", "the running program prints")
		if got, err := exec.CommandContext(t.Context(), path).Output(); string(got) != "new\n" || err != nil {
			t.Errorf("the new program prints %q, error %v", got, err)
		}
	})
}

// A forked process has the open files of its parent until it executes another program.
func TestCopy_ExecutedDuringForks(t *testing.T) {
	dir := hostfstest.Memory(t)
	for i, text := range []string{"#!/bin/sh\nexit 0\n", "#!/bin/sh\n\nexit 0\n"} {
		put(t, filepath.Join(dir, fmt.Sprint(i)), text)
	}
	for range 4 {
		agenttest.Go(t, func(ctx context.Context) {
			for ctx.Err() == nil {
				_ = exec.CommandContext(ctx, "/bin/true").Run()
			}
		})
	}
	path := filepath.Join(dir, "program")
	for i := range 200 {
		check.OK(t, hostfs.Disk{}.Copy(filepath.Join(dir, fmt.Sprint(i%2)), path, 0o755))
		check.OK(t, exec.CommandContext(t.Context(), path).Run(), "copy", i)
	}
}
