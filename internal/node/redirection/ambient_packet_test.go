package redirection_test

import (
	"slices"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

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
