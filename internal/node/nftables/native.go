package nftables

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/native"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Native returns the native tables. A rule with the same expressions as a wanted rule gets the text of the wanted rule; any
// other that is understood has the text of nft ahead of its fingerprint, and the rest the fingerprint alone. The chains of a dormant table, and a chain on another hook than its own, appear under other names.
func (v *View) Native(want ruleset.Set) ruleset.Set {
	have := v.Set(ruleset.Inet)
	if len(have.Tables) == 0 {
		return have
	}
	texts := map[string]string{}
	eachRule(want, func(r *ruleset.Rule) { texts[native.WantedFingerprint(*r)] = r.String() })
	eachRule(have, func(r *ruleset.Rule) {
		text, known := texts[r.String()]
		if !known && r.Target != nil {
			text, known = readable(*r), true
		}
		if known {
			matches, target := r.Matches, r.Target
			*r = ruleset.Opaque(text)
			r.Matches, r.Target = matches, target
		}
	})
	return have
}

// readable is the text of a rule that is understood: of nft, if a rule with that text has the same expressions.
func readable(r ruleset.Rule) string {
	text := ruleset.NFT("", r.Target, r.Matches...)
	if native.WantedFingerprint(text) == r.String() {
		return text.String()
	}
	return strings.Replace(text.String(), " counter ", " ", 1) + " " + r.String()
}

func eachRule(s ruleset.Set, do func(*ruleset.Rule)) {
	for _, t := range s.Tables {
		for _, c := range t.Chains {
			for i := range c.Rules {
				do(&c.Rules[i])
			}
		}
	}
}

// native replaces each table that differs from the wanted one. Rules of another configuration are deleted with the table.
func (w *writer) native(want ruleset.Set) error {
	have := w.view.Native(want)
	sets := uint32(0)
	for _, name := range redirect.NativeTables() {
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

// nativeTable makes a table, its chains and then the rules, which may lead to any of these. It numbers the sets.
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
