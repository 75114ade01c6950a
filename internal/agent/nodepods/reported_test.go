package nodepods

import (
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/test/check"
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

// TestReport_OneInspection: a new pod that the plugin has redirected costs one search, which enters the namespace for its addresses, and
// one inspection, the audit's.
func TestReport_OneInspection(t *testing.T) { //nolint:paralleltest // it counts the entries of the process
	p := podSpec{name: "web", uid: "u"}.at("10.88.0.2/24")
	l := newFixture(t, inPlace, report(p))
	l.redirect(p)
	before := netns.Entries()
	c := l.start()
	l.set(p)
	agenttest.Eventually(t, "the pod is not captured", func() bool {
		all := c.Pods()
		return len(all) == 1 && all[0].State == audit.Captured
	})
	l.waitForStates(1, 0, 0, 0)
	l.end()
	check.Equal(t, l.searches.Load(), 1, "searches")
	check.Equal(t, netns.Entries()-before, 2, "entries into a namespace")
}
