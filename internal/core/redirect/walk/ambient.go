package walk

import (
	"net/netip"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// WantedOf returns the configuration of a pod in any mode of the mesh, nil if want is nil. In ambient mode Spec has only ztunnel's
// ports, and whether DNS is captured.
func WantedOf(want redirect.Wanted, f redirect.Families, native bool) *Wanted {
	switch s := want.(type) {
	case redirect.Spec:
		return &Wanted{Spec: s, Families: f, Native: native}
	case ambient.Spec:
		ports := redirect.Spec{OutboundPort: redirect.OutboundPort, InboundPort: redirect.InboundPort, TunnelPort: redirect.TunnelPort}
		if s.DNSCapture {
			ports.DNS = redirect.DNSAll
		}
		return &Wanted{Spec: ports, Ambient: &s, Families: f, Native: native}
	}
	return nil
}

// Mode returns what WantedOf was called with.
func (w Wanted) Mode() redirect.Wanted {
	if w.Ambient != nil {
		return *w.Ambient
	}
	return w.Spec
}

// proxyMark returns the mark of the proxy's packets, 0 for a sidecar's: the rules know it by its user.
func (w *Wanted) proxyMark() uint32 {
	if w != nil && w.Ambient != nil {
		return ambient.ProxyMark
	}
	return 0
}

// ambientSettings are the settings by which packets of a pod in ambient mode pass.
func ambientSettings() []setting {
	row := func(name, key, value string, take func(w, from *Wanted)) setting {
		return setting{name: name, key: key, items: func(*Wanted) []string { return []string{value} }, take: func(w, from *Wanted) {
			own := *w.Ambient
			w.Ambient = &own
			take(w, from)
		}}
	}
	return []setting{
		row("bypass-inbound-capture", ambient.BypassInboundKey, "true", func(w, from *Wanted) { w.Ambient.Ingress = from.Ambient.Ingress }),
		row("AMBIENT_IPV6", "", "false", func(w, from *Wanted) { w.Ambient.IPv6, w.Families = from.Ambient.IPv6, from.Families }),
	}
}

// ambientCanaries returns packets that only a pod in ambient mode gets: in is an arriving connection to any port.
func (k comparison) ambientCanaries(in Packet, self netip.Addr) []canary {
	probe, tunnel := to(in, self, httpPort), to(in, self, redirect.TunnelPort)
	source := k.Ambient.ProbeV4
	if k.family == ruleset.IPv6 {
		source = k.Ambient.ProbeV6
	}
	probe.Src = netip.AddrPortFrom(source, client)
	probe.Free &^= FreeSource
	tunnel.Free &^= FreeDestinationPort
	return []canary{{Packet: probe, name: "the node's probes"}, {Packet: tunnel, name: "inbound tunnels (HBONE)"}}
}

// InferAmbient is Infer for ambient mode. It returns false if the namespace has no chain or table that only this mode has.
func (n Namespace) InferAmbient() (spec ambient.Spec, native, found bool) {
	spec.Config = ambient.DefaultConfig()
	spec.Ingress = true
	own := ambient.Owner().NativePrefix
	eachChain(n.Live, func(f ruleset.Family, table string, c ruleset.Chain) {
		isNative := f == ruleset.Inet && strings.HasPrefix(table, own)
		in, out := c.Name == "ISTIO_PRERT", c.Name == "ISTIO_OUTPUT"
		native, found = native || isNative, found || isNative || in
		spec.IPv6 = spec.IPv6 || in && f == ruleset.IPv6
		if in || out || isNative && strings.HasPrefix(c.Name, "istio-") {
			for _, r := range c.Rules {
				inferRule(&spec, r)
			}
		}
	})
	return spec, native, found
}

// inferRule reads the settings of ambient mode from a rule.
func inferRule(spec *ambient.Spec, r ruleset.Rule) {
	p := partsOf(r)
	spec.IPv6 = spec.IPv6 || p.family == ruleset.IPv6
	switch n, _ := translation(r.Target); {
	case n.Port == redirect.DNSPort:
		spec.DNSCapture = true
	case n.Port == redirect.InboundPort:
		spec.Ingress = false
	case n.Port == redirect.OutboundPort && p.in != "":
		spec.Interfaces = once(spec.Interfaces, p.in)
	}
	for _, m := range r.Matches {
		switch from, is := m.(ruleset.Network); {
		case !is || r.Target != ruleset.Accept || !from.Source || !from.Prefix.IsSingleIP():
		case from.Prefix.Addr().Is4():
			spec.ProbeV4 = from.Prefix.Addr()
		default:
			spec.ProbeV6 = from.Prefix.Addr()
		}
	}
}
