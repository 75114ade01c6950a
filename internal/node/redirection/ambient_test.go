package redirection_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/ambient/ambienttest"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// backends are all ways to write an ambient pod's rules.
var backends = []iptables.Variant{byNetlink, byTables, iptables.NFT, iptables.Legacy}

// ambientReference adds the reference's rules and routing.
func (p pod) ambientReference(t *testing.T, v iptables.Variant, s ambient.Spec) {
	t.Helper()
	if v == byTables {
		p.feed(t, ambienttest.Script(s), "nft", "-f", "-")
	}
	for i, option := range []string{"-4", "-6"} {
		if i == 1 && !s.IPv6 {
			break
		}
		if v != byTables {
			p.restore(t, v, families[i], ambienttest.Restore(s, families[i]))
		}
		p.run(t, "ip", option, "rule", "add", "fwmark", "0x111/0xfff", "pref", "32764", "lookup", "100")
		p.run(t, "ip", option, "route", "replace", "local", []string{"0.0.0.0/0", "::/0"}[i], "dev", "lo", "table", "100")
	}
}

// ambientPod returns a pod whose IPv6 is captured, or which has no IPv6 address.
func ambientPod(t *testing.T, s ambient.Spec) pod {
	t.Helper()
	if s.IPv6 {
		return dualPod(t)
	}
	return newPod(t, "10.20.0.2/24")
}

// TestAmbient_ReferenceRules: rules and routing of the reference are the wanted ones, and Apply makes the same. Clean removes them.
func TestAmbient_ReferenceRules(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"ingress", "default, virtual interfaces, DNS, IPv6"} {
		s := ambienttest.Specs()[name]
		for _, v := range backends {
			t.Run(fmt.Sprintf("%s, %s", name, v), func(t *testing.T) {
				t.Parallel()
				theirs, ours := ambientPod(t, s), ambientPod(t, s)
				untouched := ours.everything(t)
				theirs.ambientReference(t, v, s)
				verified(t, theirs.namespace(v), s)
				for i := range 2 {
					r := mustApply(t, ours.namespace(v), s)
					check.Equal(t, len(r.Programs) == 0, i > 0, "no programs in turn", i)
				}
				verified(t, ours.namespace(v), s)
				equal(t, "rules", sortedTables(theirs.everything(t)), sortedTables(ours.everything(t)))
				for _, p := range []pod{theirs, ours} {
					check.OK(t, check.Err(p.namespace(v).Clean(t.Context(), s)))
					equal(t, "cleaned", untouched, p.everything(t))
				}
			})
		}
	}
}

// sortedTables returns a text with its native tables in any order: nft lists them as they were made.
func sortedTables(text string) string {
	tables := strings.Split(text, "table inet ")
	slices.Sort(tables[1:])
	return strings.Join(tables, "table inet ")
}

// TestAmbient_Replaces: whatever rules were there, with foreign ones, the result is that on a fresh pod. The reference leaves table raw
// behind when DNS capture ends, does not notice a change from nft to iptables, and lets foreign rules win that come first.
func TestAmbient_Replaces(t *testing.T) {
	t.Parallel()
	specs := ambienttest.Specs()
	before := map[string]func(*testing.T, pod){
		"sidecar":           func(t *testing.T, p pod) { mustApply(t, p.namespace(byNetlink), dual()) },
		"sidecar by TPROXY": func(t *testing.T, p pod) { mustApply(t, p.namespace(byNetlink), dual(byTPROXY)) },
	}
	for _, name := range []string{"default, IPv6", "ingress, virtual interfaces, DNS, IPv6"} {
		for _, v := range backends {
			before[name+" by "+string(v)] = func(t *testing.T, p pod) { mustApply(t, p.namespace(v), specs[name]) }
		}
	}
	to, untouched := specs["default"], sharedPod(t).everything(t)
	for _, v := range backends[:2] {
		fresh := sharedPod(t)
		mustApply(t, fresh.namespace(v), to)
		want := sortedTables(fresh.everything(t))
		for from, program := range before {
			t.Run(fmt.Sprintf("%s to %s", from, v), func(t *testing.T) {
				t.Parallel()
				p := sharedPod(t)
				program(t, p)
				mustApply(t, p.namespace(v), to)
				verified(t, p.namespace(v), to)
				equal(t, "not as on a fresh pod", want, sortedTables(p.everything(t)))
				check.Equal(t, len(mustApply(t, p.namespace(v), to).Programs), 0, "programs of a second Apply")
				check.OK(t, check.Err(p.namespace(v).Clean(t.Context(), to)))
				equal(t, "cleaned", untouched, p.everything(t))
			})
		}
	}
}

// TestAmbient_ReleasedFromOtherSettings: Clean needs nothing of the configuration that wrote the rules.
func TestAmbient_ReleasedFromOtherSettings(t *testing.T) {
	t.Parallel()
	for _, v := range backends {
		p := dualPod(t)
		untouched := p.everything(t)
		mustApply(t, p.namespace(v), ambienttest.Specs()["default, virtual interfaces, DNS, IPv6"])
		check.OK(t, check.Err(p.namespace("").Clean(t.Context(), ambient.Spec{})))
		equal(t, string(v), untouched, p.everything(t))
	}
}

// TestAmbient_EmptyChainIsWanted: a chain of ours without rules is no leftover, so that rules like a sidecar's stay another program's.
func TestAmbient_EmptyChainIsWanted(t *testing.T) {
	t.Parallel()
	s := ambienttest.Specs()["ingress"]
	p := ambientPod(t, s)
	mustApply(t, p.namespace(byNetlink), s)
	p.iptables(t, iptables.NFT, ruleset.IPv4, "-t nat -A OUTPUT -p udp --dport 53 -j REDIRECT --to-ports 15053")
	before := p.everything(t)
	check.Equal(t, len(mustApply(t, p.namespace(byNetlink), s).Programs), 0, "programs")
	equal(t, "with a foreign rule", before, p.everything(t))
}

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

// TestWalk_AmbientAgreesWithTheKernel compares the walk with real packets, of which ztunnel sends some, beside foreign rules.
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
				for range 30 {
					foreign := w.xtables("nft")
					if strings.HasPrefix(foreign.text, "*nat") && !strings.Contains(foreign.text, " --to") { // the others also change answers
						t.Log(foreign, foreign.install(t.Context(), w.Path()))
					}
				}
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

var ztunnel actor = func(s fixture) labtest.Actor { return s.Ztunnel() }

// throughTunnel expects the app behind the tunnel, on its own port, with the client's address.
var throughTunnel outcome = func(s fixture) ([]labtest.Hop, error) {
	hops, err := by(labtest.ByTunnel, labtest.ByApp).seenFrom(labtest.Far)(s)
	hops[1].Dst = labtest.Pod.Port(s.family, 80)
	return hops, err
}

// inMesh holds for every captured pod.
func inMesh() []packet {
	return []packet{
		send(app, tcp, 80, toOutbound, labtest.Peer, labtest.Side),
		send(app, tcp, 443, toOutbound, labtest.Far),
		send(app, tcp, 80, by(labtest.ByOutbound, labtest.ByPeer).seenFrom(labtest.Pod), labtest.Peer).passedOn(),
		send(root, tcp, 15008, toOutbound, labtest.Peer),
		send(app, udp, 5000, toPeer, labtest.Peer),
		send(app, ping, 0, pong, labtest.Far),
		send(app, tcp, 80, toApp, labtest.Loopback, labtest.Pod, labtest.PodSide),
		send(app, udp, 5000, toApp, labtest.Loopback, labtest.Pod),

		send(ztunnel, tcp, 80, toPeer, labtest.Peer),
		send(ztunnel, tcp, 53, toPeer, labtest.Resolver),
		send(ztunnel, udp, 53, toPeer, labtest.Resolver),
		send(ztunnel, tcp, 80, toApp, labtest.Pod, labtest.Loopback),

		send(client, udp, 5000, toApp, labtest.Pod),
		send(client, ping, 0, pong, labtest.Pod),
		send(client, tcp, 15008, toTunnel, labtest.Pod),
		send(client, tcp, 15008, throughTunnel, labtest.Pod).from(labtest.Far).passedOn(),
		send(client, tcp, 80, toApp, labtest.Pod, labtest.PodSide).from(labtest.Probe),
	}
}

// ambientCases are the configurations with their packets.
func ambientCases() []struct {
	name    string
	set     func(*ambient.Spec)
	packets []packet
} {
	captured := []packet{
		send(client, tcp, 80, toInbound, labtest.Pod, labtest.PodSide),
		send(client, tcp, 15001, toInbound, labtest.Pod),
		send(client, tcp, 80, by(labtest.ByInbound, labtest.ByApp).seenFrom(labtest.Far), labtest.Pod).from(labtest.Far).passedOn(),
		send(guest, tcp, 80, toInbound, labtest.Far),
	}
	resolved := []packet{send(app, udp, 53, toPeer, labtest.Resolver), send(app, tcp, 53, toOutbound, labtest.Resolver)}
	return []struct {
		name    string
		set     func(*ambient.Spec)
		packets []packet
	}{
		{"default", func(*ambient.Spec) {}, slices.Concat(captured, resolved)},
		{"DNS", func(s *ambient.Spec) { s.DNSCapture = true }, slices.Concat(captured, []packet{
			send(app, udp, 53, toAgent, labtest.Resolver),
			send(app, tcp, 53, toAgent, labtest.Resolver),
			send(app, udp, 53, by(labtest.ByDNS, labtest.ByPeer), labtest.Resolver).passedOn(),
			send(app, tcp, 53, by(labtest.ByDNS, labtest.ByPeer), labtest.Resolver).passedOn(),
			// The app and ztunnel use the same port, one after the other.
			send(app, udp, 53, toAgent, labtest.Resolver).fromPort(4000),
			send(ztunnel, udp, 53, toPeer, labtest.Resolver).fromPort(4000),
			send(ztunnel, udp, 53, toPeer, labtest.Resolver).fromPort(4001),
			send(app, udp, 53, toAgent, labtest.Resolver).fromPort(4001),
		})},
		{"ingress", func(s *ambient.Spec) { s.Ingress = true }, slices.Concat(resolved, []packet{
			send(client, tcp, 80, toApp, labtest.Pod, labtest.PodSide), send(guest, tcp, 80, toPeer, labtest.Far),
		})},
		{"virtual interface", func(s *ambient.Spec) { s.Interfaces = []string{"vm0"} }, slices.Concat(captured[:3], resolved, []packet{
			send(guest, tcp, 80, toOutbound, labtest.Far),
		})},
	}
}

// TestPackets_Ambient sends real packets in a pod with two ztunnels, as during its update.
func TestPackets_Ambient(t *testing.T) {
	t.Parallel()
	for _, v := range []iptables.Variant{byNetlink, byTables} {
		for _, c := range ambientCases() {
			t.Run(string(v)+", "+c.name, func(t *testing.T) {
				t.Parallel()
				s := fixture{Fixture: labtest.New(t, families...)}
				for range 2 {
					s.StartZtunnel(t)
				}
				spec := ambient.Spec{Config: ambient.DefaultConfig()}
				spec.IPv6 = true
				c.set(&spec)
				n := namespaceOf(s.Fixture, v)
				mustApply(t, n, spec)
				s.sendAll(t, v, append(inMesh(), c.packets...))
				check.OK(t, check.Err(n.Clean(t.Context(), spec)))
				s.sendAll(t, v, []packet{
					send(app, tcp, 80, toPeer, labtest.Peer), send(app, udp, 53, toPeer, labtest.Resolver), send(client, tcp, 80, toApp, labtest.Pod),
				})
			})
		}
	}
}

// TestPackets_AmbientWithoutIPv6: IPv6 runs past the mesh, except what the native tables' rules without an address capture.
func TestPackets_AmbientWithoutIPv6(t *testing.T) {
	t.Parallel()
	for _, v := range []iptables.Variant{byNetlink, byTables} {
		s := fixture{Fixture: labtest.New(t, families...)}
		s.StartZtunnel(t)
		spec := ambient.Spec{Config: ambient.DefaultConfig(), Interfaces: []string{"vm0"}}
		spec.DNSCapture = true
		mustApply(t, namespaceOf(s.Fixture, v), spec)
		dns, ofGuest := perFamily(toAgent, toPeer), perFamily(toOutbound, toPeer)
		if v == byTables {
			dns, ofGuest = toAgent, toOutbound
		}
		s.sendAll(t, v, []packet{
			send(app, tcp, 80, perFamily(toOutbound, toPeer), labtest.Peer),
			send(app, udp, 53, dns, labtest.Resolver),
			send(app, tcp, 53, perFamily(toAgent, toPeer), labtest.Resolver),
			send(client, tcp, 80, perFamily(toInbound, toApp), labtest.Pod),
			send(guest, tcp, 80, ofGuest, labtest.Far),
		})
	}
}

// TestPackets_AmbientBehindForeignRules: another program's rules in the same chains come after ours, whoever was first.
func TestPackets_AmbientBehindForeignRules(t *testing.T) {
	t.Parallel()
	s := fixture{Fixture: labtest.New(t, families...)}
	s.StartZtunnel(t)
	p := pod(s.Path())
	accept := func() {
		for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
			p.iptables(t, iptables.NFT, f, "-t nat -I OUTPUT -p tcp -j ACCEPT", "-t nat -I PREROUTING -p tcp -j ACCEPT")
		}
	}
	spec := ambient.Spec{Config: ambient.DefaultConfig()}
	spec.IPv6 = true
	accept()
	for range 2 {
		mustApply(t, namespaceOf(s.Fixture, byNetlink), spec)
		s.sendAll(t, byNetlink, []packet{send(app, tcp, 80, toOutbound, labtest.Peer), send(client, tcp, 80, toInbound, labtest.Pod)})
		accept() // ahead of ours: the next Apply puts it behind
	}
}
