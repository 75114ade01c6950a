package nftables

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/node/nftables/xtables"
)

// Apply applies a Plan in one transaction. It sends no transaction without a change. It returns ErrChanged if the rules
// differ from the View by now; after an error no rule was changed.
func (v *View) Apply(plan Plan) error {
	w := &writer{view: v, batch: v.session.conn.Batch(v.generation), tables: map[tableKey]*table{}}
	for _, p := range plan.Programs {
		if err := w.program(p); err != nil {
			return err
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

// writer turns Programs into messages. It keeps the state of the tables after each operation.
type writer struct {
	view   *View
	batch  *nfnetlink.Batch
	tables map[tableKey]*table // those that a Program changes
	notes  []note              // the object of each message of the batch
	at     tableKey
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

func (w *writer) program(p ruleset.Program) error {
	for _, o := range p.Operations {
		if err := w.operation(p.Family, o); err != nil {
			return fmt.Errorf("writing %s rules: table %s, %q: %w", p.Family, o.Table, o.String(), err)
		}
	}
	return nil
}

func (w *writer) operation(f ruleset.Family, o ruleset.Operation) error {
	w.at = tableKey{f, o.Table}
	if err := w.table(); err != nil {
		return err
	}
	switch o.Verb {
	case ruleset.EmptyChain, ruleset.RemoveChain:
		if ruleset.Builtin(o.Table, o.Chain) {
			return errors.New("a built-in chain is never emptied or removed")
		}
		if o.Verb == ruleset.RemoveChain {
			return w.deleteChain(o.Chain)
		}
		return w.emptyChain(o.Chain)
	case ruleset.Append:
		return w.appendRule(o.Chain, o.Rule)
	case ruleset.Insert:
		return w.insertRule(o.Chain, o.Place, o.Rule)
	case ruleset.Delete:
	}
	return w.deleteRule(o.Chain, o.Rule.String())
}

// table begins to write in the current table, and creates it if it is missing.
func (w *writer) table() error {
	if w.at.family == ruleset.Inet || !w.at.known() {
		return errors.New("iptables has no such table")
	}
	if w.tables[w.at] != nil {
		return nil
	}
	t, there := w.view.tables[w.at]
	if !there {
		w.tables[w.at] = &table{chains: map[string]*chain{}}
		w.add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, note{tableKey: w.at}, func(b *nfnetlink.Buffer) {
			b.String(unix.NFTA_TABLE_NAME, w.at.table)
		})
		return nil
	}
	if t.dormant {
		return errors.New("the table is dormant: packets do not reach its rules")
	}
	copied := &table{chains: map[string]*chain{}}
	for name, c := range t.chains {
		copied.chains[name] = &chain{name: c.name, policy: c.policy, rules: slices.Clone(c.rules)}
	}
	w.tables[w.at] = copied
	return nil
}

func (w *writer) add(kind, flags uint16, n note, fill func(*nfnetlink.Buffer)) {
	w.batch.Add(kind, flags, protocolFamily(n.family), fill)
	w.notes = append(w.notes, n)
}

// emptyChain creates one of our chains, or empties it if it exists.
func (w *writer) emptyChain(name string) error {
	chains := w.tables[w.at].chains
	c, there := chains[name]
	if !there {
		chains[name] = &chain{name: name, policy: ruleset.NoPolicy}
		w.add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, note{tableKey: w.at, chain: name}, func(b *nfnetlink.Buffer) {
			b.String(unix.NFTA_CHAIN_TABLE, w.at.table)
			b.String(unix.NFTA_CHAIN_NAME, name)
		})
		return nil
	}
	if c.compact(); len(c.rules) > 0 {
		c.rules = nil
		w.add(unix.NFT_MSG_DELRULE, 0, note{tableKey: w.at, chain: name}, func(b *nfnetlink.Buffer) {
			b.String(unix.NFTA_RULE_TABLE, w.at.table)
			b.String(unix.NFTA_RULE_CHAIN, c.name)
		})
	}
	return nil
}

// chain returns a chain to write to. A built-in one is made when it is needed.
func (w *writer) chain(name string) (*chain, error) {
	chains := w.tables[w.at].chains
	if c, there := chains[name]; there {
		c.compact()
		return c, nil
	}
	hook, builtin := w.at.base(name)
	if !builtin {
		return nil, fmt.Errorf("there is no chain %q", name)
	}
	for shown, c := range chains {
		if c.name == name {
			return nil, fmt.Errorf("chain %q is not the built-in one, so packets would not reach rules in it: "+
				"it is %s, not %s, hook %d, priority %d", name, shown, hook.Type, hooks[hook.Name], hook.Priority)
		}
	}
	chains[name] = &chain{name: name, policy: policyName(nfnetlink.Accept)}
	w.add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, note{tableKey: w.at, chain: name}, func(m *nfnetlink.Buffer) {
		baseChain(m, w.at.table, name, hook)
	})
	return chains[name], nil
}

// baseChain adds the attributes of a base chain, with policy accept.
func baseChain(m *nfnetlink.Buffer, table, name string, hook ruleset.Hook) {
	m.String(unix.NFTA_CHAIN_TABLE, table)
	m.String(unix.NFTA_CHAIN_NAME, name)
	m.Nested(unix.NFTA_CHAIN_HOOK, func() {
		m.Uint32(unix.NFTA_HOOK_HOOKNUM, hooks[hook.Name])
		m.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(hook.Priority)) //nolint:gosec // two's complement
	})
	m.Uint32(unix.NFTA_CHAIN_POLICY, nfnetlink.Accept)
	m.String(unix.NFTA_CHAIN_TYPE, hook.Type)
}

func (w *writer) appendRule(name string, r ruleset.Rule) error {
	c, err := w.chain(name)
	if err != nil {
		return err
	}
	c.rules = append(c.rules, installedRule{text: r.String()})
	return w.newRule(c, r, unix.NLM_F_APPEND, 0)
}

// insertRule puts a rule at the n-th place, counted from 1.
func (w *writer) insertRule(name string, n int, r ruleset.Rule) error {
	c, err := w.chain(name)
	switch {
	case err != nil:
		return err
	case n < 1 || n > len(c.rules)+1:
		return fmt.Errorf("position %d is out of range: the chain has %d rules", n, len(c.rules))
	case n == len(c.rules)+1:
		return w.appendRule(name, r)
	}
	before := c.rules[n-1].handle
	if before == 0 {
		return errors.New("a rule cannot be inserted before one of the same transaction")
	}
	c.rules = slices.Insert(c.rules, n-1, installedRule{text: r.String()})
	return w.newRule(c, r, 0, before)
}

// newRule adds a rule at the end, or ahead of the one with the handle.
func (w *writer) newRule(c *chain, r ruleset.Rule, flags uint16, before uint64) error {
	var err error
	w.add(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|flags, note{w.at, c.name, r.String()}, func(b *nfnetlink.Buffer) {
		b.String(unix.NFTA_RULE_TABLE, w.at.table)
		b.String(unix.NFTA_RULE_CHAIN, c.name)
		if before != 0 {
			b.Uint64(unix.NFTA_RULE_POSITION, before)
		}
		err = xtables.Encode(b, w.at.family, r)
	})
	return err
}

// deleteRule deletes the first rule with that text.
func (w *writer) deleteRule(name, text string) error {
	c, there := w.tables[w.at].chains[name]
	if !there {
		return fmt.Errorf("there is no chain %q", name)
	}
	handle, found := c.removeFirst(text)
	if !found {
		return errors.New("there is no such rule")
	}
	if handle == 0 {
		return errors.New("a rule of the same transaction cannot be deleted")
	}
	w.add(unix.NFT_MSG_DELRULE, 0, note{w.at, name, text}, func(b *nfnetlink.Buffer) {
		b.String(unix.NFTA_RULE_TABLE, w.at.table)
		b.String(unix.NFTA_RULE_CHAIN, c.name)
		b.Uint64(unix.NFTA_RULE_HANDLE, handle)
	})
	return nil
}

func (w *writer) deleteChain(name string) error {
	c, there := w.tables[w.at].chains[name]
	if !there {
		return fmt.Errorf("there is no chain %q", name)
	}
	delete(w.tables[w.at].chains, name)
	w.add(unix.NFT_MSG_DELCHAIN, 0, note{tableKey: w.at, chain: name}, func(b *nfnetlink.Buffer) {
		b.String(unix.NFTA_CHAIN_TABLE, w.at.table)
		b.String(unix.NFTA_CHAIN_NAME, c.name)
	})
	return nil
}
