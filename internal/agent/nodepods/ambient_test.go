package nodepods

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/podcache"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/inspect"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/probeset"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// ambientFixture is a fixture with one enrolled pod, whose rules are in place.
type ambientFixture struct {
	*auditFixture

	// missing is the first missing step of the enrolment, nil before the pod was looked at.
	missing atomic.Pointer[string]
	// deaf leaves out ztunnel's sockets.
	deaf bool
}

func newAmbientFixture(t *testing.T, backend redirect.Backend, change ...func(*cniconf.NetConf)) *ambientFixture {
	t.Helper()
	l := &ambientFixture{auditFixture: &auditFixture{}}
	l.fixture = newFixture(t, repair.Switches{InPlace: true, Delete: true}, func(o *Options) {
		o.Audit = auditor.Settings{Interval: time.Minute}
		o.Follow = func(ctx context.Context, listener kube.Listener[kube.Pod]) {
			update := listener.OnUpdate
			listener.OnUpdate = func(p kube.Pod) {
				p.Facts.Selected = p.Facts.Labels["istio.io/dataplane-mode"] == "ambient"
				update(p)
			}
			o.API.WatchPods(ctx, kube.PodScope{Node: node1, Transform: podcache.Trim([]string{"istio.io/dataplane-mode", ambient.RedirectionKey}, "")}, listener)
		}
		o.Enrolment = func(string) (string, bool) {
			if step := l.missing.Load(); step != nil {
				return *step, true
			}
			return "", false
		}
	})
	conf := cniconf.NetConf{Backend: backend, AmbientEnabled: true, Ambient: ambient.DefaultConfig()}
	conf.Ambient.IPv6, conf.Ambient.DNSCapture = true, true
	for _, c := range change {
		c(&conf)
	}
	l.conf.Store(&conf)
	l.pod = podSpec{
		name: "web", uid: "u1", plain: true, phase: "Running", labels: object{"istio.io/dataplane-mode": "ambient"},
	}.at("10.88.0.2/24")
	l.path = l.Sandbox(l.pod.ips...)
	l.cache(l.pod, l.path)
	l.misses("")
	return l
}

func (l *ambientFixture) misses(step string) { l.missing.Store(&step) }

// begin writes the rules if wanted, and starts the controller.
func (l *ambientFixture) begin(programmed bool) {
	l.Helper()
	if programmed {
		l.enrol()
	}
	if !l.deaf {
		l.listen(l.path, 0, "15001", "15006", "15008")
	}
	l.publish(nil)
	l.controller = l.start()
}

// enrol writes the rules of the configuration.
func (l *ambientFixture) enrol() {
	l.Helper()
	spec, _ := ambient.Of(l.conf.Load().Ambient, nil)
	_, err := l.space(l.path).Apply(l.Context(), spec, redirection.Reconcile)
	l.Do(err)
}

// TestAmbientStates is TestAuditStates for a pod in ambient mode; TestAudit_AmbientRulesTaken of node/redirection has the rules of others.
func TestAmbientStates(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]fault{
		"a rule is deleted":  {redirect.Netlink, "iptables-nft -t nat -D ISTIO_OUTPUT 1", audit.Drifted, "missing", true},
		"all rules are gone": {redirect.Netlink, "nft flush ruleset", audit.Bypassed, "no rule of the mesh", true},
		"native: a table":    {redirect.Native, "nft delete table inet istio-ambient-mangle", audit.Drifted, "missing", true},
		"the policy rule":    {redirect.Netlink, "ip rule del fwmark 0x111/0xfff", audit.Drifted, "0x111", true},
		"the whole mark": {
			redirect.Netlink, "ip rule del fwmark 0x111/0xfff; ip rule add fwmark 0x111 pref 32764 lookup 100", audit.Drifted, "0x111", true,
		},
		"the route of IPv6": {redirect.Netlink, "ip -6 route flush table 100", audit.Drifted, "table 100", true},
		"RETURN ahead":      {redirect.Netlink, "iptables-nft -t nat -I OUTPUT -p tcp -j RETURN", audit.ForeignRule, "-A OUTPUT -p tcp -j RETURN", true},
		"native: a table ahead": {
			redirect.Native,
			"nft 'add table ip x; add chain ip x out { type nat hook output priority -150; }; add rule ip x out tcp dport 80 redirect to :9999'",
			audit.ForeignRule, "table ip x, chain out", false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newAmbientFixture(t, f.backend)
			l.begin(true)
			l.faulty(f)
		})
	}
}

// TestAmbientOpen: IPv6 that the settings leave out is a state. A changed annotation applies to the running pod.
func TestAmbientOpen(t *testing.T) {
	t.Parallel()
	l := newAmbientFixture(t, redirect.Netlink, func(c *cniconf.NetConf) { c.Ambient.IPv6 = false })
	netnstest.Run(t, l.path, "ip", "addr", "add", "fd00::5/64", "dev", "eth0", "nodad")
	l.begin(true)
	l.want(audit.IPv6Open, "AMBIENT_IPV6")
	l.pod.annotations = object{ambient.BypassInboundKey: "true"}
	l.publish(nil)
	agenttest.Eventually(t, "the annotation is not known", func() bool { return l.check().State == audit.Drifted })
	l.want(audit.Drifted, "the earlier rules")
	l.controller.auditor.Settings.Repair = true
	s := l.want(audit.IPv6Open, "AMBIENT_IPV6")
	if len(s.Exceptions) != 1 || s.Exceptions[0].Setting != ambient.BypassInboundKey {
		t.Errorf("got %+v", s)
	}
}

// TestAmbientPending: a pod whose enrolment is not done is pending, and an event says so if that lasts.
func TestAmbientPending(t *testing.T) {
	t.Parallel()
	l := newAmbientFixture(t, redirect.Netlink)
	l.missing.Store(nil)
	l.begin(false)
	l.want(audit.Pending, "has not begun")
	l.misses("waiting for ztunnel: no ztunnel is connected")
	s := l.want(audit.Pending, "no ztunnel is connected")
	if s.Remedy == "" || len(l.events(l.pod)) > 0 {
		t.Errorf("got %+v, events %v", s, l.events(l.pod))
	}
	l.clock.Step(11 * time.Second)
	l.waitForEvent(l.pod, "Warning", podwork.ReasonPending, "waits to be taken into the ambient mesh: waiting for ztunnel")
	l.enrol()
	l.want(audit.Pending, "no ztunnel is connected")
	l.waitForStates(0, 1, 0, 0)
	l.misses("")
	l.want(audit.Captured, "")
	l.waitForEvent(l.pod, "Normal", podwork.ReasonVerified, "again")
	l.misses("waiting for ztunnel: no ztunnel is connected")
	netnstest.Run(t, l.path, "nft", "flush", "ruleset")
	l.want(audit.Bypassed, "no rule of the mesh") // it had its rules
}

// TestAmbientPending_Annotation: the end of an enrolment is seen at once, by the annotation.
func TestAmbientPending_Annotation(t *testing.T) {
	t.Parallel()
	l := newAmbientFixture(t, redirect.Netlink)
	l.misses("waiting for the API server to take its annotation")
	l.begin(true)
	l.want(audit.Pending, "its annotation")
	l.misses("")
	l.pod.annotations = object{ambient.RedirectionKey: ambient.RedirectionEnabled}
	l.publish(nil)
	agenttest.Eventually(t, "it stays pending", func() bool { // the clock stands still
		return slices.ContainsFunc(l.controller.Pods(), func(s audit.Status) bool { return s.State == audit.Captured })
	})
	l.wantEvents(l.pod)
}

// shows waits for a state in the list of pods, without a request to inspect.
func (l *ambientFixture) shows(want audit.State, text string) {
	l.Helper()
	agenttest.Until(l.T, func() string { return fmt.Sprintf("got %+v", l.controller.Pods()) }, func() bool {
		l.clock.Step(100 * time.Millisecond)
		return slices.ContainsFunc(l.controller.Pods(), func(s audit.Status) bool { return s.State == want && strings.Contains(s.Why(), text) })
	})
}

// TestAmbientPending_Again: a pod was enrolled, and ztunnel has ended since. The annotation does not show it.
func TestAmbientPending_Again(t *testing.T) {
	t.Parallel()
	l := newAmbientFixture(t, redirect.Netlink)
	l.begin(true)
	l.want(audit.Captured, "")
	const step = "ztunnel: no ztunnel is connected"
	l.misses(step)
	l.controller.Notify(web)
	l.shows(audit.Pending, step)
	l.misses("")
	l.controller.Notify(web)
	l.shows(audit.Captured, "")
}

// TestAmbientNotListening: ztunnel has acknowledged the pod, and its sockets are not there. A fresh enrolment gets time.
func TestAmbientNotListening(t *testing.T) {
	t.Parallel()
	l := newAmbientFixture(t, redirect.Netlink)
	l.deaf = true
	l.begin(true)
	l.want(audit.Captured, "")
	l.clock.Step(16 * time.Second)
	s := l.want(audit.NoListener, "nothing listens on 10.88.0.2:15008, to which other ztunnels send tunnels (HBONE)")
	if len(s.Problems) != 3 || !strings.Contains(s.Remedy, "ztunnel") {
		t.Errorf("got %+v", s)
	}
	l.waitForEvent(l.pod, "Warning", podwork.ReasonNoListener, "nothing listens on", "Remedy: ")
	l.misses("ztunnel: no ztunnel is connected")
	l.want(audit.Pending, "no ztunnel is connected")
	l.misses("")
	l.want(audit.Captured, "")
	l.listen(l.path, 0)
	l.clock.Step(16 * time.Second)
	if s = l.want(audit.NoListener, "10.88.0.2:15008"); len(s.Problems) != 1 {
		t.Errorf("got %+v", s)
	}
	l.listen(l.path, 0, "15008")
	l.want(audit.Captured, "")
	l.waitForEvent(l.pod, "Normal", podwork.ReasonVerified, "again")
}

// TestAmbientObserved: a pod of another agent, by its annotation, its rules, the probe set and the listeners.
func TestAmbientObserved(t *testing.T) {
	t.Parallel()
	l := newAmbientFixture(t, redirect.Netlink)
	host, err := netns.Open(l.Host)
	l.Do(err)
	t.Cleanup(host.Close)
	l.deaf, l.options.Enrolment, l.options.Audit.Observe = true, nil, true
	l.options.ProbeSet = func() (map[netip.Addr]string, error) { return probeset.ReadAny(host) }
	has := func(addresses ...string) {
		config := ambient.DefaultConfig()
		want := probeset.Want{V4: config.ProbeV4, V6: config.ProbeV6, Pods: map[netip.Addr]string{}}
		for _, a := range addresses {
			want.Pods[netip.MustParseAddr(a)] = "uid"
		}
		l.Do(check.Err(probeset.Apply(host, want)))
	}
	l.begin(false)
	if s := l.want(audit.Pending, `the annotation ambient.istio.io/redirection is "", not "enabled"`); !strings.Contains(s.Remedy, "Istio's agent") {
		t.Errorf("got %+v", s)
	}
	l.enrol()
	l.pod.annotations = object{ambient.RedirectionKey: ambient.RedirectionEnabled}
	l.publish(nil)
	agenttest.Eventually(t, "the annotation is not known", func() bool { return strings.Contains(l.check().Why(), "probe set") })
	has("10.88.0.9")
	l.want(audit.Pending, "the probe set of the node does not have the pod's address 10.88.0.2")
	has("10.88.0.9", "10.88.0.2")
	l.want(audit.Captured, "")
	l.clock.Step(16 * time.Second)
	l.want(audit.NoListener, "10.88.0.2:15008")
	netnstest.Run(t, l.path, "nft", "flush", "ruleset")
	if s := l.want(audit.Bypassed, "no rule of the mesh"); s.Remedy != "restart the pod" {
		t.Errorf("got %+v", s)
	}
	l.noWrites()
}

// TestAmbientRaceRepair: race repair, which deletes broken pods, leaves a pod in ambient mode alone, also without rules.
func TestAmbientRaceRepair(t *testing.T) {
	t.Parallel()
	l := newAmbientFixture(t, redirect.Netlink)
	l.begin(false)
	l.want(audit.Bypassed, "no rule")
	l.waitForStates(0, 1, 0, 0)
	l.noWrites()
	l.untouched(l.path)
}

// TestAmbientExplain: the decision, each rule with its reason, and the ways of packets.
func TestAmbientExplain(t *testing.T) {
	t.Parallel()
	for _, backend := range []redirect.Backend{redirect.Netlink, redirect.Native} {
		t.Run(string(backend), func(t *testing.T) {
			t.Parallel()
			l := newAmbientFixture(t, backend)
			l.begin(true)
			l.want(audit.Captured, "")
			netnstest.Run(t, l.path, "ip", "route", "add", "default", "dev", "eth0")
			explain := func(q *inspect.Question) document.Explanation {
				e, err := l.controller.Explain(t.Context(), auditor.Socket, web, q)
				l.Do(err)
				return e.Explanation
			}
			e := explain(nil)
			if !e.Decision.Captured || e.Decision.Reason != string(sidecar.Ambient) || e.InspectionError != "" {
				t.Errorf("got %+v", e)
			}
			asWanted(t, e)
			for text, q := range map[string]inspect.Question{
				"is redirected to port 15001":                                        {To: netip.MustParseAddrPort("192.0.2.1:80")},
				"is redirected to port 15053":                                        {To: netip.MustParseAddrPort("192.0.2.1:53"), UDP: true},
				"is redirected to port 15006":                                        {Inbound: true, From: netip.MustParseAddr("192.0.2.1"), Port: 8080},
				"comes in unredirected, as in every pod: the node's own connections": {Inbound: true, From: netip.MustParseAddr("169.254.7.127"), Port: 8080},
				"comes in unredirected, as in every pod: no rule takes it":           {Inbound: true, From: netip.MustParseAddr("192.0.2.1"), Port: 15008},
			} {
				if a := explain(&q).Answer; a == nil || !strings.Contains(a.Sentence, text) {
					t.Errorf("%s: got %+v", text, a)
				}
			}
			alone, err := inspect.Alone(t.Context(), l.space(l.path))
			l.Do(err)
			check.Equal(t, alone.State, audit.Captured, "by its rules alone", alone.Status)
			asWanted(t, alone)
		})
	}
}

// asWanted checks that each rule is wanted and has a reason.
func asWanted(t *testing.T, e document.Explanation) {
	t.Helper()
	rules := 0
	for _, c := range e.Chains {
		for _, r := range c.Rules {
			if rules++; r.Op != "" || r.Why == "" {
				t.Errorf("%s %s: %+v", c.Table, c.Chain, r)
			}
		}
	}
	if rules < 18 {
		t.Errorf("%d rules", rules)
	}
}
