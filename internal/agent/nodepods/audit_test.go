package nodepods

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/nftables/nftablestest"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
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
	l.path = l.Sandbox(l.pod.ips...)
	l.cache(l.pod, l.path)
	l.program(l.path)
	l.publish(nil)
	l.controller = l.controllerOf(l.options)
	l.stops = append(l.stops, agenttest.Go(l.T, l.controller.Run))
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
	data, err := json.Marshal(o)
	l.Do(err)
	l.server.Set(data)
}

// space is the pod's namespace with the configured backend.
func (l *auditFixture) space(path string) redirection.Namespace {
	l.Helper()
	conf := l.conf.Load()
	return redirection.Namespace{
		NetNS: netnstest.Open(l.T, path), Backend: conf.Backend, Log: slog.New(slog.DiscardHandler),
		Tools: iptables.Host{Force: iptables.Variant(conf.ForceIptables)},
	}
}

// program writes the wanted rules like the plugin.
func (l *auditFixture) program(path string) {
	l.Helper()
	_, err := l.space(path).Apply(l.Context(), redirect.Default(), redirection.Reconcile)
	l.Do(err)
}

// check inspects the pod now.
func (l *auditFixture) check() (s audit.Status) {
	l.Helper()
	agenttest.Eventually(l.T, "the controller does not know the pod", func() bool {
		var err error
		s, err = l.controller.Check(l.Context(), types.NamespacedName{Namespace: "shop", Name: "web"})
		return err == nil
	})
	return s
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

func TestAuditStates(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		backend redirect.Backend
		change  []string // a command in the namespace
		want    audit.State
		text    string
		event   kube.EventReason
		// repaired is set if mode repair ends the state.
		repaired bool
	}{
		"a rule is deleted": {
			redirect.Netlink, []string{"iptables-nft", "-t", "nat", "-D", "ISTIO_OUTPUT", "1"}, audit.Drifted, "missing", podwork.ReasonDrifted, true,
		},
		"a jump is deleted": {
			redirect.Netlink, []string{"iptables-nft", "-t", "nat", "-F", "OUTPUT"}, audit.Drifted, "nat/OUTPUT: missing", podwork.ReasonDrifted, true,
		},
		"the table is flushed": {
			redirect.Netlink, []string{"nft", "flush", "ruleset"}, audit.Bypassed, "no rule of the mesh", podwork.ReasonBroken, true,
		},
		"RETURN is inserted ahead": {
			redirect.Netlink,
			[]string{"iptables-nft", "-t", "nat", "-I", "OUTPUT", "-p", "tcp", "-j", "RETURN"},
			audit.ForeignRule,
			"-A OUTPUT -p tcp -j RETURN", podwork.ReasonForeignRule, true,
		},
		"a native table is deleted": {
			redirect.Native, []string{"nft", "delete", "table", "inet", "istio-proxy-nat"}, audit.Bypassed, "no rule", podwork.ReasonBroken, true,
		},
		"native rules are flushed": {
			redirect.Native, []string{"nft", "flush", "ruleset"}, audit.Bypassed, "no rule", podwork.ReasonBroken, true,
		},
		"legacy rules are flushed": {
			redirect.Tools, []string{"sh", "-c", "iptables-legacy -t nat -F; iptables-legacy -t nat -X"}, audit.Bypassed, "no rule", podwork.ReasonBroken, true,
		},
		"RETURN in our chain": {
			redirect.Netlink,
			[]string{"iptables-nft", "-t", "nat", "-I", "ISTIO_OUTPUT", "2", "-p", "tcp", "-j", "RETURN"},
			audit.ForeignRule,
			"-A ISTIO_OUTPUT -p tcp -j RETURN", podwork.ReasonForeignRule, true,
		},
		"ACCEPT ahead, for a port": {
			redirect.Netlink,
			[]string{"iptables-nft", "-t", "nat", "-I", "PREROUTING", "-p", "tcp", "--dport", "8080", "-j", "ACCEPT"},
			audit.ForeignRule,
			"--dport 8080 -j ACCEPT", podwork.ReasonForeignRule, true,
		},
		"a REDIRECT of its own": {
			redirect.Netlink,
			[]string{"iptables-nft", "-t", "nat", "-I", "OUTPUT", "-p", "tcp", "-m", "owner", "--uid-owner", "1000", "-j", "REDIRECT", "--to-ports", "9999"},
			audit.ForeignRule,
			"--to-ports 9999", podwork.ReasonForeignRule, true,
		},
		"NOTRACK in table raw": {
			redirect.Netlink,
			[]string{"iptables-nft", "-t", "raw", "-A", "OUTPUT", "-p", "tcp", "-j", "NOTRACK"},
			audit.ForeignRule,
			"raw/OUTPUT: foreign rule", podwork.ReasonForeignRule, false,
		},
		"a policy that drops": {
			redirect.Netlink,
			[]string{"iptables-nft", "-t", "mangle", "-P", "OUTPUT", "DROP"},
			audit.ForeignRule,
			"mangle/OUTPUT: policy DROP", podwork.ReasonForeignRule, false,
		},
		"a table of nftables": {
			redirect.Netlink,
			[]string{"nft", "add table ip x; add chain ip x out { type nat hook output priority -150; }; add rule ip x out tcp dport 80 redirect to :9999"},
			audit.ForeignRule, "table ip x, chain out (hook output, priority -150): foreign rule", podwork.ReasonForeignRule, false,
		},
		"a chain that a table of nftables calls": {
			redirect.Native,
			[]string{"nft", "add table inet x; add chain inet x y; add rule inet x y drop; add chain inet x in { type filter hook prerouting priority -300; }; add rule inet x in jump y"},
			audit.ForeignRule, "table inet x, chain in (hook prerouting, priority -300): foreign rule", podwork.ReasonForeignRule, false,
		},
		"a chain beside iptables'": {
			redirect.Netlink,
			[]string{"nft", "add chain ip nat early { type nat hook output priority -150; }; add rule ip nat early meta l4proto tcp redirect to :9999"},
			audit.ForeignRule, "table ip nat, chain early", podwork.ReasonForeignRule, false,
		},
		"a chain of iptables' table that such a chain calls": {
			redirect.Netlink,
			[]string{"nft", "add chain ip nat early { type filter hook output priority -350; }; add chain ip nat x; add rule ip nat x notrack; add rule ip nat early jump x"},
			audit.ForeignRule, "table ip nat, chain early", podwork.ReasonForeignRule, false,
		},
		"a rule of nft that writes another port": {
			redirect.Netlink,
			[]string{"nft", "insert rule ip nat OUTPUT tcp dport set tcp sport"},
			audit.ForeignRule, "a header of the packet is rewritten", podwork.ReasonForeignRule, false,
		},
		"a rule of nft that writes another port ahead of native ones": {
			redirect.Native,
			[]string{"nft", "insert rule inet istio-proxy-nat output tcp dport set tcp sport"},
			audit.ForeignRule, "a header of the packet is rewritten", podwork.ReasonForeignRule, true,
		},
		"a dormant table": {
			redirect.Netlink, []string{"nft", "add table ip nat { flags dormant; }"}, audit.Drifted, "nat", podwork.ReasonDrifted, false,
		},
		"legacy tables beside nf_tables": {
			redirect.Netlink,
			[]string{"iptables-legacy", "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "-j", "REDIRECT", "--to-ports", "9999"},
			audit.ForeignRule,
			"IPv4 (legacy) nat/OUTPUT: foreign rule", podwork.ReasonForeignRule, false,
		},
		"a native rule is deleted": {
			redirect.Native, []string{"nft", "flush chain inet istio-proxy-nat istio-output"}, audit.Drifted, "istio-proxy-nat", podwork.ReasonDrifted, true,
		},
		"a native rule ahead": {
			redirect.Native,
			[]string{"nft", "insert rule inet istio-proxy-nat istio-output tcp dport 80 return"},
			audit.ForeignRule, "istio-proxy-nat/istio-output",
			podwork.ReasonForeignRule, true,
		},
		"a legacy rule is changed": { // the tables keep their size
			redirect.Tools,
			[]string{"iptables-legacy", "-t", "nat", "-R", "ISTIO_REDIRECT", "1", "-p", "tcp", "-j", "REDIRECT", "--to-ports", "15009"},
			audit.Drifted, "ISTIO_REDIRECT", podwork.ReasonDrifted, true,
		},
		"RETURN ahead in legacy tables": {
			redirect.Tools,
			[]string{"iptables-legacy", "-t", "nat", "-I", "OUTPUT", "-p", "tcp", "-j", "RETURN"},
			audit.ForeignRule,
			"-A OUTPUT -p tcp -j RETURN", podwork.ReasonForeignRule, true,
		},
		"an address of IPv6": {
			redirect.Netlink, []string{"ip", "addr", "add", "fd00::5/64", "dev", "eth0", "nodad"}, audit.IPv6Open, "bypass", podwork.ReasonIPv6Open, false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conf := cniconf.NetConf{Backend: test.backend}
			if test.backend == redirect.Tools {
				conf.ForceIptables = "legacy"
			}
			l := newAuditFixture(t, auditor.Settings{}, conf)
			captured := l.want(audit.Captured, "redirected as wanted")
			l.clock.Step(time.Second)
			netnstest.Run(t, l.path, test.change[0], test.change[1:]...)
			s := l.want(test.want, test.text)
			if !s.Since.After(captured.Since) || s.Remedy == "" {
				t.Errorf("got %+v", s)
			}
			l.want(test.want, test.text)
			l.waitForEvent(l.pod, "Warning", test.event, test.text, "Remedy: ")
			l.controller.auditor.Settings.Repair = true
			if !test.repaired {
				l.want(test.want, test.text)
				return
			}
			l.want(audit.Captured, "")
			l.waitForEvent(l.pod, "Normal", podwork.ReasonRepaired, test.text, "restored")
			if got := l.metric(`istio_cni_audit_repairs_total{result="success"}`); got != 1 {
				t.Errorf("%d repairs", got)
			}
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
			e, err := l.controller.Explain(t.Context(), auditor.Socket, types.NamespacedName{Namespace: "shop", Name: "web"}, nil)
			if err != nil || len(e.Chains) == 0 {
				t.Fatalf("got %+v, %v", e, err)
			}
			for _, c := range e.Chains {
				for _, r := range c.Rules {
					if r.Op != "" {
						t.Errorf("%s %s: %q is %s", c.Table, c.Chain, r.Text, r.Op)
					}
				}
			}
			netnstest.Run(t, l.path, "sh", "-c", "nft flush ruleset; iptables-legacy -t nat -F; iptables-legacy -t nat -X")
			l.want(audit.Captured, "")
			l.waitForEvent(l.pod, "Normal", podwork.ReasonRepaired, "no rule of the mesh", "restored")
		})
	}
}

func TestAuditOfTheProxy(t *testing.T) {
	t.Parallel()
	collision := func(o *Options) {
		o.Processes = func(context.Context) (map[string][]sandbox.Process, error) {
			return map[string][]sandbox.Process{
				"u1": {{PID: 7, Container: appID, UID: redirect.DefaultID}, {PID: 8, Container: "4567", UID: redirect.DefaultID}, {PID: 9, Container: "pause", UID: redirect.DefaultID}},
				"u2": {{PID: 10, Container: appID, UID: redirect.DefaultID}},
			}, nil
		}
	}
	l := newAuditFixture(t, auditor.Settings{}, cniconf.NetConf{}, collision)
	l.want(audit.Captured, "")
	l.publish(running())
	l.clock.Step(20 * time.Second)
	agenttest.Eventually(t, "the proxy is not known", func() bool { return l.check().State == audit.NoListener })
	s := l.want(audit.NoListener, "127.0.0.1:15001")
	if len(s.Problems) != 3 || s.Problems[2] != (audit.Problem{State: audit.UIDCollision, Detail: `process 7 of container "app" runs with uid 1337 and gid 0`}) {
		t.Errorf("got %+v", s.Problems)
	}
	l.waitForEvent(l.pod, "Warning", podwork.ReasonNoListener, "nothing listens on 127.0.0.1:15001")
	l.Do(l.space(l.path).NetNS.Do(func() error {
		for _, port := range []string{"15001", "15006"} {
			socket, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "0.0.0.0:"+port)
			if err != nil {
				return err
			}
			t.Cleanup(func() { _ = socket.Close() })
		}
		return nil
	}))
	l.want(audit.UIDCollision, `process 7 of container "app"`)
	l.waitForEvent(l.pod, "Warning", podwork.ReasonUIDCollision)
}

// TestHarmlessRules: foreign rules that take no traffic of the mesh are not a fault.
func TestHarmlessRules(t *testing.T) {
	t.Parallel()
	for name, change := range map[string][]string{
		"counts":                 {"iptables-nft", "-t", "nat", "-I", "OUTPUT", "-p", "tcp"},
		"a counter of nftables":  {"nft", "insert rule ip nat OUTPUT counter"},
		"logs":                   {"iptables-nft", "-t", "nat", "-I", "PREROUTING", "-j", "LOG"},
		"behind ours":            {"iptables-nft", "-t", "nat", "-A", "OUTPUT", "-j", "ACCEPT"},
		"another protocol":       {"iptables-nft", "-t", "nat", "-I", "OUTPUT", "-p", "udp", "--dport", "5353", "-j", "RETURN"},
		"another table accepts":  {"iptables-nft", "-t", "mangle", "-A", "OUTPUT", "-j", "ACCEPT"},
		"a chain that counts":    {"sh", "-c", "iptables-nft -t mangle -N C; iptables-nft -t mangle -A C -p tcp; iptables-nft -t mangle -A OUTPUT -j C"},
		"a firewall":             {"nft", "add table inet f; add chain inet f in { type filter hook input priority 0; policy drop; }; add rule inet f in accept"},
		"nftables accepts":       {"nft", "add table ip x; add chain ip x out { type nat hook output priority -150; }; add rule ip x out tcp dport 80 accept"},
		"nftables traces":        {"nft", "add table inet x; add chain inet x out { type filter hook output priority -400; }; add rule inet x out meta nftrace set 1"},
		"a dormant other table":  {"nft", "add table ip x { flags dormant; }; add chain ip x out { type filter hook output priority -150; policy drop; }"},
		"translated behind ours": {"nft", "add table ip x; add chain ip x out { type nat hook output priority 0; }; add rule ip x out tcp dport 80 redirect to :9999"},
		"a legacy filter":        {"iptables-legacy", "-A", "INPUT", "-p", "icmp", "-j", "DROP"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newAuditFixture(t, auditor.Settings{}, cniconf.NetConf{Backend: redirect.Netlink})
			l.want(audit.Captured, "")
			netnstest.Run(t, l.path, change[0], change[1:]...)
			l.want(audit.Captured, "")
			l.wantEvents(l.pod)
		})
	}
}

// TestAuditIsPeriodic: a change of the rules is found within the interval, and an unchanged namespace is not read.
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

// TestAuditListsPodsOutside the mesh, with the reason.
func TestAuditListsPodsOutside(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, auditor.Settings{}, cniconf.NetConf{ExcludeNamespaces: []string{"kube-system"}})
	dns := podSpec{ns: "kube-system", name: "dns", uid: "d", phase: "Running"}.at("10.88.0.7/24")
	l.set(dns)
	l.want(audit.Captured, "")
	agenttest.Eventually(t, "one pod is missing", func() bool { return len(l.controller.Pods()) == 2 })
	all := l.controller.Pods()
	audit.Sort(all)
	if all[1].State != audit.Outside || !strings.Contains(all[1].Sentence, sidecar.ExcludedNamespace.Sentence()) || all[1].Faulty() {
		t.Errorf("got %+v", all[1])
	}
	l.noEvents(dns)
}

// TestAuditKeepsNoNamespace: between two inspections no descriptor of a namespace is open.
func TestAuditKeepsNoNamespace(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, auditor.Settings{}, cniconf.NetConf{})
	l.want(audit.Captured, "")
	inode := fmt.Sprintf("net:[%d]", netnstest.Open(t, l.path).Inode().Ino)
	files, err := os.ReadDir("/proc/self/fd")
	l.Do(err)
	open := 0
	for _, f := range files {
		if target, err := os.Readlink("/proc/self/fd/" + f.Name()); err == nil && target == inode {
			open++
		}
	}
	if all := slices.Clone(l.controller.Pods()); open > 4 || len(all) != 1 { // this test's descriptors
		t.Errorf("%d descriptors of the namespace are open, pods %+v", open, all)
	}
}

// TestAudit_RemedyOfTheMode: the list, the event and the log never name a setting as remedy that is already set.
func TestAudit_RemedyOfTheMode(t *testing.T) {
	t.Parallel()
	const advice = "set audit.mode=repair"
	const why = "its events or the log of the agent say why audit.mode=repair has not restored the rules"
	for mode, want := range map[auditor.Settings]string{{}: advice, {Repair: true}: why} {
		l := newAuditFixture(t, mode, cniconf.NetConf{})
		l.want(audit.Captured, "")
		netnstest.Run(t, l.path, "nft", "add table ip nat { flags dormant; }") // no repair ends this
		s := l.want(audit.Drifted, "nat")
		if !strings.Contains(s.Remedy, want) {
			t.Errorf("%+v: got %q", mode, s.Remedy)
		}
		if !mode.Repair {
			l.waitForEvent(l.pod, "Warning", podwork.ReasonDrifted, "Remedy: ", want)
		}
		l.end()
		if strings.Contains(l.log.String(), advice) != (want == advice) {
			t.Errorf("%+v: the log has another remedy", mode)
		}
	}
}
