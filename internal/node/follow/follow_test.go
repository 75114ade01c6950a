package follow_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/follow"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/nftables/nftrace"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// The matrix: the backends that wrote the rules, and the modes.
const legacy = "legacy"

func backends() []string {
	return []string{string(redirect.Netlink), string(redirect.Native), string(redirect.Tools), legacy}
}

func spaceOf(l *labtest.Fixture, backend string) redirection.Namespace {
	space := redirection.Namespace{NetNS: l.NetNS(), Backend: redirect.Backend(backend), Log: slog.New(slog.DiscardHandler)}
	if backend == legacy {
		space.Backend, space.Tools = redirect.Tools, iptables.Host{Force: iptables.Legacy}
	}
	return space
}

// lab is a redirected pod.
type lab struct {
	*labtest.Fixture
	*testing.T

	space redirection.Namespace
	spec  redirect.Spec
}

func newLab(t *testing.T, backend string, mode redirect.Mode) lab {
	t.Helper()
	spec := redirect.Default()
	spec.Mode, spec.DualStack, spec.DNS, spec.OutboundPortsExclude = mode, true, redirect.DNSAll, ruleset.PortList(443)
	l := lab{Fixture: labtest.New(t, ruleset.IPv4, ruleset.IPv6), T: t, spec: spec}
	l.StartProxy(t, l.Proxy(mode), mode)
	l.space = spaceOf(l.Fixture, backend)
	check.OK(t, check.Err(l.space.Apply(t.Context(), spec, redirection.Reconcile)))
	return l
}

// trace runs a trace during do, and returns its records.
func (l lab) trace(f nftrace.Filter, do func()) (all []document.TraceEvent) {
	l.Helper()
	ctx, cancel := context.WithCancel(l.Context())
	defer cancel()
	records, failed := make(chan document.TraceEvent, 2*follow.MaxPackets), make(chan error, 1)
	o := follow.Options{Subject: "pod shop/web", Filter: f, For: time.Minute, Now: time.Now}
	go func() {
		failed <- follow.Run(ctx, l.space, l.spec, o, func(r document.TraceEvent) error { records <- r; return nil })
	}()
	select {
	case r := <-records:
		all = append(all, r)
	case err := <-failed:
		l.Fatal(err)
	}
	do()
	time.Sleep(200 * time.Millisecond) // for the kernel's last events
	cancel()
	check.OK(l, <-failed)
	close(records)
	for r := range records {
		all = append(all, r)
	}
	if first, last := all[0].Begin, all[len(all)-1].End; first == nil || last == nil || last.Lost > 0 {
		l.Errorf("the trace is %+v ... %+v", first, last)
	}
	if tables := netnstest.Run(l, l.Path(), "nft", "list", "tables"); strings.Contains(tables, "trace") {
		l.Errorf("left behind:\n%s", tables)
	}
	return all
}

// sent is a request with its packet for a walk and the expected result.
type sent struct {
	name string
	labtest.Request
	outgoing bool
	verdict  walk.Verdict
	to       uint16
	wanted   document.Wanted
	text     string
}

func (l lab) requests(f ruleset.Family) []sent {
	inbound, to := walk.Redirected, uint16(15006)
	if l.spec.Mode == redirect.TPROXY {
		inbound = walk.HandedOver
	}
	proxy := l.Proxy(l.spec.Mode)
	return []sent{
		{"the app's", labtest.Request{From: l.App(), To: labtest.Far.Port(f, 80)}, true, walk.Redirected, 15001, document.AsWanted, "is redirected to "},
		{"an excluded port", labtest.Request{From: l.App(), To: labtest.Far.Port(f, 443)}, true, walk.Passed, 0, document.Past, "excludeOutboundPorts"},
		{"the proxy's", labtest.Request{From: proxy, To: labtest.Far.Port(f, 80)}, true, walk.Passed, 0, document.AsWanted, "goes out unredirected, as in every pod: "},
		{"a query", labtest.Request{From: l.App(), Via: labtest.UDP, To: labtest.Resolver.Port(f, 53)}, true, walk.Redirected, 15053, document.AsWanted, "15053"},
		{"the pod's other UDP", labtest.Request{From: l.App(), Via: labtest.UDP, To: labtest.Far.Port(f, labtest.UDPPort)}, true, walk.Passed, 0, document.AsWanted, ""},
		{"what arrives", labtest.Request{From: l.Peer(), To: labtest.Pod.Port(f, 80)}, false, inbound, to, document.AsWanted, "15006"},
		{"a status port", labtest.Request{From: l.Peer(), To: labtest.Pod.Port(f, 15020)}, false, walk.Passed, 0, "", "comes in unredirected, as in every pod: "},
	}
}

// TestFollow_PacketsAreExplained compares a trace with the sent packets, their results without a trace, and the walk of each.
func TestFollow_PacketsAreExplained(t *testing.T) {
	for _, backend := range backends() {
		for _, mode := range []redirect.Mode{redirect.Redirect, redirect.TPROXY} {
			t.Run(backend+"/"+mode.String(), func(t *testing.T) {
				t.Parallel()
				l := newLab(t, backend, mode)
				for _, f := range l.Families {
					for _, s := range l.requests(f) {
						if s.Via == "" {
							s.Via = labtest.TCP
						}
						without := s.Send(t.Context())
						s.SourcePort = l.FreshPort()
						var with labtest.Answer
						all := l.trace(nftrace.Filter{}, func() { with = s.Send(t.Context()) })
						if len(with.Hops) == 0 || len(without.Hops) == 0 || with.Hops[0].By != without.Hops[0].By || with.Hops[0].Dst != without.Hops[0].Dst {
							t.Errorf("%s: the answer is %v, without a trace %v", s.name, with, without)
						}
						l.check(s, backend == legacy, all)
					}
				}
			})
		}
	}
}

// check finds the packet in the records.
func (l lab) check(s sent, legacy bool, all []document.TraceEvent) {
	l.Helper()
	port := fmt.Sprintf(":%d", s.SourcePort)
	i := slices.IndexFunc(all, func(r document.TraceEvent) bool { return r.Packet != nil && strings.HasSuffix(r.Packet.Source, port) })
	if i < 0 {
		l.Errorf("%s: no packet from port %d in %d records", s.name, s.SourcePort, len(all))
		return
	}
	if seen := all[len(all)-1].End.Packets; seen != 1 { // answers are not shown
		l.Errorf("%s: %d packets: %+v", s.name, seen, all)
	}
	got := *all[i].Packet
	if i := slices.IndexFunc(got.Hops, func(h document.Hop) bool { return strings.Contains(h.Why, "TCP is captured") }); i >= 0 && s.Via == labtest.UDP &&
		got.Hops[i].Why != "only TCP is captured here" {
		l.Errorf("%s: %+v", s.name, got.Hops[i])
	}
	unseen := legacy && s.verdict == walk.HandedOver
	if got.NoListener {
		l.Errorf("%s: %s", s.name, got.Sentence)
	}
	if got.Destination != s.To.String() || got.Outgoing != s.outgoing || got.Verdict != s.verdict.String() && !unseen {
		l.Errorf("%s: %+v", s.name, got)
	}
	if legacy {
		return
	}
	if s.wanted != "" && got.Wanted != s.wanted || !strings.Contains(got.Sentence, s.text) || s.to != 0 && !strings.Contains(got.Sentence, fmt.Sprint(s.to)) {
		l.Errorf("%s: %s: %s", s.name, got.Wanted, got.Sentence)
	}
	l.agree(s, got)
}

// agree compares a traced packet with its walk through the live rules.
func (l lab) agree(s sent, got document.TracePacket) {
	l.Helper()
	live, err := l.space.Live(l.Context(), l.spec)
	check.OK(l, err)
	p := walk.Packet{
		Outgoing: s.outgoing, Out: "eth0", Protocol: ruleset.TCP, Src: netip.MustParseAddrPort(got.Source), Dst: s.To,
		UID: uint32(s.From.UID), GID: uint32(s.From.GID),
	}
	if s.Via == labtest.UDP {
		p.Protocol = ruleset.UDP
	}
	if !s.outgoing {
		p.In, p.Out = "eth0", ""
	}
	r := live.Walk(p)
	var walked, traced []string
	for _, h := range r.Hops {
		if h.Answer == walk.Yes {
			walked = append(walked, fmt.Sprint(h.Hook, h.Table, h.Chain, h.Number, h.Rule, h.Why))
		}
	}
	for _, h := range got.Hops {
		traced = append(traced, fmt.Sprint(h.Hook, h.Table, h.Chain, h.Number, h.Rule, h.Why))
	}
	if diff := cmp.Diff(walked, traced); diff != "" || r.Verdict.String() != got.Verdict {
		l.Errorf("%s: %s, %s (-walk +trace):\n%s", s.name, r.Verdict, got.Verdict, diff)
	}
	_, one, _ := strings.Cut(r.Summary, ", because")
	_, other, _ := strings.Cut(got.Sentence, ", because")
	if one != other {
		l.Errorf("%s: the walk's sentence is\n%s\nthe trace's\n%s", s.name, r.Summary, got.Sentence)
	}
}
