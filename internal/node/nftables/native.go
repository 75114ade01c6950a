package nftables

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/native"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Native gives the native tables. A table that somebody put to sleep shows none of its chains under their names, and
// neither does a chain that is not where it should be.
func (v *View) Native() ruleset.Set { return v.Set(native.Inet) }

// native replaces what is not as wanted. Rules of another configuration cannot stay behind: they go with their table.
func (w *writer) native(want ruleset.Set) error {
	have := w.view.Native()
	sets := uint32(0)
	for _, name := range native.Tables() {
		w.at = place{native.Inet, name}
		wanted := want.Table(name)
		_, there := w.view.tables[w.at]
		if there == (len(wanted.Chains) > 0) && native.Same(wanted, have.Table(name)) {
			continue
		}
		if there {
			w.add(unix.NFT_MSG_DELTABLE, 0, note{place: w.at}, func(b *nfnetlink.Buffer) { b.String(unix.NFTA_TABLE_NAME, name) })
		}
		if err := w.nativeTable(wanted, &sets); err != nil {
			return fmt.Errorf("writing table inet %s: %w", name, err)
		}
	}
	return nil
}

// nativeTable makes a table, its chains and then the rules, which may lead to any of these. It numbers the sets.
func (w *writer) nativeTable(want ruleset.Table, sets *uint32) error {
	if len(want.Chains) == 0 {
		return nil
	}
	w.add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, note{place: w.at}, func(b *nfnetlink.Buffer) {
		b.String(unix.NFTA_TABLE_NAME, want.Name)
	})
	for _, c := range want.Chains {
		w.nativeChain(c.Name)
	}
	for _, c := range want.Chains {
		for _, r := range c.Rules {
			*sets++
			if err := w.nativeRule(c.Name, r.Spec, *sets); err != nil {
				return fmt.Errorf("chain %s, rule %q: %w", c.Name, r.Spec, err)
			}
		}
	}
	return nil
}

func (w *writer) nativeChain(name string) {
	w.add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, note{place: w.at, chain: name}, func(b *nfnetlink.Buffer) {
		if at, ok := w.at.base(name); ok {
			baseChain(b, w.at.table, name, at)
			return
		}
		b.String(unix.NFTA_CHAIN_TABLE, w.at.table)
		b.String(unix.NFTA_CHAIN_NAME, name)
	})
}

func (w *writer) nativeRule(chain, spec string, id uint32) error {
	r, err := native.Parse(spec, id)
	if err != nil {
		return err
	}
	about := note{w.at, chain, spec}
	if set, needed := r.Set(); needed {
		w.add(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, about, func(b *nfnetlink.Buffer) { set.Declare(b, w.at.table) })
		w.add(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, about, func(b *nfnetlink.Buffer) { set.Fill(b, w.at.table) })
	}
	w.add(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, about, func(b *nfnetlink.Buffer) {
		b.String(unix.NFTA_RULE_TABLE, w.at.table)
		b.String(unix.NFTA_RULE_CHAIN, chain)
		r.Encode(b)
	})
	return nil
}
