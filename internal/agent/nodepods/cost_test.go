package nodepods

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// fullNode is a node with the usual maximum of pods, each with a namespace, the rules of the mesh, listeners of a proxy, and an entry
// in libcni's cache.
const fullNode = 110

// occupy creates the pods of a full node, and a controller that knows them after a call of start.
func (l *fixture) occupy(interval time.Duration) (c *Controller, start func()) {
	l.Helper()
	l.options.Audit, l.options.Repair = auditor.Settings{Interval: interval}, nil
	l.options.Clock, l.options.Workers = clock.RealClock{}, 0
	l.options.Processes = sandbox.Places{Proc: "/proc", Roots: []string{"/"}}.Processes // this machine's
	feed := l.feed()
	c, err := New(l.options)
	l.Do(err)
	var pods []kube.Pod
	for i := range fullNode {
		p := podSpec{name: fmt.Sprintf("web-%d", i), uid: fmt.Sprintf("uid-%d", i)}.at(fmt.Sprintf("10.88.1.%d/24", i+1))
		l.listen(l.redirect(p), 0)
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

// descriptors lists the descriptors of namespaces that this process has.
func descriptors(t *testing.T) string {
	t.Helper()
	files, err := filepath.Glob("/proc/self/fd/*")
	check.OK(t, err)
	var all []string
	for _, f := range files {
		if target, err := os.Readlink(f); err == nil && strings.HasPrefix(target, "net:") {
			all = append(all, target)
		}
	}
	return strings.Join(all, " ")
}

// TestCostOfTheAudit measures a full node; with -v it prints the numbers. It asserts no number that depends on the machine's speed, and
// that no descriptor is kept between two inspections, which would hold a namespace when its pod ends.
func TestCostOfTheAudit(t *testing.T) { //nolint:paralleltest // it measures the process
	l := newFixture(t, nothing)
	const interval = 5 * time.Minute
	c, start := l.occupy(interval)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before, open := heap(), descriptors(t)
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
	agenttest.Eventually(t, "a namespace stays open", func() bool { return descriptors(t) == open })
	allocations := (m2.Mallocs - m.Mallocs) / n
	if allocations > 600 {
		t.Errorf("%d allocations for an unchanged pod", allocations)
	}
	t.Logf("first inspection %s, of an unchanged pod %s and %d allocations (%d bytes); memory held for each pod: %d bytes", first, each,
		allocations, (m2.TotalAlloc-m.TotalAlloc)/n, held/fullNode)
	t.Logf("%d pods each %s to %s: %.3f %% of a core", fullNode, interval*4/5, interval, 100*float64(each*fullNode)/float64(interval*9/10))
}
