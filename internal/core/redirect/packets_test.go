package redirect_test

import (
	"maps"
	"net/netip"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
)

// book has the addresses of the questions, in each family.
var book = map[string][2]string{
	"pod":      {"10.0.0.5", "fd00::5"},
	"lo":       {"127.0.0.1", "::1"},
	"six":      {"127.0.0.6", "::6"}, // where Envoy calls the app from
	"service":  {"10.0.0.7", "fd00::7"},
	"client":   {"10.0.0.9", "fd00::9"},
	"resolver": {"10.0.0.53", "fd00::53"},
	"outside":  {"192.0.2.9", "2001:db8::9"},
}

func address(f ruleset.Family, name string) netip.Addr {
	if f == ruleset.IPv4 {
		return netip.MustParseAddr(book[name][0])
	}
	return netip.MustParseAddr(book[name][1])
}

// sender is who sends a packet.
type sender struct{ uid, gid uint32 }

var (
	app       = sender{1000, 1000}
	proxy     = sender{1337, 1337}
	rootProxy = sender{0, 1337} // as the injector makes it for TPROXY
)

// packet makes a packet of a family.
type packet func(ruleset.Family) rulesettest.Packet

type change func(ruleset.Family, *rulesettest.Packet)

// sends is a packet of a process of the pod. What goes to an address of the pod itself goes by lo, from that address but
// for the rest of 127/8, which is called from 127.0.0.1.
func sends(who sender, proto rulesettest.Proto, to string, port uint16, changes ...change) packet {
	return func(f ruleset.Family) rulesettest.Packet {
		p := rulesettest.Packet{
			Hook: rulesettest.Outgoing, Out: "eth0", Proto: proto, UID: who.uid, GID: who.gid,
			Src: address(f, "pod"), Sport: 40000, Dst: address(f, to), Dport: port,
		}
		if to == "pod" || to == "lo" || to == "six" {
			p.Out, p.Src = "lo", p.Dst
		}
		if to == "six" && f == ruleset.IPv4 {
			p.Src = address(f, "lo")
		}
		return changed(f, p, changes)
	}
}

// arrives is a packet from outside for the pod.
func arrives(proto rulesettest.Proto, from string, port uint16, changes ...change) packet {
	return func(f ruleset.Family) rulesettest.Packet {
		return changed(f, rulesettest.Packet{
			Hook: rulesettest.Incoming, In: "eth0", Proto: proto,
			Src: address(f, from), Sport: 40000, Dst: address(f, "pod"), Dport: port,
		}, changes)
	}
}

func changed(f ruleset.Family, p rulesettest.Packet, changes []change) rulesettest.Packet {
	if p.Proto == rulesettest.ICMP {
		p.Sport, p.Dport = 0, 0
	}
	for _, c := range changes {
		c(f, &p)
	}
	return p
}

// by sends or receives it by another interface.
func by(name string) change {
	return func(_ ruleset.Family, p *rulesettest.Packet) {
		if p.Hook == rulesettest.Outgoing {
			p.Out = name
		} else {
			p.In = name
		}
	}
}

func from(name string) change {
	return func(f ruleset.Family, p *rulesettest.Packet) { p.Src = address(f, name) }
}

func to(name string) change {
	return func(f ruleset.Family, p *rulesettest.Packet) { p.Dst = address(f, name) }
}

func sport(n uint16) change { return func(_ ruleset.Family, p *rulesettest.Packet) { p.Sport = n } }

func marked(n uint32) change { return func(_ ruleset.Family, p *rulesettest.Packet) { p.Mark = n } }

func connmarked(n uint32) change {
	return func(_ ruleset.Family, p *rulesettest.Packet) { p.Connmark = n }
}

func state(s rulesettest.State) change {
	return func(_ ruleset.Family, p *rulesettest.Packet) { p.State = s }
}

func noSocket(_ ruleset.Family, p *rulesettest.Packet) { p.NoSocket = true }

const (
	tcp  = rulesettest.TCP
	udp  = rulesettest.UDP
	icmp = rulesettest.ICMP
)

// question is one requirement.
type question struct {
	name string
	p    packet
	want string
}

// packetCase asks questions of the rules of a Spec, in both families unless it says in which.
type packetCase struct {
	name  string
	w     written
	tweak func(*redirect.Spec)
	only  []ruleset.Family
	ask   []question
}

func (c packetCase) run(t *testing.T) {
	t.Run(c.name, func(t *testing.T) {
		spec := c.w.spec(t)
		if c.tweak != nil {
			c.tweak(&spec)
		}
		in := c.only
		if in == nil {
			in = families
		}
		native := redirect.NativeRules(spec, redirect.Families{IPv6: redirect.Captured})
		for _, f := range in {
			put(t, redirect.Rules(spec, f), f, c.ask)
			put(t, native, f, c.ask)
		}
	})
}

// put puts questions about packets of a family to rules.
func put(t *testing.T, set ruleset.Set, f ruleset.Family, questions []question) {
	t.Helper()
	rules, err := rulesettest.Compile(set)
	if err != nil {
		t.Fatalf("%s: %v", set.Family, err)
	}
	for _, q := range questions {
		v, err := rules.Trace(q.p(f))
		if got := v.String(); err != nil || got != q.want {
			t.Errorf("%s in %s of %s: the packet was %s (%v), want %s; it met\n%s", q.name, f, set.Family, got, err, q.want, v.Explain())
		}
	}
}

// Answers that come often.
const (
	untouched  = "accepted"
	toOutbound = "redirected to 15001"
	toInbound  = "redirected to 15006"
	toDNS      = "redirected to 15053, zone 2"
)

// TestPackets asks what no packet of the redirection tests can show on a real kernel, which are asked who is captured: states of
// connections, zones, other listeners, and settings that concern one family.
func TestPackets(t *testing.T) {
	for _, test := range []packetCase{
		{
			name: "a pod that says nothing",
			ask: []question{
				{"app → any port of a service, even the mesh's own, is captured", sends(app, tcp, "service", 15008), toOutbound},
				{"app → service:15020 stays free", sends(app, tcp, "service", 15020), untouched},
				{"app → service:15020 by UDP stays free", sends(app, udp, "service", 15020), untouched},
				{"ICMP is never captured", sends(app, icmp, "service", 0), untouched},
				{"a connection that is under way is left as it was begun", sends(app, tcp, "service", 80, state(rulesettest.Established)), untouched},
				{"proxy with another group is known by its user", sends(sender{1337, 5}, tcp, "service", 80), untouched},
				{"app → 127.0.0.6 goes directly", sends(app, tcp, "six", 8080), untouched},
				{"proxy → its own pod by HBONE goes directly", sends(proxy, tcp, "pod", 15008), untouched},
				{"proxy → app from 127.0.0.6 is the end of an inbound connection", sends(proxy, tcp, "pod", 8080, from("six")), untouched},
				{"app's answer to it is no new connection", sends(app, tcp, "six", 40000, from("pod"), sport(8080), state(rulesettest.Established)), untouched},
				{"the validation's probe comes back to the inbound listener", sends(proxy, tcp, "six", redirect.ProbePort, from("lo")), toInbound},
				{"a ping is untouched", arrives(icmp, "client", 0), untouched},
				{"an answer to the pod is untouched", arrives(tcp, "service", 40000, state(rulesettest.Established)), untouched},
				{"an invalid packet is let pass", arrives(tcp, "client", 8080, state(rulesettest.Invalid)), untouched},
				{"what arrives by lo was decided about on its way out", arrives(tcp, "pod", 8080, by("lo")), untouched},
				{"an ICMP error of the kernel is untouched", sends(sender{}, icmp, "client", 0, noSocket), untouched},
			},
		},
		{
			name: "the proxy is known by its group alone",
			ask: []question{
				// The reference has it so: "everybody but the user on lo" comes before the group's rule.
				{"it calls its own pod directly", sends(rootProxy, tcp, "pod", 8080), untouched},
			},
		},
		{
			name: "other listeners", w: written{
				redirect.FieldOutboundPort: "15101", redirect.FieldInboundPort: "15106", redirect.FieldTunnelPort: "15108",
			},
			ask: []question{
				{"app → service goes to the outbound one", sends(app, tcp, "service", 80), "redirected to 15101"},
				{"client → pod goes to the inbound one", arrives(tcp, "client", 80), "redirected to 15106"},
				{"proxy → its own pod goes to the inbound one", sends(proxy, tcp, "pod", 80), "redirected to 15106"},
				{"the tunnel port is free", arrives(tcp, "client", 15108), untouched},
				{"proxy → its own pod's tunnel port is free", sends(proxy, tcp, "pod", 15108), untouched},
				{"the usual tunnel port is a port like any other", arrives(tcp, "client", 15008), "redirected to 15106"},
			},
		},

		{
			name: "outbound networks of IPv4 only", w: written{redirect.FieldOutbound: "10.0.0.0/8"}, only: families[1:],
			ask: []question{
				{"nothing outbound is captured", sends(app, tcp, "service", 80), untouched},
				{"inbound is captured", arrives(tcp, "client", 80), toInbound},
			},
		},
		{
			name: "all of IPv4", w: written{redirect.FieldOutbound: "0.0.0.0/0"}, only: families[:1],
			ask: []question{
				{"app → outside is captured", sends(app, tcp, "outside", 80), toOutbound},
				{"app → localhost is not", sends(app, tcp, "lo", 80), untouched},
			},
		},
		{
			name: "another address of 127/8 when loopback is captured", w: written{redirect.FieldOutbound: "127.0.0.0/8"}, only: families[:1],
			ask: []question{{"it is captured", sends(app, tcp, "six", 8080), toOutbound}},
		},
		{
			name: "all of 127/8 counts as the pod itself", w: written{redirect.FieldLoopback: "127.0.0.0/8"}, only: families[:1],
			ask: []question{
				{"proxy → 127.0.0.6 goes directly", sends(proxy, tcp, "six", 8080), untouched},
				// A consequence of that setting, in the reference as well: the validation cannot succeed.
				{"the validation's probe does not come back", sends(proxy, tcp, "six", redirect.ProbePort, from("lo")), untouched},
			},
		},

		{
			name: "excluded outbound ports", w: written{redirect.FieldOutboundPortsExclude: "3306,53"},
			ask: []question{
				{"TCP to one is untouched", sends(app, tcp, "service", 3306), untouched},
				{"UDP to one is untouched", sends(app, udp, "resolver", 53), untouched},
				{"others are captured", sends(app, tcp, "service", 3307), toOutbound},
				{"15020 was a default and is captured now", sends(app, tcp, "service", 15020), toOutbound},
				{"proxy → its own pod's excluded port goes directly", sends(proxy, tcp, "pod", 3306), untouched},
			},
		},
		{
			name: "a port both included and excluded", w: written{redirect.FieldOutboundPorts: "80", redirect.FieldOutboundPortsExclude: "80"},
			ask: []question{{"exclusion wins", sends(app, tcp, "service", 80), untouched}},
		},

		{
			name: "some inbound ports", w: written{redirect.FieldInbound: "8080,15008,9090", redirect.FieldInboundExclude: "8080"},
			ask: []question{
				{"one is captured; the excluded ports count only with *", arrives(tcp, "client", 8080), toInbound},
				{"the last one is captured", arrives(tcp, "client", 9090), toInbound},
				{"another is not", arrives(tcp, "client", 8081), untouched},
				{"UDP to it is not", arrives(udp, "client", 8080), untouched},
				{"the tunnel port never is, even if listed", arrives(tcp, "client", 15008), untouched},
			},
		},

		{
			name: "virtual machines and no network", w: written{redirect.FieldRerouteInterfaces: "vm0", redirect.FieldOutbound: ""},
			ask: []question{{"nothing of theirs is captured", arrives(tcp, "client", 80, by("vm0"), to("outside")), untouched}},
		},
		{
			name: "a virtual machine's interface that is excluded as well", w: written{
				redirect.FieldRerouteInterfaces: "vm0", redirect.FieldExcludeInterfaces: "vm0",
			},
			ask: []question{{"the virtual machine wins", arrives(tcp, "client", 80, by("vm0"), to("outside")), toOutbound}},
		},

		{
			name: "DNS is captured", tweak: func(s *redirect.Spec) { s.DNS = redirect.DNSAll },
			ask: []question{
				{"app → resolver:53 by UDP goes to the agent", sends(app, udp, "resolver", 53), toDNS},
				{"agent → resolver:53 by UDP is untouched, in its own zone", sends(proxy, udp, "resolver", 53), "accepted, zone 1"},
				{"agent → resolver:53 by TCP is untouched", sends(proxy, tcp, "resolver", 53), untouched},
				{"agent with another user is known by its group", sends(rootProxy, udp, "resolver", 53), "accepted, zone 1"},
				{"the resolver's answer comes in the agent's zone", arrives(udp, "resolver", 40000, sport(53), state(rulesettest.Established)), "accepted, zone 1"},
				{
					"the agent's answer to the app is in the app's zone",
					sends(proxy, udp, "pod", 40000, from("lo"), sport(15053), state(rulesettest.Established)), "accepted, zone 2",
				},
				{"proxy → its own pod's port 53 goes directly", sends(proxy, tcp, "pod", 53), untouched},
				// The reference forgot the exception of port 53 in the group's rule.
				{"proxy known by its group → its own pod's port 53 goes through the inbound listener", sends(rootProxy, tcp, "pod", 53), toInbound},
				{"proxy → its own pod's tunnel port goes directly", sends(proxy, tcp, "pod", 15008), untouched},
				{"app → service by UDP is untouched", sends(app, udp, "service", 443), untouched},
			},
		},
		{
			name: "DNS is captured and no network is", w: written{redirect.FieldOutbound: ""},
			tweak: func(s *redirect.Spec) { s.DNS = redirect.DNSAll },
			ask:   []question{{"queries go to the agent", sends(app, udp, "resolver", 53), toDNS}},
		},
		{
			name: "DNS is captured by server", tweak: func(s *redirect.Spec) { s.DNS, s.DNSServers = redirect.DNSServers, servers[3] },
			ask: []question{
				{"agent → the server is untouched", sends(proxy, udp, "resolver", 53), "accepted, zone 1"},
				{"the server's answer comes in the agent's zone", arrives(udp, "resolver", 40000, sport(53), state(rulesettest.Established)), "accepted, zone 1"},
				{"another server's answer does not", arrives(udp, "outside", 40000, sport(53), state(rulesettest.Established)), untouched},
			},
		},
		{
			name: "DNS is captured by a server of IPv4 only", only: families[1:],
			tweak: func(s *redirect.Spec) { s.DNS, s.DNSServers = redirect.DNSServers, servers[1] },
			ask: []question{
				{"queries by UDP are untouched", sends(app, udp, "resolver", 53), untouched},
				{"queries by TCP are TCP", sends(app, tcp, "resolver", 53), toOutbound},
				{"the agent's queries have their zone", sends(proxy, udp, "resolver", 53), "accepted, zone 1"},
				{"proxy → its own pod's port 53 goes directly", sends(proxy, tcp, "pod", 53), untouched},
			},
		},
		{
			name: "DNS is captured by server and there is none", tweak: func(s *redirect.Spec) { s.DNS = redirect.DNSServers },
			ask: []question{
				{"queries by UDP are untouched", sends(app, udp, "resolver", 53), untouched},
				{"the agent has no zone", sends(proxy, udp, "resolver", 53), untouched},
				{"proxy → its own pod's port 53 is a port like any other", sends(proxy, tcp, "pod", 53), toInbound},
			},
		},

		{
			name: "invalid packets are dropped", tweak: func(s *redirect.Spec) { s.DropInvalid = true },
			ask: []question{
				{"what fits no connection is dropped", arrives(tcp, "client", 8080, state(rulesettest.Invalid)), "dropped"},
				{"so it is by UDP", arrives(udp, "client", 8080, state(rulesettest.Invalid)), "dropped"},
				{"a new connection is captured", arrives(tcp, "client", 8080), toInbound},
				{"a known one goes on", arrives(tcp, "client", 8080, state(rulesettest.Established)), untouched},
				{"what the pod sends is not looked at", sends(app, tcp, "client", 80, state(rulesettest.Invalid)), untouched},
			},
		},
	} {
		test.run(t)
	}
}

// TestPacketsUnderTPROXY asks about what is different when both addresses are kept.
func TestPacketsUnderTPROXY(t *testing.T) {
	const (
		handed = "handed to 15006, mark 1337"
		known  = "accepted, mark 1337"
	)
	for _, test := range []packetCase{
		{
			name: "a pod that says nothing else",
			ask: []question{
				{"client → pod:8080 is handed to the inbound listener", arrives(tcp, "client", 8080), handed},
				{"the connection's later packets are delivered by their mark", arrives(tcp, "client", 8080, state(rulesettest.Established)), known},
				// The reference exempts the tunnel port in the nat table only, where nothing arrives under TPROXY.
				{"client → pod:15008 is handed over like any other", arrives(tcp, "client", 15008), handed},
				{"a ping is untouched", arrives(icmp, "client", 0), untouched},
				{"app's answer on a connection without mark gets none", sends(app, tcp, "client", 40000, sport(8080), state(rulesettest.Established)), untouched},
				{"proxy → app from 127.0.0.6 arrives by lo", arrives(tcp, "six", 8080, by("lo")), untouched},
				{"proxy → localhost is not marked", sends(proxy, tcp, "lo", 8080), untouched},
			},
		},
		{
			name: "another mark", w: written{redirect.FieldMark: "4000"},
			ask: []question{
				{"app's answer gets it back", sends(app, tcp, "client", 40000, connmarked(4000), state(rulesettest.Established)), "accepted, mark 4000"},
				{"the usual mark means nothing", sends(app, tcp, "client", 40000, connmarked(1337), state(rulesettest.Established)), untouched},
			},
		},
		{
			name: "another inbound listener", w: written{redirect.FieldInboundPort: "15106"},
			ask: []question{{"client → pod is handed to it", arrives(tcp, "client", 8080), "handed to 15106, mark 1337"}},
		},
	} {
		w := written{redirect.FieldMode: "TPROXY"}
		maps.Copy(w, test.w)
		test.w = w
		test.run(t)
	}
}

// TestAConnectionUnderTPROXY follows one connection packet by packet, each with the marks the one before it left.
func TestAConnectionUnderTPROXY(t *testing.T) {
	for _, f := range families {
		t.Run(f.String(), func(t *testing.T) {
			rules, err := rulesettest.Compile(redirect.Rules(written{redirect.FieldMode: "TPROXY"}.spec(t), f))
			if err != nil {
				t.Fatal(err)
			}
			follow := func(what string, p rulesettest.Packet, want string) rulesettest.Packet {
				t.Helper()
				v, err := rules.Trace(p)
				if err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				if v.String() != want {
					t.Errorf("%s: the packet was %s, want %s; it met\n%s", what, v, want, v.Explain())
				}
				return v.Packet
			}
			follow("client → pod:8080", arrives(tcp, "client", 8080)(f), "handed to 15006, mark 1337")
			onLo := follow("proxy → app as the client", sends(rootProxy, tcp, "pod", 8080, from("client"), marked(1337))(f), "accepted, mark 1337").Loop()
			atApp := follow("the same by lo", onLo, "accepted, mark 1337")
			if atApp.Connmark != 1337 {
				t.Errorf("the connection has mark %d, want 1337", atApp.Connmark)
			}
			answer := sends(app, tcp, "client", onLo.Sport, sport(8080), connmarked(atApp.Connmark), state(rulesettest.Established))(f)
			follow("app → client", answer, "accepted, mark 1337")

			self := follow("proxy → its own pod", sends(proxy, tcp, "pod", 8080)(f), "redirected to 15006, mark 1338").Loop()
			follow("the same by lo, at the inbound listener", self, "accepted, mark 1338")
			direct := follow("app → its own pod", sends(app, tcp, "pod", 8080)(f), untouched).Loop()
			follow("the same by lo, at the app", direct, untouched)
			byGroup := follow("proxy running as root → its own pod", sends(rootProxy, tcp, "pod", 8080)(f), "accepted, mark 1338").Loop()
			follow("the same by lo, handed to the inbound listener", byGroup, "handed to 15006, mark 1337")
		})
	}
}
