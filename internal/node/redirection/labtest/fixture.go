// Package labtest builds a pod and the network around it from real namespaces, and sends real requests whose answers name
// the listener.
//
// It promises that a request gets the kernel's own answer (the actors' users and groups own the sockets, nothing is
// simulated), that a wrong answer comes with the request, the expected and the actual listener, and that everything is
// removed when the test or the process ends. It never programs a rule and never touches the caller's namespace.
//
// Start at New, then Request and Expectation. Serve, Proxy and Request work in other namespaces as well.
package labtest

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
)

// Place is an address of the fixture in each family.
//
//	guest ── vm0 [ pod ] eth0 ── peer (peer, far, private, the resolvers)
//	                     eth1 ── peer (side)
type Place string

// The places. Far and Private are behind a router, each in its own network.
const (
	Pod       Place = "pod"
	PodSide   Place = "pod's second address"
	PodInside Place = "pod's address towards the guest"
	Loopback  Place = "loopback"
	// AlsoLoopback exists only in IPv4.
	AlsoLoopback  Place = "another loopback address"
	Passthrough   Place = "pass-through"
	Peer          Place = "peer"
	Far           Place = "far"
	Private       Place = "private"
	Side          Place = "side"
	Resolver      Place = "resolver"
	OtherResolver Place = "other resolver"
	Guest         Place = "guest"
	// Probe is the node's, from which it probes ambient pods.
	Probe       Place = "probe"
	gateway     Place = "gateway"
	SideGateway Place = "side gateway"
)

// Addr returns the place's address in the family; the zero Addr if it has none.
func (p Place) Addr(f ruleset.Family) netip.Addr {
	text := map[Place][2]string{
		Pod: {"10.1.0.2", "fd00:1::2"}, PodSide: {"10.4.0.2", "fd00:4::2"}, PodInside: {"10.5.0.1", "fd00:5::1"},
		Loopback: {"127.0.0.1", "::1"}, AlsoLoopback: {"127.0.0.2", ""}, Passthrough: {"127.0.0.6", "::6"},
		Peer: {"10.1.0.9", "fd00:1::9"}, Far: {"10.2.0.9", "fd00:2::9"}, Private: {"10.3.0.9", "fd00:3::9"},
		Side: {"10.4.0.9", "fd00:4::9"}, Guest: {"10.5.0.2", "fd00:5::2"},
		Probe:    {"169.254.7.127", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff"},
		Resolver: {"10.1.0.53", "fd00:1::53"}, OtherResolver: {"10.1.0.54", "fd00:1::54"},
		gateway: {"10.1.0.1", "fd00:1::1"}, SideGateway: {"10.4.0.1", "fd00:4::1"},
	}[p]
	i := 0
	if f == ruleset.IPv6 {
		i = 1
	}
	a, _ := netip.ParseAddr(text[i])
	return a
}

// Port returns a port at the place.
func (p Place) Port(f ruleset.Family, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(p.Addr(f), port)
}

// Network returns the network of the place: a /24, or a /64 in IPv6.
func (p Place) Network(f ruleset.Family) netip.Prefix {
	bits := 24
	if f == ruleset.IPv6 {
		bits = 64
	}
	return netip.PrefixFrom(p.Addr(f), bits).Masked()
}

// The ports. Peers outside of the pod answer on all PeerPorts, the app on AppPorts, and both answer UDP on UDPPort.
const (
	UDPPort = 5000
	DNSPort = 53
	AppUID  = 1000
)

// AppPorts returns the ports on which the app answers.
func AppPorts() []uint16 { return []uint16{80, 8080, 9000} }

// PeerPorts returns the ports of the peers outside of the pod; 15020 would be a status port in a pod.
func PeerPorts() []uint16 { return []uint16{80, 443, 8080, 15020, DNSPort} }

// Fixture is a pod with an app, peers outside of it, and a guest (a virtual machine) behind it. StartProxy starts the
// proxy.
type Fixture struct {
	Families         []ruleset.Family
	pod, peer, guest string
	ports            atomic.Uint32
}

// New builds a fixture for the given families, with the app and the peers ready to answer until the test ends.
func New(tb testing.TB, families ...ruleset.Family) *Fixture {
	tb.Helper()
	l := &Fixture{Families: families, guest: netnstest.New(tb), peer: netnstest.New(tb), pod: netnstest.New(tb)}
	l.wire(tb)
	l.serve(tb)
	return l
}

// Path returns the file of the pod's namespace.
func (l *Fixture) Path() string { return l.pod }

// NetNS returns the pod's namespace, which is open until the test ends.
func (l *Fixture) NetNS() *netns.Namespace { return netnstest.At(l.pod) }

// FreshPort returns an unused source port. A kernel that chooses ports itself sometimes uses one for two
// destinations. If both connections are redirected to one listener, connection tracking changes the port of the
// second one, which an Expectation reports. Fresh ports are below the kernel's range.
func (l *Fixture) FreshPort() uint16 {
	const first, count = 20000, 12000
	return uint16(first + l.ports.Add(1)%count)
}

// App returns the application in the pod.
func (l *Fixture) App() Actor { return Actor{Name: "app", Namespace: l.pod, UID: AppUID, GID: AppUID} }

// Proxy returns the sidecar proxy as the injector sets it up: for TPROXY, which needs capabilities, it is root
// in the proxy's group.
func (l *Fixture) Proxy(mode redirect.Mode) Actor {
	uid := redirect.DefaultID
	if mode == redirect.TPROXY {
		uid = 0
	}
	return Actor{Name: "proxy", Namespace: l.pod, UID: uid, GID: redirect.DefaultID}
}

// Root returns a process in the pod that is root, and not the proxy.
func (l *Fixture) Root() Actor { return Actor{Name: "root", Namespace: l.pod} }

// Peer returns a process outside of the pod.
func (l *Fixture) Peer() Actor {
	return Actor{Name: "peer", Namespace: l.peer, UID: AppUID, GID: AppUID}
}

// Guest returns the virtual machine behind the pod.
func (l *Fixture) Guest() Actor {
	return Actor{Name: "guest", Namespace: l.guest, UID: AppUID, GID: AppUID}
}

// StartProxy starts a proxy in the pod as the actor. It runs until the test ends.
func (l *Fixture) StartProxy(tb testing.TB, a Actor, mode redirect.Mode) {
	tb.Helper()
	Proxy{
		Actor: a, Mode: mode, Families: l.Families,
		Resolver: func(f ruleset.Family) netip.AddrPort { return Resolver.Port(f, DNSPort) },
	}.Start(tb)
}

// wire connects the namespaces, and makes the pod a router, like a pod with a guest.
func (l *Fixture) wire(tb testing.TB) {
	tb.Helper()
	link := func(name, other, path string) string {
		return fmt.Sprintf("link add %s type veth peer name %s netns %s\n%s", name, other, path, l.up(name, "fe80::1"))
	}
	const common = "link set lo up\n"
	var pod, peer, guest strings.Builder
	pod.WriteString(common + link("eth0", "eth0", l.peer) + link("eth1", "eth1", l.peer) + link("vm0", "eth0", l.guest))
	peer.WriteString(common + l.up("eth0", "fe80::2") + l.up("eth1", "fe80::2"))
	guest.WriteString(common + l.up("eth0", "fe80::2"))
	for _, f := range l.Families {
		pod.WriteString(addresses(f, "eth0", Pod) + addresses(f, "eth1", PodSide) + addresses(f, "vm0", PodInside))
		fmt.Fprintf(&pod, "route add default via %s\n", gateway.Addr(f))
		peer.WriteString(addresses(f, "eth0", gateway, Peer, Resolver, OtherResolver, Far, Private, Probe))
		peer.WriteString(addresses(f, "eth1", SideGateway, Side))
		fmt.Fprintf(&peer, "route add %s via %s\n", Guest.Network(f), Pod.Addr(f))
		guest.WriteString(addresses(f, "eth0", Guest))
		fmt.Fprintf(&guest, "route add default via %s\n", PodInside.Addr(f))
	}
	// The pod's commands create the links; the other commands add addresses to them.
	for _, step := range []struct{ path, batch string }{{l.pod, pod.String()}, {l.peer, peer.String()}, {l.guest, guest.String()}} {
		netnstest.Feed(tb, step.path, step.batch, "ip", "-batch", "-")
	}
	netnstest.Set(tb, l.pod, "net/ipv4/ip_forward", "1")
	netnstest.Set(tb, l.pod, "net/ipv6/conf/all/forwarding", "1")
}

// up returns the commands that bring a link up. They add the link-local address, from which a router looks for its
// neighbours, explicitly: the kernel's own needs duplicate address detection, which takes seconds.
func (l *Fixture) up(link, linkLocal string) string {
	s := fmt.Sprintf("link set %s addrgenmode none\nlink set %s up\n", link, link)
	if slices.Contains(l.Families, ruleset.IPv6) {
		s += fmt.Sprintf("address add %s/64 dev %s nodad\n", linkLocal, link)
	}
	return s
}

// addresses returns the commands that add the places' addresses to a link.
func addresses(f ruleset.Family, link string, places ...Place) string {
	var b strings.Builder
	for _, p := range places {
		nodad := ""
		if f == ruleset.IPv6 {
			nodad = " nodad"
		}
		fmt.Fprintf(&b, "address add %s/%d dev %s%s\n", p.Addr(f), p.Network(f).Bits(), link, nodad)
	}
	return b.String()
}

// serve starts the app and the peers. Each address has its own datagram socket, so that the answer comes from the address of the
// request.
func (l *Fixture) serve(tb testing.TB) {
	tb.Helper()
	var app, peer []Service
	for _, f := range l.Families {
		for _, port := range AppPorts() {
			app = append(app, Service{By: ByApp, Via: TCP, At: netip.AddrPortFrom(anyAddress(f), port)})
		}
		for _, p := range []Place{Pod, PodSide, Loopback} {
			app = append(app, Service{By: ByApp, Via: UDP, At: p.Port(f, UDPPort)})
		}
		for _, port := range PeerPorts() {
			peer = append(peer, Service{By: ByPeer, Via: TCP, At: netip.AddrPortFrom(anyAddress(f), port)})
		}
		for _, p := range []Place{Peer, Far, Private, Side, Resolver, OtherResolver} {
			peer = append(peer, Service{By: ByPeer, Via: UDP, At: p.Port(f, UDPPort)},
				Service{By: ByPeer, Via: UDP, At: p.Port(f, DNSPort)})
		}
	}
	Serve(tb, l.App(), app...)
	Serve(tb, l.Peer(), peer...)
}
