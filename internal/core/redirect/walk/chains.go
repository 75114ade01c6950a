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
func (n Namespace) Chains() []Chain {
	wanted := n.Wanted.rules()
	left := map[ruleset.Family]map[place]bool{}
	if n.Wanted != nil {
		for _, s := range n.Wanted.Sets() {
			left[s.Family] = map[place]bool{}
			each([]ruleset.Set{s}, func(at place, _ ruleset.Rule) { left[s.Family][at] = true })
		}
	}
	var all []Chain
	eachChain(n.Live, func(f ruleset.Family, table string, c ruleset.Chain) {
		if chain := n.chain(f, table, c, wanted, left[f]); len(chain.Rules) > 0 {
			all = append(all, chain)
		}
	})
	for _, missing := range n.missing(left) {
		same := func(c Chain) bool {
			return c.Family == missing.Family && c.Table == missing.Table && c.Chain == missing.Chain
		}
		if i := slices.IndexFunc(all, same); i < 0 {
			all = append(all, missing)
		} else {
			all[i].Rules = append(all[i].Rules, missing.Rules...)
		}
	}
	return all
}

func (n Namespace) chain(f ruleset.Family, table string, c ruleset.Chain, wanted map[place]ruleset.Rule, left map[place]bool) Chain {
	out := Chain{Family: f.String(), Table: printable.Text(table, maxText), Chain: printable.Text(c.Name, maxText), Hook: n.hookOf(f, table, c.Name)}
	if c.Hook != nil {
		out.Hook = fmt.Sprintf("%s, priority %d", c.Hook.Name, c.Hook.Priority)
	}
	for _, r := range c.Rules {
		at := place{table, c.Name, r.String()}
		want, isWanted := wanted[at]
		delete(left, at)
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

// missing lists the wanted rules that are not live.
func (n Namespace) missing(left map[ruleset.Family]map[place]bool) []Chain {
	if n.Wanted == nil {
		return nil
	}
	var all []Chain
	eachChain(n.Wanted.Sets(), func(f ruleset.Family, table string, c ruleset.Chain) {
		out := Chain{Family: f.String(), Table: table, Chain: c.Name, Hook: n.hookOf(f, table, c.Name)}
		for _, r := range c.Rules {
			if left[f][place{table, c.Name, r.String()}] {
				out.Rules = append(out.Rules, Rule{Text: r.String(), Why: r.Why, Op: "missing"})
			}
		}
		if len(out.Rules) > 0 {
			all = append(all, out)
		}
	})
	return all
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
