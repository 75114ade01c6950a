package nftables

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/native"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// native replaces each table that differs from the wanted one. This deletes the rules of another configuration with their table.
func (w *writer) native(want ruleset.Set) error {
	have := w.view.Set(ruleset.Inet)
	sets := uint32(0)
	for _, name := range w.view.owner.Native {
		w.at = tableKey{ruleset.Inet, name}
		wanted := want.Table(name)
		_, there := w.view.tables[w.at]
		if there == (len(wanted.Chains) > 0) && sameChains(wanted, have.Table(name)) {
			continue
		}
		if there {
			w.add(unix.NFT_MSG_DELTABLE, 0, note{tableKey: w.at}, func(b *nfnetlink.Buffer) { b.String(unix.NFTA_TABLE_NAME, name) })
		}
		if err := w.nativeTable(wanted, &sets); err != nil {
			return fmt.Errorf("writing table inet %s: %w", name, err)
		}
	}
	return nil
}

// sameChains reports whether both tables have the same chains with the same rules.
func sameChains(a, b ruleset.Table) bool {
	return len(a.Chains) == len(b.Chains) && !slices.ContainsFunc(a.Chains, func(c ruleset.Chain) bool {
		other, there := b.Chain(c.Name)
		return !there || !slices.EqualFunc(c.Rules, other.Rules, ruleset.Rule.Equal)
	})
}

// nativeTable adds a table, its chains and then the rules, which may jump to any of the chains. It numbers the sets.
func (w *writer) nativeTable(want ruleset.Table, sets *uint32) error {
	if len(want.Chains) == 0 {
		return nil
	}
	w.newTable()
	for _, c := range want.Chains {
		w.newChain(c.Name)
	}
	for _, c := range want.Chains {
		for _, r := range c.Rules {
			*sets++
			if err := w.nativeRule(c.Name, r, *sets); err != nil {
				return fmt.Errorf("chain %s, rule %q: %w", c.Name, r, err)
			}
		}
	}
	return nil
}

func (w *writer) nativeRule(name string, r ruleset.Rule, id uint32) (err error) {
	about := note{w.at, name, r.String()}
	if set := native.SetOf(r); set != nil {
		w.add(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, about, func(b *nfnetlink.Buffer) { set.Declare(b, w.at.table, id) })
		w.add(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, about, func(b *nfnetlink.Buffer) { set.Fill(b, w.at.table, id) })
	}
	c := &chain{name: name, shown: name}
	w.rule(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, c, r.String(), func(b *nfnetlink.Buffer) { err = native.Encode(b, r, id) })
	return err
}
