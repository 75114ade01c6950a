package redirection_test

import (
	"net/netip"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
)

const (
	tcp   = labtest.TCP
	udp   = labtest.UDP
	ping  = labtest.Ping
	stray = labtest.Stray
)

// The packets that many cases share.
var (
	inbound  = send(client, tcp, 80, toInbound, labtest.Pod)
	outbound = send(app, tcp, 80, toOutbound, labtest.Peer)
	// itself is the app's connection to its own pod, balanced the proxy's connection to a service whose load balancer chose its own pod.
	itself   = send(app, tcp, 80, toApp, labtest.Pod)
	balanced = send(proxy, tcp, 80, toInbound, labtest.Pod)
	// reused has packets of the agent from the port that the app has just used, and the reverse.
	reused = []packet{
		send(app, udp, 53, toAgent, labtest.Resolver).fromPort(4000),
		send(proxy, udp, 53, toPeer, labtest.Resolver).fromPort(4000),
		send(proxy, udp, 53, toPeer, labtest.Resolver).fromPort(4001),
		send(app, udp, 53, toAgent, labtest.Resolver).fromPort(4001),
	}
)

// common holds for every Spec of the cases: the proxy's own traffic is never captured, the pod's loopback
// traffic and datagrams are left alone, and health checks of the proxy reach it.
func common() []packet {
	return []packet{
		send(proxy, tcp, 80, toPeer, labtest.Peer),
		send(proxy, tcp, 443, toPeer, labtest.Far),
		send(proxy, tcp, 53, toPeer, labtest.Resolver),
		send(proxy, udp, 5000, toPeer, labtest.Peer),
		send(proxy, udp, 53, toPeer, labtest.Resolver),
		send(proxy, tcp, 80, toApp, labtest.Loopback),
		// The proxy passes a connection to the app, and must not get it back.
		send(proxy, tcp, 80, toApp, labtest.Pod).from(labtest.Passthrough),

		send(app, tcp, 80, toApp, labtest.Loopback),
		send(app, udp, 5000, toApp, labtest.Loopback, labtest.Pod),
		send(app, udp, 5000, toPeer, labtest.Peer),

		send(client, udp, 5000, toApp, labtest.Pod),
		send(client, tcp, 15020, toStatus, labtest.Pod),
		send(client, tcp, 15021, toStatus, labtest.Pod),
		send(client, tcp, 15090, toStatus, labtest.Pod),
	}
}

func packetCases() []packetCase {
	cases := slices.Concat(defaultCases(), networkCases(), portCases(), interfaceCases(), dnsCases(), ownerCases())
	for i := range cases {
		cases[i].packets = append(common(), cases[i].packets...)
	}
	return cases
}

func defaultCases() []packetCase {
	inward := by(labtest.ByInbound, labtest.ByApp)
	return []packetCase{
		{"the default", nil, []packet{
			send(app, tcp, 80, toOutbound, labtest.Peer, labtest.Private, labtest.Side),
			send(app, tcp, 443, toOutbound, labtest.Far),
			send(app, tcp, 53, toOutbound, labtest.Resolver),
			send(app, udp, 53, toPeer, labtest.Resolver),
			send(app, tcp, 15020, toPeer, labtest.Peer),
			send(app, tcp, 15008, toOutbound, labtest.Peer),
			send(app, ping, 0, pong, labtest.Far),
			send(root, tcp, 80, toOutbound, labtest.Peer),
			// Either the user or the group is enough to identify the proxy.
			send(user(1000, 1337), tcp, 80, toPeer, labtest.Peer),
			send(user(1337, 1000), tcp, 80, toPeer, labtest.Peer),

			send(client, tcp, 80, toInbound, labtest.Pod, labtest.PodSide),
			send(client, tcp, 81, toInbound, labtest.Pod),
			send(client, tcp, 15001, toInbound, labtest.Pod),
			// The reference exempts the tunnel port only in the nat table, which TPROXY does not use.
			send(client, tcp, 15008, modes(toTunnel, toInbound), labtest.Pod),
			// A guest's packets are inbound, unless its interface is rerouted.
			send(guest, tcp, 80, toInbound, labtest.Far),
			send(guest, udp, 5000, toPeer, labtest.Far),
			send(client, stray, 80, refused, labtest.Pod),
			send(client, ping, 0, pong, labtest.Pod),

			send(app, tcp, 80, toApp, labtest.Pod, labtest.PodSide, labtest.AlsoLoopback),
			send(root, tcp, 80, toApp, labtest.Pod),
			// The proxy calls a service, and the load balancer chose the proxy's own pod.
			send(proxy, tcp, 80, toInbound, labtest.Pod, labtest.PodSide),
			send(proxy, tcp, 15008, modes(toTunnel, toInbound), labtest.Pod),
		}},
		{"connections go all the way", nil, []packet{
			send(app, tcp, 80, by(labtest.ByOutbound, labtest.ByPeer).seenFrom(labtest.Pod), labtest.Peer).passedOn(),
			send(client, tcp, 80, modes(inward.seenFrom(labtest.Passthrough), inward.seenFrom(labtest.Far)), labtest.Pod).
				from(labtest.Far).passedOn(),
			send(proxy, tcp, 80, modes(inward.seenFrom(labtest.Passthrough), inward.seenFrom(labtest.Pod)), labtest.Pod).passedOn(),
		}},
		{"the validation's probe", nil, []packet{
			send(user(1337, 1337), tcp, redirect.ProbePort, toInbound, labtest.Passthrough).from(labtest.Loopback),
			send(app, tcp, redirect.ProbePort, refused, labtest.Passthrough).from(labtest.Loopback),
		}},
		{"another mark", func(s *redirect.Spec) { s.Mark = 4000 }, []packet{
			send(client, tcp, 80, toInbound, labtest.Pod), send(proxy, tcp, 80, toInbound, labtest.Pod),
		}},
		{"invalid packets dropped", func(s *redirect.Spec) { s.DropInvalid = true }, []packet{
			inbound, outbound, balanced,
			send(client, stray, 80, silence, labtest.Pod),
			send(client, stray, 15021, silence, labtest.Pod),
		}},
	}
}

func networkCases() []packetCase {
	loopbacks := []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}
	private := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}
	return []packetCase{
		{"one network captured", func(s *redirect.Spec) { s.Outbound = redirect.Networks{List: networksOf(labtest.Far)} }, []packet{
			inbound, itself,
			send(app, tcp, 80, toOutbound, labtest.Far),
			send(app, tcp, 80, toPeer, labtest.Peer),
		}},
		{"no network captured", func(s *redirect.Spec) { s.Outbound = redirect.Networks{} }, []packet{
			inbound, balanced,
			send(app, tcp, 80, toPeer, labtest.Far, labtest.Peer),
		}},
		{"a network excluded", func(s *redirect.Spec) { s.OutboundExclude = networksOf(labtest.Private) }, []packet{
			send(app, tcp, 80, toPeer, labtest.Private),
			send(app, tcp, 80, toOutbound, labtest.Far),
			send(client, tcp, 80, toInbound, labtest.Pod).from(labtest.Private),
		}},
		{"a network excluded within a captured one", func(s *redirect.Spec) {
			s.Outbound, s.OutboundExclude = redirect.Networks{List: private}, networksOf(labtest.Private, labtest.Side)
		}, []packet{
			send(app, tcp, 80, toPeer, labtest.Private, labtest.Side),
			send(app, tcp, 80, toOutbound, labtest.Far, labtest.Peer),
		}},
		// A captured network on loopback also captures the app's connections to its own pod.
		{"loopback and the pod's own network captured", func(s *redirect.Spec) {
			s.Outbound = redirect.Networks{List: slices.Concat(loopbacks, networksOf(labtest.Pod))}
		}, []packet{
			balanced,
			send(app, tcp, 80, toOutbound, labtest.Pod, labtest.AlsoLoopback, labtest.Peer),
			send(app, tcp, 80, toApp, labtest.PodSide),
			send(app, tcp, 80, toPeer, labtest.Far),
		}},
	}
}

func portCases() []packetCase {
	return []packetCase{
		{"an outbound port captured", func(s *redirect.Spec) {
			s.Outbound, s.OutboundPorts = redirect.Networks{}, ruleset.PortList(8080)
		}, []packet{
			send(app, tcp, 8080, toOutbound, labtest.Peer, labtest.Far),
			send(app, tcp, 80, toPeer, labtest.Peer),
		}},
		{"an outbound port captured and its network excluded", func(s *redirect.Spec) {
			s.Outbound, s.OutboundExclude, s.OutboundPorts = redirect.Networks{}, networksOf(labtest.Private), ruleset.PortList(8080)
		}, []packet{
			send(app, tcp, 8080, toPeer, labtest.Private),
			send(app, tcp, 8080, toOutbound, labtest.Far),
		}},
		{"outbound ports excluded", func(s *redirect.Spec) { s.OutboundPortsExclude = ruleset.PortList(8080, 443) }, []packet{
			outbound,
			send(app, tcp, 8080, toPeer, labtest.Peer),
			send(app, tcp, 443, toPeer, labtest.Far),
			send(app, tcp, 15020, toOutbound, labtest.Peer),
			send(client, tcp, 8080, toInbound, labtest.Pod),
		}},
		{"ranges of ports", func(s *redirect.Spec) {
			s.OutboundPortsExclude, s.InboundExclude = []ruleset.PortRange{{First: 8000, Last: 8080}}, append([]ruleset.PortRange{{First: 80, Last: 8079}}, redirect.AlwaysExcluded()...)
		}, []packet{
			send(app, tcp, 8080, toPeer, labtest.Peer),
			send(app, tcp, 8081, toOutbound, labtest.Far),
			send(app, tcp, 443, toOutbound, labtest.Far),
			send(client, tcp, 80, toApp, labtest.Pod),
			send(client, tcp, 8080, toInbound, labtest.Pod),
		}},
		// With a list of included ports, excluded ports have no effect.
		{"some inbound ports captured", func(s *redirect.Spec) {
			s.Inbound, s.InboundExclude = redirect.Ports{List: ruleset.PortList(80, 9000)}, ruleset.PortList(80)
		}, []packet{
			inbound, outbound, balanced,
			send(client, tcp, 9000, toInbound, labtest.Pod),
			send(client, tcp, 8080, toApp, labtest.Pod),
			send(client, tcp, 15008, toTunnel, labtest.Pod),
			// Towards its own pod the proxy is captured by its identity, whatever the port; under TPROXY, by port.
			send(proxy, tcp, 8080, modes(toInbound, toApp), labtest.Pod),
		}},
		{"an inbound port excluded", func(s *redirect.Spec) {
			s.InboundExclude = append(ruleset.PortList(8080), redirect.AlwaysExcluded()...)
		}, []packet{
			inbound,
			send(client, tcp, 8080, toApp, labtest.Pod, labtest.PodSide),
			send(proxy, tcp, 8080, modes(toInbound, toApp), labtest.Pod),
		}},
		{"no inbound port captured", func(s *redirect.Spec) { s.Inbound = redirect.Ports{} }, []packet{
			outbound, itself,
			send(client, tcp, 80, toApp, labtest.Pod),
			send(client, tcp, 15008, toTunnel, labtest.Pod),
			send(proxy, tcp, 80, modes(toInbound, toApp), labtest.Pod),
		}},
	}
}

func interfaceCases() []packetCase {
	return []packetCase{
		{"an interface excluded", func(s *redirect.Spec) { s.ExcludeInterfaces = []string{"eth1"} }, []packet{
			inbound, outbound,
			send(app, tcp, 80, toPeer, labtest.Side),
			send(client, tcp, 80, toApp, labtest.PodSide),
			send(app, tcp, 80, toApp, labtest.PodSide),
		}},
		{"an interface excluded with DNS captured", func(s *redirect.Spec) {
			s.ExcludeInterfaces, s.DNS = []string{"eth1"}, redirect.DNSAll
		}, []packet{
			send(app, udp, 53, toPeer, labtest.Side),
			send(app, tcp, 53, toPeer, labtest.Side),
			send(app, udp, 53, toAgent, labtest.Resolver),
		}},
		{"an interface rerouted", func(s *redirect.Spec) { s.RerouteInterfaces = []string{"vm0"} }, []packet{
			inbound, outbound,
			// Under TPROXY the reference's rules of the mangle table see the guest's packets first and do not
			// implement rerouting: the inbound listener gets the packets.
			send(guest, tcp, 80, modes(toOutbound, toInbound), labtest.Far, labtest.Pod),
			send(guest, udp, 5000, toPeer, labtest.Far),
		}},
		{"an interface rerouted and one network captured", func(s *redirect.Spec) {
			s.RerouteInterfaces, s.Outbound = []string{"vm0"}, redirect.Networks{List: networksOf(labtest.Far)}
		}, []packet{
			send(guest, tcp, 80, modes(toOutbound, toInbound), labtest.Far),
			send(guest, tcp, 80, modes(toPeer, toInbound), labtest.Peer),
			send(guest, tcp, 80, modes(toApp, toInbound), labtest.Pod),
		}},
		{"an interface rerouted without inbound capture", func(s *redirect.Spec) {
			s.RerouteInterfaces, s.Inbound = []string{"vm0"}, redirect.Ports{}
		}, []packet{
			send(guest, tcp, 80, toOutbound, labtest.Far, labtest.Pod),
			send(guest, udp, 5000, toPeer, labtest.Far),
			send(client, tcp, 80, toApp, labtest.Pod),
		}},
	}
}

func dnsCases() []packetCase {
	servers := func(all ...netip.Addr) func(*redirect.Spec) {
		return func(s *redirect.Spec) { s.DNS, s.DNSServers = redirect.DNSServers, all }
	}
	v4, v6 := labtest.Resolver.Addr(ruleset.IPv4), labtest.Resolver.Addr(ruleset.IPv6)
	return []packetCase{
		{"all DNS captured", func(s *redirect.Spec) { s.DNS = redirect.DNSAll }, append([]packet{
			inbound, outbound, itself, balanced,
			send(app, udp, 53, toAgent, labtest.Resolver, labtest.OtherResolver, labtest.Side, labtest.Pod),
			send(app, tcp, 53, toAgent, labtest.Resolver, labtest.OtherResolver, labtest.Loopback, labtest.Pod),
			send(root, udp, 53, toAgent, labtest.Resolver),
			// Also a resolver in the pod.
			send(app, udp, 53, toAgent, labtest.Loopback),
			send(app, udp, 53, by(labtest.ByDNS, labtest.ByPeer).seenFrom(labtest.Pod), labtest.Resolver).passedOn(),
			send(app, tcp, 53, by(labtest.ByDNS, labtest.ByPeer).seenFrom(labtest.Pod), labtest.Resolver).passedOn(),
			// The agent queries a resolver in the pod. The reference has this exception for the proxy's user, but
			// not for its group, which identifies the proxy under TPROXY.
			send(proxy, tcp, 53, modes(refused, toInbound), labtest.Pod),
			send(guest, udp, 53, toPeer, labtest.Resolver),
			send(client, udp, 53, refused, labtest.Pod),
		}, reused...)},
		{"DNS to the pod's resolvers captured", servers(v4, v6), append([]packet{
			send(app, udp, 53, toAgent, labtest.Resolver),
			send(app, tcp, 53, toAgent, labtest.Resolver),
			send(app, udp, 53, toPeer, labtest.OtherResolver),
			send(app, tcp, 53, toOutbound, labtest.OtherResolver),
			send(app, udp, 53, by(labtest.ByDNS, labtest.ByPeer).seenFrom(labtest.Pod), labtest.Resolver).passedOn(),
		}, reused...)},
		{"DNS to a resolver of one family captured", servers(v4), []packet{
			itself,
			send(app, udp, 53, perFamily(toAgent, toPeer), labtest.Resolver),
			send(app, tcp, 53, perFamily(toAgent, toOutbound), labtest.Resolver),
		}},
		{"all DNS captured and its port excluded", func(s *redirect.Spec) {
			s.DNS, s.OutboundPortsExclude = redirect.DNSAll, ruleset.PortList(53)
		}, []packet{
			outbound,
			send(app, udp, 53, toPeer, labtest.Resolver),
			send(app, tcp, 53, toPeer, labtest.Resolver),
		}},
		{"all DNS captured and a group excluded", func(s *redirect.Spec) {
			s.DNS, s.OwnerGroupsExclude = redirect.DNSAll, []uint32{3000}
		}, []packet{
			send(member(3000), udp, 53, toPeer, labtest.Resolver),
			send(member(3000), tcp, 53, toPeer, labtest.Resolver),
			send(app, udp, 53, toAgent, labtest.Resolver),
			send(app, tcp, 53, toAgent, labtest.Resolver),
		}},
	}
}

func ownerCases() []packetCase {
	return []packetCase{
		{"two groups captured", func(s *redirect.Spec) { s.OwnerGroups = redirect.Groups{List: []uint32{3000, 4000}} }, []packet{
			inbound,
			send(member(3000), tcp, 80, toOutbound, labtest.Peer),
			send(member(4000), tcp, 80, toOutbound, labtest.Peer),
			send(app, tcp, 80, toPeer, labtest.Peer),
			send(root, tcp, 80, toPeer, labtest.Peer),
		}},
		{"no group captured", func(s *redirect.Spec) { s.OwnerGroups = redirect.Groups{} }, []packet{
			inbound, balanced,
			send(app, tcp, 80, toPeer, labtest.Peer),
			send(member(3000), tcp, 80, toPeer, labtest.Peer),
		}},
		{"two groups excluded", func(s *redirect.Spec) { s.OwnerGroupsExclude = []uint32{3000, 4000} }, []packet{
			inbound, outbound,
			send(member(3000), tcp, 80, toPeer, labtest.Peer),
			send(member(4000), tcp, 80, toPeer, labtest.Peer),
		}},
		{"a proxy with another user and group", func(s *redirect.Spec) { s.UIDs, s.GIDs = []uint32{2000}, []uint32{2001} }, []packet{
			outbound, balanced,
			send(user(2000, 1000), tcp, 80, toPeer, labtest.Peer),
			send(user(1000, 2001), tcp, 80, toPeer, labtest.Peer),
			send(user(1337, 1337), tcp, 80, toOutbound, labtest.Peer),
			send(user(1337, 1337), tcp, 80, toApp, labtest.Pod),
		}},
		{"a proxy with two users", func(s *redirect.Spec) { s.UIDs = []uint32{1337, 2000} }, []packet{
			outbound,
			send(user(2000, 2000), tcp, 80, toPeer, labtest.Peer),
			send(user(1337, 1000), tcp, 80, toInbound, labtest.Pod),
			// The reference's rules for the first user let the connections of all others to their own pod pass,
			// including the second user's. The marks of TPROXY are set for both.
			send(user(2000, 2000), tcp, 80, modes(toApp, toInbound), labtest.Pod),
		}},
	}
}

// secondFamilyCases are for a pod whose first address is IPv4 and that is not dual stack.
func secondFamilyCases() []packetCase {
	with := func(f redirect.SecondFamily) func(*redirect.Spec) {
		return func(s *redirect.Spec) { s.DualStack, s.SecondFamily = false, f }
	}
	return []packetCase{
		{"bypass", with(redirect.Bypass), []packet{
			itself,
			send(client, tcp, 80, perFamily(toInbound, toApp), labtest.Pod),
			send(client, udp, 5000, toApp, labtest.Pod),
			send(app, tcp, 80, perFamily(toOutbound, toPeer), labtest.Peer),
			send(app, udp, 5000, toPeer, labtest.Peer),
			send(proxy, tcp, 80, toPeer, labtest.Peer),
			send(proxy, tcp, 80, perFamily(toInbound, toApp), labtest.Pod),
		}},
		{"capture", with(redirect.Capture), append(common(),
			send(client, tcp, 80, toInbound, labtest.Pod),
			send(app, tcp, 80, toOutbound, labtest.Peer),
			send(proxy, tcp, 80, toInbound, labtest.Pod),
			send(app, tcp, 80, toApp, labtest.Pod),
		)},
		{"reject", with(redirect.Reject), []packet{
			send(client, tcp, 80, perFamily(toInbound, refused), labtest.Pod),
			send(client, tcp, 15021, perFamily(toStatus, refused), labtest.Pod),
			send(client, udp, 5000, perFamily(toApp, refused), labtest.Pod),
			send(app, tcp, 80, perFamily(toOutbound, refused), labtest.Peer),
			// The kernel fails the send of a datagram that cannot leave.
			send(app, udp, 5000, perFamily(toPeer, forbidden), labtest.Peer),
			send(proxy, tcp, 80, perFamily(toPeer, refused), labtest.Peer),
			send(app, tcp, 80, toApp, labtest.Pod, labtest.Loopback),
			send(app, udp, 5000, toApp, labtest.Loopback),
			// ICMP finds neighbours and reports errors.
			send(client, ping, 0, pong, labtest.Pod),
			send(app, ping, 0, pong, labtest.Far),
		}},
	}
}

// direct returns the answers where nothing is captured.
func direct() []packet {
	return []packet{
		itself,
		send(app, tcp, 80, toPeer, labtest.Peer),
		send(app, tcp, 443, toPeer, labtest.Far),
		send(app, tcp, 15020, toPeer, labtest.Side),
		send(app, tcp, 53, toPeer, labtest.Resolver),
		send(app, udp, 53, toPeer, labtest.Resolver, labtest.OtherResolver),
		send(app, tcp, 15001, toOutbound, labtest.Loopback),
		send(app, udp, 5000, toApp, labtest.Loopback),
		send(proxy, tcp, 80, toPeer, labtest.Private),
		send(proxy, tcp, 80, toApp, labtest.Pod),
		send(client, tcp, 80, toApp, labtest.Pod),
		send(client, tcp, 15006, toInbound, labtest.PodSide),
		send(client, tcp, 15008, toTunnel, labtest.Pod),
		send(client, tcp, 15021, toStatus, labtest.Pod),
		send(client, tcp, 81, refused, labtest.Pod),
		send(client, tcp, 15053, refused, labtest.Pod),
		send(client, udp, 5000, toApp, labtest.PodSide),
		send(client, udp, 81, refused, labtest.Pod),
		send(client, stray, 80, refused, labtest.Pod),
		send(client, ping, 0, pong, labtest.Pod),
		send(guest, tcp, 80, toPeer, labtest.Far),
		send(guest, udp, 5000, toPeer, labtest.Private),
	}
}
