package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/node/sandbox/sandboxtest"
)

const (
	victimAt  = "10.77.9.5/24"
	theirUID  = "99999999-4d64-4b2b-9d5a-6d1d2a3b4c5d"
	victimUID = uid
)

// bySystemd returns the cgroup of a pod's process with the systemd driver.
func bySystemd(uid string) string {
	return "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + strings.ReplaceAll(uid, "-", "_") +
		".slice/cri-containerd-0123.scope\n"
}

func byCgroupfs(uid string) string {
	return "12:memory:/kubepods/burstable/pod" + uid + "/0123\n1:name=systemd:/kubepods/burstable/pod" + uid + "/0123\n"
}

// squats has the ways in which another tenant gets the victim's address into a namespace, with no privileges outside that
// namespace.
func squats() map[string]func(n *fixture) (path string) {
	return map[string]func(*fixture) string{
		"on lo": func(n *fixture) string { return n.IP(n.Sandbox("10.77.9.6/24"), "address add 10.77.9.5/32 dev lo") },
		"on a bridge": func(n *fixture) string {
			return n.IP(n.Sandbox("10.77.9.6/24"), "link add br0 up type bridge", "address add "+victimAt+" dev br0")
		},
		"on a pair of its own called eth0": func(n *fixture) string {
			return n.IP(netnstest.New(n.T), "link add eth0 up type veth peer name p0", "link set p0 up", "address add "+victimAt+" dev eth0",
				"route add default via 10.77.9.1")
		},
		"on its own interface, that is down": func(n *fixture) string {
			return n.IP(n.Sandbox("10.77.9.6/24"), "link set eth0 down", "address add 10.77.9.5/32 dev eth0")
		},
		"in a nested namespace, wired to the pod's": func(n *fixture) string {
			inner := netnstest.New(n.T)
			n.IP(n.Sandbox("10.77.9.6/24"), "link add nested up type veth peer name eth0 netns "+inner)
			return n.IP(inner, "link set eth0 up", "address add "+victimAt+" dev eth0", "route add default via 10.77.9.1")
		},
	}
}

// onEth0 is the one squat that looks like the victim: the address is on the squatter's own interface to the node.
func onEth0(n *fixture) string { return n.Sandbox(victimAt) }

// TestSquatter_Excluded: without a record, an address on an interface to the node beats an address on another
// interface, whatever the names of the namespaces and their order.
func TestSquatter_Excluded(t *testing.T) {
	t.Parallel()
	for name, squat := range squats() {
		for _, from := range []sandbox.Source{sandbox.FromMount, sandbox.FromProc} {
			for _, first := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s/%s/%v", name, from, first), func(t *testing.T) {
					t.Parallel()
					n := newFixture(t)
					victim, squatter := n.Sandbox(victimAt), squat(n)
					order := map[bool][2]string{true: {squatter, victim}, false: {victim, squatter}}[first]
					for i, path := range order {
						if from == sandbox.FromMount {
							n.Mount(path, fmt.Sprintf("cni-%d", i))
						}
						for more := range 3 {
							n.Process(fmt.Sprint(100+10*i+more), path)
						}
					}
					n.finds(podOf("10.77.9.5"), victim, from)
				})
			}
		}
	}
}

// TestSquatter_Record: with a record of the runtime or the kubelet, even an address on the squatter's own interface
// to the node neither hides the pod nor passes for it.
func TestSquatter_Record(t *testing.T) {
	t.Parallel()
	all := squats()
	all["on its own interface"] = onEth0
	records := map[string]struct {
		keep func(n *fixture, victim, squatter string)
		// alone means that the record assigns the squatter's namespace to another pod.
		alone bool
		from  sandbox.Source
	}{
		"the cache has the pod": {func(n *fixture, victim, _ string) {
			n.Cached("victim", podOf(), n.Kept(victim, "victim"))
		}, false, sandbox.FromCache},
		"the cache has the squatter": {func(n *fixture, _, squatter string) {
			n.Cached("squatter", withUID(sandbox.Pod{Namespace: "shop", Name: "evil"}, theirUID), n.Kept(squatter, "squatter"))
		}, true, sandbox.FromMount},
		"cgroups of systemd": {func(n *fixture, _, _ string) {
			n.Cgroup("100", bySystemd(victimUID))
			n.Cgroup("200", bySystemd(theirUID))
		}, true, sandbox.FromMount},
		"cgroups of cgroupfs, and one that the squatter made": {func(n *fixture, _, _ string) {
			n.Cgroup("100", byCgroupfs(victimUID))
			n.Cgroup("200", strings.TrimSpace(byCgroupfs(theirUID))+bySystemd(victimUID))
		}, true, sandbox.FromMount},
		"a cgroup of the pod alone": {func(n *fixture, _, _ string) { n.Cgroup("100", bySystemd(victimUID)) }, false, sandbox.FromMount},
		"a cgroup of the squatter alone, seen from another cgroup": {func(n *fixture, _, _ string) {
			n.Cgroup("200", "0::/../../kubepods-pod"+strings.ReplaceAll(theirUID, "-", "_")+".slice/x.scope\n")
		}, true, sandbox.FromMount},
	}
	for name, squat := range all {
		for record, r := range records {
			t.Run(name+"/"+record, func(t *testing.T) {
				t.Parallel()
				n := newFixture(t)
				victim, squatter := n.Sandbox(victimAt), squat(n)
				n.Process("100", victim)
				n.Process("200", squatter)
				r.keep(n, victim, squatter)
				if r.from == sandbox.FromMount {
					n.Mount(squatter, "a")
					n.Mount(victim, "b")
				}
				n.finds(podOf("10.77.9.5"), victim, r.from)
				// Without the victim, the search refuses the squatter's namespace.
				if r.alone {
					n.Do(os.RemoveAll(n.Proc + "/100"))
					n.Do(errors.Join(unix.Unmount(n.Netns[0]+"/b", unix.MNT_DETACH), os.Remove(n.Netns[0]+"/b")))
					n.fails(podOf("10.77.9.5"), nil)
				}
			})
		}
	}
}

// TestSquatter_Ambiguous: the error names both namespaces, and no more than fit into an event.
func TestSquatter_Ambiguous(t *testing.T) {
	t.Parallel()
	n := newFixture(t)
	victim, squatter := n.Sandbox(victimAt), onEth0(n)
	n.Mount(victim, "cni-1")
	n.Mount(squatter, "cni-2")
	n.fails(podOf("10.77.9.5"), sandbox.ErrAmbiguous, sandboxtest.Inode(t, victim).String(), sandboxtest.Inode(t, squatter).String(), "netns/cni-1", "netns/cni-2")

	many := newFixture(t)
	for i := range 40 {
		many.Process(fmt.Sprint(100+i), onEth0(many))
	}
	if text := many.failure(podOf("10.77.9.5"), sandbox.ErrAmbiguous, " more").Err.Error(); len(text) > 1000 {
		t.Errorf("the cause has %d bytes: %s", len(text), text)
	}
	// The pod's own namespace still wins by its record.
	own := onEth0(many)
	many.Process("500", own)
	many.Cgroup("500", bySystemd(victimUID))
	many.finds(podOf("10.77.9.5"), own, sandbox.FromProc)
}

// TestSquatter_Alone: the pod's own namespace lacks the address, or is gone.
func TestSquatter_Alone(t *testing.T) {
	t.Parallel()
	onFixtures(t, map[string]func(n *fixture){
		"on lo, without a record": func(n *fixture) {
			n.Mount(squats()["on lo"](n), "cni-1")
			n.fails(podOf("10.77.9.5"), sandbox.ErrLoopback, "netns/cni-1")
		},
		"while the record's namespace has another address": func(n *fixture) {
			n.Cached("victim", podOf(), n.Kept(n.Sandbox("10.77.9.9/24"), "victim"))
			n.Mount(onEth0(n), "cni-1")
			n.fails(podOf("10.77.9.5"), sandbox.ErrNotFound)
		},
		"in a namespace of another pod's user namespace": func(n *fixture) {
			n.IP(n.unshared(0, 1), "address add 10.77.9.5/32 dev lo")
			n.fails(podOf("10.77.9.5"), sandbox.ErrLoopback)
		},
	})
}

// TestFind_FlippingPath: the result is the checked namespace, even if the record's path leads to the node's or a
// squatter's namespace a moment later.
func TestFind_FlippingPath(t *testing.T) {
	t.Parallel()
	n := newFixture(t)
	victim := n.Sandbox(victimAt)
	targets := []string{victim, n.Proc + "/1/ns/net", n.Sandbox("10.77.9.6/24")}
	path := n.Dir + "/flips"
	n.Do(os.Symlink(victim, path))
	n.Cached("victim", podOf(), path)
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
		if want := sandboxtest.Inode(t, victim); got.Inode() != want || sandboxtest.Inode(t, got.Path()) != want {
			t.Errorf("got %s, want %s", got.Inode(), want)
		}
		got.Close()
		got.Close()
		if _, err := os.Stat(got.Path()); err == nil {
			t.Fatalf("the namespace is closed and has the path %q", got.Path())
		}
	}
	cancel()
	n.Do(<-flipping)
	t.Logf("found %d times, missed %d times", found, missed)
}
