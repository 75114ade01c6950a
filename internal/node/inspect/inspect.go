// Package inspect describes the redirection of one network namespace for a person, and walks a packet through it.
//
// It promises that everything shown is read at that moment, and that nothing is changed. It never decides whether a pod is in the
// mesh.
//
// Start at Read and Walk.
package inspect

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/route"
	"github.com/meshcni/istio-cni/internal/node/sockdiag"
)

// Detail is the redirection of a namespace.
type Detail struct {
	Chains    []walk.Chain `json:"chains"`
	Unread    []string     `json:"unread,omitempty"`
	Listeners []Listener   `json:"listeners"`
	Ports     Ports        `json:"ports"`
}

// Explanation is a pod from injection to kernel.
type Explanation struct {
	audit.Status

	// Injected says that the injector has marked the pod.
	Injected bool `json:"injected"`
	// Decision is the plugin's about the pod as it is now.
	Decision Decision `json:"decision"`
	Detail
	// InspectionError is why the namespace could not be read.
	InspectionError string `json:"inspectionError,omitempty"`
	// Answer is the way of the packet that was asked for.
	Answer *Answer `json:"answer,omitempty"`
}

// Decision is the plugin's decision about a pod.
type Decision struct {
	Captured bool   `json:"captured"`
	Reason   string `json:"reason"`
	Sentence string `json:"sentence"`
	Detail   string `json:"detail,omitempty"`
	Remedy   string `json:"remedy,omitempty"`
}

// Listener is a listening TCP socket.
type Listener struct {
	Address netip.AddrPort `json:"address"`
	UID     uint32         `json:"uid"`
}

// Ports are those of the proxy.
type Ports struct {
	Outbound uint16 `json:"outbound"`
	Inbound  uint16 `json:"inbound"`
}

// Read describes a namespace. The Spec is the wanted redirection; nil is unknown.
func Read(ctx context.Context, space redirection.Namespace, spec *redirect.Spec) (d Detail, err error) {
	live, err := space.Live(ctx, spec)
	if err != nil {
		return d, err
	}
	d.Chains, d.Unread, d.Ports = live.Chains(), live.Unread, Ports{redirect.OutboundPort, redirect.InboundPort}
	if spec != nil {
		d.Ports = Ports{spec.OutboundPort, spec.InboundPort}
	}
	err = space.NetNS.Do(func() error {
		all, err := sockdiag.Listening()
		for _, l := range all {
			d.Listeners = append(d.Listeners, Listener{l.Address, l.UID})
		}
		return err
	})
	return d, err
}

// Question is a packet in a person's words.
type Question struct {
	// Inbound is a packet that arrives from From at Port; else a process of UID sends one to To.
	Inbound bool
	To      netip.AddrPort
	From    netip.Addr
	Port    uint16
	UID     uint32
	UDP     bool
}

// Parse reads a question from parameters by name, those of the page: direction (out, in), to, uid, from, port, udp.
func Parse(get func(name string) string) (q Question, err error) {
	var errs []error
	number := func(name string, bits int) uint64 {
		text := get(name)
		if text == "" {
			return 0
		}
		n, err := strconv.ParseUint(text, 10, bits)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: value %q: want a decimal number of at most %d bits", name, text, bits))
		}
		return n
	}
	q.Inbound = get("direction") == "in"
	q.UDP, _ = strconv.ParseBool(get("udp"))
	q.UID = uint32(number("uid", 32))   //nolint:gosec // parsed with 32 bits
	q.Port = uint16(number("port", 16)) //nolint:gosec // parsed with 16 bits
	switch {
	case q.Inbound:
		if q.From, err = netip.ParseAddr(get("from")); err != nil {
			errs = append(errs, fmt.Errorf("from: value %q: want an IP address", get("from")))
		}
	default:
		if q.To, err = netip.ParseAddrPort(get("to")); err != nil {
			errs = append(errs, fmt.Errorf("to: value %q: want ADDRESS:PORT", get("to")))
		}
	}
	return q, errors.Join(errs...)
}

// Answer is what becomes of a packet.
type Answer struct {
	Verdict string `json:"verdict"`
	// Sentence is one sentence about it, Wanted whether that is as the mesh wants it.
	Sentence string   `json:"sentence"`
	Wanted   Wanted   `json:"wanted"`
	Settings []string `json:"settings,omitempty"`
	Hops     []Hop    `json:"hops"`
	Omitted  int      `json:"omitted,omitempty"`
}

// Wanted says whether the way of a packet is as the mesh wants it.
type Wanted string

// The packet goes as the mesh wants it, past the mesh, or that is unknown.
const (
	AsWanted Wanted = "as-wanted"
	Past     Wanted = "past-the-mesh"
	Unknown  Wanted = "unknown"
)

// Hop is a rule that the packet meets.
type Hop struct {
	Hook   string `json:"hook"`
	Table  string `json:"table"`
	Chain  string `json:"chain"`
	Number int    `json:"number"`
	Rule   string `json:"rule"`
	Answer string `json:"answer"`
	Why    string `json:"why,omitempty"`
}

// errNoAddress says that the namespace has no address of the packet's family.
var errNoAddress = errors.New("the namespace has no address of the packet's family")

// Walk follows a packet through the live rules.
func Walk(ctx context.Context, space redirection.Namespace, spec *redirect.Spec, q Question) (a Answer, err error) {
	live, err := space.Live(ctx, spec)
	if err != nil {
		return a, err
	}
	var own []netip.Addr
	if err := space.NetNS.Do(func() (err error) {
		own, err = route.Addresses()
		return err
	}); err != nil {
		return a, err
	}
	p, err := q.packet(own)
	if err != nil {
		return a, err
	}
	r := live.Walk(p)
	a = Answer{Verdict: r.Verdict.String(), Sentence: r.Summary, Settings: r.Settings, Omitted: r.Omitted, Wanted: Judge(r)}
	for _, h := range r.Hops {
		a.Hops = append(a.Hops, Hop{h.Hook, h.Table, h.Chain, h.Number, h.Rule, h.Answer.String(), h.Why})
	}
	return a, nil
}

// packet completes the question by the addresses of the namespace.
func (q Question) packet(own []netip.Addr) (walk.Packet, error) {
	p := walk.Packet{Protocol: unix.IPPROTO_TCP, UID: q.UID, GID: q.UID}
	if q.UDP {
		p.Protocol = unix.IPPROTO_UDP
	}
	other := q.To.Addr()
	if q.Inbound {
		other = q.From
	}
	i := slices.IndexFunc(own, func(a netip.Addr) bool { return a.Is4() == other.Is4() && !a.IsLoopback() && !a.IsLinkLocalUnicast() })
	if i < 0 {
		return p, fmt.Errorf("%w: %s", errNoAddress, other)
	}
	const client = 40000 // an ephemeral port
	if q.Inbound {
		p.In, p.Src, p.Dst = "eth0", netip.AddrPortFrom(q.From, client), netip.AddrPortFrom(own[i], q.Port)
		return p, nil
	}
	p.Outgoing, p.Out, p.Src, p.Dst = true, "eth0", netip.AddrPortFrom(own[i], client), q.To
	if other.IsLoopback() || slices.Contains(own, other) {
		p.Out = "lo"
	}
	return p, nil
}

// Judge says whether a result is as the mesh wants it: redirected, or let past by a rule that every pod has. A setting of the pod
// that lets it past is past the mesh.
func Judge(r walk.Result) Wanted {
	switch r.Verdict {
	case walk.Redirected, walk.HandedOver:
		return AsWanted
	case walk.CannotTell:
		return Unknown
	case walk.Passed, walk.Dropped, walk.Rejected:
	}
	if r.Decided != nil && r.Decided.Why != "" && len(r.Settings) == 0 {
		return AsWanted
	}
	if r.Verdict == walk.Passed {
		return Past
	}
	return Unknown
}

// Text prints the rules of a chain as lines, with the reason of each behind it.
func Text(c walk.Chain) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s table %s chain %s\n", c.Family, c.Table, c.Chain)
	signs := map[string]string{"": "  ", "missing": "- ", "extra": "+ ", "foreign": "! "}
	for _, r := range c.Rules {
		b.WriteString("  " + signs[r.Op] + r.Text)
		if r.Why != "" {
			b.WriteString("    # " + r.Why)
		}
		b.WriteString("\n")
	}
	if c.Omitted > 0 {
		fmt.Fprintf(&b, "  and %d more rules\n", c.Omitted)
	}
	return b.String()
}
