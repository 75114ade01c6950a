package inspect

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/route"
	"github.com/meshcni/istio-cni/internal/node/sockdiag"
)

// Question describes a packet as a person would.
type Question struct {
	// Inbound is a packet that arrives from From at Port. Otherwise a process of UID and GID sends one to To.
	Inbound  bool
	To       netip.AddrPort
	From     netip.Addr
	Port     uint16
	UID, GID uint32
	UDP      bool
}

// Parse reads a question from the page's parameters: direction (out, in), to, uid, gid (uid by default), from, port, udp.
func Parse(get func(name string) string) (q Question, err error) {
	var errs []error
	number := func(name string, bits int) uint64 {
		text := get(name)
		if text == "" {
			return 0
		}
		n, bad := strconv.ParseUint(text, 10, bits)
		if bad != nil {
			errs = append(errs, fmt.Errorf("%s: value %q: want a decimal number of at most %d bits", name, text, bits))
		}
		return n
	}
	q.Inbound = get("direction") == "in"
	q.UDP, _ = strconv.ParseBool(get("udp"))
	q.UID = uint32(number("uid", 32)) //nolint:gosec // parsed with 32 bits
	if q.GID = q.UID; get("gid") != "" {
		q.GID = uint32(number("gid", 32)) //nolint:gosec // parsed with 32 bits
	}
	q.Port = uint16(number("port", 16)) //nolint:gosec // parsed with 16 bits
	if q.Inbound {
		q.From, err = netip.ParseAddr(get("from"))
		if q.From = q.From.Unmap(); err != nil || q.From.IsUnspecified() {
			errs = append(errs, fmt.Errorf("from: value %q: want an IP address", get("from")))
		}
		if get("port") != "" && q.Port == 0 {
			errs = append(errs, errPort)
		}
		return q, errors.Join(errs...)
	}
	q.To, err = parseTo(get("to"))
	return q, errors.Join(append(errs, err)...)
}

// parseTo reads the address and port to which the pod connects.
func parseTo(text string) (netip.AddrPort, error) {
	to, err := netip.ParseAddrPort(text)
	to = netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	if err != nil || to.Port() == 0 || to.Addr().IsUnspecified() {
		return to, fmt.Errorf("to: value %q: want ADDRESS:PORT, with a port from 1 to 65535", text)
	}
	if a := to.Addr(); a.Is6() && a.IsLinkLocalUnicast() && a.Zone() == "" { // no socket connects to it
		return to, fmt.Errorf("to: value %q: want the interface of a link-local address, as in [fe80::1%%eth0]:80", text)
	}
	return to, nil
}

var errPort = errors.New("port: value 0: want a port from 1 to 65535")

// maxHops bounds the hops of an Answer because a tenant can make chains of any length.
const maxHops = 2000

// notSent is the Verdict of a packet that ends before any rule.
const notSent = "not-sent"

// Walk follows a packet through the live rules.
func Walk(ctx context.Context, space redirection.Namespace, want redirect.Wanted, q Question) (a document.Answer, err error) {
	live, err := read(ctx, space, want)
	if err != nil {
		return a, err
	}
	p, err := netns.In(space.NetNS, q.packet)
	ended := (*route.EndError)(nil)
	switch ends := errors.As(err, &ended); {
	case err != nil && !ends && !errors.Is(err, errAstray):
		return a, err
	case ends && !q.Inbound: // connect(2) looks up the route before any rule sees a packet
		return document.Answer{Packet: describe(p), Way: document.Way{Verdict: notSent, Sentence: "is not sent: " + ended.Error(), Wanted: document.Past}}, nil
	}
	r := live.Walk(p)
	if err != nil && r.Verdict != walk.CannotTell {
		r.Summary = fmt.Sprintf("cannot tell because the pod has no way for the answer: %s; if it arrives by %s, the packet %s", err, p.In, r.Summary)
		r.Verdict, r.Settings = walk.CannotTell, nil
	}
	a = document.Answer{Packet: describe(p), Way: document.Way{
		Verdict: r.Verdict.String(), Sentence: r.Summary, Omitted: r.Omitted, Wanted: Judge(r), Settings: walk.Texts(r.Settings),
	}}
	hops := r.Hops
	if a.OmittedHops = max(0, len(hops)-maxHops); a.OmittedHops > 0 {
		hops = slices.Concat(hops[:maxHops/2], hops[len(hops)-maxHops/2:])
	}
	for _, h := range hops {
		a.Hops = append(a.Hops, document.Hop{
			Hook: h.Hook, Table: h.Table, Chain: h.Chain, Number: h.Number, Rule: h.Rule, Answer: h.Answer.String(), Why: h.Why,
		})
	}
	if r.Verdict == walk.Redirected || r.Verdict == walk.HandedOver {
		return a, Lands(&a.Way, space, p.Protocol, landing(p, r))
	}
	return a, nil
}

// Lands adds to the way of a packet that is redirected or delivered whether a process of the namespace listens. Nothing is
// known about other hosts.
func Lands(a *document.Way, space redirection.Namespace, protocol uint8, to netip.AddrPort) error {
	a.To = to.String()
	here := a.Verdict == walk.HandedOver.String()
	if !here {
		way, err := netns.In(space.NetNS, func() (route.Way, error) { return route.WayTo(to.Addr(), route.Flow{Protocol: protocol}) })
		if ended := (*route.EndError)(nil); err != nil && !errors.As(err, &ended) {
			return err
		}
		here = way.Local
	}
	if !here || protocol != ruleset.TCP {
		return nil
	}
	all, err := netns.In(space.NetNS, sockdiag.Listening)
	if err != nil {
		return err
	}
	if a.NoListener = !slices.ContainsFunc(all, func(l sockdiag.Listener) bool { return l.Accepts(to) }); a.NoListener {
		fate := map[string]string{walk.Redirected.String(): "is refused", walk.HandedOver.String(): "hangs"}[a.Verdict]
		a.Sentence += fmt.Sprintf("; nothing listens on %s, so the connection %s", to, fate)
		a.Wanted = document.Past
	}
	return nil
}

// landing returns the socket of a redirected packet. Outgoing packets are redirected to loopback, arriving ones to the
// address at which they arrived.
func landing(p walk.Packet, r walk.Result) netip.AddrPort {
	switch {
	case r.To.Addr().IsValid():
		return r.To
	case r.Packet.Dst.Addr().IsValid():
		return netip.AddrPortFrom(r.Packet.Dst.Addr(), r.To.Port())
	}
	return netip.AddrPortFrom(p.Dst.Addr(), r.To.Port())
}

// client is an ephemeral port.
const client = 40000

// errOwn means that a packet from the pod's own address cannot arrive from outside.
var errOwn = errors.New("is an address of the pod itself: use --to for packets that a process of the pod sends")

// errAstray means that the answer stays in the pod although its destination is another host.
var errAstray = errors.New("the loopback device leads to an address that is not the pod's")

// packet completes the question with the addresses and routes of the calling thread's namespace. With a *route.EndError or errAstray the
// packet is as complete as possible. packet does not look up the route after a redirection, which leads to an address of the pod.
func (q Question) packet() (p walk.Packet, err error) {
	p = walk.Packet{Protocol: unix.IPPROTO_TCP, UID: q.UID, GID: q.GID}
	if q.UDP {
		p.Protocol = unix.IPPROTO_UDP
	}
	if q.Inbound {
		return q.arriving(p)
	}
	way, err := route.WayTo(q.To.Addr(), route.Flow{Protocol: p.Protocol, Source: client, Destination: q.To.Port(), UID: q.UID})
	p.Outgoing, p.Out, p.Src = true, way.Link, netip.AddrPortFrom(way.Source, client)
	if p.Dst = netip.AddrPortFrom(q.To.Addr().WithZone(""), q.To.Port()); way.Astray {
		p.Type = "UNICAST"
	}
	return p, err
}

// arriving completes a packet that arrives, using the interface of the answers. It ignores the answers' ports and user because the
// process that answers is not known.
func (q Question) arriving(p walk.Packet) (walk.Packet, error) {
	way, err := route.WayTo(q.From, route.Flow{Protocol: p.Protocol})
	if way.Local {
		return p, fmt.Errorf("from: %s %w", q.From, errOwn)
	}
	if way.Astray {
		err = fmt.Errorf("%w: %s", errAstray, q.From)
	}
	if !way.Source.IsValid() || way.Astray {
		own, failed := address(q.From.Is4())
		if failed != nil {
			return p, failed
		}
		way = route.Way{Link: "eth0", Source: own}
	}
	p.In, p.Src, p.Dst = way.Link, netip.AddrPortFrom(q.From.WithZone(""), client), netip.AddrPortFrom(way.Source, q.Port)
	return p, err
}

// errNoAddress means that the namespace has no address of the packet's family.
var errNoAddress = errors.New("the namespace has no address of the packet's family")

// address returns an address of the namespace at which packets arrive.
func address(ipv4 bool) (netip.Addr, error) {
	own, err := route.Addresses()
	if err != nil {
		return netip.Addr{}, err
	}
	i := slices.IndexFunc(own, func(a netip.Addr) bool {
		return a.Is4() == ipv4 && !a.IsLoopback() && !a.IsLinkLocalUnicast() && a != redirect.PassthroughAddress(ruleset.IPv6)
	})
	if i < 0 {
		return netip.Addr{}, errNoAddress
	}
	return own[i], nil
}

// describe describes the packet.
func describe(p walk.Packet) string {
	protocol := "the first packet of a TCP connection"
	if p.Protocol == unix.IPPROTO_UDP {
		protocol = "a UDP packet"
	}
	way := fmt.Sprintf("from %s to %s", p.Src.Addr(), p.Dst)
	if p.Outgoing && (p.Out == "" || !p.Src.Addr().IsValid()) { // an interface without an address
		way = fmt.Sprintf("to %s", p.Dst)
	}
	switch {
	case p.Outgoing && p.Out == "":
	case p.Outgoing:
		way += " by interface " + p.Out
	default:
		return fmt.Sprintf("%s %s, arriving by interface %s", protocol, way, p.In)
	}
	return fmt.Sprintf("%s %s, of a process with uid %d and gid %d", protocol, way, p.UID, p.GID)
}

// Judge says whether a result is as the mesh wants: it matches the wanted rules, unless a setting of the pod excludes the packet.
func Judge(r walk.Result) document.Wanted {
	redirected := r.Verdict == walk.Redirected || r.Verdict == walk.HandedOver
	proxys := slices.Contains([]uint16{redirect.OutboundPort, redirect.InboundPort, redirect.DNSPort}, r.To.Port()) &&
		(!r.To.Addr().IsValid() || r.To.Addr().IsLoopback())
	switch {
	case r.Verdict == walk.CannotTell:
		return document.Unknown
	case r.Fails != nil, len(r.Settings) > 0:
		return document.Past
	case r.Verdict == r.Expected && r.To == r.ExpectedTo:
		return document.AsWanted
	case redirected && proxys && r.Expected == walk.CannotTell:
		return document.AsWanted
	}
	return document.Past
}
