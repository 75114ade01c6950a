package labtest

import (
	"net/netip"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// The names by which the sockets of a pod answer.
const (
	ByApp      = "app"
	ByPeer     = "peer"
	ByOutbound = "outbound" // the proxy, for outbound connections
	ByInbound  = "inbound"  // the proxy, for inbound connections
	ByTunnel   = "tunnel"   // the proxy's HBONE port
	ByStatus   = "status"   // the proxy's and agent's health and metrics ports
	ByDNS      = "dns"      // the agent's resolver
)

// Proxy is a sidecar that answers with its listener's name, and passes on requests that have Through.
type Proxy struct {
	Actor
	Mode     redirect.Mode
	Families []ruleset.Family
	// Resolver is the upstream of the agent's DNS resolver, by family.
	Resolver func(ruleset.Family) netip.AddrPort
}

// Start opens the proxy's sockets. They stay open until the test ends.
func (p Proxy) Start(tb testing.TB) {
	tb.Helper()
	for _, f := range p.Families {
		Serve(tb, p.Actor, p.services(f)...)
	}
}

func (p Proxy) services(f ruleset.Family) []Service {
	tproxy := p.Mode == redirect.TPROXY
	tcp := func(by string, port uint16) Service {
		return Service{By: by, Via: TCP, At: netip.AddrPortFrom(anyAddress(f), port)}
	}
	outbound, inbound := tcp(ByOutbound, redirect.OutboundPort), tcp(ByInbound, redirect.InboundPort)
	outbound.Redirected, outbound.Onward = true, func(h Hop) Request { return Request{From: p.Actor, Via: TCP, To: h.Dst} }
	inbound.Redirected, inbound.Transparent, inbound.Onward = true, tproxy, p.toApp
	all := []Service{outbound, inbound, tcp(ByTunnel, redirect.TunnelPort)}
	for _, port := range redirect.AlwaysExcluded() {
		all = append(all, tcp(ByStatus, port.First))
	}
	// The agent listens only on loopback. REDIRECT sends the pod's own packets there, and answers must have that source
	// address so that the kernel can restore the resolver's.
	for _, via := range []Protocol{TCP, UDP} {
		all = append(all, Service{
			By: ByDNS, Via: via, At: netip.AddrPortFrom(Loopback.Addr(f), redirect.DNSPort), Redirected: true,
			Onward: func(Hop) Request { return Request{From: p.Actor, Via: via, To: p.Resolver(f)} },
		})
	}
	return all
}

// toApp passes an inbound connection to the app like Envoy: from the pass-through address, or under TPROXY from the
// client's own address and with the mark that returns the answers to the proxy.
func (p Proxy) toApp(h Hop) Request {
	ask := Request{From: p.Actor, Via: TCP, To: h.Dst, Source: Passthrough.Addr(ruleset.FamilyOf(h.Dst.Addr()))}
	if p.Mode == redirect.TPROXY {
		ask.Source, ask.Mark = h.From.Addr(), redirect.DefaultMark
	}
	return ask
}

func anyAddress(f ruleset.Family) netip.Addr {
	if f == ruleset.IPv6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}
