// Package redirect decides which traffic an Istio sidecar captures and by which rules, in the dialects of iptables and nft.
//
// It promises that Parse returns valid Specs only, that Rules is total (no error, no clock, no system), and that
// the rules match the rules of Istio's own CNI plugin one by one, in the spelling of the kernel's tools. It never
// touches a namespace; packages below node do.
//
// To add a rule: its field in Spec, that field's reader in parse.go, the rule in its chain in rules.go, rules_dns.go or
// rules_mangle.go, for both dialects at once; its annotation is a row in core/sidecar. A new kind of match or target also
// needs a type in core/ruleset, with its bytes in node/nftables/xtables and native. Tests: spectest draws the
// field; the packets of node/redirection test the effect of the rule.
//
// Start at Spec, then Rules; Owned recognises the rules of this or an earlier configuration in a namespace.
package redirect

import (
	"net/netip"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Protocol constants of the sidecar: Envoy's listeners and the marks it sets or expects.
const (
	OutboundPort = 15001 // Envoy's outbound listener
	InboundPort  = 15006 // Envoy's inbound listener
	TunnelPort   = 15008 // HBONE; never redirected
	DNSPort      = 15053 // the sidecar agent's DNS proxy
	DefaultID    = 1337  // uid and gid of the proxy
	DefaultMark  = 1337  // mark of TPROXY traffic
	DefaultTable = 133   // routing table for marked packets
	// SelfMark marks the proxy's connections to its own pod under TPROXY. The reference has no setting for it.
	SelfMark = 1338
	// ProbePort is the port that the validation dials. No service uses it.
	ProbePort = 15002
)

// PassthroughAddress is the source of the proxy's connections to the app. Rules recognize these connections by it.
func PassthroughAddress(f ruleset.Family) netip.Addr {
	if f == ruleset.IPv6 {
		return netip.AddrFrom16([16]byte{15: 6})
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 6})
}

// Mode is how inbound connections reach the proxy.
type Mode uint8

// Redirect rewrites the destination (the proxy reads SO_ORIGINAL_DST); TPROXY keeps both addresses.
const (
	Redirect Mode = iota
	TPROXY
)

// String returns the spelling of the annotation.
func (m Mode) String() string {
	if m == TPROXY {
		return "TPROXY"
	}
	return "REDIRECT"
}

// DNSCapture selects the DNS queries that go to the sidecar agent.
type DNSCapture uint8

// DNS capture: off, all of port 53, or only queries to Spec.DNSServers.
const (
	DNSOff DNSCapture = iota
	DNSAll
	DNSServers
)

// SecondFamily says how to treat IPv6 in a pod whose first address is IPv4 (compat: it is captured only if dual stack
// is requested).
type SecondFamily uint8

// Bypass leaves IPv6 alone, as the reference does; Capture treats IPv6 like IPv4; Reject refuses TCP and UDP of IPv6.
const (
	Bypass SecondFamily = iota
	Capture
	Reject
)

// String returns the spelling of the stanza key and the flag.
func (s SecondFamily) String() string { return [...]string{"bypass", "capture", "reject"}[s] }

// Selection is all values or a list in the order given; an empty list is nothing.
type Selection[T any] struct {
	All  bool
	List []T
}

// Empty reports whether nothing is selected.
func (s Selection[T]) Empty() bool { return !s.All && len(s.List) == 0 }

// The selections of a Spec.
type (
	// Ports is a set of TCP ports.
	Ports = Selection[ruleset.PortRange]
	// Networks is a set of addresses.
	Networks = Selection[netip.Prefix]
	// Groups is a set of group IDs.
	Groups = Selection[uint32]
)

// Spec describes the traffic to capture in one pod. Parse returns valid Specs only; Rules does not check its Spec.
type Spec struct {
	OutboundPort, InboundPort, TunnelPort uint16
	// UIDs and GIDs are the identities of the proxy. Its traffic is never captured.
	UIDs, GIDs []uint32

	Mode        Mode
	Mark, Table uint32 // TPROXY only

	// Inbound is the captured incoming TCP; InboundExclude applies only if Inbound is all ports.
	Inbound        Ports
	InboundExclude []ruleset.PortRange

	// Outbound TCP is captured by address, and also by port. OutboundPortsExclude applies to UDP (DNS) too.
	Outbound             Networks
	OutboundExclude      []netip.Prefix
	OutboundPorts        []ruleset.PortRange
	OutboundPortsExclude []ruleset.PortRange

	// ExcludeInterfaces are left alone in both directions; packets that enter by RerouteInterfaces (virtual machines) are outbound.
	ExcludeInterfaces, RerouteInterfaces []string

	OwnerGroups        Groups
	OwnerGroupsExclude []uint32

	// Loopback is the prefix of the pod's own IPv4 addresses on lo.
	Loopback netip.Prefix

	DNS        DNSCapture
	DNSServers []netip.Addr

	DropInvalid bool
	// DualStack captures IPv6 whatever the pod's addresses are; otherwise the first address decides, and SecondFamily
	// applies to a pod whose first address is IPv4.
	DualStack    bool
	SecondFamily SecondFamily

	// Annotations names the annotations of a field if they are not Istio's. It is for reports: no rule reads it.
	Annotations map[Field]string
}

// Default returns the Spec of a sidecar without annotations: everything is captured except the proxy's own ports.
func Default() Spec {
	return Spec{
		OutboundPort: OutboundPort, InboundPort: InboundPort, TunnelPort: TunnelPort,
		UIDs: []uint32{DefaultID}, GIDs: []uint32{DefaultID},
		Mark: DefaultMark, Table: DefaultTable,
		Inbound: Ports{All: true}, InboundExclude: AlwaysExcluded(),
		Outbound:             Networks{All: true},
		OutboundPortsExclude: ruleset.PortList(statusPort),
		OwnerGroups:          Groups{All: true},
		Loopback:             defaultLoopback,
	}
}

// Identities returns the users and groups of the proxy.
func (s Spec) Identities() (all []ruleset.Owner) {
	for _, u := range s.UIDs {
		all = append(all, ruleset.Owner{ID: u})
	}
	for _, g := range s.GIDs {
		all = append(all, ruleset.Owner{ID: g, Group: true})
	}
	return all
}

// CapturesLoopback reports whether a captured network begins at a loopback address: then the app's calls to itself over
// lo are captured, and both families lack the rules that let them pass.
func (s Spec) CapturesLoopback() bool {
	return slices.ContainsFunc(s.Outbound.List, func(p netip.Prefix) bool { return p.Addr().IsLoopback() })
}
