package redirect

import (
	"errors"
	"net/netip"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Treatment is what is done with one family of a pod.
type Treatment uint8

// Captured gets the rules; Rejected has its TCP and UDP refused; Bypassed runs past the mesh; Unused means that the pod
// has no address of the family.
const (
	Unused Treatment = iota
	Captured
	Rejected
	Bypassed
)

// Families says how each family of a pod is treated. IPv4 is always captured, with or without addresses, as the
// reference does.
type Families struct {
	IPv6 Treatment
	// HasIPv4 says that the pod has an IPv4 address.
	HasIPv4 bool
	// Host is the pod's first address.
	Host netip.Addr
}

// ErrNoAddress is returned for a namespace that has no address a pod could be reached by: the plugin that assigns
// addresses must come first in the chain.
var ErrNoAddress = errors.New("no valid local IP address found: the network namespace has no address besides loopback " +
	"and link-local ones; the plugin that assigns addresses must run before this one")

// FamiliesOf decides from all addresses of a namespace, in the kernel's order. Loopback and link-local addresses do not
// count. The first one decides whether IPv6 is captured; with dual stack any IPv6 address does.
func (s Spec) FamiliesOf(addresses []netip.Addr) (Families, error) {
	var f Families
	has6 := false
	for _, a := range addresses {
		a = a.Unmap().WithZone("")
		if !a.IsValid() || a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsLinkLocalMulticast() {
			continue
		}
		if !f.Host.IsValid() {
			f.Host = a
		}
		has6 = has6 || a.Is6()
		f.HasIPv4 = f.HasIPv4 || a.Is4()
	}
	switch {
	case !f.Host.IsValid():
		return Families{}, ErrNoAddress
	case !has6:
		f.IPv6 = Unused
	case f.Host.Is6() || s.DualStack:
		f.IPv6 = Captured
	default:
		f.IPv6 = map[SecondFamily]Treatment{Bypass: Bypassed, Capture: Captured, Reject: Rejected}[s.SecondFamily]
	}
	return f, nil
}

// Sets gives the wanted rules of both families. A family that is not treated has an empty Set, so that rules an earlier
// configuration left there are found and removed.
func (s Spec) Sets(f Families) []ruleset.Set {
	v6 := ruleset.Set{Family: ruleset.IPv6}
	switch f.IPv6 {
	case Captured:
		v6 = Rules(s, ruleset.IPv6)
	case Rejected:
		v6 = RejectAll(ruleset.IPv6)
	case Unused, Bypassed:
	}
	return []ruleset.Set{Rules(s, ruleset.IPv4), v6}
}

// Routing is what a Spec needs besides rules.
type Routing struct {
	// PassthroughV6 asks for ::6/128 on lo, the source address of Envoy's inbound connections to the app; in IPv4 the
	// whole of 127/8 is on lo already.
	PassthroughV6 bool
	// MarkFamilies are the families in which packets with Mark are delivered locally, through Table.
	MarkFamilies []ruleset.Family
	Mark, Table  uint32
}

// Routing gives the addresses, policy rules and routes for the families.
func (s Spec) Routing(f Families) Routing {
	r := Routing{PassthroughV6: f.IPv6 == Captured, Mark: s.Mark, Table: s.Table}
	if s.Mode == TPROXY && !s.Inbound.Empty() {
		r.MarkFamilies = []ruleset.Family{ruleset.IPv4}
		if f.IPv6 == Captured {
			r.MarkFamilies = append(r.MarkFamilies, ruleset.IPv6)
		}
	}
	return r
}
