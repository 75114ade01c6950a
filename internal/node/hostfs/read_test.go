package hostfs_test

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestReadFile(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	put(t, at("f"), "12345")
	put(t, at("empty"), "")
	check.OK(t, errors.Join(os.Chmod(at("f"), 0o640), os.Chmod(at("empty"), 0o640), os.Symlink("f", at("link"))))
	for name, want := range map[string]string{"f": "12345", "link": "12345", "empty": ""} {
		if data, mode, err := hostfs.ReadFile(at(name), int64(len(want))); string(data) != want || mode != 0o640 || err != nil {
			t.Errorf("%s: %q, mode %v, error %v", name, data, mode, err)
		}
	}
	check.OK(t, errors.Join(syscall.Mkfifo(at("pipe"), 0o600), os.Symlink("pipe", at("pipelink"))))
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", at("socket"))
	check.OK(t, err)
	defer func() { _ = listener.Close() }()
	for name, want := range map[string]error{
		at("f"):             hostfs.ErrTooLarge,
		at("missing"):       fs.ErrNotExist,
		at("pipe"):          hostfs.ErrNotRegular,
		at("pipelink"):      hostfs.ErrNotRegular,
		at("socket"):        hostfs.ErrNotRegular,
		dir:                 hostfs.ErrNotRegular,
		"/dev/zero":         hostfs.ErrNotRegular,
		at("f/below"):       syscall.ENOTDIR,
		"/proc/self/maps":   hostfs.ErrTooLarge, // of size 0, as it seems
		"/proc/self/mounts": hostfs.ErrTooLarge,
	} {
		data, _, err := hostfs.ReadFile(name, 4)
		if !errors.Is(err, want) || data != nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %q, error %v, want %v", name, data, err, want)
		}
	}
	if data, _, err := hostfs.ReadFile("/proc/version", 1000); len(data) == 0 || err != nil {
		t.Errorf("a file of size 0, as it seems: %q, error %v", data, err)
	}
}

func TestList(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"b.conf", "a.conflist", "B.conf", "10.json", "9.conf", "b.txt", ".conf"} {
		put(t, filepath.Join(dir, name), "")
	}
	check.OK(t, os.Mkdir(filepath.Join(dir, "d.conf"), 0o755))
	check.OK(t, os.Symlink("missing", filepath.Join(dir, "l.conf")))
	got, err := hostfs.List(dir, func(name string) bool { return !strings.HasSuffix(name, ".txt") })
	check.OK(t, err)
	want := []string{".conf", "10.json", "9.conf", "B.conf", "a.conflist", "b.conf", "l.conf"}
	check.Diff(t, "result", want, got)
	if got, err := hostfs.List(dir, nil); len(got) != len(want)+1 || err != nil {
		t.Errorf("all: %q, error %v", got, err)
	}
	missing := filepath.Join(dir, "missing")
	if _, err := hostfs.List(missing, nil); !errors.Is(err, fs.ErrNotExist) || hostfs.Hint(err) == "" {
		t.Errorf("error %v, hint %q", err, hostfs.Hint(err))
	}
}
