package nodepods

import (
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/nftables/nftablestest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// auditFixture is a fixture with an auditing controller and one validated pod of the mesh that the plugin has redirected.
type auditFixture struct {
	*fixture

	pod        podSpec
	path       string
	controller *Controller
	// restarts is the suffix of the proxy's container ID, others are the statuses of further containers.
	restarts string
	others   []object
}

// appID is the ID of the application's container.
const appID = "0123"

func newAuditFixture(t *testing.T, mode auditor.Settings, conf cniconf.NetConf, more ...func(*Options)) *auditFixture {
	t.Helper()
	mode.Interval = time.Minute
	l := &auditFixture{fixture: newFixture(t, repair.Switches{}, append(more, func(o *Options) { o.Audit = mode })...)}
	l.conf.Store(&conf)
	l.pod = podSpec{name: "web", uid: "u1", now: ended(0, agenttest.Start()), phase: "Running"}.at("10.88.0.2/24")
	l.path = l.redirect(l.pod)
	l.publish(nil)
	l.controller = l.start()
	return l
}

// publish makes the pod known, with running containers unless proxy is nil.
func (l *auditFixture) publish(proxy state) {
	l.Helper()
	o := l.pod.object()
	if proxy != nil {
		o["status"].(object)["containerStatuses"] = append([]object{
			{"name": "app", "containerID": "containerd://" + appID, "state": running()},
			{"name": "istio-proxy", "containerID": "containerd://4567" + l.restarts, "state": proxy},
		}, l.others...)
	}
	l.put(o)
}

// check inspects the pod now.
func (l *auditFixture) check() (s audit.Status) {
	l.Helper()
	return l.controller.statusOf(l.T, web)
}

// want checks the pod's state and the text of its first problem.
func (l *auditFixture) want(state audit.State, text string) audit.Status {
	l.Helper()
	s := l.check()
	if s.State != state || len(s.Problems) == 0 != (state == audit.Captured) || !strings.Contains(s.Why(), text) {
		l.Fatalf("got %+v, want %s with %q", s, state, text)
	}
	return s
}

// fault is a change of a namespace by a command, and what the audit makes of it.
type fault struct {
	backend redirect.Backend
	command string
	want    audit.State
	text    string
	// repaired is set if mode repair ends the state.
	repaired bool
}

// reasonOf has the reasons of the events about faults.
var reasonOf = map[audit.State]kube.EventReason{
	audit.Drifted: podwork.ReasonDrifted, audit.Bypassed: podwork.ReasonBroken, audit.ForeignRule: podwork.ReasonForeignRule,
	audit.IPv6Open: podwork.ReasonIPv6Open,
}

// faulty makes a fault, and checks the state, its event and the repair.
func (l *auditFixture) faulty(f fault) {
	l.Helper()
	captured := l.want(audit.Captured, "redirected as wanted")
	l.clock.Step(time.Second)
	netnstest.Run(l.T, l.path, "sh", "-c", f.command)
	s := l.want(f.want, f.text)
	if !s.Since.After(captured.Since) || s.Remedy == "" {
		l.Errorf("got %+v", s)
	}
	l.want(f.want, f.text)
	l.waitForEvent(l.pod, "Warning", reasonOf[f.want], f.text, "Remedy: ")
	l.controller.auditor.Settings.Repair = true
	if !f.repaired {
		if s = l.want(f.want, f.text); strings.Contains(s.Remedy, "set audit.mode") {
			l.Errorf("the remedy is a setting that is already set: %s", s.Remedy)
		}
		return
	}
	l.want(audit.Captured, "")
	l.waitForEvent(l.pod, "Normal", podwork.ReasonRepaired, f.text, "restored")
	check.Equal(l, l.metric(`istio_cni_audit_repairs_total{result="success"}`), 1, "repairs")
}

// TestAuditStates has a row for each state and each way to read a kind of rules. TestState_Takers and TestState_HarmlessPrograms of
// node/redirection have the rules of others, with packets.
func TestAuditStates(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]fault{
		"a rule is deleted":        {redirect.Netlink, "iptables-nft -t nat -D ISTIO_OUTPUT 1", audit.Drifted, "missing", true},
		"the table is flushed":     {redirect.Netlink, "nft flush ruleset", audit.Bypassed, "no rule of the mesh", true},
		"RETURN is inserted ahead": {redirect.Netlink, "iptables-nft -t nat -I OUTPUT -p tcp -j RETURN", audit.ForeignRule, "-A OUTPUT -p tcp -j RETURN", true},
		"NOTRACK in table raw":     {redirect.Netlink, "iptables-nft -t raw -A OUTPUT -p tcp -j NOTRACK", audit.ForeignRule, "raw/OUTPUT: foreign rule", false},
		"a table of nftables": {
			redirect.Netlink,
			"nft 'add table ip x; add chain ip x out { type nat hook output priority -150; }; add rule ip x out tcp dport 80 redirect to :9999'",
			audit.ForeignRule, "table ip x, chain out (hook output, priority -150): foreign rule", false,
		},
		"a dormant table": {redirect.Netlink, "nft 'add table ip nat { flags dormant; }'", audit.Drifted, "nat", false},
		"legacy tables beside nf_tables": {
			redirect.Netlink, "iptables-legacy -t nat -A OUTPUT -p tcp -j REDIRECT --to-ports 9999",
			audit.ForeignRule, "IPv4 (legacy) nat/OUTPUT: foreign rule", false,
		},
		"an address of IPv6":       {redirect.Netlink, "ip addr add fd00::5/64 dev eth0 nodad", audit.IPv6Open, "bypass", false},
		"native rules are flushed": {redirect.Native, "nft flush ruleset", audit.Bypassed, "no rule", true},
		"a native rule is deleted": {redirect.Native, "nft flush chain inet istio-proxy-nat istio-output", audit.Drifted, "istio-proxy-nat", true},
		"a native rule ahead": {
			redirect.Native, "nft insert rule inet istio-proxy-nat istio-output tcp dport 80 return", audit.ForeignRule, "istio-proxy-nat/istio-output", true,
		},
		"legacy rules are flushed": {redirect.Tools, "iptables-legacy -t nat -F; iptables-legacy -t nat -X", audit.Bypassed, "no rule", true},
		"a legacy rule is changed": { // the tables keep their size
			redirect.Tools, "iptables-legacy -t nat -R ISTIO_REDIRECT 1 -p tcp -j REDIRECT --to-ports 15009", audit.Drifted, "ISTIO_REDIRECT", true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conf := cniconf.NetConf{Backend: f.backend}
			if f.backend == redirect.Tools {
				conf.ForceIptables = "legacy"
			}
			newAuditFixture(t, auditor.Settings{}, conf).faulty(f)
		})
	}
}

// TestRulesOfAnotherBackend: a pod keeps the rules of the backend it started with, and is captured by them.
func TestRulesOfAnotherBackend(t *testing.T) {
	t.Parallel()
	legacy := cniconf.NetConf{Backend: redirect.Tools, ForceIptables: "legacy"}
	for name, test := range map[string]struct{ then, now cniconf.NetConf }{
		"native before": {cniconf.NetConf{Backend: redirect.Native}, cniconf.NetConf{}},
		"native now":    {cniconf.NetConf{}, cniconf.NetConf{Backend: redirect.Native}},
		"legacy before": {legacy, cniconf.NetConf{}},
		"legacy now":    {cniconf.NetConf{}, legacy},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newAuditFixture(t, auditor.Settings{Repair: true}, test.then)
			backend := l.want(audit.Captured, "").Backend
			l.conf.Store(&test.now)
			l.waitForWorker() // a turn that is not over would time out by the step
			l.clock.Step(time.Hour)
			if s := l.want(audit.Captured, ""); s.Backend != backend {
				t.Errorf("backend %q, %q before", s.Backend, backend)
			}
			e, err := l.controller.Explain(t.Context(), auditor.Socket, web, nil)
			if err != nil || len(e.Chains) == 0 {
				t.Fatalf("got %+v, %v", e, err)
			}
			for _, c := range e.Chains {
				for _, r := range c.Rules {
					check.Equal(t, r.Op, "", c.Table, c.Chain, r.Text)
				}
			}
			netnstest.Run(t, l.path, "sh", "-c", "nft flush ruleset; iptables-legacy -t nat -F; iptables-legacy -t nat -X")
			l.want(audit.Captured, "")
			l.waitForEvent(l.pod, "Normal", podwork.ReasonRepaired, "no rule of the mesh", "restored")
		})
	}
}

// TestAuditIsPeriodic: a change of the rules is found within the interval, and an unchanged namespace is not read. The gauge keeps what was
// found when the pod changes, whatever its validation has found before.
func TestAuditIsPeriodic(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, auditor.Settings{}, cniconf.NetConf{})
	l.want(audit.Captured, "")
	for _, change := range [][]string{{"nft", "list", "ruleset"}, {"nft", "flush", "ruleset"}} {
		netnstest.Run(t, l.path, change[0], change[1:]...)
		last := l.controller.Pods()[0].Checked
		agenttest.Eventually(t, "no further inspection", func() bool {
			l.clock.Step(time.Second) // a timer set after a step starts from that time
			return l.controller.Pods()[0].Checked.After(last)
		})
		if interval := l.controller.Pods()[0].Checked.Sub(last); interval < 40*time.Second {
			t.Errorf("inspected again after %s", interval)
		}
	}
	l.waitForEvent(l.pod, "Warning", podwork.ReasonBroken, "no rule of the mesh")
	l.pod.labels = object{"app": "web"}
	l.publish(nil)
	l.waitForWorker()
	l.waitForStates(0, 1, 0, 0)
}

// TestAuditOfHostilePods: a namespace that cannot be inspected does not delay the others, and a pod that ends meanwhile is not an error.
func TestAuditOfHostilePods(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, auditor.Settings{Repair: true}, cniconf.NetConf{})
	hostile := podSpec{name: "hostile", uid: "h", now: ended(0, agenttest.Start()), phase: "Running"}.at("10.88.0.9/24")
	path := l.Sandbox(hostile.ips...)
	nftablestest.Fill(t, path, unix.NFPROTO_IPV4, "nat", "OUTPUT", 1, 100_000)
	l.cache(hostile, path)
	l.set(hostile)
	l.waitForEvent(hostile, "Warning", podwork.ReasonUnverified, "cannot be inspected", "NET_ADMIN")
	l.want(audit.Captured, "")
	l.server.Delete(hostile.path())
	agenttest.Eventually(t, "the pod stays", func() bool { return len(l.controller.Pods()) == 1 })
}
