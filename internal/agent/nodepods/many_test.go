package nodepods

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestDeletionsAreRateLimited: every pod of the node is broken, and its replacement may be broken, too.
func TestDeletionsAreRateLimited(t *testing.T) {
	t.Parallel()
	l := newFixture(t, deleting, func(o *Options) { o.Workers = 0 })
	const all, deletionsAtOnce = 40, 30
	for i := range all {
		l.set(crashing(fmt.Sprintf("web-%d", i)))
	}
	l.run()
	l.waitForCount(metrics.RepairDelete, metrics.RepairSuccess, deletionsAtOnce)
	l.waitForStates(0, all-deletionsAtOnce, 0, 0)
	for n := deletionsAtOnce + 1; n <= all; n++ {
		if got := len(l.writes()); got != n-1 {
			t.Fatalf("%d deletions before the turn of number %d", got, n)
		}
		agenttest.Eventually(t, "no timer runs", func() bool { return l.clock.Waiters() > 2 })
		l.clock.Step(2 * time.Second)
		l.waitForCount(metrics.RepairDelete, metrics.RepairSuccess, n)
	}
	l.waitForStates(0, 0, 0, 0)
}

// TestValidatedPodsCostNothing: an agent that starts on a full node searches for no namespace of a validated pod.
func TestValidatedPodsCostNothing(t *testing.T) {
	t.Parallel()
	l := newFixture(t, inPlace)
	for i := range 9 {
		p := podSpec{name: fmt.Sprint("web-", i), uid: fmt.Sprint(i), now: ended(0, agenttest.Start()), phase: "Running", proxy: running()}
		l.set(p.at(fmt.Sprint("10.88.1.", i)))
	}
	l.run()
	l.waitForStates(9, 0, 0, 0)
	check.Equal(t, l.searches.Load(), 0, "searches")
}

// TestTheGaugeHasTheStateOfThePod through all changes of the pod.
func TestTheGaugeHasTheStateOfThePod(t *testing.T) {
	t.Parallel()
	l := newFixture(t, nothing)
	path := l.Sandbox("10.88.0.2/24")
	l.Mount(path, "cni-1")
	l.Process("77", path)
	l.run()
	p := podSpec{name: "web", uid: "u"}
	for _, step := range []struct {
		what   string
		change func()
		want   []int
	}{
		{"no sandbox yet", func() {}, []int{0, 0, 0, 0}},
		{"an address that no namespace has", func() { p = p.at("10.88.0.9") }, []int{0, 0, 0, 1}},
		{"rules missing", func() { p = p.at("10.88.0.2") }, []int{0, 1, 0, 0}},
		{"failed", func() { p.now = ended(126, agenttest.Start()) }, []int{0, 1, 0, 0}},
		{"waits", func() { p.last, p.now = p.now, waiting("CrashLoopBackOff") }, []int{0, 1, 0, 0}},
		{"validated", func() { p.now, p.proxy, p.phase = ended(0, agenttest.Start()), running(), "Running" }, []int{1, 0, 0, 0}},
		{"no more of the mesh", func() { p.plain = true }, []int{0, 0, 0, 0}},
		{"of the mesh again", func() { p.plain = false }, []int{1, 0, 0, 0}},
		{"another UID that runs with other rules", func() {
			p = podSpec{name: "web", uid: "v", unvalidated: true, proxy: running(), phase: "Running"}.at("10.88.0.2")
			l.otherRules(path)
		}, []int{0, 0, 1, 0}},
		{"leaves", func() { p.deleting = true }, []int{0, 0, 0, 0}},
		{"another UID that is broken", func() { p = crashing("web") }, []int{0, 1, 0, 0}},
	} {
		step.change()
		l.set(p)
		l.waitForStates(step.want...)
		if t.Failed() {
			t.Fatal(step.what)
		}
	}
	l.server.Delete(p.path())
	l.waitForStates(0, 0, 0, 0)
	l.set(crashing("web"))
	l.waitForStates(0, 1, 0, 0)
	// It vanishes while the watch is away.
	l.server.BreakWatches()
	l.server.Delete(p.path())
	l.server.Compact()
	l.waitForStates(0, 0, 0, 0)
}

// TestNothingIsLeftBehind counts goroutines and open files after controllers have ended during their work.
func TestNothingIsLeftBehind(t *testing.T) { //nolint:paralleltest // it counts for all tests together
	l := newFixture(t, inPlace)
	p := crashing("web").at("10.88.0.2/24")
	l.place(p)
	for i := range 10 { // fewer than events may be sent at once
		l.set(crashing(fmt.Sprintf("lost-%d", i)).at(fmt.Sprintf("192.0.2.%d", i)))
	}
	stop := l.run()
	l.waitForEvent(p, "Normal", podwork.ReasonRepaired)
	stop()
	goroutines, open := runtime.NumGoroutine(), netnstest.OpenFiles(t)
	for range 10 {
		before := l.repaired(metrics.RepairPod, metrics.RepairSkip)
		stop := l.run()
		agenttest.Eventually(t, "nothing is done", func() bool { return l.repaired(metrics.RepairPod, metrics.RepairSkip) > before })
		stop()
	}
	agenttest.Until(t, func() string {
		buffer := make([]byte, 1<<16)
		return fmt.Sprintf("%d goroutines, %d before; %d files, %d before\n%s", runtime.NumGoroutine(), goroutines, netnstest.OpenFiles(t), open,
			buffer[:runtime.Stack(buffer, true)])
	}, func() bool { return runtime.NumGoroutine() <= goroutines+2 && netnstest.OpenFiles(t) <= open+2 })
}
