package walk

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Deviation is a path of packets that differs from their path through the wanted rules.
type Deviation struct {
	Family ruleset.Family
	// Packets names the packets, such as "inbound TCP connections", and what happens, or may happen, to them.
	Packets string
	// Rule is the rule that decides, nil if no rule does. Foreign reports whether another program made it.
	Rule    *Hop
	Foreign bool
	// Unknown reports whether the path cannot be followed.
	Unknown bool
}

// String is one sentence.
func (d Deviation) String() string {
	if d.Rule == nil {
		return fmt.Sprintf("%s: %s", d.Family, d.Packets)
	}
	h, whose := d.Rule, "rule"
	if d.Foreign {
		whose = "foreign rule"
	}
	at := fmt.Sprintf("%s/%s", h.Table, printable.Text(h.Chain, maxText))
	rule := printable.Quote("-A "+h.Chain+" "+h.Rule, maxText)
	switch {
	case h.other:
		at = fmt.Sprintf("%s, chain %s (hook %s, priority %d)", h.table(), printable.Text(h.Chain, maxText), h.Hook, h.priority)
		rule = printable.Quote(h.Rule, maxText)
	case h.Family == ruleset.Inet:
		rule = printable.Quote(h.Rule, maxText)
	case h.tool != "":
		at = "(" + h.tool + ") " + at
	}
	if h.Number == 0 {
		return fmt.Sprintf("%s %s: policy DROP: %s", d.Family, at, d.Packets)
	}
	return fmt.Sprintf("%s %s: %s %s: %s", d.Family, at, whose, rule, d.Packets)
}

// canary is a packet that represents many, such as the first packet of any connection of the app to another host.
type canary struct {
	Packet

	name string
	// wholly reports whether only a rule that takes all of these packets is a deviation: packets past the mesh can take other paths,
	// such as through a service address. ownPod is for packets to the pod itself: some can be for a container network in the pod.
	wholly, ownPod bool
}

// Deviations walks canary packets through the live rules and through the wanted rules, for each family that the mesh captures: packets
// of the app to other hosts and to its own pod; incoming packets; packets of the proxy; and DNS where it is captured. It returns the
// rules that send some of them another way. A foreign rule is a deviation if it may match one of the packets that a canary represents.
// A drop by a firewall behind the mesh's redirection is a deviation only if all packets of the kind are dropped. It returns nil if
// no rules are wanted, or lo is not the loopback device.
func (n Namespace) Deviations() (all []Deviation) {
	for _, k := range n.comparisons() {
		for _, name := range n.Unread[k.family] {
			all = append(all, Deviation{Family: k.family, Packets: "packets pass " + name + ", which cannot be read here", Foreign: true})
		}
		for _, c := range k.list {
			for _, d := range k.deviations(c) {
				if !slices.ContainsFunc(all, func(o Deviation) bool { return o.Rule != nil && d.Rule != nil && o.Rule.at() == d.Rule.at() }) {
					all = append(all, d)
				}
			}
		}
	}
	return all
}

// comparisons returns one comparison for each family that the mesh captures, none if no rules are wanted or lo is not the loopback device.
func (n Namespace) comparisons() (all []comparison) {
	if n.Wanted == nil || cmp.Or(n.Loopback, "lo") != "lo" { // package route reports this: all other deviations follow from it
		return nil
	}
	links, sets := n.links(), n.Wanted.Sets()
	rules := rulesOf(sets)
	for _, f := range n.Wanted.Families.Captured() {
		if f == ruleset.IPv4 && !n.Wanted.Families.HasIPv4 {
			continue
		}
		k := comparison{live: n.course(f, rules), wanted: n.Wanted.course(f, sets, rules), Wanted: *n.Wanted, family: f}
		k.sources = k.live.sources()
		k.list = k.canaries(links, n.Own)
		all = append(all, k)
	}
	return all
}

// comparison compares the paths of canaries of a family.
type comparison struct {
	Wanted

	family       ruleset.Family
	live, wanted *course
	// sources are the networks that foreign nat rules match as a source: a hostile pod makes very many rules, which are searched once.
	sources []netip.Prefix
	// list has the canaries.
	list []canary
}

// maxLinks bounds the interfaces that canaries leave and arrive by, and the interfaces that rules name.
const maxLinks = 4

// links returns the interfaces that canaries leave and arrive by: interfaces that rules name, and some others.
func (n Namespace) links() []string {
	if len(n.Links) == 0 {
		return []string{unknown}
	}
	named := n.namedLinks()
	mentioned, others := split(n.Links, func(link string) bool {
		return slices.ContainsFunc(named, func(name string) bool { return ruleset.Interface{Name: name}.Of(link) })
	})
	return append(mentioned[:min(len(mentioned), 4*maxLinks)], others[:min(len(others), maxLinks)]...)
}

// namedLinks returns the interface names in the live rules and their hooks.
func (n Namespace) namedLinks() (named []string) {
	eachChain(n.Live, func(_ ruleset.Family, _ string, c ruleset.Chain) {
		if c.Hook != nil && c.Hook.Device != "" {
			named = append(named, strings.Split(c.Hook.Device, ",")...)
		}
		for _, r := range c.Rules {
			for _, m := range r.Matches {
				if i, is := m.(ruleset.Interface); is {
					named = append(named, i.Name)
				}
			}
		}
	})
	slices.Sort(named)
	return slices.Compact(named)
}

// at returns a Hop that has only the place of the rule.
func (h Hop) at() Hop {
	return Hop{Family: h.Family, Set: h.Set, Table: h.Table, Chain: h.Chain, Number: h.Number}
}

// deviations compares the paths of a canary, in both orders of the sets that share a hook and a priority.
func (k comparison) deviations(c canary) (all []Deviation) {
	c.Packet = c.completed(k.live.Loopback)
	want := k.wanted.walk(c.asWanted(k.live.Loopback))
	for _, course := range []*course{k.live, k.live.reversed} {
		if course == nil {
			continue
		}
		got := course.walk(c.Packet)
		if got.limit != "" {
			return []Deviation{{Family: k.family, Packets: c.name + " may go any way: " + got.limit, Unknown: true}}
		}
		all = append(all, k.compare(c, got, want)...)
		if h := course.broken(c.Packet, got); h != nil && got.Verdict == want.Verdict && got.To == want.To {
			all = append(all, Deviation{Family: k.family, Packets: c.name + " fail", Rule: h, Foreign: !h.wanted})
		}
	}
	return all
}

// compare returns the ends of a canary that differ from the wanted end. A drop behind the translation of the destination is a
// deviation only if no packet arrives.
func (k comparison) compare(c canary, got, want outcome) (all []Deviation) {
	arrives := slices.ContainsFunc(got.ended, want.is)
	for _, r := range got.ended {
		if want.is(r) || k.accepts(c, r, arrives) {
			continue
		}
		hop := r.decided
		switch {
		case r.because >= 0:
			hop = r.because
		case r.verdict == Passed && hop < 0:
			hop = got.passed
		}
		d := Deviation{Family: k.family, Packets: c.name + " " + Result{Verdict: r.verdict, To: r.to}.may(r.because >= 0, c.Outgoing)}
		if hop >= 0 && hop < len(got.Hops) {
			d.Rule, d.Foreign = &got.Hops[hop], !got.Hops[hop].wanted
		}
		all = append(all, d)
	}
	return all
}

// is reports whether a reading has this end.
func (o outcome) is(r reading) bool { return r.verdict == o.Verdict && r.to == o.To }

// accepts reports whether an end that is not wanted is no deviation. arrives is set if some packets have the wanted end.
func (k comparison) accepts(c canary, r reading, arrives bool) bool {
	dropped := r.verdict == Dropped || r.verdict == Rejected
	return arrives && (dropped && r.late || c.wholly || c.ownPod && !k.leaves(r))
}

// leaves reports whether a packet to the pod itself goes to a host outside the networks that nat rules match as a source: the masquerading
// of a container network behind the namespace.
func (k comparison) leaves(r reading) bool {
	to := r.to.Addr()
	nested := slices.ContainsFunc(k.sources, func(n netip.Prefix) bool { return n.Contains(to) })
	return r.verdict == Redirected && to.IsValid() && !to.IsLoopback() && !slices.Contains(k.live.Own, to) && !nested
}

// sources returns the networks of more than one address that foreign nat rules match as a source.
func (c *course) sources() (all []netip.Prefix) {
	for _, stages := range c.stages {
		for _, s := range stages {
			if s.hook.Type != "nat" {
				continue
			}
			for _, chain := range s.chains {
				for _, r := range chain.Rules {
					all = append(all, networks(r.Matches)...)
				}
			}
		}
	}
	return all
}

func networks(matches []ruleset.Match) (all []netip.Prefix) {
	for _, m := range matches {
		switch m := m.(type) {
		case ruleset.Network:
			if m.Source && m.Prefix.Bits() > 0 && !m.Prefix.IsSingleIP() && !m.Prefix.Addr().IsLoopback() {
				all = append(all, m.Prefix)
			}
		case ruleset.AnyOf:
			for _, one := range m.List {
				all = append(all, networks(one)...)
			}
		}
	}
	return all
}

// may says what happens, or may happen, to packets.
func (r Result) may(may, outgoing bool) string {
	way := [...]string{"may go any way", "", "are redirected to " + target(r.To), "are handed over by TPROXY to " + target(r.To), "are dropped", "are rejected"}[r.Verdict]
	if r.Verdict == Passed {
		way = map[bool]string{true: "go out unredirected", false: "come in unredirected"}[outgoing]
	}
	if may && r.Verdict != CannotTell {
		return "that it matches " + way
	}
	return way
}

// Addresses and ports of canaries, from documentation networks (RFC 5737, RFC 3849) that no pod uses.
const (
	httpPort = 80
	client   = 40000
	dnsPort  = 53
)

func elsewhere(f ruleset.Family) netip.Addr {
	if f == ruleset.IPv6 {
		return netip.MustParseAddr("2001:db8:7::7")
	}
	return netip.MustParseAddr("198.51.100.7")
}

// address returns the first address of the family that other hosts can reach.
func address(f ruleset.Family, own []netip.Addr) netip.Addr {
	for _, a := range own {
		if ruleset.FamilyOf(a) == f && !a.IsLoopback() && !a.IsLinkLocalUnicast() && a != redirect.PassthroughAddress(f) {
			return a
		}
	}
	if f == ruleset.IPv6 {
		return netip.MustParseAddr("2001:db8:8::8")
	}
	return netip.MustParseAddr("203.0.113.7")
}

// canaries returns the packets of the family.
func (k comparison) canaries(links []string, own []netip.Addr) (all []canary) {
	f := k.family
	self := address(f, own)
	sender := func(out string, free Fields, proxy bool) Packet {
		p := Packet{Outgoing: true, Out: out, Protocol: ruleset.TCP, Src: netip.AddrPortFrom(self, client), Free: free | FreeDestinationPort | FreeSourcePort | FreeOwn}
		p.UID, p.GID = k.identity(proxy)
		if proxy {
			p.Mark = k.proxyMark()
		} else {
			p.Free |= FreeUser
		}
		return p
	}
	for _, link := range links {
		in := Packet{In: link, Protocol: ruleset.TCP, Src: netip.AddrPortFrom(elsewhere(f), client), Free: FreeDestinationPort | FreeSource | FreeSourcePort | FreeOwn}
		app := sender(link, FreeDestination, false)
		all = append(all,
			canary{Packet: k.first(app, k.destinations(f), ports(k.Spec.OutboundPorts)), name: "the app's outbound TCP connections"},
			canary{Packet: k.first(in, []netip.Addr{self}, ports(k.Spec.Inbound.List)), name: "inbound TCP connections"},
			canary{Packet: to(sender(link, FreeDestination, true), elsewhere(f), httpPort), name: "the proxy's outbound TCP connections", wholly: true})
		all = append(all, k.dns(app, f)...)
		if k.Ambient != nil {
			all = append(all, k.ambientCanaries(in, self)...)
		}
	}
	lo := k.live.Loopback
	delivery := to(sender(lo, 0, true), loopback(self), httpPort)
	delivery.Src = netip.AddrPortFrom(loopback(self), client)
	if k.Ambient != nil { // from the client's address to the pod's
		delivery = to(delivery, self, httpPort)
		delivery.Src = netip.AddrPortFrom(elsewhere(f), client)
	}
	return append(all,
		canary{Packet: to(sender(lo, 0, false), self, httpPort), name: "the app's TCP connections to its own pod", ownPod: true},
		canary{Packet: delivery, name: "the proxy's TCP connections to the app", wholly: true})
}

func to(p Packet, a netip.Addr, port uint16) Packet {
	p.Dst = netip.AddrPortFrom(a, port)
	return p
}

// identity returns the proxy's user and group, or ones that the mesh captures.
func (w Wanted) identity(proxy bool) (uid, gid uint32) {
	if w.Ambient != nil && proxy {
		return 0, redirect.DefaultID
	}
	other := func(ids []uint32) uint32 {
		id := uint32(ordinaryID)
		for slices.Contains(ids, id) {
			id++
		}
		return id
	}
	if proxy {
		return append(slices.Clip(w.Spec.UIDs), ordinaryID)[0], append(slices.Clip(w.Spec.GIDs), ordinaryID)[0]
	}
	gid = other(slices.Concat(w.Spec.GIDs, w.Spec.OwnerGroupsExclude))
	if !w.Spec.OwnerGroups.All && len(w.Spec.OwnerGroups.List) > 0 {
		gid = w.Spec.OwnerGroups.List[0]
	}
	return other(w.Spec.UIDs), gid
}

// ordinaryID is a typical user or group of an app.
const ordinaryID = 4711

// destinations returns addresses of other hosts, some of them captured by the mesh.
func (w Wanted) destinations(f ruleset.Family) []netip.Addr {
	all := []netip.Addr{elsewhere(f)}
	for _, p := range w.Spec.Outbound.List {
		if ruleset.FamilyOf(p.Addr()) == f && len(all) < maxTries {
			all = append(all, last(p).Prev())
			all = append(all, p.Addr())
		}
	}
	return all
}

// maxTries bounds the addresses and ports to try for a canary that the mesh captures.
const maxTries = 8

func ports(list []ruleset.PortRange) []uint16 {
	all := []uint16{httpPort, 8080, 33333}
	for _, p := range list[:min(len(list), maxTries)] {
		all = append(all, p.First, p.Last)
	}
	return all
}

// first returns the packet with the first address and port that the wanted rules redirect, otherwise with the first of each list.
func (k comparison) first(p Packet, addresses []netip.Addr, ports []uint16) Packet {
	for _, a := range addresses {
		for _, port := range ports {
			q := to(p, a, port)
			if k.wanted.walk(q.completed(k.live.Loopback)).Verdict.redirects() {
				return q
			}
		}
	}
	return to(p, addresses[0], ports[0])
}

// dns returns the app's packets to resolvers, if they are captured.
func (w Wanted) dns(app Packet, f ruleset.Family) (all []canary) {
	servers := []netip.Addr{elsewhere(f)}
	app.Free &^= FreeDestinationPort
	switch w.Spec.DNS {
	case redirect.DNSOff:
		return nil
	case redirect.DNSServers:
		app.Free &^= FreeDestination
		servers = slices.DeleteFunc(slices.Clone(w.Spec.DNSServers), func(a netip.Addr) bool { return ruleset.FamilyOf(a) != f })
	case redirect.DNSAll:
	}
	for _, server := range servers[:min(len(servers), maxTries)] {
		for _, protocol := range []uint8{ruleset.UDP, ruleset.TCP} {
			app.Protocol = protocol
			all = append(all, canary{Packet: to(app, server, dnsPort), name: "the app's DNS queries"})
		}
	}
	return all
}
