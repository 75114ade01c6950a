package nodepods

import (
	"context"
	"fmt"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// fullNode is a node with the usual maximum of pods, each with a namespace, the rules of the mesh, listeners of a proxy, and an entry
// in libcni's cache.
const fullNode = 110

// occupy creates the pods, and a controller that knows them after a call of start.
func (l *fixture) occupy(n int, interval time.Duration) (c *Controller, start func()) {
	l.Helper()
	l.options.Audit, l.options.Repair = auditor.Settings{Interval: interval}, nil
	l.options.Clock, l.options.Workers = clock.RealClock{}, 0
	l.options.Processes = func(ctx context.Context) (map[string][]sandbox.Process, error) { // this machine's
		all := map[string][]sandbox.Process{}
		err := sandbox.Places{Proc: "/proc", Roots: []string{"/"}}.Processes(ctx, func(p sandbox.Process) {
			all[p.Pod] = append(all[p.Pod], p)
		})
		return all, err
	}
	feed := l.feed()
	c, err := New(l.options)
	l.Do(err)
	var pods []kube.Pod
	for i := range n {
		p := podSpec{name: fmt.Sprintf("web-%d", i), uid: fmt.Sprintf("uid-%d", i)}.at(fmt.Sprintf("10.88.1.%d/24", i+1))
		path := l.Sandbox(p.ips...)
		l.cache(p, path)
		space := netnstest.Open(l.T, path)
		_, err := redirection.Namespace{NetNS: space, Log: l.options.Log}.Apply(l.Context(), redirect.Default(), redirection.Reconcile)
		l.Do(err)
		for _, port := range []string{"15001", "15006"} {
			socket, err := netns.In(space, func() (net.Listener, error) {
				return (&net.ListenConfig{}).Listen(l.Context(), "tcp4", "0.0.0.0:"+port)
			})
			l.Do(err)
			l.Cleanup(func() { _ = socket.Close() })
		}
		pod := p.nodePod()
		pod.Containers = []repair.Container{{Name: sidecar.ProxyContainer, ID: "1", State: repair.State{Running: true, Began: agenttest.Start()}}}
		pods = append(pods, pod)
	}
	return c, func() {
		l.stops = append(l.stops, agenttest.Go(l.T, c.Run))
		<-feed.began
		for _, pod := range pods {
			feed.listener.OnUpdate(pod)
		}
		feed.listener.OnSync()
	}
}

// cpu returns the CPU time that this process has used.
func cpu(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	check.OK(t, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestCostOfTheAudit measures a full node; with -v it prints the numbers. It asserts no number that depends
// on the machine's speed.
func TestCostOfTheAudit(t *testing.T) { //nolint:paralleltest // it measures the process
	l := newFixture(t, nothing)
	const interval = 5 * time.Minute
	c, start := l.occupy(fullNode, interval)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	inspect := func() {
		for _, k := range c.pods.Keys() {
			_, err := c.auditor.InspectNext(t.Context(), k, false)
			l.Do(err)
		}
	}
	began := cpu(t)
	start()
	inspect()
	first := (cpu(t) - began) / fullNode
	for _, s := range c.Pods() {
		if s.State != audit.Captured {
			t.Fatalf("got %+v", s)
		}
	}
	held := max(0, int64(heap())-int64(before))
	const searchEvery = 12 // inspections of a pod
	const rounds = 2 * searchEvery
	searches := l.searches.Load()
	var m, m2 runtime.MemStats
	runtime.ReadMemStats(&m)
	began = cpu(t)
	for range rounds {
		inspect()
	}
	each := (cpu(t) - began) / fullNode / rounds
	runtime.ReadMemStats(&m2)
	const n = fullNode * rounds
	if got := l.searches.Load() - searches; got > n/searchEvery {
		t.Errorf("%d searches in %d inspections", got, n)
	}
	allocations := (m2.Mallocs - m.Mallocs) / n
	if allocations > 600 {
		t.Errorf("%d allocations for an unchanged pod", allocations)
	}
	t.Logf("first inspection %s, of an unchanged pod %s and %d allocations (%d bytes); memory held for each pod: %d bytes", first, each,
		allocations, (m2.TotalAlloc-m.TotalAlloc)/n, held/fullNode)
	t.Logf("%d pods each %s to %s: %.3f %% of a core", fullNode, interval*4/5, interval, 100*float64(each*fullNode)/float64(interval*9/10))
}

// TestANamespaceEndsWithItsPod: between two inspections the audit keeps no descriptor that would hold the namespace.
func TestANamespaceEndsWithItsPod(t *testing.T) { //nolint:paralleltest // it counts the descriptors of the process
	l := newFixture(t, nothing)
	c, start := l.occupy(1, 5*time.Minute)
	start()
	// The agent's own inspection at its start holds a descriptor, too.
	agenttest.Eventually(t, "the pod is not captured", func() bool { all := c.Pods(); return len(all) == 1 && all[0].State == audit.Captured })
	k := c.pods.Keys()[0]
	inspect := func() {
		_, err := c.auditor.InspectNext(t.Context(), k, false)
		l.Do(err)
	}
	descriptors := func() string {
		files, err := os.ReadDir("/proc/self/fd")
		l.Do(err)
		var all []string
		for _, f := range files {
			if target, err := os.Readlink("/proc/self/fd/" + f.Name()); err == nil && strings.HasPrefix(target, "net:") {
				all = append(all, target)
			}
		}
		return strings.Join(all, " ")
	}
	before := descriptors()
	const rounds = 36
	for range rounds {
		inspect()
	}
	check.Equal(t, descriptors(), before, "descriptors of namespaces")
	if got := l.searches.Load(); got > rounds/4 {
		t.Errorf("%d searches for the namespace in %d inspections", got, rounds)
	}
}
