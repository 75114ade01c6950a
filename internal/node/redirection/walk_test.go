package redirection_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// These tests compare the walk with real packets: they apply random Specs and send random packets. The listener that answers must be
// the end of the walk through the rules as they are read back. TestAnswers_ForeignRules does so beside foreign rules.

var (
	walkSeed  = flag.Uint64("walk.seed", 1, "seed of TestWalk_AgreesWithTheKernel")
	walkSpecs = flag.Int("walk.specs", 5, "number of Specs of each backend there")
)

const walkPackets = 40 // per Spec and family

// walked is one Spec in a fixture, with its random numbers.
type walked struct {
	fixture
	*rand.Rand
	tb   testing.TB
	used []string // chains of foreign tables
}

func TestWalk_AgreesWithTheKernel(t *testing.T) {
	t.Logf("-walk.seed=%d", *walkSeed)
	var verdicts [walk.Rejected + 1]atomic.Int64
	t.Run("backend", func(t *testing.T) {
		for i, v := range []iptables.Variant{iptables.NFT, iptables.Legacy, byNetlink, byTables} {
			for n := range *walkSpecs {
				t.Run(fmt.Sprintf("%s/%d", v, n), func(t *testing.T) {
					t.Parallel()
					w := walked{Rand: rand.New(rand.NewPCG(*walkSeed, uint64(i*1000+n))), tb: t}
					w.compare(t, v, &verdicts)
				})
			}
		}
	})
	all := int64(0)
	for v := range verdicts {
		t.Logf("%d packets %s", verdicts[v].Load(), walk.Verdict(v))
		all += verdicts[v].Load()
	}
	if verdicts[walk.CannotTell].Load() > all/5 {
		t.Error("the walk often has no answer")
	}
}

func (w *walked) compare(t *testing.T, v iptables.Variant, verdicts *[walk.Rejected + 1]atomic.Int64) {
	t.Helper()
	spec := w.randomSpec()
	w.fixture = newFixture(t, spec, families...)
	w.apply(t, v, spec)
	live, err := namespaceOf(w.Fixture, v).Live(t.Context(), spec)
	check.OK(t, err)
	alone, err := namespaceOf(w.Fixture, v).Live(t.Context(), nil)
	check.OK(t, err)
	for _, w.family = range families {
		for range walkPackets {
			q, p := w.packet()
			r := live.Walk(p)
			if bare := alone.Walk(p); bare.Verdict != r.Verdict || bare.To != r.To {
				t.Errorf("%s: without a Spec %q, with it %q\nof %+v", q, bare.Summary, r.Summary, spec)
			}
			if verdicts[r.Verdict].Add(1); r.Verdict != walk.CannotTell {
				w.agree(t, q, r, spec)
			}
		}
	}
}

// agree sends a request: the listener at the end of the walk must answer.
func (w *walked) agree(t *testing.T, q labtest.Request, r walk.Result, want redirect.Wanted) {
	t.Helper()
	expected := w.listener(q, r)
	if got := w.send(q, expected); !slices.Contains(expected, got) {
		t.Errorf("%s: the kernel's answer is %q, the walk's %q\n%s\n%s\nof %+v", q, got, expected, r.Summary, met(r), want)
	}
}

// send returns the listener that answers, or the error. It waits only briefly if silence is expected.
func (w *walked) send(q labtest.Request, want []string) string {
	ctx := w.tb.Context()
	if slices.Contains(want, labtest.ErrSilent.Error()) {
		short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
		defer cancel()
		ctx = short
	}
	got := q.Send(ctx)
	return w.answeredBy(q, got)
}

// listener returns the expected answers of the listener at the end of the walk.
func (w *walked) listener(q labtest.Request, r walk.Result) []string {
	to := q.To
	switch r.Verdict {
	case walk.Dropped:
		return []string{labtest.ErrSilent.Error(), labtest.ErrForbidden.Error()}
	case walk.Rejected:
		return []string{labtest.ErrRefused.Error(), labtest.ErrForbidden.Error()}
	case walk.Redirected, walk.HandedOver:
		if to = r.To; !to.Addr().IsValid() {
			to = netip.AddrPortFrom(labtest.Loopback.Addr(w.family), to.Port())
		}
	case walk.Passed, walk.CannotTell:
	}
	if q.Via == stray {
		return []string{labtest.ErrRefused.Error()}
	}
	at := func(places ...labtest.Place) bool {
		return slices.ContainsFunc(places, func(p labtest.Place) bool { return to.Addr() == p.Addr(w.family) })
	}
	loopback, port := at(labtest.Loopback), to.Port()
	app := q.Via == tcp && slices.Contains(labtest.AppPorts(), port) ||
		q.Via == udp && port == labtest.UDPPort && at(labtest.Pod, labtest.PodSide, labtest.Loopback)
	peer := at(labtest.Peer, labtest.Far, labtest.Private, labtest.Side, labtest.Resolver, labtest.OtherResolver)
	answers := q.Via == tcp && slices.Contains(labtest.PeerPorts(), port) || q.Via == udp && slices.Contains([]uint16{53, labtest.UDPPort}, port)
	named := map[uint16]string{redirect.OutboundPort: labtest.ByOutbound, redirect.InboundPort: labtest.ByInbound, redirect.TunnelPort: labtest.ByTunnel}
	switch {
	case peer && w.spec.Mode == redirect.TPROXY && q.From == w.Guest(): // TPROXY diverts answers to a guest
		return []string{labtest.ByPeer, labtest.ErrRefused.Error(), labtest.ErrSilent.Error()}
	case peer && answers:
		return []string{labtest.ByPeer}
	case peer || at(labtest.Guest):
	case loopback && port == redirect.DNSPort:
		return []string{labtest.ByDNS}
	case app:
		return []string{labtest.ByApp}
	case q.Via == tcp && slices.Contains(redirect.AlwaysExcluded(), ruleset.OnePort(port)):
		return []string{labtest.ByStatus}
	case q.Via == tcp && named[port] != "":
		return []string{named[port]}
	}
	if q.Via == udp { // conntrack may classify the error as invalid and drop it
		return []string{labtest.ErrRefused.Error(), labtest.ErrSilent.Error()}
	}
	return []string{labtest.ErrRefused.Error()}
}

func pick[T any](w *walked, from ...T) T { return from[w.IntN(len(from))] }

// randomSpec returns a Spec of spectest, changed to the fixture's addresses and ports.
func (w *walked) randomSpec() redirect.Spec {
	s := spectest.Random(w.Uint64())
	s.UIDs, s.GIDs = append([]uint32{1337}, s.UIDs...), append([]uint32{1337}, s.GIDs...)
	s.OutboundPort, s.InboundPort, s.DualStack = redirect.OutboundPort, redirect.InboundPort, true
	s.DNSServers = []netip.Addr{labtest.Resolver.Addr(ruleset.IPv4), labtest.Resolver.Addr(ruleset.IPv6)}
	s.TunnelPort = pick(w, s.TunnelPort, 80, redirect.TunnelPort)
	s.RerouteInterfaces = pick(w, nil, []string{"vm0"})
	s.ExcludeInterfaces = pick(w, nil, nil, nil, s.ExcludeInterfaces, []string{"eth1"})
	s.Loopback = pick(w, s.Loopback, redirect.Default().Loopback)
	some := func(list []ruleset.PortRange) []ruleset.PortRange {
		return append(list, pick(w, nil, ruleset.PortList(80), ruleset.PortList(443, 53), []ruleset.PortRange{{First: 79, Last: 500}})...)
	}
	s.OutboundPorts, s.OutboundPortsExclude, s.InboundExclude = some(s.OutboundPorts), some(s.OutboundPortsExclude), some(s.InboundExclude)
	if !s.Inbound.All {
		s.Inbound.List = some(s.Inbound.List)
	}
	if w.IntN(5) > 0 {
		s.OwnerGroups = pick(w, redirect.Groups{All: true}, redirect.Groups{All: true}, redirect.Groups{List: []uint32{3000}})
		s.OwnerGroupsExclude = pick(w, nil, []uint32{3000})
		s.Outbound = pick(w, redirect.Networks{All: true}, redirect.Networks{List: networksOf(labtest.Far, labtest.Side, labtest.Loopback)})
		s.Inbound.All = w.IntN(3) > 0
		s.OutboundExclude = pick(w, nil, networksOf(labtest.Private, labtest.Resolver))
	}
	return s
}

// packet returns a random request, and its first packet.
func (w *walked) packet() (labtest.Request, walk.Packet) {
	ids := []int{0, 1000, 1337, 3000, int(pick(w, w.spec.UIDs...)), int(pick(w, w.spec.GIDs...))}
	who := labtest.Actor{Name: "somebody", Namespace: w.Path(), UID: pick(w, ids...), GID: pick(w, ids...)}
	p := walk.Packet{Outgoing: true, Out: "eth0", Protocol: ruleset.TCP, UID: uint32(who.UID), GID: uint32(who.GID)}
	from, to := labtest.Pod, pick(w, labtest.Peer, labtest.Far, labtest.Private, labtest.Resolver, labtest.OtherResolver)
	switch w.IntN(8) {
	case 0, 1: // the pod itself
		from, to = labtest.Loopback, pick(w, labtest.Loopback, labtest.Passthrough)
		if p.Out = "lo"; w.IntN(2) == 0 {
			from, to = pick(w, labtest.Pod, labtest.Passthrough), pick(w, labtest.Pod, labtest.PodSide, labtest.PodInside)
		}
	case 2:
		from, to, p.Out = labtest.PodSide, labtest.Side, "eth1"
	case 3:
		from, to, p.Out = labtest.PodInside, labtest.Guest, "vm0"
	case 4, 5:
		who, from, to = w.Peer(), pick(w, labtest.Far, labtest.Peer), labtest.Pod
		p.Outgoing, p.In, p.Out = false, "eth0", ""
	case 6:
		who, from, to = w.Guest(), labtest.Guest, pick(w, labtest.PodInside, labtest.Far, labtest.Pod)
		if p.Outgoing, p.In, p.Out = false, "vm0", ""; to == labtest.Far {
			p.Type = "UNICAST"
		}
	}
	ports := []uint16{80, 80, 443, 53, 8080, 9000, 81, 15001, 15006, 15008, 15020, 15053}
	for _, p := range slices.Concat(w.spec.OutboundPorts, w.spec.Inbound.List) {
		ports = append(ports, p.First, p.Last)
	}
	q := labtest.Request{From: who, Via: tcp, To: to.Port(w.family, max(1, pick(w, ports...))), Source: from.Addr(w.family), SourcePort: w.FreshPort()}
	if w.IntN(4) == 0 {
		q.Via, p.Protocol = udp, ruleset.UDP
		q.To = to.Port(w.family, pick[uint16](w, 53, 53, labtest.UDPPort, 81))
	}
	p.Src = netip.AddrPortFrom(q.Source, q.SourcePort)
	if who == w.Peer() && w.IntN(4) == 0 {
		q.Via, q.To, p.Protocol, p.State, p.Src = stray, to.Port(w.family, 80), ruleset.TCP, ruleset.StateInvalid, netip.AddrPort{}
	}
	p.Dst = q.To
	return q, p
}

// met lists the rules that matched or may have matched.
func met(r walk.Result) string {
	var b strings.Builder
	for _, h := range r.Hops {
		if h.Answer != walk.No {
			fmt.Fprintf(&b, "  %s %s: set %d, %s/%s %d: %s    # %s\n", h.Answer, h.Hook, h.Set, h.Table, h.Chain, h.Number, h.Rule, h.Why)
		}
	}
	return b.String()
}

// Foreign rules, some of which resemble ours. They must survive every change of the mesh's rules: early ones exist before the
// mesh, late ones come after it.
var early, late = texts("early.*")["early.iptables"], texts("late.*")["late.iptables"]

// plant adds rules to both families.
func (p pod) plant(tb testing.TB, v iptables.Variant, text string) {
	tb.Helper()
	for _, f := range families {
		p.restore(tb, v, f, text)
	}
}

// foreign returns a saved text without the lines of the wanted Sets and without the mesh's chains.
func foreign(saved string, wanted ...ruleset.Set) string {
	ours := map[string]bool{}
	for _, s := range wanted {
		for line := range strings.Lines(s.String()) {
			ours[line] = strings.HasPrefix(line, "-A")
		}
	}
	var b strings.Builder
	for line := range strings.Lines(saved) {
		inChain := strings.HasPrefix(line, ":ISTIO_") || strings.HasPrefix(line, "-A ISTIO_")
		if !ours[line] && !inChain {
			b.WriteString(line)
		}
	}
	return b.String()
}
