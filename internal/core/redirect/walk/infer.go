package walk

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Infer returns the configuration by which the live rules of the mesh were most likely made, where nothing is known of the pod.
// It returns false if there is no chain of the mesh. A rule that was removed by hand can look like a setting; a rule that no
// setting makes is not in the result.
func (n Namespace) Infer() (spec redirect.Spec, native, found bool) {
	g := guess{Spec: redirect.Default()}
	g.Inbound, g.InboundExclude, g.Outbound, g.OutboundPortsExclude = redirect.Ports{}, nil, redirect.Networks{}, nil
	g.UIDs, g.GIDs, g.Mark, g.TunnelPort = nil, nil, 0, 0
	for _, s := range n.Live {
		for _, t := range s.Tables {
			name, ours := strings.CutPrefix(t.Name, redirect.NativePrefix)
			native = native || ours
			for _, c := range t.Chains {
				g.family, g.tunnel, g.own = s.Family, false, nil
				chain := strings.ReplaceAll(strings.ToUpper(c.Name), "-", "_")
				found = found || strings.HasPrefix(chain, redirect.ChainPrefix)
				for _, r := range c.Rules {
					g.rule(name+"/"+chain, meaning(t.Name, r))
				}
			}
		}
	}
	for _, owner := range g.returned { // a group that only passes is an excluded one
		if !slices.Contains(g.GIDs, owner) {
			g.OwnerGroupsExclude = once(g.OwnerGroupsExclude, owner)
		}
	}
	g.complete(n)
	return g.Spec, native, found
}

// guess is a Spec on its way.
type guess struct {
	redirect.Spec

	family ruleset.Family
	// returned are the groups whose traffic passes, families those with rules for what the pod sends.
	returned []uint32
	families []ruleset.Family
	// tunnel is set behind the rule for the tunnel's port, own has the families of the rules for the pod's own addresses.
	tunnel bool
	own    []ruleset.Family
	// arrives is set by a rule that leads arriving packets to the chain of the mesh.
	arrives bool
	// entering and leaving are the interfaces of RETURN rules.
	entering, leaving []string
}

// maxGuessed bounds a list: no setting has more items, but a pod can have any number of rules.
const maxGuessed = 1000

// once appends a value that is not in the list yet.
func once[T comparable](list []T, value T) []T {
	if len(list) >= maxGuessed || slices.Contains(list, value) {
		return list
	}
	return append(list, value)
}

// has are the conditions of a rule by their options, with "!" ahead of those that are negated.
func (r rule) has() map[string]string {
	all := map[string]string{}
	for _, c := range r.conditions {
		name := c.option
		if c.module == "connmark" {
			name = "conn" + name
		}
		if c.not {
			name = "!" + name
		}
		all[name] = c.value
	}
	return all
}

// port is the target's, 0 without one.
func (r rule) port() uint16 {
	to, _ := r.end(netip.AddrPort{})
	return to.Port()
}

// portRange reads a port, or a range of ports of either dialect.
func portRange(text string) (ruleset.PortRange, bool) {
	from, to, ranged := strings.Cut(strings.Replace(text, "-", ":", 1), ":")
	if !ranged {
		to = from
	}
	first, ok := number[uint16](from)
	last, ok2 := number[uint16](to)
	return ruleset.PortRange{First: first, Last: last}, ok && ok2
}

func number[T uint16 | uint32](text string) (T, bool) {
	n, err := strconv.ParseUint(text, 0, 32)
	return T(n), err == nil && uint64(T(n)) == n
}

// rule takes a rule of a chain into account.
func (g *guess) rule(at string, r rule) {
	has := r.has()
	r.target = strings.ReplaceAll(strings.ToUpper(r.target), "-", "_") // as iptables names chains
	dport, ported := portRange(has["--dport"])
	g.arrives = g.arrives || strings.HasSuffix(at, "/PREROUTING") && r.target == redirect.ChainPrefix+"INBOUND" && at != "raw/PREROUTING"
	switch at {
	case "nat/ISTIO_REDIRECT":
		g.OutboundPort = r.port()
	case "nat/ISTIO_IN_REDIRECT":
		g.InboundPort = r.port()
	case "mangle/ISTIO_TPROXY":
		if r.target == "TPROXY" {
			g.Mode, g.InboundPort = redirect.TPROXY, r.port()
		}
	case "nat/ISTIO_INBOUND", "mangle/ISTIO_INBOUND":
		g.inbound(at, r, dport, ported)
	case "nat/ISTIO_OUTPUT":
		g.output(r, has)
	case "nat/ISTIO_OUTPUT_DNS":
		g.dns(has)
	case "nat/PREROUTING", "nat/OUTPUT":
		g.interfaces(r, has)
	case "mangle/PREROUTING":
		g.DropInvalid = g.DropInvalid || r.target == redirect.ChainPrefix+"DROP" && strings.Contains(has["--ctstate"], "INVALID")
	case "mangle/OUTPUT":
		if mark, marked := number[uint32](has["--mark"]); marked && r.target == "RETURN" {
			g.Mode, g.Mark = redirect.TPROXY, mark
		}
	case "filter/ISTIO_REJECT":
		g.SecondFamily = redirect.Reject
	}
}

// inbound reads the ports that arrive.
func (g *guess) inbound(at string, r rule, dport ruleset.PortRange, ported bool) {
	table, _, _ := strings.Cut(at, "/")
	switch {
	case r.target == "RETURN" && ported && table == "nat" && !g.tunnel:
		g.TunnelPort, g.tunnel = dport.First, true
	case r.target == "RETURN" && ported:
		g.InboundExclude = once(g.InboundExclude, dport)
	case r.target != "ISTIO_IN_REDIRECT" && r.target != "ISTIO_TPROXY":
	case ported:
		g.Inbound.List = once(g.Inbound.List, dport)
	default:
		g.Inbound.All = true
	}
}

// output reads what the pod sends.
func (g *guess) output(r rule, has map[string]string) {
	family := max(g.family, r.family)
	g.families = once(g.families, family)
	dport, ported := portRange(has["--dport"])
	to, networked := has["-d"]
	network, err := netip.ParsePrefix(to)
	switch {
	case r.target == "ISTIO_IN_REDIRECT":
		g.proxy(has)
	case r.target == "ISTIO_REDIRECT" && ported:
		g.OutboundPorts = once(g.OutboundPorts, dport)
	case r.target == "ISTIO_REDIRECT" && networked && err == nil:
		g.Outbound.List = once(g.Outbound.List, network)
	case r.target == "ISTIO_REDIRECT":
		g.Outbound.List = once(g.Outbound.List, everything(family))
	case r.target != "RETURN":
	case len(has) == 0 && len(g.own) > 0: // everything, behind the pod's own addresses
		g.OutboundExclude = once(g.OutboundExclude, everything(family))
	case len(has) == 0:
		g.OwnerGroups = redirect.Groups{}
	case len(has) == 2 && ported:
		g.OutboundPortsExclude = once(g.OutboundPortsExclude, dport)
	case len(has) == 1 && (err == nil && network.Addr().IsLoopback() || network == g.Loopback) && !slices.Contains(g.own, familyOf(network.Addr())):
		g.own = append(g.own, familyOf(network.Addr()))
	case len(has) == 1 && networked && err == nil:
		g.OutboundExclude = once(g.OutboundExclude, network)
	default:
		g.owners(r)
	}
}

// everything is the network of all addresses of a family, the zero Prefix for both.
func everything(f ruleset.Family) netip.Prefix {
	switch f {
	case ruleset.IPv4:
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	case ruleset.IPv6:
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	case ruleset.Inet:
	}
	return netip.Prefix{}
}

// proxy reads the identity of the proxy, and the loopback network, from the rule for the proxy's calls of its own pod.
func (g *guess) proxy(has map[string]string) {
	if uid, is := number[uint32](has["--uid-owner"]); is {
		g.UIDs = once(g.UIDs, uid)
	}
	if gid, is := number[uint32](has["--gid-owner"]); is {
		g.GIDs = once(g.GIDs, gid)
	}
	if own, err := netip.ParsePrefix(has["!-d"]); err == nil && own.Addr().Is4() {
		g.Loopback = own
	}
}

// owners reads the groups that are not captured, or all that are.
func (g *guess) owners(r rule) {
	var groups []uint32
	for _, c := range r.conditions {
		gid, is := number[uint32](c.value)
		switch {
		case c.option != "--gid-owner" || !is:
			return
		case c.not:
			groups = append(groups, gid)
		default:
			g.returned = once(g.returned, gid)
		}
	}
	if len(groups) > 0 {
		g.OwnerGroups = redirect.Groups{List: groups}
	}
}

// dns reads the resolvers whose queries are captured.
func (g *guess) dns(has map[string]string) {
	server, err := netip.ParsePrefix(has["-d"])
	switch _, only := has["-d"]; {
	case !only:
		g.DNS = redirect.DNSAll
	case err == nil:
		g.DNS, g.DNSServers = redirect.DNSServers, once(g.DNSServers, server.Addr())
	}
}

// interfaces reads those that are excluded, and those of virtual machines.
func (g *guess) interfaces(r rule, has map[string]string) {
	in, enters := has["-i"]
	out, leaves := has["-o"]
	switch {
	case r.target == "ISTIO_REDIRECT" && enters:
		g.RerouteInterfaces = once(g.RerouteInterfaces, in)
	case r.target != "RETURN" || len(r.conditions) != 1:
	case enters:
		g.entering = once(g.entering, in)
	case leaves:
		g.leaving = once(g.leaving, out)
	}
}

// complete decides what several rules say together, and fills in what no rule has.
func (g *guess) complete(n Namespace) {
	g.links()
	slices.Reverse(g.RerouteInterfaces) // the last one comes first, see redirect
	// A pod that captures nothing has no rule for it. That of everything is more likely to be missing than not to be wanted.
	only := !slices.ContainsFunc(g.Outbound.List, func(p netip.Prefix) bool { return p.IsValid() && p.Bits() > 0 })
	if only && (len(g.Outbound.List) > 0 || len(g.OutboundPorts) == 0) {
		g.Outbound = redirect.Networks{All: true}
	}
	if len(g.Inbound.List) == 0 && (g.arrives || len(g.InboundExclude) > 0) {
		g.Inbound.All = true
	}
	standard := redirect.Default()
	g.DualStack = slices.Contains(g.families, ruleset.IPv6)
	if g.Mark == 0 {
		g.Mark = standard.Mark
	}
	if table := n.Tables[g.Mark]; table != 0 {
		g.Table = table
	}
}

// links tells the interfaces that are excluded from those of virtual machines.
func (g *guess) links() {
	for _, name := range g.leaving {
		if slices.Contains(g.entering, name) {
			g.ExcludeInterfaces = append(g.ExcludeInterfaces, name)
		}
	}
	for _, name := range g.entering {
		if len(g.Outbound.List) == 0 && !slices.Contains(g.leaving, name) { // a virtual machine of which nothing is captured
			g.RerouteInterfaces = once(g.RerouteInterfaces, name)
		}
	}
}
