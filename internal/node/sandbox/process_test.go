package sandbox_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

func TestProcessesOfPods(t *testing.T) {
	t.Parallel()
	const pod = "0f5d3a52-4d64-4b2b-9d5a-6d1d2a3b4c5d"
	const slice = "kubepods-besteffort-pod0f5d3a52_4d64_4b2b_9d5a_6d1d2a3b4c5d.slice"
	id := strings.Repeat("0123456789abcdef", 4)
	status := func(uid, gid string) string {
		return "Name:\tapp Uid:\nUid:\t0\t0\t0\t" + uid + "\nGid:\t0\t0\t0\t" + gid + "\n"
	}
	proc := t.TempDir()
	for process, files := range map[string][]string{ // cgroup, status, uid_map
		"1":   {"0::/init.scope", status("0", "0"), ""},
		"10":  {"0::/kubepods.slice/" + slice + "/cri-containerd-" + id + ".scope", status("1337", "7"), "0 0 4294967295"},
		"11":  {"0::/kubepods/besteffort/pod" + pod + "/" + id, status("66873", "65536"), "0 65536 65536"},
		"12":  {"0::/../../" + slice + "/crio-" + id + ".scope/" + strings.Repeat("f", 64), status("0", "0"), ""},
		"13":  {"0::/kubepods.slice/" + slice + "/short", status("5", "5"), ""},
		"14":  {"0::/kubepods.slice/" + slice + "/short", "Uid:\tx\t0\t0\tx\n", ""},
		"abc": {"0::/kubepods.slice/" + slice, status("0", "0"), ""},
	} {
		dir := filepath.Join(proc, process)
		for name, text := range map[string]string{"cgroup": files[0], "status": files[1], "uid_map": files[2], "gid_map": files[2], "ns/net": ""} {
			if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o750); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	var got []sandbox.Process
	if err := (sandbox.Places{Proc: proc}).Processes(t.Context(), func(p sandbox.Process) { got = append(got, p) }); err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(got, func(a, b sandbox.Process) int { return a.PID - b.PID })
	want := []sandbox.Process{
		{PID: 10, Pod: pod, Container: id, UID: 1337, GID: 7},
		{PID: 11, Pod: pod, Container: id, UID: 1337, GID: 0},
		{PID: 12, Pod: pod, Container: id},
		{PID: 13, Pod: pod, UID: 5, GID: 5},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v", got)
	}
	if err := (sandbox.Places{Proc: t.TempDir()}).Processes(t.Context(), nil); err == nil {
		t.Error("no error without a procfs of the node")
	}
}
