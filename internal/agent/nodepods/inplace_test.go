package nodepods

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestRepair_Backends: the rules are those of the plugin's backend. Package redirection has the packets.
func TestRepair_Backends(t *testing.T) {
	t.Parallel()
	const jump = "-A OUTPUT -j ISTIO_OUTPUT"
	for name, test := range map[string]struct {
		conf          cniconf.NetConf
		command, want string
	}{
		"auto":            {cniconf.NetConf{}, "iptables-nft-save", jump},
		"netlink":         {cniconf.NetConf{Backend: redirect.Netlink}, "iptables-nft-save", jump},
		"iptables":        {cniconf.NetConf{Backend: redirect.Tools}, "iptables-save", jump},
		"iptables nft":    {cniconf.NetConf{Backend: redirect.Tools, ForceIptables: "nft"}, "iptables-nft-save", jump},
		"iptables legacy": {cniconf.NetConf{Backend: redirect.Tools, ForceIptables: "legacy"}, "iptables-legacy-save", jump},
		"native":          {cniconf.NetConf{Backend: redirect.Native}, "nft list ruleset", "table inet istio-proxy-nat"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newFixture(t, inPlace)
			l.conf.Store(&test.conf)
			p, path := l.crashing()
			l.run()
			l.waitForRepair(p)
			check.Contains(t, netnstest.Run(t, path, "sh", "-c", test.command), test.want)
			l.untouched(l.Host)
		})
	}
}

// TestTheRulesAreThoseOfThePodsSettings, and the pod is neither deleted nor labelled.
func TestTheRulesAreThoseOfThePodsSettings(t *testing.T) {
	t.Parallel()
	l := newFixture(t, repair.Switches{InPlace: true, Delete: true, Label: true})
	p := crashing("web").at("10.88.0.2/24")
	p.annotations = object{sidecar.InboundPortsKey: "8080,9090", "traffic.sidecar.istio.io/excludeOutboundPorts": "5432"}
	path := l.place(p)
	l.run()
	l.waitForRepair(p)
	l.noWrites()
	got := netnstest.Run(t, path, "iptables-save")
	check.Contains(t, got, "--dport 8080 -j ISTIO_IN_REDIRECT", "--dport 9090 -j ISTIO_IN_REDIRECT", "--dport 5432 -j RETURN")
}

// TestW8APodOfTheSameNameIsAnotherPod: a pod of a StatefulSet returns at once, with its previous address in another
// namespace. The watch does not deliver the deletion in between.
func TestW8APodOfTheSameNameIsAnotherPod(t *testing.T) {
	t.Parallel()
	l := newFixture(t, inPlace)
	first := crashing("db-0").at("10.88.0.2/24")
	l.place(first)
	l.run()
	l.waitForRepair(first)
	second := first
	second.uid = "another-uid"
	after := l.place(second) // the previous namespace still exists, too
	l.waitForEvent(second, "Normal", podwork.ReasonRepaired)
	l.waitForCount(metrics.RepairPod, metrics.RepairSuccess, 2)
	l.redirected(after)
	l.waitForStates(1, 0, 0, 0)
}

// TestPodsThatCannotBeRedirectedInPlace are reported, and no rule is written: W-10, W-11 and settings that the plugin refuses.
func TestPodsThatCannotBeRedirectedInPlace(t *testing.T) {
	t.Parallel()
	const unfit = "cannot be redirected in place"
	for name, test := range map[string]struct {
		change func(p *podSpec)
		// prepare returns the namespace that must not change.
		prepare func(l *fixture, p podSpec) (path string)
		reason  kube.EventReason
		texts   []string
	}{
		"W-11: the node has its address": {nil, func(l *fixture, p podSpec) string {
			l.IP(l.Host, "address add "+p.ips[0]+" dev lo")
			l.Mount(l.Host, "host")
			l.Start(l.Host)
			return l.Host
		}, podwork.ReasonRepaired, []string{unfit, "it is on the node's own network", "delete the pod"}},
		"W-11: the cache names the node's": {nil, func(l *fixture, p podSpec) string {
			l.cache(p, l.Host)
			return l.Host
		}, podwork.ReasonRepaired, []string{unfit, "it is on the node's own network", "delete the pod"}},
		"W-11: a pod in creation has its address": {nil, func(l *fixture, p podSpec) string {
			path := l.Sandbox(p.ips...)
			l.Mount(path, "cni-1")
			return path
		}, podwork.ReasonRepaired, []string{"no process is in it yet", "a pod in creation"}},
		"W-11: another pod adds its address": {nil, func(l *fixture, p podSpec) string { // package sandbox has the records that decide
			squatter := l.Sandbox("10.88.0.3/24", p.ips[0])
			l.Mount(squatter, "cni-0")
			l.Mount(l.Sandbox(p.ips...), "cni-1")
			return squatter
		}, podwork.ReasonRepaired, []string{unfit, sandbox.ErrAmbiguous.Error(), "netns/cni-0", "netns/cni-1"}},
		"W-10: a job that is over": {
			func(p *podSpec) { p.now, p.last, p.restart = p.last, nil, "Never" },
			(*fixture).place, podwork.ReasonBroken,
			[]string{repair.FailedForGood.Sentence(), unfit + " any more: delete it"},
		},
		"bad settings": {
			func(p *podSpec) { p.annotations = object{"traffic.sidecar.istio.io/includeInboundPorts": "many"} },
			(*fixture).place, podwork.ReasonBroken,
			[]string{"settings are invalid", "many", "create the pod again"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newFixture(t, inPlace)
			p := crashing("web").at("10.88.0.2/24")
			if test.change != nil {
				test.change(&p)
			}
			path := test.prepare(l, p)
			l.set(p)
			l.run()
			l.waitForEvent(p, "Warning", test.reason, test.texts...)
			l.waitForStates(0, 1, 0, 0)
			if got := l.repaired(metrics.RepairPod, metrics.RepairFail); (got == 1) != (test.reason == podwork.ReasonRepaired) {
				t.Errorf("%d failures", got)
			}
			l.untouched(path)
		})
	}
}

// TestW11AnAddressThatWasGivenToAnotherPodIsNoProof: the sandbox of a pod ended with the node's last run, and in the API server
// another pod, in the mesh or not, has its address now. Package sandbox shows that libcni's cache decides as well.
func TestW11AnAddressThatWasGivenToAnotherPodIsNoProof(t *testing.T) {
	t.Parallel()
	l := newFixture(t, inPlace)
	p := crashing("web").at("10.88.0.2/24")
	path := l.Sandbox(p.ips...)
	l.Mount(path, "cni-1")
	l.Start(path)
	other := podSpec{name: "other", uid: "other", plain: true, phase: "Running"}.at("10.88.0.2/24")
	l.set(other)
	// Pods that have ended or use the node's network are ignored.
	l.set(podSpec{name: "over", uid: "over", plain: true, phase: "Succeeded"}.at("10.88.0.2/24"))
	l.set(podSpec{name: "host", uid: "host", plain: true, phase: "Running", host: true}.at("10.88.0.2/24"))
	l.set(p)
	l.run()
	l.waitForEvent(p, "Warning", podwork.ReasonRepaired, "may be another pod's", "pod shop/other has the same ones")
	l.waitForStates(0, 1, 0, 0)
	l.untouched(path)
	l.server.Delete(other.path())
	l.stepUntilSuccess(metrics.RepairPod)
	l.redirected(path)
}

// TestRepairComesBeforeTheValidation inspects namespaces of pods without a failure.
func TestRepairComesBeforeTheValidation(t *testing.T) {
	t.Parallel()
	l := newFixture(t, inPlace)
	p := podSpec{name: "web", uid: "u"}
	l.set(p)
	l.run()
	l.waitForWorker()
	if l.searches.Load() != 1 { // the search for the last pod
		t.Error("a namespace was searched for before the pod had an address")
	}
	p = p.at("10.88.0.2/24")
	l.place(p)
	message := l.waitForEvent(p, "Normal", podwork.ReasonRepaired, "no rules").Message
	if strings.Contains(message, "Connections") || strings.Contains(message, "back-off") {
		t.Errorf("nothing has run in it yet: %s", message)
	}
	l.waitForStates(1, 0, 0, 0)
	searched := l.searches.Load()
	p.now = running()
	l.set(p)
	l.waitForWorker()
	p.now = ended(0, agenttest.Start().Add(time.Second))
	p.phase, p.proxy = "Running", running()
	l.set(p)
	l.waitForWorker()
	l.waitForStates(1, 0, 0, 0)
	if got := l.searches.Load() - searched; got > 5 { // includes one search for each of the two last pods
		t.Errorf("%d searches for a pod that is fine", got)
	}
	l.waitForCount(metrics.RepairPod, metrics.RepairSuccess, 1)
}

// otherRules writes the rules of another configuration, like an earlier version's.
func (l *fixture) otherRules(path string) {
	l.Helper()
	netnstest.Run(l.T, path, "sh", "-c", `printf '*nat\n:ISTIO_OUTPUT -\n-A OUTPUT -p tcp -j ISTIO_OUTPUT\n-A ISTIO_OUTPUT -j RETURN\nCOMMIT\n' | iptables-nft-restore -n`)
}

// TestRunningPodsKeepTheirRules: rules that differ from the current ones are changed before the validation, and only reported
// after it. A pod without rules is redirected while it runs.
func TestRunningPodsKeepTheirRules(t *testing.T) {
	t.Parallel()
	l := newFixture(t, inPlace)
	runs := podSpec{name: "runs", uid: "u1", unvalidated: true, proxy: running(), phase: "Running"}.at("10.88.0.2/24")
	comes := podSpec{name: "comes", uid: "u2"}.at("10.88.0.3/24")
	bare := podSpec{name: "bare", uid: "u3", unvalidated: true, proxy: running(), phase: "Running"}.at("10.88.0.4/24")
	old, young, none := l.place(runs), l.place(comes), l.place(bare)
	l.otherRules(old)
	l.otherRules(young)
	before := rulesOf(t, old)
	l.run()
	l.waitForEvent(comes, "Normal", podwork.ReasonRepaired, repair.RulesDiffer.Sentence())
	l.waitForEvent(runs, "Warning", podwork.ReasonDrifted, "from its next start")
	l.waitForEvent(bare, "Normal", podwork.ReasonRepaired, "no rules", "Connections that it opened before stay outside")
	l.waitForStates(2, 0, 1, 0)
	check.Equal(t, rulesOf(t, old), before, "the rules of a running pod were changed")
	l.redirected(young, none)
	for range 3 {
		runs.labels = object{"touched": stamp(l.clock.Now())}
		l.set(runs)
		l.waitForWorker()
	}
	l.oneEvent(runs)
}

// TestAFailureAfterTheRepairIsInspectedAgain: a validation keeps failing, once with the rules in place and then because they
// were removed.
func TestAFailureAfterTheRepairIsInspectedAgain(t *testing.T) {
	t.Parallel()
	l := newFixture(t, inPlace)
	p, path := l.crashing()
	l.run()
	l.waitForRepair(p)

	p.last = ended(126, l.clock.Now()) // the validation ran while the rules were written
	l.set(p)
	l.waitForWorker()
	l.waitForCount(metrics.RepairPod, metrics.RepairSkip, 0)

	l.clock.Step(10 * time.Second)
	p.last = ended(126, l.clock.Now())
	l.set(p)
	l.waitForEvent(p, "Warning", podwork.ReasonRepaired, "validation fails although the rules are in place", "delete the pod")
	l.waitForCount(metrics.RepairPod, metrics.RepairSkip, 1)

	netnstest.Run(t, path, "iptables-nft", "-t", "nat", "-F")
	l.clock.Step(10 * time.Second)
	p.last = ended(126, l.clock.Now())
	l.set(p)
	l.waitForCount(metrics.RepairPod, metrics.RepairSuccess, 2)
	l.redirected(path)
}

// nodePod returns the pod in the form that the controller gets.
func (p podSpec) nodePod() kube.Pod {
	pod := kube.Pod{
		Facts: sidecar.Facts{
			Namespace: p.namespace(), Name: p.name, UID: p.uid, Annotations: map[string]string{sidecar.StatusKey: ""},
			Containers: []sidecar.Container{{Name: sidecar.ValidationContainer, Init: true}, {Name: "istio-proxy", Args: []string{"proxy", "sidecar"}}},
		},
		Version: "1", NodeName: node1,
	}
	for _, ip := range p.ips {
		pod.Addresses = append(pod.Addresses, netip.MustParsePrefix(ip).Addr())
	}
	return pod
}

// TestAChangeDuringTheWork: a pod changes during a turn. The result for the earlier sandbox or pod is discarded.
func TestAChangeDuringTheWork(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(podSpec) podSpec{
		"another sandbox": func(p podSpec) podSpec { return p },
		"another pod":     func(p podSpec) podSpec { p.uid = "another"; return p },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newFixture(t, inPlace)
			first := podSpec{name: "web", uid: "u"}.at("10.88.0.2/24")
			second := change(first).at("10.88.0.3/24")
			paths := []string{l.Sandbox(first.ips...), l.Sandbox(second.ips...)}
			l.Process("77", paths[0])
			l.Process("78", paths[1])
			feed := l.feed()
			var calls atomic.Int64
			l.options.Plugin = func() (cniconf.NetConf, error) {
				if calls.Add(1) == 2 { // the first turn; the first call reads the configuration to compare later ones with
					feed.listener.OnUpdate(second.nodePod())
				}
				return cniconf.NetConf{}, nil
			}
			l.run()
			<-feed.began
			feed.listener.OnUpdate(first.nodePod())
			feed.listener.OnSync()
			for i, path := range paths {
				agenttest.Eventually(t, fmt.Sprintf("sandbox %d is not redirected", i), func() bool { return captured(t, path) })
			}
			l.waitForStates(1, 0, 0, 0)
			feed.listener.OnDelete(first.nodePod())
			if name == "another pod" {
				l.waitForStates(1, 0, 0, 0) // the first pod was replaced
			}
			third := second
			third.uid, third.ips = "third", nil
			feed.listener.OnUpdate(third.nodePod()) // the end of the second pod is not delivered
			l.waitForStates(0, 0, 0, 0)
		})
	}
}

// TestAPodIsDeletedForMissingRulesOnlyIfSeenTwice: the modes that disrupt a pod need two inspections.
func TestAPodIsDeletedForMissingRulesOnlyIfSeenTwice(t *testing.T) {
	t.Parallel()
	l := newFixture(t, deleting)
	gone, late := podSpec{name: "gone", uid: "u1"}.at("10.88.0.2/24"), podSpec{name: "late", uid: "u2"}.at("10.88.0.3/24")
	l.place(gone)
	with := l.place(late)
	l.run()
	l.waitForStates(0, 2, 0, 0)
	l.noWrites()
	// Another agent writes the rules meanwhile.
	helper := newFixture(t, inPlace)
	helper.cache(late, with)
	helper.set(late)
	helper.run()
	helper.waitForEvent(late, "Normal", podwork.ReasonRepaired)
	agenttest.Eventually(t, "no timer runs for the second inspection", func() bool { return l.clock.Waiters() > 2 })
	l.clock.Step(3 * time.Second)
	l.waitForEvent(gone, "Warning", podwork.ReasonDeleted, "no rules")
	l.waitForStates(1, 0, 0, 0)
	check.Equal(t, len(l.writes()), 1, "deletions, of the other pod,")
	l.wantEvents(late)
}

// TestMissingRulesAreForgottenWhenOtherRulesCome: rules that vanish, are replaced and vanish again are confirmed anew.
func TestMissingRulesAreForgottenWhenOtherRulesCome(t *testing.T) {
	t.Parallel()
	l := newFixture(t, deleting)
	p := podSpec{name: "web", uid: "u", unvalidated: true, proxy: running(), phase: "Running"}.at("10.88.0.2/24")
	path := l.place(p)
	l.run()
	l.waitForStates(0, 1, 0, 0)
	l.otherRules(path)
	p.labels = object{"touched": "1"}
	l.set(p)
	l.waitForStates(0, 0, 1, 0)
	l.clock.Step(time.Hour)
	netnstest.Run(t, path, "sh", "-c", "printf '*nat\n:PREROUTING ACCEPT\n:INPUT ACCEPT\n:OUTPUT ACCEPT\n:POSTROUTING ACCEPT\nCOMMIT\n' | iptables-nft-restore")
	p.labels = object{"touched": "2"}
	l.set(p)
	l.waitForStates(0, 1, 0, 0)
	l.waitForWorker()
	l.noWrites()
	l.clock.Step(3 * time.Second)
	l.waitForEvent(p, "Warning", podwork.ReasonDeleted, "no rules")
}

// TestANewConfigurationIsUsed: the plugin's configuration cannot be read at first, and changes while no pod changes.
func TestANewConfigurationIsUsed(t *testing.T) {
	t.Parallel()
	l := newFixture(t, inPlace)
	l.conf.Store(nil)
	p, path := l.crashing()
	l.run()
	agenttest.Eventually(t, "the error is not logged", func() bool { return strings.Contains(l.log.String(), "it is no JSON") })
	change := func(conf cniconf.NetConf) {
		agenttest.Eventually(t, "no timer runs for the configuration", func() bool { return l.clock.Waiters() > 1 })
		changes := func() int { return strings.Count(l.log.String(), "configuration has changed") }
		before := changes()
		l.conf.Store(&conf)
		l.clock.Step(10 * time.Second)
		agenttest.Eventually(t, "the change is not seen", func() bool { return changes() > before })
	}
	change(cniconf.NetConf{ExcludeNamespaces: []string{"shop"}})
	l.waitForWorker()
	l.waitForStates(0, 0, 0, 0)
	l.untouched(path)
	if got := l.events(p); len(got) > 0 {
		t.Errorf("events %v", got)
	}
	change(cniconf.NetConf{})
	l.waitForRepair(p)
	change(cniconf.NetConf{ExcludeNamespaces: []string{"shop"}})
	l.waitForStates(0, 0, 0, 0)
	l.redirected(path)
}

// TestAPodOfAnotherNodeIsNotSearched: a server sends more pods than requested.
func TestAPodOfAnotherNodeIsNotSearched(t *testing.T) {
	t.Parallel()
	l := newFixture(t, inPlace)
	l.run()
	agenttest.Eventually(t, "no watch", func() bool { return l.server.Watches() > 0 })
	p := crashing("web").at("10.88.0.2/24")
	p.node = "node-2"
	path := l.Sandbox(p.ips...)
	l.cache(p, path)
	whole := p.object()
	whole["metadata"].(object)["resourceVersion"] = "100"
	data, err := json.Marshal(whole)
	l.Do(err)
	l.server.Send("ADDED", data)
	l.waitForEvent(p, "Warning", podwork.ReasonBroken, "only on its own node")
	if l.searches.Load() != 0 || captured(t, path) {
		t.Error("it was searched for")
	}
}
