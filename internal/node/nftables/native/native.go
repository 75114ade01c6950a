// Package native knows the rules of the reference's native mode: tables of nf_tables of its own, for both families at
// once, beside whatever iptables has.
//
// It promises that Rules gives what the reference gives to nft for a Spec, chain by chain and in its order, but for what
// is said at Rules; that Encode gives the very expressions that nft makes of that text; and that Decode gives such a
// text only for what it understands whole. It touches nothing: no socket, no file, no process.
//
// A rule's text is the one that "nft list ruleset" prints, with two differences: a counter has no numbers, and
// "meta l4proto tcp" stands wherever the rule asks for it ahead of its ports, which nft leaves out.
//
// Start reading at Rules.
package native

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Inet is the family of tables that see both families at once.
const Inet ruleset.Family = 0

// Names of the tables. The prefix is what marks a table as the mesh's; the first three are protocol.
const (
	NAT    = "istio-proxy-nat"
	Mangle = "istio-proxy-mangle"
	Raw    = "istio-proxy-raw"
	// Filter is ours: the reference cannot refuse a family.
	Filter = "istio-proxy-filter"
)

// Tables are all names, in the order in which they are written.
func Tables() []string { return []string{NAT, Mangle, Raw, Filter} }

// Base is what makes a chain one that packets meet.
type Base struct {
	Kind     string // nat, filter or route
	Hook     uint32 // NF_INET_…
	Priority int32
}

// Names of the chains.
const (
	prerouting = "prerouting"
	output     = "output"
	input      = "input"

	inbound    = "istio-inbound"
	toProxy    = "istio-redirect"
	toInbound  = "istio-in-redirect"
	outbound   = "istio-output"
	outputDNS  = "istio-output-dns"
	divert     = "istio-divert"
	tproxy     = "istio-tproxy"
	dropChain  = "istio-drop"
	rejectAll  = "istio-reject"
	hookInput  = unix.NF_INET_LOCAL_IN
	hookOutput = unix.NF_INET_LOCAL_OUT
)

// bases are the chains that packets meet, by table.
var bases = map[string]map[string]Base{ //nolint:gochecknoglobals // a constant table
	NAT: {
		prerouting: {"nat", unix.NF_INET_PRE_ROUTING, -100},
		output:     {"nat", hookOutput, -100},
	},
	Mangle: {
		prerouting: {"filter", unix.NF_INET_PRE_ROUTING, -150},
		output:     {"route", hookOutput, -150},
	},
	Raw: {
		prerouting: {"filter", unix.NF_INET_PRE_ROUTING, -300},
		output:     {"filter", hookOutput, -300},
	},
	Filter: {
		input:  {"filter", hookInput, 0},
		output: {"filter", hookOutput, 0},
	},
}

// BaseOf tells whether packets meet a chain by itself, and where.
func BaseOf(table, chain string) (Base, bool) {
	b, ok := bases[table][chain]
	return b, ok
}

// Script prints the tables as a text for "nft -f" that replaces what is there by them, as the reference logs it. Tables
// that the Set does not have are removed.
func Script(s ruleset.Set) string {
	var b strings.Builder
	for _, name := range Tables() {
		fmt.Fprintf(&b, "add table inet %s\ndelete table inet %s\n", name, name)
		t := s.Table(name)
		if len(t.Chains) == 0 {
			continue
		}
		fmt.Fprintf(&b, "add table inet %s\n", name)
		for _, c := range t.Chains {
			fmt.Fprintf(&b, "add chain inet %s %s%s\n", name, c.Name, declaration(name, c.Name))
		}
		for _, c := range t.Chains {
			for _, r := range c.Rules {
				fmt.Fprintf(&b, "add rule inet %s %s %s\n", name, c.Name, r.Spec)
			}
		}
	}
	return b.String()
}

func declaration(table, chain string) string {
	base, ok := BaseOf(table, chain)
	if !ok {
		return ""
	}
	hook := map[uint32]string{hookInput: "input", hookOutput: "output", unix.NF_INET_PRE_ROUTING: "prerouting"}[base.Hook]
	return fmt.Sprintf(" { type %s hook %s priority %d; }", base.Kind, hook, base.Priority)
}

// Same reports whether both have the same chains with the same rules.
func Same(a, b ruleset.Table) bool {
	within := func(a, b ruleset.Table) bool {
		return !slices.ContainsFunc(a.Chains, func(c ruleset.Chain) bool {
			other, there := b.Chain(c.Name)
			return !there || !slices.EqualFunc(c.Rules, other.Rules, func(x, y ruleset.Rule) bool { return x.Spec == y.Spec })
		})
	}
	return len(a.Chains) == len(b.Chains) && within(a, b)
}

// Claim says that all of a Set of such tables is the mesh's.
func Claim(have ruleset.Set) ruleset.Claim {
	claim := ruleset.Claim{Chains: map[string]map[string]bool{}}
	for _, t := range have.Tables {
		claim.Chains[t.Name] = map[string]bool{}
		for _, c := range t.Chains {
			claim.Chains[t.Name][c.Name] = true
		}
	}
	return claim
}
