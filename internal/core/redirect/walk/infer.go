package walk

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Infer returns the configuration that most likely produced the live rules of the mesh. It needs no knowledge of the pod.
// It returns false if no chain belongs to the mesh. A rule that was removed by hand can look like a setting; a rule that no
// setting makes has no effect on the result.
func (n Namespace) Infer() (spec redirect.Spec, native, found bool) {
	g := guess{Spec: redirect.Default()}
	g.Inbound, g.InboundExclude, g.Outbound, g.OutboundPortsExclude = redirect.Ports{}, nil, redirect.Networks{}, nil
	g.UIDs, g.GIDs, g.Mark, g.TunnelPort = nil, nil, 0, 0
	eachChain(n.Live, func(f ruleset.Family, table string, c ruleset.Chain) {
		name, ours := strings.CutPrefix(table, redirect.Sidecar().NativePrefix)
		native = native || ours
		g.family, g.tunnel, g.own = f, false, nil
		chain := strings.ReplaceAll(strings.ToUpper(c.Name), "-", "_")
		found = found || strings.HasPrefix(chain, redirect.Sidecar().ChainPrefix)
		for _, r := range c.Rules {
			g.rule(name+"/"+chain, partsOf(r))
		}
	})
	g.complete(n)
	return g.Spec, native, found
}

// guess is an unfinished Spec.
type guess struct {
	redirect.Spec

	family ruleset.Family
	// returned has the groups whose traffic passes.
	returned []uint32
	// tunnel is set after the rule for the tunnel's port; own has the families of the rules for the pod's own addresses.
	tunnel bool
	own    []ruleset.Family
	// arrives is set by a rule that sends incoming packets to the chain of the mesh.
	arrives bool
	// entering and leaving are the interfaces of RETURN rules.
	entering, leaving []string
}

// maxGuessed bounds a list: no setting has more items, but a pod can make any number of rules.
const maxGuessed = 1000

// once appends a value unless the list contains it or is full.
func once[T comparable](list []T, value T) []T {
	if len(list) >= maxGuessed || slices.Contains(list, value) {
		return list
	}
	return append(list, value)
}

// parts are the possible parts of a rule of the mesh.
type parts struct {
	// chain is the target of a jump, as iptables names it; returns reports whether the target is RETURN; port is for REDIRECT and TPROXY.
	chain   string
	returns bool
	port    uint16

	in, out string
	dst     netip.Prefix
	notDst  netip.Prefix
	dport   *ruleset.PortRange
	mark    *uint32
	states  ruleset.States
	owners  []ruleset.Owner
	family  ruleset.Family
	// matches counts the matches except on protocol and family; protocol reports whether the rule matches a protocol.
	matches  int
	protocol bool
}

func partsOf(r ruleset.Rule) (p parts) {
	switch t := r.Target.(type) {
	case ruleset.Jump:
		p.chain = strings.ReplaceAll(strings.ToUpper(t.Chain), "-", "_")
	case ruleset.Verdict:
		p.returns = t == ruleset.Return
	case ruleset.RedirectTo:
		p.port = uint16(t)
	case ruleset.TProxy:
		p.port = t.Port
	}
	for _, m := range r.Matches {
		p.match(m)
	}
	return p
}

func (p *parts) match(m ruleset.Match) {
	p.matches++
	switch m := m.(type) {
	case ruleset.Counter, ruleset.Comment, ruleset.Neutral, ruleset.Header:
		p.matches--
	case ruleset.OfFamily:
		p.family = ruleset.Family(m)
		p.matches--
	case ruleset.Protocol:
		p.protocol = true
		p.matches--
	case ruleset.Interface:
		switch {
		case m.Not:
		case m.Out:
			p.out = m.Name
		default:
			p.in = m.Name
		}
	case ruleset.Network:
		switch p.family = ruleset.FamilyOf(m.Prefix.Addr()); {
		case m.Source:
		case m.Not:
			p.notDst = m.Prefix
		default:
			p.dst = m.Prefix
		}
	case ruleset.Port:
		if !m.Not && !m.Source {
			p.dport = &m.Range
		}
	case ruleset.Mark:
		if !m.Not && !m.Connection && m.Mask == 0 {
			p.mark = &m.Value
		}
	case ruleset.States:
		p.states = m
	case ruleset.Owner:
		p.owners = append(p.owners, m)
	}
}

// rule updates the guess by a rule of a chain.
func (g *guess) rule(at string, r parts) {
	g.arrives = g.arrives || strings.HasSuffix(at, "/PREROUTING") && r.chain == "ISTIO_INBOUND" && at != "raw/PREROUTING"
	switch at {
	case "nat/ISTIO_REDIRECT":
		g.OutboundPort = r.port
	case "nat/ISTIO_IN_REDIRECT":
		g.InboundPort = r.port
	case "mangle/ISTIO_TPROXY":
		if r.port != 0 {
			g.Mode, g.InboundPort = redirect.TPROXY, r.port
		}
	case "nat/ISTIO_INBOUND", "mangle/ISTIO_INBOUND":
		g.inbound(at, r)
	case "nat/ISTIO_OUTPUT":
		g.output(r)
	case "nat/ISTIO_OUTPUT_DNS":
		g.dns(r)
	case "nat/PREROUTING", "nat/OUTPUT":
		g.interfaces(r)
	case "mangle/PREROUTING":
		g.DropInvalid = g.DropInvalid || r.chain == "ISTIO_DROP" && r.states&ruleset.StateInvalid != 0
	case "mangle/OUTPUT":
		if r.mark != nil && r.returns {
			g.Mode, g.Mark = redirect.TPROXY, *r.mark
		}
	case "filter/ISTIO_REJECT":
		g.SecondFamily = redirect.Reject
	}
}

// inbound reads the inbound ports.
func (g *guess) inbound(at string, r parts) {
	table, _, _ := strings.Cut(at, "/")
	switch {
	case r.returns && r.dport != nil && table == "nat" && !g.tunnel:
		g.TunnelPort, g.tunnel = r.dport.First, true
	case r.returns && r.dport != nil:
		g.InboundExclude = once(g.InboundExclude, *r.dport)
	case r.chain != "ISTIO_IN_REDIRECT" && r.chain != "ISTIO_TPROXY":
	case r.dport != nil:
		g.Inbound.List = once(g.Inbound.List, *r.dport)
	default:
		g.Inbound.All = true
	}
}

// output reads the outbound networks and ports.
func (g *guess) output(r parts) {
	family := max(g.family, r.family)
	g.DualStack = g.DualStack || family == ruleset.IPv6
	network, networked := r.dst, r.dst.IsValid()
	bare := r.matches == 0 && !r.protocol
	switch {
	case r.chain == "ISTIO_IN_REDIRECT":
		g.proxy(r)
	case r.chain == "ISTIO_REDIRECT" && r.dport != nil:
		g.OutboundPorts = once(g.OutboundPorts, *r.dport)
	case r.chain == "ISTIO_REDIRECT" && networked:
		g.Outbound.List = once(g.Outbound.List, network)
	case r.chain == "ISTIO_REDIRECT":
		g.Outbound.List = once(g.Outbound.List, everything(family))
	case !r.returns:
	case bare && len(g.own) > 0: // all networks, behind the pod's own addresses
		g.OutboundExclude = once(g.OutboundExclude, everything(family))
	case bare:
		g.OwnerGroups = redirect.Groups{}
	case r.matches == 1 && r.dport != nil:
		g.OutboundPortsExclude = once(g.OutboundPortsExclude, *r.dport)
	case r.matches == 1 && networked && (network.Addr().IsLoopback() || network == g.Loopback) && !slices.Contains(g.own, ruleset.FamilyOf(network.Addr())):
		g.own = append(g.own, ruleset.FamilyOf(network.Addr()))
	case r.matches == 1 && networked:
		g.OutboundExclude = once(g.OutboundExclude, network)
	case len(r.owners) == r.matches:
		g.groups(r)
	}
}

// everything returns the network of all addresses of a family, the zero Prefix for both.
func everything(f ruleset.Family) netip.Prefix {
	all := map[ruleset.Family]netip.Addr{ruleset.IPv4: netip.IPv4Unspecified(), ruleset.IPv6: netip.IPv6Unspecified()}
	return netip.PrefixFrom(all[f], 0)
}

// proxy reads the identity of the proxy, and the loopback network, from the rule for the proxy's calls to its own pod.
func (g *guess) proxy(r parts) {
	for _, o := range r.owners {
		switch {
		case o.Not:
		case o.Group:
			g.GIDs = once(g.GIDs, o.ID)
		default:
			g.UIDs = once(g.UIDs, o.ID)
		}
	}
	if r.notDst.IsValid() && r.notDst.Addr().Is4() {
		g.Loopback = r.notDst
	}
}

// groups reads the excluded groups, or the list of captured groups.
func (g *guess) groups(r parts) {
	var groups []uint32
	for _, o := range r.owners {
		switch {
		case !o.Group:
			return
		case o.Not:
			groups = append(groups, o.ID)
		default:
			g.returned = once(g.returned, o.ID)
		}
	}
	if len(groups) > 0 {
		g.OwnerGroups = redirect.Groups{List: groups}
	}
}

// dns reads the resolvers with captured queries.
func (g *guess) dns(r parts) {
	if !r.dst.IsValid() {
		g.DNS = redirect.DNSAll
		return
	}
	g.DNS, g.DNSServers = redirect.DNSServers, once(g.DNSServers, r.dst.Addr())
}

// interfaces reads excluded interfaces and virtual machines' interfaces.
func (g *guess) interfaces(r parts) {
	switch {
	case r.chain == "ISTIO_REDIRECT" && r.in != "":
		g.RerouteInterfaces = once(g.RerouteInterfaces, r.in)
	case !r.returns || r.matches != 1 || r.protocol:
	case r.in != "":
		g.entering = once(g.entering, r.in)
	case r.out != "":
		g.leaving = once(g.leaving, r.out)
	}
}

// complete evaluates rules that have a meaning only together, and fills in fields that no rule shows.
func (g *guess) complete(n Namespace) {
	g.OwnerGroupsExclude = slices.DeleteFunc(g.returned, func(group uint32) bool { return slices.Contains(g.GIDs, group) })
	g.ExcludeInterfaces = slices.DeleteFunc(g.leaving, func(name string) bool { return !slices.Contains(g.entering, name) })
	for _, name := range g.entering {
		if len(g.Outbound.List) == 0 && !slices.Contains(g.ExcludeInterfaces, name) { // a virtual machine without captured networks
			g.RerouteInterfaces = once(g.RerouteInterfaces, name)
		}
	}
	slices.Reverse(g.RerouteInterfaces) // the last one comes first, see redirect
	// A pod without outbound capture has no such rule: the rule is not missing.
	only := !slices.ContainsFunc(g.Outbound.List, func(p netip.Prefix) bool { return p.IsValid() && p.Bits() > 0 })
	if only && len(g.Outbound.List) > 0 {
		g.Outbound = redirect.Networks{All: true}
	}
	if len(g.Inbound.List) == 0 && (g.arrives || len(g.InboundExclude) > 0) {
		g.Inbound.All = true
	}
	g.Mark = cmp.Or(g.Mark, redirect.DefaultMark)
	g.Table = cmp.Or(n.Tables[g.Mark], g.Table)
}
