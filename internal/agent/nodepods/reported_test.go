package nodepods

import (
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// report makes the plugin's report of a captured pod known.
func report(p podSpec) func(*Options) {
	return func(o *Options) {
		o.Audit = auditor.Settings{Interval: time.Minute}
		one := agentapi.Report{
			Time: agenttest.Start(), Command: "ADD", UID: p.uid, Captured: true, Reason: "captured", Container: p.name + "-" + p.uid,
		}
		o.Reported = func(is func(string) bool) (agentapi.Report, bool) { return one, is(one.UID) }
	}
}

// TestReport_WithoutRules: race repair trusts the plugin's report until the audit finds something else.
func TestReport_WithoutRules(t *testing.T) {
	t.Parallel()
	for name, change := range map[string][]string{
		"none":  {"nft", "flush", "ruleset"},
		"other": {"iptables-nft", "-t", "nat", "-F", "OUTPUT"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := podSpec{name: "web", uid: "u"}.at("10.88.0.2/24")
			l := newFixture(t, inPlace, report(p))
			path := l.redirect(p)
			netnstest.Run(t, path, change[0], change[1:]...)
			l.run()
			l.set(p)
			l.waitForCount(metrics.RepairPod, metrics.RepairSuccess, 1)
			l.redirected(path)
			l.waitForEvent(p, "Normal", podwork.ReasonRepaired, "it is redirected now")
		})
	}
}

// TestReport_AnotherSandbox: a report does not apply to the next sandbox, which is inspected.
func TestReport_AnotherSandbox(t *testing.T) {
	t.Parallel()
	p := podSpec{name: "web", uid: "u"}.at("10.88.0.2/24")
	l := newFixture(t, inPlace, report(p))
	path := l.redirect(p)
	l.run()
	l.set(p)
	l.waitForStates(1, 0, 0, 0)
	next := p.at("10.88.0.3/24")
	other := l.Sandbox(next.ips...)
	l.Cached("next", sandbox.Pod{Namespace: p.namespace(), Name: p.name, UID: p.uid}, l.Kept(other, "next"))
	l.set(next)
	l.waitForCount(metrics.RepairPod, metrics.RepairSuccess, 1)
	l.redirected(path, other)
}

// TestCostOfANewPod counts the agent's work for a pod that a kubelet starts and the plugin has redirected: one search and two
// inspections, of which the second reads no rules.
func TestCostOfANewPod(t *testing.T) { //nolint:paralleltest // it counts the entries of the process
	p := podSpec{name: "web", uid: "u"}.at("10.88.0.2/24")
	l := newFixture(t, inPlace, report(p))
	feed := l.feed()
	l.redirect(p)
	c := l.start()
	<-feed.began
	feed.listener.OnSync()
	before := netns.Entries()
	now := p.nodePod()
	addresses := now.Addresses
	now.Addresses = nil
	step := func(change func()) {
		if change != nil {
			change()
		}
		feed.listener.OnUpdate(now)
	}
	checked := func() (at time.Time) {
		for _, s := range c.Pods() {
			if s.Pod != p.name {
				continue
			}
			if at = s.Checked; s.State != audit.Captured && !at.IsZero() {
				t.Fatalf("got %+v", s)
			}
		}
		return at
	}
	runs := func(name string) repair.Container {
		return repair.Container{Name: name, ID: name, State: repair.State{Running: true, Began: l.clock.Now()}}
	}
	step(nil)
	step(func() { now.Phase, now.Started = "Pending", l.clock.Now() })
	step(func() { now.Addresses, now.Init = addresses, []repair.Container{runs("istio-validation")} })
	agenttest.Eventually(t, "the pod is not inspected", func() bool { return !checked().IsZero() })
	first := checked()
	step(func() {
		now.Init = []repair.Container{{Name: "istio-validation", ID: "istio-validation", State: repair.State{Terminated: true}}}
	})
	step(func() { now.Phase, now.Containers = "Running", []repair.Container{runs("app")} })
	step(func() { now.Containers = append(now.Containers, runs("late")) })
	step(func() { now.Ready = true })
	last := podSpec{name: "last", uid: "last"}.at("10.88.0.9/24").nodePod() // the only worker takes it last
	last.Facts.Annotations = nil
	feed.listener.OnUpdate(last)
	agenttest.Eventually(t, "the worker has not ended", func() bool { return len(c.Pods()) == 2 })
	if !checked().Equal(first) {
		t.Error("the start of a container is inspected at once")
	}
	l.clock.Step(15 * time.Second)
	agenttest.Eventually(t, "the pod is not inspected again", func() bool { return checked().After(first) })
	// A search enters the namespace for its addresses, and an inspection once.
	if searches, entries := l.searches.Load(), netns.Entries()-before; searches != 1 || entries != 3 {
		t.Errorf("%d searches, %d entries into a namespace", searches, entries)
	}
}
