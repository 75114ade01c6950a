package redirection_test

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
)

// The packet tests: rules are applied to a pod, real actors send real packets, and each answer names its sender. The tests
// do not read the rules' text, so that they can judge a change of it.

// fixture is a pod with a proxy.
type fixture struct {
	*labtest.Fixture
	spec   redirect.Spec
	family ruleset.Family
}

// newFixture makes a pod with a proxy for the Spec, which is not yet applied.
func newFixture(t *testing.T, spec redirect.Spec, families ...ruleset.Family) fixture {
	t.Helper()
	s := fixture{Fixture: labtest.New(t, families...), spec: spec}
	s.StartProxy(t, s.proxy(), spec.Mode)
	return s
}

// dualStack returns the default Spec in a mode, for both families.
func dualStack(mode redirect.Mode) redirect.Spec {
	return dual(func(s *redirect.Spec) { s.Mode = mode })
}

// actor returns an Actor that opens the sockets in a fixture.
type actor func(fixture) labtest.Actor

var (
	app    actor = func(s fixture) labtest.Actor { return s.App() }
	client actor = func(s fixture) labtest.Actor { return s.Peer() }
	guest  actor = func(s fixture) labtest.Actor { return s.Guest() }
	root   actor = func(s fixture) labtest.Actor { return s.Root() }
	proxy  actor = func(s fixture) labtest.Actor { return s.proxy() }
)

// member returns the app in another group.
func member(gid int) actor { return user(labtest.AppUID, gid) }

// user returns a process of the pod with a user and a group.
func user(uid, gid int) actor {
	return func(s fixture) labtest.Actor {
		return labtest.Actor{Name: "process", Namespace: s.Path(), UID: uid, GID: gid}
	}
}

// proxy has the first user and group of the Spec; under TPROXY it is root.
func (s fixture) proxy() labtest.Actor {
	a := s.Proxy(s.spec.Mode)
	if a.GID = int(s.spec.GIDs[0]); s.spec.Mode == redirect.Redirect {
		a.UID = int(s.spec.UIDs[0])
	}
	return a
}

// outcome returns the expected answers, or the expected error.
type outcome func(fixture) ([]labtest.Hop, error)

// by expects answers with these names. Unless the outcome says otherwise, the original destination must be the address of
// the request, and the source the sender's own.
func by(names ...string) outcome {
	return func(fixture) (hops []labtest.Hop, _ error) {
		for _, name := range names {
			hops = append(hops, labtest.Hop{By: name})
		}
		return hops, nil
	}
}

// seenFrom expects that the last answer has the place as the source of the request.
func (o outcome) seenFrom(p labtest.Place) outcome {
	return func(s fixture) ([]labtest.Hop, error) {
		hops, err := o(s)
		hops[len(hops)-1].From = p.Port(s.family, 0)
		return hops, err
	}
}

// modes chooses between REDIRECT and TPROXY.
func modes(redirected, tproxied outcome) outcome {
	return func(s fixture) ([]labtest.Hop, error) {
		if s.spec.Mode == redirect.TPROXY {
			return tproxied(s)
		}
		return redirected(s)
	}
}

// perFamily chooses between IPv4 and IPv6.
func perFamily(v4, v6 outcome) outcome {
	return func(s fixture) ([]labtest.Hop, error) {
		if s.family == ruleset.IPv6 {
			return v6(s)
		}
		return v4(s)
	}
}

var (
	toOutbound         = by(labtest.ByOutbound)
	toInbound          = by(labtest.ByInbound)
	toTunnel           = by(labtest.ByTunnel)
	toStatus           = by(labtest.ByStatus)
	toAgent            = by(labtest.ByDNS)
	toApp              = by(labtest.ByApp)
	toPeer             = by(labtest.ByPeer)
	pong               = by("echo")
	refused    outcome = func(fixture) ([]labtest.Hop, error) { return nil, labtest.ErrRefused }
	forbidden  outcome = func(fixture) ([]labtest.Hop, error) { return nil, labtest.ErrForbidden }
	silence    outcome = func(fixture) ([]labtest.Hop, error) { return nil, labtest.ErrSilent }
)

// packet is a request of a case to one or more places.
type packet struct {
	sender  actor
	via     labtest.Protocol
	port    uint16
	want    outcome
	to      []labtest.Place
	source  labtest.Place
	srcPort uint16
	through bool
}

func send(sender actor, via labtest.Protocol, port uint16, want outcome, to ...labtest.Place) packet {
	return packet{sender: sender, via: via, port: port, want: want, to: to}
}

// from gives the packet a source address.
func (p packet) from(source labtest.Place) packet {
	p.source = source
	return p
}

// fromPort gives the packet a source port.
func (p packet) fromPort(port uint16) packet {
	p.srcPort = port
	return p
}

// passedOn makes the proxy pass the request on.
func (p packet) passedOn() packet {
	p.through = true
	return p
}

// requests returns the packet's requests in a fixture: none for a place without an address of the family, and pings only in IPv6.
func (p packet) requests(s fixture) (all []labtest.Expectation) {
	for _, to := range p.to {
		if !to.Addr(s.family).IsValid() || p.via == ping && s.family == ruleset.IPv4 {
			continue
		}
		var q labtest.Expectation
		q.Request = labtest.Request{From: p.sender(s), Via: p.via, To: to.Port(s.family, p.port), SourcePort: p.srcPort, Through: p.through}
		if p.srcPort == 0 && (p.via == tcp || p.via == udp) {
			q.SourcePort = s.FreshPort()
		}
		if p.source != "" {
			q.Source = p.source.Addr(s.family)
		}
		q.Want, q.WantErr = p.want(s)
		all = append(all, q)
	}
	return all
}

// packetCase is a capture configuration with the packets that show its effect.
type packetCase struct {
	name    string
	set     func(*redirect.Spec)
	packets []packet
}

// spec returns the case's Spec in a mode for a pod with the families.
func (c packetCase) spec(mode redirect.Mode, families ...ruleset.Family) redirect.Spec {
	spec := dualStack(mode)
	spec.DualStack = len(families) > 1
	if c.set != nil {
		c.set(&spec)
	}
	return spec
}

// run applies the case's Spec in a fresh pod and sends the packets in each of its families.
func (c packetCase) run(t *testing.T, v iptables.Variant, mode redirect.Mode, families ...ruleset.Family) fixture {
	t.Helper()
	s := newFixture(t, c.spec(mode, families...), families...)
	s.apply(t, v, s.spec)
	s.sendAll(t, v, c.packets)
	return s
}

// sendAll sends in every family, and prints the family's rules with each wrong answer. It stops after a silence because
// further ones would delay all other tests.
func (s fixture) sendAll(t *testing.T, v iptables.Variant, packets []packet) {
	t.Helper()
	for _, s.family = range s.Families {
		for _, p := range packets {
			for _, q := range p.requests(s) {
				err := q.Check(t.Context())
				if err == nil {
					continue
				}
				t.Errorf("%v\n%s", err, counters(t, s.Fixture, v, s.family))
				var wrong *labtest.Wrong
				if errors.As(err, &wrong) && errors.Is(wrong.Got.Err, labtest.ErrSilent) {
					return
				}
			}
		}
	}
}

// namespaceOf returns the pod's namespace for the code under test.
func namespaceOf(f *labtest.Fixture, v iptables.Variant) redirection.Namespace {
	return inNamespace(f.NetNS(), v)
}

// apply applies a Spec to the pod.
func (s fixture) apply(t *testing.T, v iptables.Variant, spec redirect.Spec) {
	t.Helper()
	mustApply(t, namespaceOf(s.Fixture, v), spec)
}

// counters returns the rules of a family with the number of packets that each matched.
func counters(t *testing.T, at *labtest.Fixture, v iptables.Variant, f ruleset.Family) string {
	t.Helper()
	if v == byTables {
		return netnstest.Run(t, at.Path(), "nft", "list", "ruleset")
	}
	return netnstest.Run(t, at.Path(), program(v, f, "-save"), "-c")
}

// networksOf returns the networks of the places, in both families.
func networksOf(places ...labtest.Place) []netip.Prefix {
	var all []netip.Prefix
	for _, p := range places {
		all = append(all, p.Network(ruleset.IPv4), p.Network(ruleset.IPv6))
	}
	return all
}

// eachCell runs a test for every backend of the rules, in both modes.
func eachCell(t *testing.T, test func(*testing.T, iptables.Variant, redirect.Mode)) {
	t.Helper()
	for _, v := range []iptables.Variant{iptables.NFT, iptables.Legacy, byNetlink, byTables} {
		for _, mode := range []redirect.Mode{redirect.Redirect, redirect.TPROXY} {
			t.Run(fmt.Sprintf("%s/%s", v, mode), func(t *testing.T) {
				t.Parallel()
				test(t, v, mode)
			})
		}
	}
}

// TestPackets sends every packet of every case in a dual-stack pod, for each backend and each mode. Netlink writes the rules
// of iptables-nft byte for byte (TestRules_OfTheReference, package nftables), so it is not tested again. In a pod of one
// family, iptables has the same rules as for that family in a dual-stack pod; native tables serve both families and differ.
func TestPackets(t *testing.T) {
	eachCell(t, func(t *testing.T, v iptables.Variant, mode redirect.Mode) {
		t.Helper()
		if v == byNetlink {
			return
		}
		for kind, families := range map[string][]ruleset.Family{"IPv4": families[:1], "IPv6": families[1:], "dual": families} {
			cases := packetCases()
			if kind != "dual" && v != byTables {
				cases = defaultCases()
			}
			for _, c := range cases {
				t.Run(kind+"/"+c.name, func(t *testing.T) {
					t.Parallel()
					c.run(t, v, mode, families...)
				})
			}
		}
	})
}

// TestPackets_SecondFamily sends IPv6 packets in a pod whose first address is IPv4.
func TestPackets_SecondFamily(t *testing.T) {
	eachCell(t, func(t *testing.T, v iptables.Variant, mode redirect.Mode) {
		t.Helper()
		for _, c := range secondFamilyCases() {
			t.Run(c.name, func(t *testing.T) {
				t.Parallel()
				c.run(t, v, mode, families...)
			})
		}
	})
}

// TestPackets_WithoutRules checks the harness itself: a pod with a proxy but without rules captures nothing, and each wrong answer
// is found.
func TestPackets_WithoutRules(t *testing.T) {
	t.Parallel()
	elsewhere := func(s fixture) ([]labtest.Hop, error) {
		return []labtest.Hop{{By: labtest.ByPeer, Dst: labtest.Far.Port(s.family, 80)}}, nil
	}
	for _, mode := range []redirect.Mode{redirect.Redirect, redirect.TPROXY} {
		s := newFixture(t, dualStack(mode), families...)
		s.sendAll(t, iptables.NFT, direct())
		for _, s.family = range families {
			for what, p := range map[string]packet{
				"another listener":         outbound,
				"another source":           send(app, tcp, 80, toPeer.seenFrom(labtest.Far), labtest.Peer),
				"another destination":      send(app, tcp, 80, elsewhere, labtest.Peer),
				"an answer, not a refusal": send(app, tcp, 80, refused, labtest.Peer),
				"an answer, not silence":   send(app, udp, 53, silence, labtest.Resolver),
				"a refusal, not silence":   send(client, tcp, 81, silence, labtest.Pod),
				"a refusal":                send(client, tcp, 81, toApp, labtest.Pod),
				"one answer less":          send(app, tcp, 80, by(labtest.ByPeer, labtest.ByPeer), labtest.Peer),
				"one answer more":          send(app, tcp, redirect.DNSPort, toAgent, labtest.Loopback).passedOn(),
				"the second is another's":  send(app, tcp, redirect.DNSPort, by(labtest.ByDNS, labtest.ByApp), labtest.Loopback).passedOn(),
			} {
				if err := p.requests(s)[0].Check(t.Context()); err == nil {
					t.Errorf("%s is not found", what)
				}
			}
		}
	}
}

// TestPackets_LastSpec replaces one capture configuration by another in a running pod, and then removes it.
func TestPackets_LastSpec(t *testing.T) {
	eachCell(t, func(t *testing.T, v iptables.Variant, mode redirect.Mode) {
		t.Helper()
		first := dualStack(redirect.TPROXY - mode) // the other mode
		first.DNS, first.DropInvalid, first.Inbound = redirect.DNSAll, true, redirect.Ports{List: ruleset.PortList(80)}
		first.ExcludeInterfaces, first.RerouteInterfaces = []string{"eth0", "eth1"}, []string{"vm0"}
		s := newFixture(t, dualStack(mode), families...)
		s.apply(t, v, first)
		s.apply(t, v, s.spec)
		for _, c := range defaultCases() {
			if c.set == nil {
				s.sendAll(t, v, c.packets)
			}
		}
		mustClean(t, namespaceOf(s.Fixture, v))
		s.sendAll(t, v, direct())
	})
}

// TestPackets_AnswersOfResolvers reads the kernel's connection table: an answer in another zone
// than its request has its own entry there, and neither entry has a reply.
func TestPackets_AnswersOfResolvers(t *testing.T) {
	eachCell(t, func(t *testing.T, v iptables.Variant, mode redirect.Mode) {
		t.Helper()
		for _, c := range dnsCases() {
			if c.name != "all DNS captured" && c.name != "DNS to the pod's resolvers captured" {
				continue
			}
			c.packets = []packet{send(proxy, udp, 53, toPeer, labtest.Resolver), send(app, udp, 53, toAgent, labtest.Resolver)}
			s := c.run(t, v, mode, families...)
			tracked := netnstest.Run(t, s.Path(), "cat", "/proc/self/net/nf_conntrack")
			if n := strings.Count(tracked, "udp"); n < 4 || strings.Contains(tracked, "UNREPLIED") {
				t.Errorf("%s: want four or more requests by UDP, each with its answer, got %d:\n%s", c.name, n, tracked)
			}
		}
	})
}
