package redirect

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Wanted is the redirection that a namespace shall have, whatever the mode of the mesh. A Spec is that of a sidecar.
type Wanted interface {
	// FamiliesOf decides the treatment of both families from the addresses of the namespace; see Spec.
	FamiliesOf(addresses []netip.Addr, kernelHasIPv6 bool) (Families, error)
	// Sets are iptables' rules of IPv4 and of IPv6, NativeSet the native tables. A namespace has one or the other.
	Sets(f Families) []ruleset.Set
	NativeSet(f Families) ruleset.Set
	// Routing are the addresses, policy rules and routes.
	Routing(f Families) Routing
	// Owner tells the mode's rules from those of others.
	Owner() Owner
}

// Owner tells by names which chains and tables belong to a mode of the mesh. The names are protocol.
type Owner struct {
	// ChainPrefix begins the names of chains of iptables.
	ChainPrefix string
	// Native are the names of the native tables, all with NativePrefix, in the order in which they are written.
	Native       []string
	NativePrefix string
	// Mark is that of policy rules which belong to the mode even where no rule has it.
	Mark uint32
}

const (
	chainPrefix  = "ISTIO_"
	nativePrefix = "istio-proxy-"
)

// Sidecar is the Owner of a sidecar's rules. The first three native tables are the reference's; it cannot refuse a family.
func Sidecar() Owner {
	return Owner{
		ChainPrefix: chainPrefix, NativePrefix: nativePrefix, Mark: DefaultMark,
		Native: []string{nativePrefix + "nat", nativePrefix + "mangle", nativePrefix + "raw", nativePrefix + "filter"},
	}
}

// Owner is Sidecar.
func (s Spec) Owner() Owner { return Sidecar() }

// KnownTable reports whether a table is one whose rules are read: a native one in family Inet, else one of iptables.
func (o Owner) KnownTable(f ruleset.Family, table string) bool {
	if f == ruleset.Inet {
		return slices.Contains(o.Native, table)
	}
	return f != ruleset.Netdev && ruleset.KnownTable(table)
}

// HookOf returns the hook of a base chain of a known table: of iptables' chain of that name, which a native table has in small letters.
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

// TraceTable begins the name of the table of a packet trace, which no Set has.
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

// NativeScript prints native tables as a text for "nft -f" that replaces the present tables, as the reference logs it. The
// text removes tables that the Set does not have.
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
