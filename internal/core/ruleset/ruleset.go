// Package ruleset holds rules of iptables and of nf_tables as values: they can be printed, compared and turned into the
// operations that bring a namespace from its present rules to the wanted ones.
//
// It promises that a Set prints exactly what iptables-save prints for it (less the comment lines), and that a rule which
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

// The families of iptables, and that of tables of nf_tables which see both.
const (
	Inet Family = 0
	IPv4 Family = 4
	IPv6 Family = 6
	// Netdev has the tables of the hooks of an interface.
	Netdev Family = 5
)

// String returns "IPv4", "IPv6", "inet" or "netdev".
func (f Family) String() string {
	switch f {
	case Inet:
		return "inet"
	case Netdev:
		return "netdev"
	case IPv4, IPv6:
	}
	return fmt.Sprintf("IPv%d", uint8(f))
}

// Set is the content of the tables of one family, in canonical form: tables by name, in each table the built-in chains
// in hook order, then own chains by name. Tables without rules are absent from a wanted Set, as they are from
// iptables-save when nothing created them.
type Set struct {
	Family Family
	Tables []Table
	// Tool, if set, is the variant of iptables whose tables these are, see [Diff.Tool].
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
	// Hook is that of a base chain which does not follow from its names: in a table of another program, or with another hook or
	// priority than iptables'. It is not part of the text.
	Hook *Hook
	// Handle is the kernel's number of the chain in its table, which it counts up; 0 is not known.
	Handle uint64
}

// NoPolicy replaces the policy of a chain that is not built in.
const NoPolicy = "-"

// builtins are the built-in chains of each table, in the order of the hooks a packet passes, which is the order in
// which iptables-save prints them (include/uapi/linux/netfilter_ipv4/ip_tables.h, valid_hooks of each table).
var builtins = map[string][]string{ //nolint:gochecknoglobals // a constant table
	"filter": {"INPUT", "FORWARD", "OUTPUT"},
	"mangle": {"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"},
	"nat":    {"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"},
	"raw":    {"PREROUTING", "OUTPUT"},

	"security": {"INPUT", "FORWARD", "OUTPUT"},
}

// KnownTable reports whether iptables has a table of that name.
func KnownTable(name string) bool { return builtins[name] != nil }

// Builtin reports whether the chain is one that the kernel makes with its table.
func Builtin(table, chain string) bool { return slices.Contains(builtins[table], chain) }

// Hook is the netfilter hook of a base chain, in the terms of nf_tables.
type Hook struct {
	Type, Name string
	Priority   int32
	// Device names the interfaces of the hooks ingress and egress, with commas between them.
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

// Table returns the table of that name, empty if there is none.
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

// Empty reports whether the Set holds no rule and no chain of its own.
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

// Equal reports whether both print alike. The Whys do not count.
func (s Set) Equal(o Set) bool { return s.Family == o.Family && s.String() == o.String() }

// String prints the Set as iptables-save does, without comment lines and with counters at zero. Tables come by name;
// the kernel tools print them in an order of their own, which Parse puts right.
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

// New makes a Set of tables given in any order. Each gets all its built-in chains, with policy ACCEPT, as the kernel
// makes them with the table.
func New(family Family, tables ...Table) Set {
	s := Set{Family: family, Tables: slices.Clone(tables)}
	for i := range s.Tables {
		s.Tables[i].Chains = slices.Clone(s.Tables[i].Chains)
	}
	return s.canonical()
}

// canonical puts tables and chains into the order of the type's description.
func (s Set) canonical() Set {
	for i := range s.Tables {
		t := &s.Tables[i]
		for _, name := range builtins[t.Name] {
			if _, ok := t.Chain(name); !ok {
				t.Chains = append(t.Chains, Chain{Name: name, Policy: "ACCEPT"})
			}
		}
		slices.SortStableFunc(t.Chains, func(a, b Chain) int {
			return cmp.Or(cmp.Compare(rank(t.Name, a.Name), rank(t.Name, b.Name)), strings.Compare(a.Name, b.Name))
		})
	}
	slices.SortStableFunc(s.Tables, func(a, b Table) int { return strings.Compare(a.Name, b.Name) })
	return s
}

// rank is a built-in chain's place in its table; every other chain comes behind them.
func rank(table, chain string) int {
	if at := slices.Index(builtins[table], chain); at >= 0 {
		return at
	}
	return len(builtins[table])
}
