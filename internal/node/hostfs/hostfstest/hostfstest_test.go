package hostfstest_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// left writes a file with the faults and returns the remaining files.
func left(t *testing.T, faults *hostfstest.Faults) (files string, err error) {
	t.Helper()
	dir := t.TempDir()
	err = hostfs.Disk{Before: faults.Before}.WriteFile(filepath.Join(dir, "f"), []byte("12345678"), 0o600)
	all, globErr := filepath.Glob(dir + "/*")
	for _, file := range all {
		data, readErr := os.ReadFile(file)
		if errors.Join(globErr, readErr) != nil {
			t.Fatal(globErr, readErr)
		}
		name, _, temporary := strings.Cut(filepath.Base(file), ".istio-cni.tmp.")
		if temporary {
			name += ".tmp"
		}
		files += name + "=" + string(data)
	}
	return files, err
}

func verbs(log []string) string {
	var all []string
	for _, line := range log {
		verb, _, _ := strings.Cut(line, " ")
		all = append(all, verb)
	}
	return strings.Join(all, " ")
}

func TestFaults(t *testing.T) {
	kill, cut, fail := hostfstest.KillAt, hostfstest.PowerCutAt, func(n int) *hostfstest.Faults {
		return hostfstest.FailAt(n, syscall.EIO)
	}
	for _, c := range []struct {
		name   string
		faults *hostfstest.Faults
		err    error
		log    string
		left   string
	}{
		{"killed first", kill(0), hostfstest.ErrKilled, "create", ""},
		{"killed in the middle of a write", kill(1), hostfstest.ErrKilled, "create write close remove", "f.tmp=1234"},
		{"killed before the rename", kill(5), hostfstest.ErrKilled, "create write chmod sync close rename remove", "f.tmp=12345678"},
		{"killed after the rename", kill(6), hostfstest.ErrKilled, "create write chmod sync close rename syncdir", "f=12345678"},
		{"killed too late", kill(7), nil, "create write chmod sync close rename syncdir", "f=12345678"},
		{"power cut before the sync", cut(3), hostfstest.ErrKilled, "create write chmod sync close remove", "f.tmp="},
		{"power cut after the sync", cut(4), hostfstest.ErrKilled, "create write chmod sync close remove", "f.tmp=12345678"},
		{"a failure is cleaned up", fail(1), syscall.EIO, "create write close remove", ""},
		{"a failure at the close", fail(4), syscall.EIO, "create write chmod sync close remove", ""},
	} {
		files, err := left(t, c.faults)
		if log := verbs(c.faults.Log()); !errors.Is(err, c.err) || log != c.log || files != c.left {
			t.Errorf("%s: error %v, operations %q, files %q; want %v, %q, %q", c.name, err, log, files, c.err, c.log, c.left)
		}
	}
}

// The tests of durable writes must find a rename of unsynced content.
func TestFaults_PowerCutOfRenamedFile(t *testing.T) {
	dir := t.TempDir()
	faults, temp := hostfstest.PowerCutAt(2), filepath.Join(dir, "temp")
	check.OK(t, faults.Before(hostfs.Call{Name: "create", Path: temp}))
	check.OK(t, os.WriteFile(temp, []byte("new"), 0o600))
	disk := hostfs.Disk{Before: faults.Before}
	if err := disk.Rename(temp, filepath.Join(dir, "f")); !errors.Is(err, hostfstest.ErrKilled) { // before it syncs the directory
		t.Errorf("error %v", err)
	}
	if data, err := os.ReadFile(filepath.Join(dir, "f")); len(data) != 0 || err != nil {
		t.Errorf("content %q, error %v", data, err)
	}
}
