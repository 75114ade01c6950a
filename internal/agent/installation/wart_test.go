package installation_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/installation"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// ends asserts that the runtime runs the stanza exactly once, last, after these plugins.
func (n *fixture) ends(want ...string) {
	n.t.Helper()
	check.Diff(n.t, "the runtime runs", append(want, "istio-cni"), n.loaded())
}

func modes() []cniconf.Mode {
	return []cniconf.Mode{cniconf.Inline, cniconf.DropIn, cniconf.Owned, cniconf.Standalone}
}

func (n *fixture) uninstall(a *installation.Installation) {
	n.t.Helper()
	check.OK(n.t, a.Uninstall(n.t.Context()))
}

// running starts Run and returns a function that ends it; an error of Run fails the test.
func (n *fixture) running(a *installation.Installation) (end func()) {
	n.t.Helper()
	return agenttest.Go(n.t, func(ctx context.Context) {
		if err := a.Run(ctx); err != nil {
			n.t.Error(err)
		}
	})
}

// TestModes_InstallAndUninstall reads the calls of an installation and of its removal: a file is synced before it is renamed to
// its name, and a directory before any other change, because the order must survive a loss of power; the stanza is removed
// first and the program last, so that a pod that is created or removed meanwhile finds everything it needs; no other file changes.
func TestModes_InstallAndUninstall(t *testing.T) {
	t.Parallel()
	podman := strings.Replace(conflist, "net", "podman", 1)
	for _, mode := range modes() {
		for _, files := range [][]string{{"10-bridge.conflist", conflist, "87-podman.conflist", podman}, {"10-bridge.conf", bridgeConf}} {
			if mode == cniconf.DropIn && files[0] == "10-bridge.conf" {
				continue
			}
			n := newFixture(t, files...)
			n.config.Want.Mode, n.config.Want.Stanza.AmbientEnabled = mode, len(files) > 2
			before := n.tree("net.d")
			install := hostfstest.Record(func(d hostfs.Disk) { n.disk = d; check.OK(t, n.agent().Reconcile()) })
			durable(t, install)
			if cmp.Equal(before, n.tree("net.d")) || len(install) < 20 {
				t.Errorf("%s: too little was installed: %q", mode, install)
			}
			remove := hostfstest.Record(func(d hostfs.Disk) { n.disk = d; n.uninstall(n.agent()) })
			durable(t, remove)
			check.Diff(t, fmt.Sprintf("%s, %q", mode, files[0]), before, n.tree("net.d"))
			var order []string
			for _, call := range remove {
				for _, dir := range []string{"net.d", "run", "bin"} {
					if strings.Contains(call, n.path(dir)) && !strings.HasSuffix(strings.Join(order, " "), dir) {
						order = append(order, dir)
					}
				}
			}
			if !slices.Equal(order, []string{"net.d", "run", "bin"}) || remove[len(remove)-2] != "remove "+n.path("bin/istio-cni") {
				t.Errorf("%s: the order is %q\n%s", mode, order, strings.Join(remove, "\n"))
			}
		}
	}
}

func durable(t *testing.T, calls []string) {
	t.Helper()
	synced := map[string]bool{}
	loose := "" // the directory whose names may not be on the disk yet
	for at, call := range calls {
		words := strings.Fields(call)
		verb, file := words[0], words[1]
		temporary := strings.Contains(file, ".tmp.")
		if loose != "" && verb != "syncdir" && filepath.Dir(file) != loose {
			t.Errorf("call %d, %q: the names in %q may not be on the disk yet", at, call, loose)
		}
		switch verb {
		case "create", "write", "chown", "chmod":
			synced[file] = false
		case "sync":
			synced[file] = true
		case "rename":
			if made, known := synced[file]; known && !made {
				t.Errorf("call %d, %q: the content may not be on the disk yet", at, call)
			}
			loose = filepath.Dir(words[2])
		case "mkdir":
			loose = filepath.Dir(file)
		case "remove":
			if !temporary {
				loose = filepath.Dir(file)
			}
		case "syncdir":
			if file == loose {
				loose = ""
			}
		}
	}
	check.Equal(t, loose, "", "at the end the names in", "may be lost", calls)
}

// TestReadiness_FollowsTheNode makes the changes that happen on a node all the time. The last event has a visible effect,
// which proves that the events before it were processed, too.
func TestReadiness_FollowsTheNode(t *testing.T) {
	t.Parallel()
	n := newFixture(t, "10-bridge.conflist", conflist)
	var mu sync.Mutex
	lost := 0
	n.health = health.NewState(health.Options{OnChange: func(ready bool) {
		mu.Lock()
		defer mu.Unlock()
		if !ready {
			lost++
		}
	}}, installation.PartBinaries, installation.PartKubeconfig, installation.PartConf)
	end := n.running(n.agent())
	n.until(func() bool { return n.health.Snapshot().Ready })
	inodes := func() (out []uint64) {
		for _, file := range []string{"bin/istio-cni", "net.d/10-bridge.conflist"} {
			info, err := os.Stat(n.path(file))
			check.OK(t, err)
			out = append(out, info.Sys().(*syscall.Stat_t).Ino)
		}
		return out
	}
	before := inodes()
	for round := range 5 {
		n.put("net.d/.05-cilium.conflist123", "half", 0o600)
		n.put("net.d/calico-kubeconfig", fmt.Sprint(round), 0o600)
		n.put("sa/namespace", "istio-system", 0o600)
		check.OK(t, os.Chmod(n.path("net.d/10-bridge.conflist"), 0o644))
		token := fmt.Sprintf("rotated-%d", round)
		n.put("sa/token", token, 0o600)
		n.until(func() bool { return strings.Contains(n.read("run/istio-cni-kubeconfig"), token) })
	}
	end()
	if lost != 0 || !n.health.Snapshot().Ready {
		t.Errorf("readiness was lost %d times: %+v", lost, n.health.Snapshot())
	}
	check.Diff(t, "inodes of files that were as wanted", before, inodes())
	check.Equal(t, n.there("net.d/.05-cilium.conflist123"), true, "another program's temporary file was removed")
}

// refusing makes the creation and removal of files fail in some directories.
func refusing(dirs ...string) func(hostfs.Call) error {
	return func(c hostfs.Call) error {
		if slices.Contains([]string{"create", "remove"}, c.Name) && slices.Contains(dirs, filepath.Dir(c.Path)) {
			return syscall.EIO
		}
		return nil
	}
}

// TestRun_ChangeDuringInstallation: what has been read already is watched. Without the event the next reconciliation would be much later.
func TestRun_ChangeDuringInstallation(t *testing.T) {
	t.Parallel()
	n := newFixture(t, "10-bridge.conflist", conflist)
	changed := make(chan struct{})
	once := sync.OnceFunc(func() { n.put("sa/token", "token-2", 0o600); close(changed) })
	n.disk.Before = func(c hostfs.Call) error {
		if c.Name == "syncdir" && c.Path == n.path("net.d") {
			once()
		}
		return nil
	}
	n.running(n.agent())
	<-changed
	n.until(n.asWanted)
}

// TestUninstall_ReportsEveryError refuses the removal of kubeconfigs and of a program directory.
func TestUninstall_ReportsEveryError(t *testing.T) {
	t.Parallel()
	n := newFixture(t, "10-bridge.conflist", conflist)
	check.OK(t, os.Mkdir(n.path("bin2"), 0o755))
	n.config.BinDirs = []string{n.path("bin"), n.path("bin2")}
	check.OK(t, n.agent().Reconcile())
	n.put("old/ZZZ-istio-cni-kubeconfig", "x", 0o600)
	n.config.OldKubeconfig = n.path("old/ZZZ-istio-cni-kubeconfig")
	n.disk.Before = refusing(n.path("old"), n.path("run"), n.path("bin"))
	err := n.agent().Uninstall(t.Context())
	for _, file := range []string{"old/ZZZ-istio-cni-kubeconfig", "run/istio-cni-kubeconfig", "bin/istio-cni", "bin/istio-iptables"} {
		check.Fails(t, err, n.path(file))
	}
	if rest := n.tree("bin2"); len(rest) > 0 || n.read("net.d/10-bridge.conflist") != conflist {
		t.Errorf("a removable file is left: %v", n.tree("."))
	}
}

// TestReconcile_AfterReboot: the run directory, on a tmpfs, is empty, and the primary CNI has not started yet. Pods need the
// credentials before anything else happens.
func TestReconcile_AfterReboot(t *testing.T) {
	t.Parallel()
	for _, mode := range []cniconf.Mode{cniconf.Inline, cniconf.Owned} {
		n := newFixture(t, "10-bridge.conflist", conflist)
		n.config.Want.Mode = mode
		check.OK(t, n.agent().Reconcile())
		check.OK(t, os.RemoveAll(n.path("run")))
		check.OK(t, os.Remove(n.path("net.d/10-bridge.conflist"))) // as some primary CNIs do until they are ready
		err := n.agent().Reconcile()
		var waiting *installation.WaitingError
		if mode == cniconf.Inline && !errors.As(err, &waiting) {
			t.Errorf("%s: %v, want to wait", mode, err)
		}
		check.Equal(t, n.there("run/istio-cni-kubeconfig"), true, mode, "the kubeconfig while the primary CNI is away")
		if mode == cniconf.Owned && !slices.Contains(n.loaded(), "istio-cni") {
			t.Errorf("%s: pods may start without redirection: the runtime runs %q", mode, n.loaded())
		}
	}
}

func TestReconcile_SweepsTemporaryFiles(t *testing.T) {
	t.Parallel()
	n, a := newInstalled(t, "10-bridge.conf", bridgeConf) // renames 10-bridge.conf
	ours := []string{
		"net.d/10-bridge.conf.tmp.1", "net.d/10-bridge.conflist.tmp.2837465019", "net.d/02-istio-cni.conflist.tmp.3",
		"net.d/50-removed.conflist.istio-cni.tmp.1", "net.d/sub/zzz-istio-cni.conf.istio-cni.tmp.2",
		"bin/istio-cni.tmp.4", "bin/istio-iptables.tmp.5", "run/istio-cni-kubeconfig.tmp.6",
	}
	theirs := []string{
		"net.d/.05-cilium.conflist123", "net.d/10-calico.conf.tmp", "net.d/10-bridge.conf.tmp.x", "net.d/50-removed.conflist.tmp.1",
		"net.d/50-removed.conflist.istio-cni.tmp.x", "net.d/sub/zzz.conf.tmp.1", "bin/bridge.tmp.1", "run/ztunnel.tmp.1",
		"run/verdict.istio-cni.tmp.1",
	}
	for _, name := range slices.Concat(ours, theirs) {
		n.put(name, "{", 0o600)
	}
	check.OK(t, a.Reconcile())
	for _, name := range ours {
		check.Equal(t, n.there(name), false, name, "is left")
	}
	for _, name := range theirs {
		check.Equal(t, n.there(name), true, name, "of another program")
	}
}

// TestRun_DirectoryRemovedUnderItsMount: a new container mounts the new directory, even if the removal preceded
// the agent's start, which may have waited for another agent.
func TestRun_DirectoryRemovedUnderItsMount(t *testing.T) {
	for _, name := range []string{"net.d", "bin"} {
		n := newFixture(t)
		host := n.path("host")
		check.OK(t, os.Mkdir(host, 0o755))
		check.OK(t, unix.Mount(host, n.path(name), "", unix.MS_BIND, ""))
		t.Cleanup(func() { _ = unix.Unmount(n.path(name), unix.MNT_DETACH) })
		check.OK(t, os.Remove(host))
		if err := n.agent().Run(t.Context()); !errors.Is(err, installation.ErrGone) || !strings.Contains(err.Error(), n.path(name)) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

// TestReadiness_HangingDisk takes the stanza out while the disk is frozen. The agent is then not ready but
// answers both probes all the time, and is alive: a restart would not help.
func TestReadiness_HangingDisk(t *testing.T) {
	t.Parallel()
	n := newFixture(t, "10-bridge.conflist", conflist)
	clock := agenttest.NewClock()
	var disk sync.RWMutex // if locked, no file can be created: like under fsfreeze(8), the call does not return
	n.disk.Before = func(hostfs.Call) error {
		disk.RLock()
		defer disk.RUnlock()
		return nil
	}
	n.health = health.NewState(health.Options{Now: clock.Now}, installation.PartBinaries, installation.PartKubeconfig, installation.PartConf)
	probe := func(path string) (int, string) {
		answer := httptest.NewRecorder()
		n.health.Handler().ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		return answer.Code, answer.Body.String()
	}
	ready := func() bool { code, _ := probe("/readyz"); return code == http.StatusOK }
	n.running(n.agent())
	n.until(func() bool { return ready() && len(n.loaded()) == 3 })

	disk.Lock()
	thaw := sync.OnceFunc(disk.Unlock)
	defer thaw()
	n.put("net.d/10-bridge.conflist", conflist, 0o644)
	n.until(func() bool { // in small steps: a comparison that ends in time is not a hang
		clock.Step(100 * time.Millisecond)
		return !ready()
	})
	if _, body := probe("/readyz"); !strings.Contains(body, "no comparison with the node's files was completed in time") {
		t.Errorf("not ready: %s", body)
	}
	clock.Step(time.Hour)
	if code, body := probe("/healthz"); code != http.StatusOK {
		t.Errorf("not alive: %s", body)
	}
	check.Equal(t, len(n.loaded()), 2, "plugins while the disk is frozen")
	thaw()
	n.until(func() bool { return ready() && len(n.loaded()) == 3 })
}

// TestRun_WithoutInotify installs and repairs while the user has no inotify instance or watch left, and uses inotify again
// when one is free. The limits are set in a separate user namespace.
func TestRun_WithoutInotify(t *testing.T) {
	namespace := func(cmd *exec.Cmd) {
		root := []syscall.SysProcIDMap{{Size: 1}}
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: root, GidMappings: root}
	}
	limit := func(name string, n int) {
		check.OK(t, os.WriteFile("/proc/sys/user/max_inotify_"+name, fmt.Append(nil, n), 0o600))
	}
	if !netnstest.Inside(t, namespace) {
		return
	}
	for _, exhausted := range []string{"instances", "watches"} {
		t.Run(exhausted, func(t *testing.T) {
			limit(exhausted, 0)
			n := newFixture(t, "10-bridge.conflist", conflist)
			n.running(n.agent())
			n.until(n.asWanted)
			for range 3 {
				check.OK(t, os.Remove(n.path("bin/istio-cni")))
				n.put("net.d/10-bridge.conflist", conflist, 0o644)
				n.until(n.asWanted)
			}
			polled := func() int { return agenttest.Metric(t, n.metrics.Text(), "istio_cni_files_polled") }
			check.Equal(t, polled(), 1, "istio_cni_files_polled is")
			check.Equal(t, strings.Count(n.log.String(), "sysctl fs.inotify"), 1, "hints in", n.log.String())
			limit(exhausted, 1000)
			n.until(func() bool { return polled() == 0 })
			check.OK(t, os.Remove(n.path("bin/istio-cni")))
			n.until(n.asWanted)
		})
	}
}

func TestReconcile_DropIns(t *testing.T) {
	t.Parallel()
	const yes, no, unknown = cniconf.Loaded, cniconf.NotLoaded, cniconf.Unknown
	for runtime, want := range map[string]cniconf.Support{
		"containerd://1.6.20": no, "containerd://1.7.35": no, "containerd://2.0.14": no, "containerd://2.1.3": yes,
		"containerd://2.1.4-k3s2": yes, "containerd://2.4.2+unknown": yes, "containerd://2.10.0": yes, "containerd://3.0.0": yes,
		"containerd://v2.2.0": yes, "cri-o://1.34.0": unknown, "docker://28.0.0": unknown, "": unknown, "containerd://": unknown,
		"containerd://2": unknown, "containerd://x.y": unknown, "containerd://2.x": unknown,
	} {
		check.Equal(t, installation.LoadsDropIns(runtime), want, runtime)
	}
}
