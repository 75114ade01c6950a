package redirection_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ambient/ambienttest"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestAudit_AmbientAsWanted: no deviation is reported in a captured pod, also with rules of others that take none of its packets.
func TestAudit_AmbientAsWanted(t *testing.T) {
	t.Parallel()
	for name, s := range ambienttest.Specs() {
		for _, v := range []iptables.Variant{byNetlink, byTables} {
			p := ambientPod(t, s)
			p.run(t, "ip", "link", "set", "eth0", "up")
			mustApply(t, p.namespace(v), s)
			for _, foreign := range []string{
				"", "table inet other { chain input { type filter hook input priority 0; tcp dport 8 drop; }\n}",
				"table inet asleep { flags dormant; chain input { type filter hook input priority 0; policy drop; }\n}",
			} {
				p.feed(t, foreign, "nft", "-f", "-")
				r, err := p.namespace(v).Audit(t.Context(), s)
				check.OK(t, err)
				if len(r.Ways) > 0 || !r.Clean() {
					t.Errorf("%s by %s: %v %v %v", name, v, r.Ways, r.Diffs, r.Routing)
				}
			}
		}
	}
}

// TestAudit_AmbientRulesTaken: a rule that takes some of the pod's packets is reported with its packets.
func TestAudit_AmbientRulesTaken(t *testing.T) {
	t.Parallel()
	const firewall = "table inet o { chain c { type filter hook %s priority 0; %s; }\n}"
	const ahead = "table inet o { chain c { type nat hook %s priority -150; %s; }\n}"
	for _, tt := range []struct{ name, iptables, nft, want string }{
		{"an accept ahead", "-t nat -I OUTPUT -p tcp -j ACCEPT", "", "the app's outbound TCP connections go out unredirected"},
		{"an accept for incoming", "-t nat -I PREROUTING -p tcp -j ACCEPT", "", "inbound TCP connections come in unredirected"},
		{"DNS taken", "-t nat -I OUTPUT -p udp --dport 53 -j ACCEPT", "", "the app's DNS queries go out unredirected"},
		{"another redirection", "", fmt.Sprintf(ahead, "output", "tcp dport 80 redirect to :9"), "the app's outbound TCP connections that it matches are redirected to port 9"},
		{"tunnels dropped", "", fmt.Sprintf(firewall, "input", "tcp dport 15008 drop"), "inbound tunnels (HBONE) are dropped"},
		{"probes dropped", "", fmt.Sprintf(firewall, "input", "ip saddr 169.254.7.127 drop"), "the node's probes are dropped"},
		{"the proxy's answers dropped", "", fmt.Sprintf(firewall, "output", "meta mark 0x539 drop"), "the app's outbound TCP connections fail"},
		{"the proxy's connections dropped", "", fmt.Sprintf(firewall, "output", "meta mark 0x539 ct state new drop"), "the proxy's outbound TCP connections are dropped"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := ambienttest.Specs()["default, DNS, IPv6"]
			p := ambientPod(t, s)
			p.run(t, "ip", "link", "set", "eth0", "up")
			mustApply(t, p.namespace(byNetlink), s)
			if tt.iptables != "" {
				p.iptables(t, iptables.NFT, ruleset.IPv4, tt.iptables)
			}
			p.feed(t, tt.nft, "nft", "-f", "-")
			r, err := p.namespace(byNetlink).Audit(t.Context(), s)
			check.OK(t, err)
			var all []string
			for _, d := range r.Ways {
				all = append(all, d.String())
			}
			if text := strings.Join(all, "\n"); !strings.Contains(text, tt.want) || tt.want == "" && text != "" {
				t.Errorf("want %q in:\n%s", tt.want, text)
			}
		})
	}
}

// TestLive_AmbientReasons: a walk explains why a packet passes.
func TestLive_AmbientReasons(t *testing.T) {
	t.Parallel()
	in := walk.Packet{In: "eth0", Protocol: ruleset.TCP, Src: netip.MustParseAddrPort("10.9.9.9:40000"), Dst: netip.MustParseAddrPort("10.20.0.2:80")}
	out := walk.Packet{Outgoing: true, Out: "eth0", Protocol: ruleset.TCP, Src: netip.MustParseAddrPort("10.20.0.2:40000"), Dst: netip.MustParseAddrPort("10.9.9.9:80")}
	marked, probe := out, in
	marked.Mark, probe.Src = 0x539, netip.MustParseAddrPort("169.254.7.127:1")
	for _, tt := range []struct {
		spec   string
		packet walk.Packet
		want   string
	}{
		{"default", out, "is redirected to port 15001: all other TCP goes to ztunnel's outbound listener, except ztunnel's own"},
		{"default", in, "is redirected to port 15006: incoming TCP outside of a tunnel goes to ztunnel's inbound listener"},
		{"ingress", in, "comes in unredirected, because bypass-inbound-capture=true (annotation ambient.istio.io/bypass-inbound-capture)"},
		{"default", probe, "comes in unredirected, as in every pod: the node's own connections, such as the kubelet's probes, reach the app directly"},
		{"default", marked, "goes out unredirected, as in every pod: no rule takes it"},
	} {
		s := ambienttest.Specs()[tt.spec]
		p := ambientPod(t, s)
		mustApply(t, p.namespace(byNetlink), s)
		live, err := p.namespace(byNetlink).Live(t.Context(), s)
		check.OK(t, err)
		check.Equal(t, live.Walk(tt.packet).Summary, tt.want)
	}
}

// TestWalk_AmbientAgreesWithTheKernel compares the walk with real packets, of which ztunnel sends some.
func TestWalk_AmbientAgreesWithTheKernel(t *testing.T) {
	t.Parallel()
	for i, v := range []iptables.Variant{byNetlink, byTables} {
		for _, name := range []string{"default, DNS, IPv6", "ingress, virtual interfaces, IPv6"} {
			s := ambienttest.Specs()[name]
			t.Run(name+", "+string(v), func(t *testing.T) {
				t.Parallel()
				w := walked{Rand: rand.New(rand.NewPCG(*walkSeed, uint64(i))), tb: t}
				w.fixture = fixture{Fixture: labtest.New(t, families...), spec: redirect.Default()}
				w.StartZtunnel(t)
				if len(s.Interfaces) > 0 {
					s.Interfaces = []string{"vm0"}
				}
				mustApply(t, namespaceOf(w.Fixture, v), s)
				live, err := namespaceOf(w.Fixture, v).Live(t.Context(), s)
				check.OK(t, err)
				for _, w.family = range families {
					for range walkPackets / 2 {
						q, p := w.packet()
						self := labtest.Passthrough.Addr(ruleset.IPv6)
						if q.To.Port() == 15020 || q.To.Addr() == self || q.Source == self { // a sidecar's
							continue
						}
						if p.Outgoing && w.IntN(4) == 0 {
							q.From, p.Mark = w.Ztunnel(), w.Ztunnel().Mark
						}
						if r := live.Walk(p); r.Verdict != walk.CannotTell {
							w.agree(t, q, r, s)
						}
					}
				}
			})
		}
	}
}
