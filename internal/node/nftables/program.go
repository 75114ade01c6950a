package nftables

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/native"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/node/nftables/xtables"
)

// Apply applies a Plan in one transaction, at most once per View. It sends no transaction without a change. It returns
// ErrChanged if the rules differ from the View; after an error no rule was changed.
func (v *View) Apply(plan Plan) error {
	w := &writer{view: v, batch: v.session.conn.Batch(v.generation)}
	for _, p := range plan.Programs {
		for _, o := range p.Operations {
			if err := w.operation(p.Family, o); err != nil {
				return fmt.Errorf("writing %s rules: table %s, %q: %w", p.Family, o.Table, o.String(), err)
			}
		}
	}
	if plan.Native != nil {
		if err := w.native(*plan.Native); err != nil {
			return err
		}
	}
	err := w.batch.Commit()
	var refused *nfnetlink.Refused
	if errors.As(err, &refused) && !errors.Is(err, ErrChanged) {
		return w.explain(refused)
	}
	if err != nil {
		return fmt.Errorf("writing rules: %w", err)
	}
	return nil
}

// writer turns Programs into messages. It adds new tables and chains to the View, and marks removed rules.
type writer struct {
	view  *View
	batch *nfnetlink.Batch
	notes []note // the object of each message of the batch
	at    tableKey
}

// note names the object of a message, for errors.
type note struct {
	tableKey
	chain, rule string
}

// String names the object.
func (n note) String() string {
	out := fmt.Sprintf("%s, table %s", n.family, n.table)
	if n.chain != "" {
		out += ", chain " + n.chain
	}
	if n.rule != "" {
		out += fmt.Sprintf(", rule %q", n.rule)
	}
	return out
}

// operation relies on the promises of Reconcile: that the chains of a Program are in the View, that it removes rules of the View, and
// that it inserts rules only behind our own rules.
func (w *writer) operation(f ruleset.Family, o ruleset.Operation) error {
	w.at = tableKey{f, o.Table}
	t, err := w.table()
	if err != nil {
		return err
	}
	c, err := w.chain(t, o)
	if err != nil {
		return err
	}
	switch o.Verb {
	case ruleset.EmptyChain:
		if len(c.rules) > 0 {
			w.rule(unix.NFT_MSG_DELRULE, 0, c, "", func(*nfnetlink.Buffer) {})
		}
	case ruleset.RemoveChain:
		w.add(unix.NFT_MSG_DELCHAIN, 0, note{tableKey: w.at, chain: o.Chain}, func(b *nfnetlink.Buffer) {
			b.Chain(w.at.table, c.name)
		})
	case ruleset.Append:
		return w.newRule(c, o.Rule, 0)
	case ruleset.Insert:
		return w.newRule(c, o.Rule, c.first())
	case ruleset.Delete:
		if c.removed == nil {
			c.removed = map[uint64]bool{}
		}
		c.removed[o.Rule.Handle] = true
		w.rule(unix.NFT_MSG_DELRULE, 0, c, o.Rule.String(), func(b *nfnetlink.Buffer) { b.Uint64(unix.NFTA_RULE_HANDLE, o.Rule.Handle) })
	}
	return nil
}

// table returns the current table, and creates it if it is missing.
func (w *writer) table() (*table, error) {
	t, there := w.view.tables[w.at]
	switch {
	case !there:
		t = &table{chains: map[string]*chain{}, byName: map[string]*chain{}}
		w.view.tables[w.at] = t
		w.newTable()
	case t.dormant:
		return nil, errors.New("the table is dormant: packets do not reach its rules")
	}
	return t, nil
}

// chain returns the chain of an operation, and creates a missing one.
func (w *writer) chain(t *table, o ruleset.Operation) (*chain, error) {
	if c, there := t.chains[o.Chain]; there {
		return c, nil
	}
	hook, builtin := w.view.base(w.at, o.Chain)
	if !builtin && o.Verb != ruleset.EmptyChain {
		return nil, fmt.Errorf("there is no chain %q", o.Chain)
	}
	if other, taken := t.byName[o.Chain]; taken {
		return nil, fmt.Errorf("chain %q is not the built-in one, so packets would not reach rules in it: "+
			"it is %s, not %s, hook %d, priority %d", o.Chain, other.shown, hook.Type, hooks[hook.Name], hook.Priority)
	}
	c := &chain{name: o.Chain, shown: o.Chain}
	t.chains[o.Chain] = c
	w.newChain(o.Chain)
	return c, nil
}

func (w *writer) add(kind, flags uint16, n note, fill func(*nfnetlink.Buffer)) {
	w.batch.Add(kind, flags, protocolFamily(n.family), fill)
	w.notes = append(w.notes, n)
}

func (w *writer) newTable() {
	w.add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, note{tableKey: w.at}, func(b *nfnetlink.Buffer) {
		b.String(unix.NFTA_TABLE_NAME, w.at.table)
	})
}

// newChain adds a chain; a base chain gets its hook and the policy accept.
func (w *writer) newChain(name string) {
	w.add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, note{tableKey: w.at, chain: name}, func(b *nfnetlink.Buffer) {
		b.Chain(w.at.table, name)
		if hook, base := w.view.base(w.at, name); base {
			b.Base(nfnetlink.Hook{Number: hooks[hook.Name], Priority: hook.Priority, Type: hook.Type})
		}
	})
}

// rule adds a message about a rule, or about all rules of the chain.
func (w *writer) rule(kind, flags uint16, c *chain, text string, fill func(*nfnetlink.Buffer)) {
	w.add(kind, flags, note{w.at, c.shown, text}, func(b *nfnetlink.Buffer) {
		b.In(w.at.table, c.name)
		fill(b)
	})
}

// newRule adds a rule before the one with the handle; 0 means the end of the chain.
func (w *writer) newRule(c *chain, r ruleset.Rule, before uint64) error {
	flags := uint16(unix.NLM_F_CREATE)
	if before == 0 {
		flags |= unix.NLM_F_APPEND
	}
	var err error
	w.rule(unix.NFT_MSG_NEWRULE, flags, c, r.String(), func(b *nfnetlink.Buffer) {
		if before != 0 {
			b.Uint64(unix.NFTA_RULE_POSITION, before)
		}
		err = xtables.Encode(b, w.at.family, r)
	})
	return err
}

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
