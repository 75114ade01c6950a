package podns_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/podns"
)

const (
	victimAt  = "10.77.9.5/24"
	theirUID  = "99999999-4d64-4b2b-9d5a-6d1d2a3b4c5d"
	victimUID = uid
)

// wired is the namespace of a pod whose interface has its other end in the node's namespace, as those of nearly all CNI
// plugins have.
func (n *node) wired(addresses ...string) string {
	n.t.Helper()
	path := netnstest.New(n.t)
	n.wire(path)
	addressed(n.t, path, "eth0", addresses...)
	return path
}

func (n *node) wire(path string) {
	n.t.Helper()
	n.wires++
	netnstest.Run(n.t, n.Proc+"/1/ns/net", "ip", "link", "add", fmt.Sprintf("veth%d", n.wires), "up",
		"type", "veth", "peer", "name", "eth0", "netns", path)
	netnstest.Run(n.t, path, "ip", "link", "set", "eth0", "up")
}

// of puts a process into a pod's cgroup, as the kubelet does.
func (n *node) of(pid, cgroup string) {
	n.t.Helper()
	n.do(os.WriteFile(filepath.Join(n.Proc, pid, "cgroup"), []byte(cgroup), 0o600))
}

// bySystemd is the cgroup of a process of a pod.
func bySystemd(uid string) string {
	return "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + strings.ReplaceAll(uid, "-", "_") +
		".slice/cri-containerd-0123.scope\n"
}

func byCgroupfs(uid string) string {
	return "12:memory:/kubepods/burstable/pod" + uid + "/0123\n1:name=systemd:/kubepods/burstable/pod" + uid + "/0123\n"
}

// squats are the ways in which somebody else gets the victim's address into a namespace: with no privilege beyond those in
// a network namespace.
func squats() map[string]func(n *node) (path string) {
	ip := func(n *node, path string, lines ...string) string {
		n.t.Helper()
		for _, line := range lines {
			netnstest.Run(n.t, path, "ip", strings.Fields(line)...)
		}
		return path
	}
	return map[string]func(*node) string{
		"on lo": func(n *node) string {
			return ip(n, n.wired("10.77.9.6/24"), "address add 10.77.9.5/32 dev lo", "link set lo up")
		},
		"on a bridge": func(n *node) string {
			return ip(n, n.wired("10.77.9.6/24"), "link add br0 up type bridge", "address add "+victimAt+" dev br0")
		},
		"on a pair of its own called eth0": func(n *node) string {
			return ip(n, netnstest.New(n.t), "link add eth0 up type veth peer name p0", "link set p0 up", "address add "+victimAt+" dev eth0",
				"route add default via 10.77.9.1")
		},
		"on its own interface, that is down": func(n *node) string {
			return ip(n, n.wired("10.77.9.6/24"), "link set eth0 down", "address add 10.77.9.5/32 dev eth0")
		},
		"in a nested namespace, wired to the pod's": func(n *node) string {
			inner := netnstest.New(n.t)
			outer := n.wired("10.77.9.6/24")
			netnstest.Run(n.t, outer, "ip", "link", "add", "nested", "up", "type", "veth", "peer", "name", "eth0", "netns", inner)
			return ip(n, inner, "link set eth0 up", "address add "+victimAt+" dev eth0", "route add default via 10.77.9.1")
		},
	}
}

// onEth0 is the one squat that by itself looks like the victim: the address on the squatter's own way to the node.
func onEth0(n *node) string {
	path := n.wired("10.77.9.6/24")
	netnstest.Run(n.t, path, "ip", "address", "flush", "dev", "eth0")
	addressed(n.t, path, "eth0", victimAt)
	return path
}

// TestASquatterIsNeverTakenForThePod: without any record an address on an interface that leads to the node beats one that
// does not, wherever the namespaces are named, and whoever comes first.
func TestASquatterIsNeverTakenForThePod(t *testing.T) {
	t.Parallel()
	for name, squat := range squats() {
		for _, from := range []podns.Source{podns.FromMount, podns.FromProc} {
			for _, first := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s/%s/%v", name, from, first), func(t *testing.T) {
					t.Parallel()
					n := newNode(t)
					victim, squatter := n.wired(victimAt), squat(n)
					order := map[bool][2]string{true: {squatter, victim}, false: {victim, squatter}}[first]
					for i, path := range order {
						if from == podns.FromMount {
							n.mount(path, fmt.Sprintf("cni-%d", i))
						}
						for more := range 3 {
							n.process(fmt.Sprint(100+10*i+more), path)
						}
					}
					n.finds(podOf("10.77.9.5"), victim, from)
				})
			}
		}
	}
}

// TestARecordDecidesAboutASquatter: with a record of the runtime's or the kubelet's even an address on the squatter's own
// way to the node neither blocks the pod nor passes for it.
func TestARecordDecidesAboutASquatter(t *testing.T) {
	t.Parallel()
	all := squats()
	all["on its own interface"] = onEth0
	records := map[string]struct {
		keep func(n *node, victim, squatter string)
		// alone says that the squatter alone is known to be another pod's.
		alone bool
		from  podns.Source
	}{
		"the cache has the pod": {func(n *node, victim, _ string) {
			n.cached("victim", podOf(), n.mountAt(victim, n.dir+"/kept/victim"), nil)
		}, false, podns.FromCache},
		"the cache has the squatter": {func(n *node, _, squatter string) {
			n.cached("squatter", podns.Pod{Namespace: "shop", Name: "evil", UID: theirUID}, n.mountAt(squatter, n.dir+"/kept/squatter"), nil)
		}, true, podns.FromMount},
		"cgroups of systemd": {func(n *node, _, _ string) {
			n.of("100", bySystemd(victimUID))
			n.of("200", bySystemd(theirUID))
		}, true, podns.FromMount},
		"cgroups of cgroupfs, and one that the squatter made": {func(n *node, _, _ string) {
			n.of("100", byCgroupfs(victimUID))
			n.of("200", strings.TrimSpace(byCgroupfs(theirUID))+bySystemd(victimUID))
		}, true, podns.FromMount},
		"a cgroup of the pod alone": {func(n *node, _, _ string) { n.of("100", bySystemd(victimUID)) }, false, podns.FromMount},
		"a cgroup of the squatter alone, seen from another cgroup": {func(n *node, _, _ string) {
			n.of("200", "0::/../../kubepods-pod"+strings.ReplaceAll(theirUID, "-", "_")+".slice/x.scope\n")
		}, true, podns.FromMount},
	}
	for name, squat := range all {
		for record, r := range records {
			t.Run(name+"/"+record, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				victim, squatter := n.wired(victimAt), squat(n)
				n.process("100", victim)
				n.process("200", squatter)
				r.keep(n, victim, squatter)
				if r.from == podns.FromMount {
					n.mount(squatter, "a")
					n.mount(victim, "b")
				}
				n.finds(podOf("10.77.9.5"), victim, r.from)
				// And alone it is refused, not taken.
				if r.alone {
					n.do(os.RemoveAll(n.Proc + "/100"))
					n.unmount("b")
					n.fails(podOf("10.77.9.5"), nil)
				}
			})
		}
	}
}

// TestSquattersThatCannotBeToldApartAreNamed: both, and no more than fit into an event, however many there are.
func TestSquattersThatCannotBeToldApartAreNamed(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	victim, squatter := n.wired(victimAt), onEth0(n)
	n.mount(victim, "cni-1")
	n.mount(squatter, "cni-2")
	n.fails(podOf("10.77.9.5"), podns.ErrAmbiguous, inode(t, victim).String(), inode(t, squatter).String(), "netns/cni-1", "netns/cni-2")

	many := newNode(t)
	for i := range 40 {
		many.process(fmt.Sprint(100+i), onEth0(many))
	}
	_, err := many.Find(t.Context(), podOf("10.77.9.5"))
	failed, is := errors.AsType[*podns.Error](err)
	if !is || !errors.Is(err, podns.ErrAmbiguous) || !strings.Contains(err.Error(), " more") {
		t.Fatalf("got %v", err)
	}
	if text := failed.Err.Error(); len(text) > 1000 {
		t.Errorf("the cause has %d bytes: %s", len(text), text)
	}
	// The pod's own still wins by its record among them all.
	own := onEth0(many)
	many.process("500", own)
	many.of("500", bySystemd(victimUID))
	many.finds(podOf("10.77.9.5"), own, podns.FromProc)
}

// TestASquatterAloneIsNotTakenForThePod: the pod's own namespace does not have the address, or is gone.
func TestASquatterAloneIsNotTakenForThePod(t *testing.T) {
	t.Parallel()
	t.Run("on lo, without a record", func(t *testing.T) {
		t.Parallel()
		n := newNode(t)
		n.mount(squats()["on lo"](n), "cni-1")
		n.fails(podOf("10.77.9.5"), podns.ErrLoopback, "netns/cni-1")
	})
	t.Run("while the record says that the pod's has another address", func(t *testing.T) {
		t.Parallel()
		n := newNode(t)
		n.cached("victim", podOf(), n.mountAt(n.wired("10.77.9.9/24"), n.dir+"/kept/victim"), nil)
		n.mount(onEth0(n), "cni-1")
		n.fails(podOf("10.77.9.5"), podns.ErrNotFound)
	})
	t.Run("in a namespace of another pod's user namespace", func(t *testing.T) {
		t.Parallel()
		n := newNode(t)
		path := n.runs(unshared(t))
		addressed(t, path, "lo", "10.77.9.5/32")
		n.fails(podOf("10.77.9.5"), podns.ErrLoopback)
	})
}

// unshared is a process as any user makes it in a container, without privileges there: "unshare --user --net".
func unshared(t *testing.T) *exec.Cmd {
	t.Helper()
	process := exec.CommandContext(t.Context(), "sleep", "1000")
	process.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}},
	}
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { end(process) })
	return process
}

// TestAPathThatFlipsIsNeverAnother: what is given is what was looked at, whatever the path of the record leads to a moment
// later: the node's namespace, or a squatter's.
func TestAPathThatFlipsIsNeverAnother(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	victim := n.wired(victimAt)
	targets := []string{victim, n.Proc + "/1/ns/net", n.wired("10.77.9.6/24")}
	path := n.dir + "/flips"
	n.do(os.Symlink(victim, path))
	n.cached("victim", podOf(), path, nil)
	flipping := make(chan error)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		for i := 0; ctx.Err() == nil; i++ {
			if err := errors.Join(os.Symlink(targets[i%len(targets)], path+".new"), os.Rename(path+".new", path)); err != nil {
				flipping <- err
				return
			}
		}
		flipping <- nil
	}()
	found, missed := 0, 0
	for found < 50 || missed < 50 {
		got, err := n.Find(t.Context(), podOf("10.77.9.5"))
		if err != nil {
			missed++
			continue
		}
		found++
		if want := inode(t, victim); got.Inode() != want || inode(t, got.Path()) != want {
			t.Errorf("got %s, want %s", got.Inode(), want)
		}
		got.Close()
	}
	cancel()
	n.do(<-flipping)
	t.Logf("found %d times, missed %d times", found, missed)
}
