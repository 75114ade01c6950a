package labtest

import (
	"net/netip"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/redirect"
)

// Ztunnel returns the node's proxy, as it opens sockets in an ambient pod.
func (l *Fixture) Ztunnel() Actor {
	return Actor{Name: "ztunnel", Namespace: l.pod, Mark: ambient.ProxyMark}
}

// StartZtunnel opens ztunnel's sockets in the pod, with the options of the real one. They stay open until the test ends. Of several
// ztunnels, the kernel chooses one for each connection.
func (l *Fixture) StartZtunnel(tb testing.TB) {
	tb.Helper()
	z := l.Ztunnel()
	for _, f := range l.Families {
		tcp := func(by string, port uint16, onward func(Hop) Request) Service {
			at := netip.AddrPortFrom(anyAddress(f), port)
			return Service{By: by, Via: TCP, At: at, Transparent: true, Redirected: port != redirect.TunnelPort, Onward: onward}
		}
		services := []Service{
			tcp(ByOutbound, redirect.OutboundPort, func(h Hop) Request { return Request{From: z, Via: TCP, To: h.Dst} }),
			tcp(ByInbound, redirect.InboundPort, z.deliver),
			tcp(ByTunnel, redirect.TunnelPort, func(h Hop) Request {
				h.Dst = netip.AddrPortFrom(h.Dst.Addr(), AppPorts()[0]) // the tunnel names it
				return z.deliver(h)
			}),
		}
		for _, via := range []Protocol{TCP, UDP} {
			services = append(services, Service{
				By: ByDNS, Via: via, At: Loopback.Port(f, redirect.DNSPort), Redirected: true, Transparent: true,
				Onward: func(Hop) Request { return Request{From: z, Via: via, To: Resolver.Port(f, DNSPort)} },
			})
		}
		Serve(tb, z, services...)
	}
}

// deliver passes a connection to the app from the client's own address.
func (a Actor) deliver(h Hop) Request {
	return Request{From: a, Via: TCP, To: h.Dst, Source: h.From.Addr(), Mark: a.Mark}
}
