package nftables

import "github.com/meshcni/istio-cni/internal/core/ruleset"

// Handle is the kernel's number of a rule, in its table.
type Handle struct {
	Family ruleset.Family
	Table  string
	Number uint64
}

// Place is a rule in a Set of a View: Number counts the rules of the chain from 1.
type Place struct {
	Chain  string
	Number int
}

// Places returns the rules of the View by the kernel's numbers.
func (v *View) Places() map[Handle]Place {
	all := map[Handle]Place{}
	for at, t := range v.tables {
		for shown, c := range t.chains {
			for i, r := range c.rules {
				all[Handle{at.family, at.table, r.handle}] = Place{shown, i + 1}
			}
		}
	}
	return all
}
