// Package ruleset holds rules of iptables and of nf_tables as values: they can be printed, compared and turned into the
// operations that bring a namespace from its present rules to the wanted ones.
//
// It promises that a Set prints exactly as iptables-save prints it (without comment lines), and that a rule that
// was read keeps its text byte for byte. It never touches the system and has no Istio-specific rules: package redirect
// decides which rules are wanted.
//
// Start at Rule and Set; Compare and Reconcile use the rest.
package ruleset

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Family is an IP family. Its values are the family's version number.
type Family uint8

// The families of iptables, and the nf_tables family of tables that see both.
const (
	Inet Family = 0
	IPv4 Family = 4
	IPv6 Family = 6
	// Netdev is the family of tables with hooks of an interface.
	Netdev Family = 5
)

// String returns "IPv4", "IPv6", "inet" or "netdev".
func (f Family) String() string {
	return map[Family]string{Inet: "inet", IPv4: "IPv4", IPv6: "IPv6", Netdev: "netdev"}[f]
}

// Set is the content of the tables of one family, in canonical form: tables by name, in each table the built-in chains
// in hook order, then user-defined chains by name. Tables without rules are absent from a wanted Set, and from
// iptables-save if nothing created them.
type Set struct {
	Family Family
	Tables []Table
	// Tool, if set, is the variant of iptables that has these tables, see [Diff.Tool].
	Tool string
}

// Table is one table with all its chains.
type Table struct {
	Name   string
	Chains []Chain
}

// Chain is a chain and its rules in the order of evaluation.
type Chain struct {
	Name string
	// Policy is ACCEPT or DROP for a built-in chain and "-" for any other.
	Policy string
	Rules  []Rule
	// Hook is set for a base chain whose hook does not follow from its name: in another program's table, or with a hook or
	// priority that differs from iptables'. It is not part of the text.
	Hook *Hook
	// Handle is the kernel's number of the chain; it increases within a table; 0 is unknown.
	Handle uint64
}

// NoPolicy replaces the policy of a user-defined chain.
const NoPolicy = "-"

// builtins are the built-in chains of each table, in the order of a packet's hooks. iptables-save prints this order
// (include/uapi/linux/netfilter_ipv4/ip_tables.h, valid_hooks of each table).
var builtins = map[string][]string{ //nolint:gochecknoglobals // a constant table
	"filter": {"INPUT", "FORWARD", "OUTPUT"},
	"mangle": {"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"},
	"nat":    {"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"},
	"raw":    {"PREROUTING", "OUTPUT"},

	"security": {"INPUT", "FORWARD", "OUTPUT"},
}

// KnownTable reports whether iptables has a table of that name.
func KnownTable(name string) bool { return builtins[name] != nil }

// Builtin reports whether the kernel makes the chain with its table.
func Builtin(table, chain string) bool { return slices.Contains(builtins[table], chain) }

// Hook is the netfilter hook of a base chain, in the terms of nf_tables.
type Hook struct {
	Type, Name string
	Priority   int32
	// Device names the interfaces of the hooks ingress and egress, separated by commas.
	Device string
}

// priorities of the hooks of a table (NF_IP_PRI_… of include/uapi/linux/netfilter_ipv4.h).
var priorities = map[string]int32{ //nolint:gochecknoglobals // a constant table
	"raw": -300, "mangle": -150, "nat": -100, "filter": 0, "security": 50,
}

// HookOf returns the hook of a built-in chain, as iptables-nft makes it.
func HookOf(table, chain string) (Hook, bool) {
	if !Builtin(table, chain) {
		return Hook{}, false
	}
	h := Hook{Type: "filter", Name: strings.ToLower(chain), Priority: priorities[table]}
	switch {
	case table == "nat" && (chain == "INPUT" || chain == "POSTROUTING"):
		h.Type, h.Priority = "nat", 100
	case table == "nat":
		h.Type = "nat"
	case table == "mangle" && chain == "OUTPUT":
		h.Type = "route"
	}
	return h, true
}

// Table returns the table of that name, empty if the Set has no such table.
func (s Set) Table(name string) Table {
	for _, t := range s.Tables {
		if t.Name == name {
			return t
		}
	}
	return Table{Name: name}
}

// Chain returns the chain of that name and whether it exists.
func (t Table) Chain(name string) (Chain, bool) {
	for _, c := range t.Chains {
		if c.Name == name {
			return c, true
		}
	}
	return Chain{Name: name, Policy: NoPolicy}, false
}

// Empty reports whether the Set has no rules and no user-defined chains.
func (s Set) Empty() bool {
	for _, t := range s.Tables {
		for _, c := range t.Chains {
			if len(c.Rules) > 0 || c.Policy == NoPolicy {
				return false
			}
		}
	}
	return true
}

// Equal reports whether both print alike, whatever their reasons.
func (s Set) Equal(o Set) bool { return s.Family == o.Family && s.String() == o.String() }

// String prints the Set as iptables-save does, without comment lines and with counters at zero. Tables are sorted by
// name; Parse restores this order from the tools' own order.
func (s Set) String() string {
	var b strings.Builder
	for _, t := range s.Tables {
		t.print(&b)
	}
	return b.String()
}

func (t Table) print(b *strings.Builder) {
	fmt.Fprintf(b, "*%s\n", t.Name)
	for _, c := range t.Chains {
		fmt.Fprintf(b, ":%s %s [0:0]\n", c.Name, c.Policy)
	}
	for _, c := range t.Chains {
		for _, r := range c.Rules {
			fmt.Fprintln(b, r.appendTo(c.Name))
		}
	}
	b.WriteString("COMMIT\n")
}

// New makes a Set of tables in any order, which it takes over. Each table gets all its built-in chains, with policy ACCEPT, like the
// tables that the kernel makes.
func New(family Family, tables ...Table) Set {
	for i := range tables {
		t := &tables[i]
		for _, name := range builtins[t.Name] {
			if _, ok := t.Chain(name); !ok {
				t.Chains = append(t.Chains, Chain{Name: name, Policy: "ACCEPT"})
			}
		}
		slices.SortStableFunc(t.Chains, func(a, b Chain) int {
			return cmp.Or(cmp.Compare(rank(t.Name, a.Name), rank(t.Name, b.Name)), strings.Compare(a.Name, b.Name))
		})
	}
	slices.SortStableFunc(tables, func(a, b Table) int { return strings.Compare(a.Name, b.Name) })
	return Set{Family: family, Tables: tables}
}

// rank returns a built-in chain's position in its table; all other chains follow.
func rank(table, chain string) int {
	if at := slices.Index(builtins[table], chain); at >= 0 {
		return at
	}
	return len(builtins[table])
}
