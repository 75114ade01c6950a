package walk

import (
	"net/netip"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// An ambient pod differs from a pod with a sidecar: the rules know the proxy by its mark, not by its user; the proxy connects to the
// app from the client's own address; and the node's own connections, and tunnels, reach their sockets directly.

// proxyMark returns the mark of the proxy's packets, 0 for a sidecar's.
func (w Wanted) proxyMark() uint32 {
	if w.Ambient != nil {
		return ambient.ProxyMark
	}
	return 0
}

// dnsCapture returns the DNS queries that are captured.
func (w Wanted) dnsCapture() redirect.DNSCapture {
	switch {
	case w.Ambient == nil:
		return w.Spec.DNS
	case w.Ambient.DNSCapture:
		return redirect.DNSAll
	}
	return redirect.DNSOff
}

// ambientSettings returns the settings of an ambient pod that let packets pass.
func ambientSettings() []setting {
	take := func(change func(s *ambient.Spec, from ambient.Spec)) func(w, from *Wanted) {
		return func(w, from *Wanted) {
			s := *w.Ambient // other copies of the Wanted share it
			change(&s, *from.Ambient)
			w.Ambient = &s
		}
	}
	is := func(text string) func(*Wanted) []string { return func(*Wanted) []string { return []string{text} } }
	return []setting{
		{
			key: ambient.BypassInboundKey, name: "bypass-inbound-capture", items: is("true"),
			take: take(func(s *ambient.Spec, from ambient.Spec) { s.Ingress = from.Ingress }),
		},
		{
			key: ambient.RerouteInterfacesKey, name: "reroute-virtual-interfaces", items: func(w *Wanted) []string { return w.Ambient.Interfaces },
			take: take(func(s *ambient.Spec, from ambient.Spec) { s.Interfaces = from.Interfaces }),
		},
		{
			field: redirect.FieldSecondFamily, name: "AMBIENT_IPV6", items: is("false"),
			take: func(w, from *Wanted) { w.Families = from.Families },
		},
	}
}

// past returns the incoming packets that the proxy's redirection lets pass in an ambient pod.
func (k comparison) past(in Packet) []canary {
	if k.Ambient == nil {
		return nil
	}
	tunnel, node := in, in
	tunnel.Dst, tunnel.Free = netip.AddrPortFrom(in.Dst.Addr(), redirect.TunnelPort), in.Free&^FreeDestinationPort
	probe := k.Ambient.ProbeV4
	if k.family == ruleset.IPv6 {
		probe = k.Ambient.ProbeV6
	}
	node.Src, node.Free = netip.AddrPortFrom(probe, client), in.Free&^FreeSource
	return []canary{{Packet: tunnel, name: "incoming tunnels"}, {Packet: node, name: "the node's TCP connections to the pod"}}
}
