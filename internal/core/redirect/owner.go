package redirect

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Wanted is the desired redirection of a namespace, in any mode of the mesh. Spec implements it for a sidecar, ambient.Spec for a pod in
// ambient mode.
type Wanted interface {
	// FamiliesOf decides how to treat both families from the addresses of the namespace; see Spec.
	FamiliesOf(addresses []netip.Addr, kernelHasIPv6 bool) (Families, error)
	// Sets returns iptables' rules for IPv4 and IPv6, NativeSet the native tables. A namespace has one or the other.
	Sets(f Families) []ruleset.Set
	NativeSet(f Families) ruleset.Set
	// Routing returns the addresses, policy rules and routes.
	Routing(f Families) Routing
	// Owner recognises the rules of this mode.
	Owner() Owner
}

// Owner recognises by name the chains and tables of a mode of the mesh. The names are protocol.
type Owner struct {
	// ChainPrefix begins the names of iptables chains.
	ChainPrefix string
	// Native are the names of the native tables, all with NativePrefix, in the order in which they are written.
	Native       []string
	NativePrefix string
	// Mark identifies the mode's policy rules even where no rule uses the mark. They all have Mask, 0 means the whole mark.
	Mark, Mask uint32
}

const (
	chainPrefix  = "ISTIO_"
	nativePrefix = "istio-proxy-"
)

// Sidecar is the Owner of a sidecar's rules. The first three native tables are the reference's, which cannot reject a family.
func Sidecar() Owner {
	return Owner{
		ChainPrefix: chainPrefix, NativePrefix: nativePrefix, Mark: DefaultMark,
		Native: []string{nativePrefix + "nat", nativePrefix + "mangle", nativePrefix + "raw", nativePrefix + "filter"},
	}
}

// Owner is Sidecar.
func (s Spec) Owner() Owner { return Sidecar() }

// KnownTable reports whether rules are read from a table: a native table in family Inet, otherwise a table of iptables.
func (o Owner) KnownTable(f ruleset.Family, table string) bool {
	if f == ruleset.Inet {
		return slices.Contains(o.Native, table)
	}
	return f != ruleset.Netdev && ruleset.KnownTable(table)
}

// HookOf returns the hook of a base chain of a known table. Native tables have iptables' chain names in lower case.
func (o Owner) HookOf(f ruleset.Family, table, chain string) (ruleset.Hook, bool) {
	if f != ruleset.Inet {
		return ruleset.HookOf(table, chain)
	}
	upper := strings.ToUpper(chain)
	if !o.KnownTable(f, table) || upper == chain || upper != "INPUT" && upper != prerouting && upper != outHook {
		return ruleset.Hook{}, false
	}
	return ruleset.HookOf(strings.TrimPrefix(table, o.NativePrefix), upper)
}

// TraceTable begins the name of a packet trace's table. No Set contains this table.
const TraceTable = "istio-cni-trace-"

// OwnedNative marks all of a Set of native tables as the mesh's.
func OwnedNative(have ruleset.Set) ruleset.Ownership {
	owned := ruleset.Ownership{Chains: map[string]map[string]bool{}}
	for _, t := range have.Tables {
		owned.Chains[t.Name] = map[string]bool{}
		for _, c := range t.Chains {
			owned.Chains[t.Name][c.Name] = true
		}
	}
	return owned
}

// NativeScript prints native tables as input for "nft -f", as the reference logs it. The input replaces the present
// tables, and removes tables that the Set lacks.
func (o Owner) NativeScript(s ruleset.Set) string {
	var b strings.Builder
	for _, name := range o.Native {
		fmt.Fprintf(&b, "add table inet %s\ndelete table inet %s\n", name, name)
		t := s.Table(name)
		if len(t.Chains) == 0 {
			continue
		}
		fmt.Fprintf(&b, "add table inet %s\n", name)
		for _, c := range t.Chains {
			fmt.Fprintf(&b, "add chain inet %s %s", name, c.Name)
			if h, base := o.HookOf(ruleset.Inet, name, c.Name); base {
				fmt.Fprintf(&b, " { type %s hook %s priority %d; }", h.Type, h.Name, h.Priority)
			}
			b.WriteByte('\n')
		}
		for _, c := range t.Chains {
			for _, r := range c.Rules {
				fmt.Fprintf(&b, "add rule inet %s %s %s\n", name, c.Name, r)
			}
		}
	}
	return b.String()
}
