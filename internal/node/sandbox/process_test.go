package sandbox_test

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/node/sandbox/sandboxtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestProcesses_OfPods(t *testing.T) {
	t.Parallel()
	const pod = "0f5d3a52-4d64-4b2b-9d5a-6d1d2a3b4c5d"
	const slice = "kubepods-besteffort-pod0f5d3a52_4d64_4b2b_9d5a_6d1d2a3b4c5d.slice"
	id := strings.Repeat("0123456789abcdef", 4)
	status := func(uid, gid string) string {
		return "Name:\tapp Uid:\nUid:\t0\t0\t0\t" + uid + "\nGid:\t0\t0\t0\t" + gid + "\nThreads:\t1\n"
	}
	proc := t.TempDir()
	for process, files := range map[string][]string{ // cgroup, status
		"1":   {"0::/init.scope", status("0", "0")},
		"10":  {"0::/kubepods.slice/" + slice + "/cri-containerd-" + id + ".scope", status("1337", "7")},
		"11":  {"0::/kubepods/besteffort/pod" + pod + "/" + id, status("66873", "65536")},
		"12":  {"0::/../../" + slice + "/crio-" + id + ".scope/" + strings.Repeat("f", 64), status("0", "0")},
		"13":  {"0::/kubepods.slice/" + slice + "/short", status("5", "5")},
		"14":  {"0::/kubepods.slice/" + slice + "/short", "Uid:\tx\t0\t0\tx\n"},
		"abc": {"0::/kubepods.slice/" + slice, status("0", "0")},
	} {
		dir := filepath.Join(proc, process)
		for name, text := range map[string]string{"cgroup": files[0], "status": files[1], "ns/net": ""} {
			check.OK(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o750))
			check.OK(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
		}
	}
	all, err := sandbox.Places{Proc: proc}.Processes(t.Context())
	check.OK(t, err)
	var got []string
	for _, p := range all[pod] {
		got = append(got, fmt.Sprintf("%d %d %s %s %d:%d", p.PID, p.Thread, p.Pod, p.Container, p.UID, p.GID))
	}
	slices.Sort(got)
	want := []string{
		"10 0 " + pod + " " + id + " 1337:7", "11 0 " + pod + " " + id + " 66873:65536", "12 0 " + pod + " " + id + " 0:0", "13 0 " + pod + "  5:5",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	check.Equal(t, len(all), 1, "pods")
	check.Is(t, check.Err(sandbox.Places{Proc: t.TempDir()}.Processes(t.Context())), sandbox.ErrNoHost, "without a procfs of the node")
}

// pods has UIDs, container is the ID of a container.
var (
	pods      = []string{"0f5d3a52-4d64-4b2b-9d5a-6d1d2a3b4c5d", "1f5d3a52-4d64-4b2b-9d5a-6d1d2a3b4c5d"}
	container = strings.Repeat("0123456789abcdef", 4)
)

// identities returns the users and groups of a pod's processes on the node.
func identities(n *sandboxtest.Node, uid string) (all []string) {
	n.Helper()
	byPod, err := n.Processes(n.Context())
	n.Do(err)
	for _, p := range byPod[uid] {
		if p.Container == container {
			all = append(all, fmt.Sprintf("%d:%d", p.UID, p.GID))
		}
	}
	slices.Sort(all)
	return all
}

// TestProcesses_OneThread: one thread runs as another user, which Linux allows.
func TestProcesses_OneThread(t *testing.T) {
	t.Parallel()
	n := sandboxtest.New(t)
	n.Contain(os.Getpid(), pods[0], container)
	started, end := make(chan struct{}), make(chan struct{})
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		_, _, _ = unix.RawSyscall(unix.SYS_SETFSGID, 7, 0, 0)
		_, _, _ = unix.RawSyscall(unix.SYS_SETFSUID, 1337, 0, 0)
		close(started)
		<-end
	}()
	<-started
	defer close(end)
	if got := identities(n, pods[0]); len(got) != 2 || got[0] != "0:0" || got[1] != "1337:7" {
		t.Errorf("got %q", got)
	}
}

// unshared starts a process in this process's network namespace and a new user namespace, as a user there.
func unshared(n *sandboxtest.Node, uid string, inside, outside int) {
	n.Helper()
	ids := []syscall.SysProcIDMap{{ContainerID: inside, HostID: outside, Size: 1}}
	n.StartAs(syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true,
		Credential: &syscall.Credential{Uid: uint32(inside), Gid: uint32(inside)},
	}, uid, container)
}

// TestProcesses_UserNamespace: the kernel's owner match ignores the IDs of a user namespace that a process has created.
func TestProcesses_UserNamespace(t *testing.T) {
	t.Parallel()
	n := sandboxtest.New(t)
	unshared(n, pods[0], 5000, 1337)
	unshared(n, pods[1], 1337, 2000)
	for i, want := range []string{"1337:1337", "2000:2000"} {
		if got := identities(n, pods[i]); len(got) != 1 || got[0] != want {
			t.Errorf("got %q, want %s", got, want)
		}
	}
}

// TestProcesses_IDs: a user namespace has its own IDs, like a pod with hostUsers: false.
func TestProcesses_IDs(t *testing.T) {
	t.Parallel()
	n := sandboxtest.New(t)
	process, path := netnstest.Unshared(t, 100000, 65536)
	n.Contain(process.Process.Pid, pods[0], container)
	unshared(n, pods[0], 5000, 101337)
	byPod, err := n.Processes(t.Context())
	n.Do(err)
	all := byPod[pods[0]]
	users, own, err := netnstest.Open(t, path).Users()
	n.Do(err)
	ids, known := sandbox.IDsOf(users, all)
	if own || !known || len(all) != 2 {
		t.Fatalf("own %v, known %v, processes %+v", own, known, all)
	}
	for id, want := range map[uint32]uint32{100000: 0, 101337: 1337, 165535: 65535, 165536: sandbox.Overflow, 1337: sandbox.Overflow} {
		if user, group := ids.UID(id), ids.GID(id); user != want || group != want {
			t.Errorf("%d: user %d, group %d, want %d", id, user, group, want)
		}
	}
	if none := (sandbox.IDs{}); none.UID(5) != 5 || none.GID(5) != 5 {
		t.Error("the zero value converts IDs")
	}
	if _, known = sandbox.IDsOf(users, all[:0]); known {
		t.Error("the IDs are known without a process")
	}
}
