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

// whatever holds for every Spec of the cases: the proxy's own traffic is never captured, the pod's loopback and
// datagrams are left alone, and health checks of the proxy reach the proxy.
func whatever() []packet {
	return []packet{
		ask(proxy, tcp, labtest.Peer, 80, toPeer),
		ask(proxy, tcp, labtest.Far, 443, toPeer),
		ask(proxy, tcp, labtest.Resolver, 53, toPeer),
		ask(proxy, udp, labtest.Peer, 5000, toPeer),
		ask(proxy, udp, labtest.Resolver, 53, toPeer),
		ask(proxy, tcp, labtest.Loopback, 80, toApp),
		// The proxy hands a connection to the app: it must not get it back.
		ask(proxy, tcp, labtest.Pod, 80, toApp).from(labtest.Passthrough),

		ask(app, tcp, labtest.Loopback, 80, toApp),
		ask(app, udp, labtest.Loopback, 5000, toApp),
		ask(app, udp, labtest.Pod, 5000, toApp),
		ask(app, udp, labtest.Peer, 5000, toPeer),

		ask(client, udp, labtest.Pod, 5000, toApp),
		ask(client, tcp, labtest.Pod, 15020, toStatus),
		ask(client, tcp, labtest.Pod, 15021, toStatus),
		ask(client, tcp, labtest.Pod, 15090, toStatus),
	}
}

func packetCases() []packetCase {
	cases := slices.Concat(defaultCases(), networkCases(), portCases(), interfaceCases(), dnsCases(), ownerCases())
	for i := range cases {
		cases[i].asks = append(whatever(), cases[i].asks...)
	}
	return cases
}

func defaultCases() []packetCase {
	return []packetCase{
		{name: "a pod that says nothing", asks: []packet{
			ask(app, tcp, labtest.Peer, 80, toOutbound),
			ask(app, tcp, labtest.Far, 443, toOutbound),
			ask(app, tcp, labtest.Private, 80, toOutbound),
			ask(app, tcp, labtest.Side, 80, toOutbound),
			ask(app, tcp, labtest.Resolver, 53, toOutbound),
			ask(app, udp, labtest.Resolver, 53, toPeer),
			ask(app, tcp, labtest.Peer, 15020, toPeer),
			ask(app, tcp, labtest.Peer, 15008, toOutbound),
			ask(app, ping, labtest.Far, 0, pong),
			ask(root, tcp, labtest.Peer, 80, toOutbound),
			// The user or the group of the proxy is enough to be taken for it.
			ask(user(1000, 1337), tcp, labtest.Peer, 80, toPeer),
			ask(user(1337, 1000), tcp, labtest.Peer, 80, toPeer),

			ask(client, tcp, labtest.Pod, 80, toInbound),
			ask(client, tcp, labtest.Pod, 81, toInbound),
			ask(client, tcp, labtest.PodSide, 80, toInbound),
			ask(client, tcp, labtest.Pod, 15001, toInbound),
			// The reference exempts the tunnel port in the nat table only, which TPROXY does without.
			ask(client, tcp, labtest.Pod, 15008, modes(toTunnel, toInbound)),
			// What a guest sends comes in, unless its interface is said to be one that reroutes.
			ask(guest, tcp, labtest.Far, 80, toInbound),
			ask(guest, udp, labtest.Far, 5000, toPeer),
			ask(client, stray, labtest.Pod, 80, refused),
			ask(client, ping, labtest.Pod, 0, pong),

			ask(app, tcp, labtest.Pod, 80, toApp),
			ask(app, tcp, labtest.PodSide, 80, toApp),
			ask(app, tcp, labtest.AlsoLoopback, 80, toApp),
			ask(root, tcp, labtest.Pod, 80, toApp),
			// The proxy calls a service, and the load balancer chose its own pod.
			ask(proxy, tcp, labtest.Pod, 80, toInbound),
			ask(proxy, tcp, labtest.PodSide, 80, toInbound),
			ask(proxy, tcp, labtest.Pod, 15008, modes(toTunnel, toInbound)),
		}},
		{name: "connections go all the way", asks: []packet{
			ask(app, tcp, labtest.Peer, 80, by(labtest.ByOutbound, labtest.ByPeer).seenFrom(labtest.Pod)).passedOn(),
			ask(client, tcp, labtest.Pod, 80, modes(
				by(labtest.ByInbound, labtest.ByApp).seenFrom(labtest.Passthrough),
				by(labtest.ByInbound, labtest.ByApp).seenFrom(labtest.Far),
			)).from(labtest.Far).passedOn(),
			ask(proxy, tcp, labtest.Pod, 80, modes(
				by(labtest.ByInbound, labtest.ByApp).seenFrom(labtest.Passthrough),
				by(labtest.ByInbound, labtest.ByApp).seenFrom(labtest.Pod),
			)).passedOn(),
		}},
		{name: "the validation's probe", asks: []packet{
			ask(user(1337, 1337), tcp, labtest.Passthrough, redirect.ProbePort, toInbound).from(labtest.Loopback),
			ask(app, tcp, labtest.Passthrough, redirect.ProbePort, refused).from(labtest.Loopback),
		}},
		{
			name: "another mark",
			spec: func(s *redirect.Spec) { s.Mark = 4000 },
			asks: []packet{ask(client, tcp, labtest.Pod, 80, toInbound), ask(proxy, tcp, labtest.Pod, 80, toInbound)},
		},
		{
			name: "invalid packets dropped",
			spec: func(s *redirect.Spec) { s.DropInvalid = true },
			asks: []packet{
				ask(client, stray, labtest.Pod, 80, silence),
				ask(client, stray, labtest.Pod, 15021, silence),
				ask(client, tcp, labtest.Pod, 80, toInbound),
				ask(app, tcp, labtest.Peer, 80, toOutbound),
				ask(proxy, tcp, labtest.Pod, 80, toInbound),
			},
		},
	}
}

func networkCases() []packetCase {
	loopbacks := []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}
	private := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}
	return []packetCase{
		{
			name: "one network captured",
			spec: func(s *redirect.Spec) { s.Outbound = redirect.Networks{List: networksOf(labtest.Far)} },
			asks: []packet{
				ask(app, tcp, labtest.Far, 80, toOutbound),
				ask(app, tcp, labtest.Peer, 80, toPeer),
				ask(app, tcp, labtest.Pod, 80, toApp),
				ask(client, tcp, labtest.Pod, 80, toInbound),
			},
		},
		{
			name: "no network captured",
			spec: func(s *redirect.Spec) { s.Outbound = redirect.Networks{} },
			asks: []packet{
				ask(app, tcp, labtest.Far, 80, toPeer),
				ask(app, tcp, labtest.Peer, 80, toPeer),
				ask(client, tcp, labtest.Pod, 80, toInbound),
				ask(proxy, tcp, labtest.Pod, 80, toInbound),
			},
		},
		{
			name: "a network excluded",
			spec: func(s *redirect.Spec) { s.OutboundExclude = networksOf(labtest.Private) },
			asks: []packet{
				ask(app, tcp, labtest.Private, 80, toPeer),
				ask(app, tcp, labtest.Far, 80, toOutbound),
				ask(client, tcp, labtest.Pod, 80, toInbound).from(labtest.Private),
			},
		},
		{
			name: "a network excluded within a captured one",
			spec: func(s *redirect.Spec) {
				s.Outbound, s.OutboundExclude = redirect.Networks{List: private}, networksOf(labtest.Private, labtest.Side)
			},
			asks: []packet{
				ask(app, tcp, labtest.Private, 80, toPeer),
				ask(app, tcp, labtest.Side, 80, toPeer),
				ask(app, tcp, labtest.Far, 80, toOutbound),
				ask(app, tcp, labtest.Peer, 80, toOutbound),
			},
		},
		{
			// A captured network on loopback asks for the app's calls to its own pod to be captured as well.
			name: "loopback and the pod's own network captured",
			spec: func(s *redirect.Spec) {
				s.Outbound = redirect.Networks{List: slices.Concat(loopbacks, networksOf(labtest.Pod))}
			},
			asks: []packet{
				ask(app, tcp, labtest.Pod, 80, toOutbound),
				ask(app, tcp, labtest.PodSide, 80, toApp),
				ask(app, tcp, labtest.AlsoLoopback, 80, toOutbound),
				ask(app, tcp, labtest.Peer, 80, toOutbound),
				ask(app, tcp, labtest.Far, 80, toPeer),
				ask(proxy, tcp, labtest.Pod, 80, toInbound),
			},
		},
	}
}

func portCases() []packetCase {
	return []packetCase{
		{
			name: "an outbound port captured",
			spec: func(s *redirect.Spec) { s.Outbound, s.OutboundPorts = redirect.Networks{}, []uint16{8080} },
			asks: []packet{
				ask(app, tcp, labtest.Peer, 8080, toOutbound),
				ask(app, tcp, labtest.Far, 8080, toOutbound),
				ask(app, tcp, labtest.Peer, 80, toPeer),
			},
		},
		{
			name: "an outbound port captured and its network excluded",
			spec: func(s *redirect.Spec) {
				s.Outbound, s.OutboundExclude, s.OutboundPorts = redirect.Networks{}, networksOf(labtest.Private), []uint16{8080}
			},
			asks: []packet{
				ask(app, tcp, labtest.Private, 8080, toPeer),
				ask(app, tcp, labtest.Far, 8080, toOutbound),
			},
		},
		{
			name: "outbound ports excluded",
			spec: func(s *redirect.Spec) { s.OutboundPortsExclude = []uint16{8080, 443} },
			asks: []packet{
				ask(app, tcp, labtest.Peer, 8080, toPeer),
				ask(app, tcp, labtest.Far, 443, toPeer),
				ask(app, tcp, labtest.Peer, 80, toOutbound),
				ask(app, tcp, labtest.Peer, 15020, toOutbound),
				ask(client, tcp, labtest.Pod, 8080, toInbound),
			},
		},
		{
			name: "some inbound ports captured",
			// With a list, excluded ports count for nothing.
			spec: func(s *redirect.Spec) {
				s.Inbound, s.InboundExclude = redirect.Ports{List: []uint16{80, 9000}}, []uint16{80}
			},
			asks: []packet{
				ask(client, tcp, labtest.Pod, 80, toInbound),
				ask(client, tcp, labtest.Pod, 9000, toInbound),
				ask(client, tcp, labtest.Pod, 8080, toApp),
				ask(client, tcp, labtest.Pod, 15008, toTunnel),
				ask(proxy, tcp, labtest.Pod, 80, toInbound),
				// Towards its own pod the proxy is captured by identity, whatever the port; under TPROXY, by port.
				ask(proxy, tcp, labtest.Pod, 8080, modes(toInbound, toApp)),
				ask(app, tcp, labtest.Peer, 80, toOutbound),
			},
		},
		{
			name: "an inbound port excluded",
			spec: func(s *redirect.Spec) { s.InboundExclude = append([]uint16{8080}, redirect.AlwaysExcluded()...) },
			asks: []packet{
				ask(client, tcp, labtest.Pod, 8080, toApp),
				ask(client, tcp, labtest.PodSide, 8080, toApp),
				ask(client, tcp, labtest.Pod, 80, toInbound),
				ask(proxy, tcp, labtest.Pod, 8080, modes(toInbound, toApp)),
			},
		},
		{
			name: "no inbound port captured",
			spec: func(s *redirect.Spec) { s.Inbound = redirect.Ports{} },
			asks: []packet{
				ask(client, tcp, labtest.Pod, 80, toApp),
				ask(client, tcp, labtest.Pod, 15008, toTunnel),
				ask(proxy, tcp, labtest.Pod, 80, modes(toInbound, toApp)),
				ask(app, tcp, labtest.Peer, 80, toOutbound),
				ask(app, tcp, labtest.Pod, 80, toApp),
			},
		},
	}
}

func interfaceCases() []packetCase {
	return []packetCase{
		{
			name: "an interface excluded",
			spec: func(s *redirect.Spec) { s.ExcludeInterfaces = []string{"eth1"} },
			asks: []packet{
				ask(app, tcp, labtest.Side, 80, toPeer),
				ask(client, tcp, labtest.PodSide, 80, toApp),
				ask(app, tcp, labtest.Peer, 80, toOutbound),
				ask(client, tcp, labtest.Pod, 80, toInbound),
				ask(app, tcp, labtest.PodSide, 80, toApp),
			},
		},
		{
			name: "an interface excluded with DNS captured",
			spec: func(s *redirect.Spec) { s.ExcludeInterfaces, s.DNS = []string{"eth1"}, redirect.DNSAll },
			asks: []packet{
				ask(app, udp, labtest.Side, 53, toPeer),
				ask(app, tcp, labtest.Side, 53, toPeer),
				ask(app, udp, labtest.Resolver, 53, toAgent),
			},
		},
		{
			name: "an interface rerouted",
			spec: func(s *redirect.Spec) { s.RerouteInterfaces = []string{"vm0"} },
			asks: []packet{
				// Under TPROXY the reference's rules of the mangle table see the guest's packets first, and know nothing
				// of rerouting: the inbound listener gets them.
				ask(guest, tcp, labtest.Far, 80, modes(toOutbound, toInbound)),
				ask(guest, tcp, labtest.Pod, 80, modes(toOutbound, toInbound)),
				ask(guest, udp, labtest.Far, 5000, toPeer),
				ask(client, tcp, labtest.Pod, 80, toInbound),
				ask(app, tcp, labtest.Peer, 80, toOutbound),
			},
		},
		{
			name: "an interface rerouted and one network captured",
			spec: func(s *redirect.Spec) {
				s.RerouteInterfaces, s.Outbound = []string{"vm0"}, redirect.Networks{List: networksOf(labtest.Far)}
			},
			asks: []packet{
				ask(guest, tcp, labtest.Far, 80, modes(toOutbound, toInbound)),
				ask(guest, tcp, labtest.Peer, 80, modes(toPeer, toInbound)),
				ask(guest, tcp, labtest.Pod, 80, modes(toApp, toInbound)),
			},
		},
		{
			name: "an interface rerouted without inbound capture",
			spec: func(s *redirect.Spec) { s.RerouteInterfaces, s.Inbound = []string{"vm0"}, redirect.Ports{} },
			asks: []packet{
				ask(guest, tcp, labtest.Far, 80, toOutbound),
				ask(guest, tcp, labtest.Pod, 80, toOutbound),
				ask(guest, udp, labtest.Far, 5000, toPeer),
				ask(client, tcp, labtest.Pod, 80, toApp),
			},
		},
	}
}

func dnsCases() []packetCase {
	servers := func(all ...netip.Addr) func(*redirect.Spec) {
		return func(s *redirect.Spec) { s.DNS, s.DNSServers = redirect.DNSServers, all }
	}
	v4, v6 := labtest.Resolver.Addr(ruleset.IPv4), labtest.Resolver.Addr(ruleset.IPv6)
	return []packetCase{
		{
			name: "all DNS captured",
			spec: func(s *redirect.Spec) { s.DNS = redirect.DNSAll },
			asks: []packet{
				ask(app, udp, labtest.Resolver, 53, toAgent),
				ask(app, tcp, labtest.Resolver, 53, toAgent),
				ask(app, udp, labtest.OtherResolver, 53, toAgent),
				ask(app, tcp, labtest.OtherResolver, 53, toAgent),
				ask(app, udp, labtest.Side, 53, toAgent),
				// The agent happens to ask from the port from which the app has just asked, and the other way round.
				ask(app, udp, labtest.Resolver, 53, toAgent).fromPort(4000),
				ask(proxy, udp, labtest.Resolver, 53, toPeer).fromPort(4000),
				ask(proxy, udp, labtest.Resolver, 53, toPeer).fromPort(4001),
				ask(app, udp, labtest.Resolver, 53, toAgent).fromPort(4001),
				ask(root, udp, labtest.Resolver, 53, toAgent),
				// A resolver in the pod, too.
				ask(app, udp, labtest.Loopback, 53, toAgent),
				ask(app, tcp, labtest.Loopback, 53, toAgent),
				ask(app, udp, labtest.Pod, 53, toAgent),
				ask(app, tcp, labtest.Pod, 53, toAgent),
				ask(app, udp, labtest.Resolver, 53, by(labtest.ByDNS, labtest.ByPeer).seenFrom(labtest.Pod)).passedOn(),
				ask(app, tcp, labtest.Resolver, 53, by(labtest.ByDNS, labtest.ByPeer).seenFrom(labtest.Pod)).passedOn(),
				// The agent asks a resolver in the pod. The reference has that exception for the proxy's user and not
				// for its group, which is what identifies it under TPROXY.
				ask(proxy, tcp, labtest.Pod, 53, modes(refused, toInbound)),
				ask(guest, udp, labtest.Resolver, 53, toPeer),
				ask(client, udp, labtest.Pod, 53, refused),
				ask(app, tcp, labtest.Peer, 80, toOutbound),
				ask(app, tcp, labtest.Pod, 80, toApp),
				ask(client, tcp, labtest.Pod, 80, toInbound),
				ask(proxy, tcp, labtest.Pod, 80, toInbound),
			},
		},
		{
			name: "DNS to the pod's resolvers captured",
			spec: servers(v4, v6),
			asks: []packet{
				ask(app, udp, labtest.Resolver, 53, toAgent),
				ask(app, tcp, labtest.Resolver, 53, toAgent),
				ask(app, udp, labtest.OtherResolver, 53, toPeer),
				ask(app, tcp, labtest.OtherResolver, 53, toOutbound),
				ask(app, udp, labtest.Resolver, 53, by(labtest.ByDNS, labtest.ByPeer).seenFrom(labtest.Pod)).passedOn(),
				ask(app, udp, labtest.Resolver, 53, toAgent).fromPort(4000),
				ask(proxy, udp, labtest.Resolver, 53, toPeer).fromPort(4000),
				ask(proxy, udp, labtest.Resolver, 53, toPeer).fromPort(4001),
				ask(app, udp, labtest.Resolver, 53, toAgent).fromPort(4001),
			},
		},
		{
			name: "DNS to a resolver of one family captured",
			spec: servers(v4),
			asks: []packet{
				ask(app, udp, labtest.Resolver, 53, perFamily(toAgent, toPeer)),
				ask(app, tcp, labtest.Resolver, 53, perFamily(toAgent, toOutbound)),
				ask(app, tcp, labtest.Pod, 80, toApp),
			},
		},
		{
			name: "all DNS captured and its port excluded",
			spec: func(s *redirect.Spec) { s.DNS, s.OutboundPortsExclude = redirect.DNSAll, []uint16{53} },
			asks: []packet{
				ask(app, udp, labtest.Resolver, 53, toPeer),
				ask(app, tcp, labtest.Resolver, 53, toPeer),
				ask(app, tcp, labtest.Peer, 80, toOutbound),
			},
		},
		{
			name: "all DNS captured and a group excluded",
			spec: func(s *redirect.Spec) { s.DNS, s.OwnerGroupsExclude = redirect.DNSAll, []uint32{3000} },
			asks: []packet{
				ask(member(3000), udp, labtest.Resolver, 53, toPeer),
				ask(member(3000), tcp, labtest.Resolver, 53, toPeer),
				ask(app, udp, labtest.Resolver, 53, toAgent),
				ask(app, tcp, labtest.Resolver, 53, toAgent),
			},
		},
	}
}

func ownerCases() []packetCase {
	return []packetCase{
		{
			name: "two groups captured",
			spec: func(s *redirect.Spec) { s.OwnerGroups = redirect.Groups{List: []uint32{3000, 4000}} },
			asks: []packet{
				ask(member(3000), tcp, labtest.Peer, 80, toOutbound),
				ask(member(4000), tcp, labtest.Peer, 80, toOutbound),
				ask(app, tcp, labtest.Peer, 80, toPeer),
				ask(root, tcp, labtest.Peer, 80, toPeer),
				ask(client, tcp, labtest.Pod, 80, toInbound),
			},
		},
		{
			name: "no group captured",
			spec: func(s *redirect.Spec) { s.OwnerGroups = redirect.Groups{} },
			asks: []packet{
				ask(app, tcp, labtest.Peer, 80, toPeer),
				ask(member(3000), tcp, labtest.Peer, 80, toPeer),
				ask(client, tcp, labtest.Pod, 80, toInbound),
				ask(proxy, tcp, labtest.Pod, 80, toInbound),
			},
		},
		{
			name: "two groups excluded",
			spec: func(s *redirect.Spec) { s.OwnerGroupsExclude = []uint32{3000, 4000} },
			asks: []packet{
				ask(member(3000), tcp, labtest.Peer, 80, toPeer),
				ask(member(4000), tcp, labtest.Peer, 80, toPeer),
				ask(app, tcp, labtest.Peer, 80, toOutbound),
				ask(client, tcp, labtest.Pod, 80, toInbound),
			},
		},
		{
			name: "a proxy with another user and group",
			ids:  ids{uid: 2000, gid: 2001},
			spec: func(s *redirect.Spec) { s.UIDs, s.GIDs = []uint32{2000}, []uint32{2001} },
			asks: []packet{
				ask(proxy, tcp, labtest.Pod, 80, toInbound),
				ask(user(2000, 1000), tcp, labtest.Peer, 80, toPeer),
				ask(user(1000, 2001), tcp, labtest.Peer, 80, toPeer),
				ask(user(1337, 1337), tcp, labtest.Peer, 80, toOutbound),
				ask(user(1337, 1337), tcp, labtest.Pod, 80, toApp),
				ask(app, tcp, labtest.Peer, 80, toOutbound),
			},
		},
		{
			name: "a proxy with two users",
			spec: func(s *redirect.Spec) { s.UIDs = []uint32{1337, 2000} },
			asks: []packet{
				ask(user(2000, 2000), tcp, labtest.Peer, 80, toPeer),
				ask(user(1337, 1000), tcp, labtest.Pod, 80, toInbound),
				// The reference's rules for the first user let the calls of everybody else to their own pod pass, the
				// second one's included. Marks, which TPROXY looks at, are set for both.
				ask(user(2000, 2000), tcp, labtest.Pod, 80, modes(toApp, toInbound)),
				ask(app, tcp, labtest.Peer, 80, toOutbound),
			},
		},
	}
}

// secondFamilyCases are for a pod whose first address is IPv4 and which is not said to be dual stack.
func secondFamilyCases() []packetCase {
	with := func(f redirect.SecondFamily) func(*redirect.Spec) {
		return func(s *redirect.Spec) { s.DualStack, s.SecondFamily = false, f }
	}
	return []packetCase{
		{name: "bypass", spec: with(redirect.Bypass), asks: []packet{
			ask(client, tcp, labtest.Pod, 80, perFamily(toInbound, toApp)),
			ask(client, udp, labtest.Pod, 5000, toApp),
			ask(app, tcp, labtest.Peer, 80, perFamily(toOutbound, toPeer)),
			ask(app, udp, labtest.Peer, 5000, toPeer),
			ask(proxy, tcp, labtest.Peer, 80, toPeer),
			ask(proxy, tcp, labtest.Pod, 80, perFamily(toInbound, toApp)),
			ask(app, tcp, labtest.Pod, 80, toApp),
		}},
		{name: "capture", spec: with(redirect.Capture), asks: append(whatever(),
			ask(client, tcp, labtest.Pod, 80, toInbound),
			ask(app, tcp, labtest.Peer, 80, toOutbound),
			ask(proxy, tcp, labtest.Pod, 80, toInbound),
			ask(app, tcp, labtest.Pod, 80, toApp),
		)},
		{name: "reject", spec: with(redirect.Reject), asks: []packet{
			ask(client, tcp, labtest.Pod, 80, perFamily(toInbound, refused)),
			ask(client, tcp, labtest.Pod, 15021, perFamily(toStatus, refused)),
			ask(client, udp, labtest.Pod, 5000, perFamily(toApp, refused)),
			ask(app, tcp, labtest.Peer, 80, perFamily(toOutbound, refused)),
			// The kernel fails the send of a datagram that does not get out.
			ask(app, udp, labtest.Peer, 5000, perFamily(toPeer, forbidden)),
			ask(proxy, tcp, labtest.Peer, 80, perFamily(toPeer, refused)),
			ask(app, tcp, labtest.Pod, 80, toApp),
			ask(app, tcp, labtest.Loopback, 80, toApp),
			ask(app, udp, labtest.Loopback, 5000, toApp),
			// ICMP finds neighbours and reports errors.
			ask(client, ping, labtest.Pod, 0, pong),
			ask(app, ping, labtest.Far, 0, pong),
		}},
	}
}

// direct are the answers where nothing is captured.
func direct() []packet {
	return []packet{
		ask(app, tcp, labtest.Peer, 80, toPeer),
		ask(app, tcp, labtest.Far, 443, toPeer),
		ask(app, tcp, labtest.Side, 15020, toPeer),
		ask(app, tcp, labtest.Resolver, 53, toPeer),
		ask(app, udp, labtest.Resolver, 53, toPeer),
		ask(app, udp, labtest.OtherResolver, 53, toPeer),
		ask(app, tcp, labtest.Pod, 80, toApp),
		ask(app, tcp, labtest.Loopback, 15001, toOutbound),
		ask(app, udp, labtest.Loopback, 5000, toApp),
		ask(proxy, tcp, labtest.Private, 80, toPeer),
		ask(proxy, tcp, labtest.Pod, 80, toApp),
		ask(client, tcp, labtest.Pod, 80, toApp),
		ask(client, tcp, labtest.PodSide, 15006, toInbound),
		ask(client, tcp, labtest.Pod, 15008, toTunnel),
		ask(client, tcp, labtest.Pod, 15021, toStatus),
		ask(client, tcp, labtest.Pod, 81, refused),
		ask(client, tcp, labtest.Pod, 15053, refused),
		ask(client, udp, labtest.PodSide, 5000, toApp),
		ask(client, udp, labtest.Pod, 81, refused),
		ask(client, stray, labtest.Pod, 80, refused),
		ask(client, ping, labtest.Pod, 0, pong),
		ask(guest, tcp, labtest.Far, 80, toPeer),
		ask(guest, udp, labtest.Private, 5000, toPeer),
	}
}
