package redirection_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
)

// everyPacket are the packets for every pod, whatever its Spec; the expected answers are those of another backend.
func everyPacket() []packet {
	var all []packet
	for _, sender := range []actor{app, root, member(2000), proxy} {
		all = append(all,
			send(sender, tcp, 80, nil, labtest.Peer, labtest.Far, labtest.Private, labtest.Side, labtest.Pod, labtest.Loopback),
			send(sender, tcp, 443, nil, labtest.Peer), send(sender, udp, 53, nil, labtest.Resolver), send(sender, tcp, 53, nil, labtest.Resolver),
			send(sender, udp, labtest.UDPPort, nil, labtest.Peer))
	}
	for _, port := range []uint16{80, 8080, 15008, 15020} {
		all = append(all, send(client, tcp, port, nil, labtest.Pod), send(guest, tcp, port, nil, labtest.PodInside))
	}
	return append(all, send(client, udp, labtest.UDPPort, nil, labtest.Pod), send(guest, tcp, 80, nil, labtest.Far))
}

// answers are those to each packet, with the original destination. The proxy's traffic, but for its calls to its own pod, must
// not be captured.
func (s fixture) answers(t *testing.T, v iptables.Variant) []string {
	t.Helper()
	listeners := []string{labtest.ByOutbound, labtest.ByInbound, labtest.ByDNS}
	var all []string
	for _, s.family = range s.Families {
		for _, p := range everyPacket() {
			p.want = func(fixture) ([]labtest.Hop, error) { return nil, nil }
			for _, q := range p.requests(s) {
				got := q.Send(t.Context())
				text := fmt.Sprintf("%s %s to %s:", q.From.Name, p.via, q.To)
				itself := q.To.Addr() == labtest.Pod.Addr(s.family) || q.To.Addr() == labtest.Loopback.Addr(s.family)
				for _, h := range got.Hops {
					text += fmt.Sprintf(" %s at %s", h.By, h.Dst)
					if q.From == s.proxy() && !itself && slices.Contains(listeners, h.By) {
						t.Errorf("%s: the proxy's own traffic is captured: %s\nof %+v", v, text, s.spec)
					}
				}
				if got.Err != nil {
					text += " " + got.Err.Error()
				}
				all = append(all, text)
			}
		}
	}
	return all
}

// localized makes a random Spec one that matters to the fixture's addresses, in several ways.
func localized(spec *redirect.Spec, seed uint64) {
	spec.DNSServers = []netip.Addr{labtest.Resolver.Addr(ruleset.IPv4), labtest.Resolver.Addr(ruleset.IPv6)}
	switch seed % 4 {
	case 0, 1:
		spec.Outbound, spec.Inbound = redirect.Default().Outbound, redirect.Default().Inbound
		spec.OutboundExclude = append(spec.OutboundExclude, networksOf(labtest.Private)...)
	case 2:
		spec.Outbound, spec.Inbound = redirect.Networks{List: networksOf(labtest.Far, labtest.Side)}, redirect.Ports{List: ruleset.PortList(80)}
	}
	if seed%2 == 1 {
		spec.DualStack = true
	}
}

// TestBackends_AnswerAlike puts random Specs through every backend and compares the answers to all packets. The
// proxy's traffic, but for its calls to its own pod, is never captured.
func TestBackends_AnswerAlike(t *testing.T) {
	const specs = 20
	for seed := range uint64(specs) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			spec := spectest.Random(seed + 1)
			spec.UIDs, spec.GIDs = redirect.Default().UIDs, redirect.Default().GIDs
			// Interfaces and listeners are the fixture's.
			spec.ExcludeInterfaces, spec.RerouteInterfaces = nil, nil
			spec.OutboundPort, spec.InboundPort = redirect.Default().OutboundPort, redirect.Default().InboundPort
			localized(&spec, seed)
			var want []string
			for _, v := range []iptables.Variant{iptables.NFT, iptables.Legacy, byNetlink, byTables} {
				s := newFixture(t, spec, families...)
				s.apply(t, v, spec)
				got := s.answers(t, v)
				if want == nil {
					want = got
					t.Log(strings.Join(got, "\n"))
					continue
				}
				for i := range want {
					if got[i] != want[i] {
						t.Errorf("%s answers otherwise than %s:\n  %s\n  %s\nof %+v", v, iptables.NFT, got[i], want[i], spec)
					}
				}
			}
		})
	}
}
