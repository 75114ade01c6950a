package redirect

import (
	"errors"
	"net/netip"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Treatment says how the rules treat one IP family of a pod.
type Treatment uint8

// Captured gets the rules; Rejected refuses TCP and UDP; Bypassed leaves the packets alone; Unused needs no rules: the
// kernel lacks the family, or the family would be bypassed and the pod has no address in it.
const (
	Unused Treatment = iota
	Captured
	Rejected
	Bypassed
)

// String returns one word.
func (t Treatment) String() string {
	return [...]string{"unused", "captured", "rejected", "bypassed"}[t]
}

// Families is the treatment of each family of a pod. IPv4 is always captured, with or without addresses, as the
// reference does.
type Families struct {
	IPv6 Treatment
	// HasIPv4 and HasIPv6 report whether the pod has an address in the family.
	HasIPv4, HasIPv6 bool
	// Host is the pod's first address.
	Host netip.Addr
}

// Captured returns the captured families, IPv4 first.
func (f Families) Captured() []ruleset.Family {
	if f.IPv6 == Captured {
		return []ruleset.Family{ruleset.IPv4, ruleset.IPv6}
	}
	return []ruleset.Family{ruleset.IPv4}
}

// ErrNoAddress means that no address of the namespace is reachable from outside: the plugin that assigns addresses
// must come first in the chain.
var ErrNoAddress = errors.New("no valid local IP address found: the network namespace has no address besides loopback " +
	"and link-local ones; the plugin that assigns addresses must run before this one")

// Addressed returns Families without a treatment, from all addresses of a namespace in the kernel's order. It ignores loopback
// and link-local addresses and the address that a sidecar's Routing adds.
func Addressed(addresses []netip.Addr) (f Families) {
	for _, a := range addresses {
		a = a.Unmap().WithZone("")
		if !a.IsValid() || a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsLinkLocalMulticast() || a == PassthroughAddress(ruleset.IPv6) {
			continue
		}
		if !f.Host.IsValid() {
			f.Host = a
		}
		f.HasIPv6 = f.HasIPv6 || a.Is6()
		f.HasIPv4 = f.HasIPv4 || a.Is4()
	}
	return f
}

// FamiliesOf takes all addresses of a namespace, in the kernel's order, and whether the kernel supports IPv6. IPv6 is captured if the first address is
// IPv6. For other pods the setting decides: dual stack, capture and reject apply whatever the addresses are, because
// a pod always has link-local addresses and may get others later.
func (s Spec) FamiliesOf(addresses []netip.Addr, kernelHasIPv6 bool) (Families, error) {
	f := Addressed(addresses)
	switch {
	case !f.Host.IsValid():
		return Families{}, ErrNoAddress
	case f.Host.Is6():
		f.IPv6 = Captured
	case !kernelHasIPv6:
		f.IPv6 = Unused
	case s.DualStack || s.SecondFamily == Capture:
		f.IPv6 = Captured
	case s.SecondFamily == Reject:
		f.IPv6 = Rejected
	case f.HasIPv6:
		f.IPv6 = Bypassed
	}
	return f, nil
}

// Sets returns the wanted rules of both families. A family without rules has an empty Set, so that rules left by an
// earlier configuration are found and removed.
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

// Routing holds the addresses, policy rules and routes that a Spec needs besides rules.
type Routing struct {
	// PassthroughV6 adds ::6/128 to lo, the source address of Envoy's inbound connections to the app; in IPv4, lo
	// already has all of 127/8.
	PassthroughV6 bool
	// MarkFamilies are the families in which packets with Mark are delivered locally, through Table.
	MarkFamilies []ruleset.Family
	Mark, Table  uint32
	// Mask selects the compared bits of packet marks, 0 for all. Priority is the policy rule's, 0 for the kernel's choice.
	Mask, Priority uint32
}

// Routing returns the addresses, policy rules and routes for the families.
func (s Spec) Routing(f Families) Routing {
	r := Routing{PassthroughV6: f.IPv6 == Captured, Mark: s.Mark, Table: s.Table}
	if s.tproxyInbound() {
		r.MarkFamilies = f.Captured()
	}
	return r
}
