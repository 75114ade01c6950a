package walk

import (
	"fmt"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Rule is a live or missing rule, compared with the wanted rules.
type Rule struct {
	// Text is the rule as its tool prints it.
	Text string `json:"rule"`
	// Why is the reason of the rule. An unwanted rule has none.
	Why string `json:"why,omitempty"`
	// Op is absent for a wanted rule that is there. An extra rule is in a chain of the mesh.
	Op string `json:"op,omitempty" jsonschema:"enum=missing,enum=extra,enum=foreign"`
}

// Chain is a chain with its rules; missing rules come last.
type Chain struct {
	// Family is the address family, inet for both.
	Family string `json:"family" jsonschema:"enum=IPv4,enum=IPv6,enum=inet"`
	// Table is the chain's table.
	Table string `json:"table"`
	// Chain is the chain's name.
	Chain string `json:"chain"`
	// Hook is the hook of a base chain. Any other chain has none.
	Hook string `json:"hook,omitempty"`
	// Rules are the chain's rules, in order.
	Rules []Rule `json:"rules"`
	// Omitted is the number of further rules.
	Omitted int `json:"omitted,omitempty"`
}

// maxListed bounds the listed rules of a chain: a pod can have very many.
const maxListed = 500

// Chains lists the live rules with their reasons, and the missing rules.
func (n Namespace) Chains() (all []Chain) {
	type located struct {
		ruleset.Family
		place
	}
	wanted, live := n.Wanted.rules(), map[located]bool{}
	eachChain(n.Live, func(f ruleset.Family, table string, c ruleset.Chain) {
		for _, r := range c.Rules {
			live[located{f, place{table, c.Name, r.String()}}] = true
		}
		if chain := n.chain(f, table, c, wanted); len(chain.Rules) > 0 {
			all = append(all, chain)
		}
	})
	if n.Wanted == nil {
		return all
	}
	eachChain(n.Wanted.Sets(), func(f ruleset.Family, table string, c ruleset.Chain) {
		var missing []Rule
		for _, r := range c.Rules {
			if !live[located{f, place{table, c.Name, r.String()}}] {
				missing = append(missing, Rule{Text: r.String(), Why: r.Why, Op: "missing"})
			}
		}
		at := slices.IndexFunc(all, func(o Chain) bool { return o.Family == f.String() && o.Table == table && o.Chain == c.Name })
		switch {
		case at >= 0:
			all[at].Rules = append(all[at].Rules, missing...)
		case len(missing) > 0:
			all = append(all, Chain{Family: f.String(), Table: table, Chain: c.Name, Hook: n.hookOf(f, table, c.Name), Rules: missing})
		}
	})
	return all
}

func (n Namespace) chain(f ruleset.Family, table string, c ruleset.Chain, wanted map[place]ruleset.Rule) Chain {
	out := Chain{Family: f.String(), Table: printable.Text(table, maxText), Chain: printable.Text(c.Name, maxText), Hook: n.hookOf(f, table, c.Name)}
	if c.Hook != nil {
		out.Hook = fmt.Sprintf("%s, priority %d", c.Hook.Name, c.Hook.Priority)
	}
	for _, r := range c.Rules {
		want, isWanted := wanted[place{table, c.Name, r.String()}]
		rule := Rule{Text: printable.Text(r.String(), maxText), Why: want.Why}
		switch {
		case isWanted:
		case strings.HasPrefix(strings.ToUpper(c.Name), n.Owner.ChainPrefix):
			rule.Op = "extra"
		default:
			rule.Op = "foreign"
		}
		if len(out.Rules) == maxListed {
			out.Omitted++
			continue
		}
		out.Rules = append(out.Rules, rule)
	}
	if c.Policy == string(ruleset.Drop) {
		out.Rules = append(out.Rules, Rule{Text: "policy DROP", Op: "foreign"})
	}
	return out
}

// eachChain calls do with all chains of some sets.
func eachChain(sets []ruleset.Set, do func(f ruleset.Family, table string, c ruleset.Chain)) {
	for _, s := range sets {
		for _, t := range s.Tables {
			for _, c := range t.Chains {
				do(s.Family, t.Name, c)
			}
		}
	}
}

// hookOf returns the name of a base chain's hook, "" for any other chain.
func (n Namespace) hookOf(f ruleset.Family, table, chain string) string {
	hook, _ := n.Owner.HookOf(f, table, chain)
	return hook.Name
}
