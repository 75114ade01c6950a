package nftables

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/expression"
	"github.com/meshcni/istio-cni/internal/node/nftables/native"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/node/nftables/xtables"
)

// Apply carries out a Plan in one transaction. If there is nothing to do, nothing is sent. It is ErrChanged if the rules
// are not as in the View any more, and nothing was done if it fails.
func (v *View) Apply(plan Plan) error {
	w := &writer{view: v, batch: v.session.conn.Batch(v.generation), tables: map[place]*table{}}
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

// writer turns Programs into messages. It follows what the rules are after each of them.
type writer struct {
	view   *View
	batch  *nfnetlink.Batch
	tables map[place]*table // those that a Program mentioned
	notes  []note           // what each message of the batch is about
	at     place
}

// note says what a message is about, for errors.
type note struct {
	place
	chain, rule string
}

// String names what it is about.
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
	for line := range strings.Lines(p.String()) {
		line = strings.TrimSuffix(line, "\n")
		if err := w.line(p.Family, line); err != nil {
			return fmt.Errorf("writing %s rules: table %s, %q: %w", p.Family, w.at.table, line, err)
		}
	}
	return nil
}

// line carries out one line of a Program; ruleset.Reconcile knows no others.
func (w *writer) line(f ruleset.Family, line string) error {
	if name, ok := strings.CutPrefix(line, "*"); ok {
		w.at = place{f, name}
		return w.table()
	}
	if line == "COMMIT" {
		return nil
	}
	if w.tables[w.at] == nil {
		return errors.New("it stands outside of any table")
	}
	if name, ok := strings.CutPrefix(line, ":"); ok {
		name, _, _ = strings.Cut(name, " ")
		return w.freshChain(name)
	}
	verb, rest, _ := strings.Cut(line, " ")
	name, spec, _ := strings.Cut(rest, " ")
	switch verb {
	case "-A":
		return w.appendRule(name, spec)
	case "-I":
		number, inserted, _ := strings.Cut(spec, " ")
		n, err := strconv.Atoi(number)
		if err != nil {
			return fmt.Errorf("reading the place of a rule: %w", err)
		}
		return w.insertRule(name, n, inserted)
	case "-D":
		return w.deleteRule(name, spec)
	case "-X":
		return w.deleteChain(name)
	}
	return fmt.Errorf("%q is no command that is known here", verb)
}

// table begins to write in the current table, which is made if it is not there.
func (w *writer) table() error {
	if _, known := natural[w.at.table]; !known || w.at.family == native.Inet {
		return errors.New("iptables has no such table")
	}
	if w.tables[w.at] != nil {
		return nil
	}
	t, there := w.view.tables[w.at]
	if !there {
		w.tables[w.at] = &table{chains: map[string]*chain{}}
		w.add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, note{place: w.at}, func(b *nfnetlink.Buffer) {
			b.String(unix.NFTA_TABLE_NAME, w.at.table)
		})
		return nil
	}
	if t.dormant {
		return errors.New("somebody made the table dormant: no packet meets the rules in it")
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

// freshChain makes a chain of our own, or empties it if it is there.
func (w *writer) freshChain(name string) error {
	chains := w.tables[w.at].chains
	if ruleset.Builtin(w.at.table, name) {
		return errors.New("a built-in chain is never emptied")
	}
	c, there := chains[name]
	if !there {
		chains[name] = &chain{name: name, policy: ruleset.NoPolicy}
		w.add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, note{place: w.at, chain: name}, func(b *nfnetlink.Buffer) {
			b.String(unix.NFTA_CHAIN_TABLE, w.at.table)
			b.String(unix.NFTA_CHAIN_NAME, name)
		})
		return nil
	}
	if c.compact(); len(c.rules) > 0 {
		c.rules = nil
		w.add(unix.NFT_MSG_DELRULE, 0, note{place: w.at, chain: name}, func(b *nfnetlink.Buffer) {
			b.String(unix.NFTA_RULE_TABLE, w.at.table)
			b.String(unix.NFTA_RULE_CHAIN, c.name)
		})
	}
	return nil
}

// chain gives a chain to write to. A built-in one is made when it is needed.
func (w *writer) chain(name string) (*chain, error) {
	chains := w.tables[w.at].chains
	if c, there := chains[name]; there {
		c.compact()
		return c, nil
	}
	b, builtin := natural[w.at.table][name]
	if !builtin {
		return nil, fmt.Errorf("there is no chain %q", name)
	}
	for shown, c := range chains {
		if c.name == name {
			return nil, fmt.Errorf("somebody made chain %q for something else, so packets would not meet rules in it: "+
				"it is %s, not %s, hook %d, priority %d", name, shown, b.Kind, b.Hook, b.Priority)
		}
	}
	chains[name] = &chain{name: name, policy: policyName(expression.Accept)}
	w.add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, note{place: w.at, chain: name}, func(m *nfnetlink.Buffer) {
		baseChain(m, w.at.table, name, b)
	})
	return chains[name], nil
}

// baseChain adds the attributes of a chain that packets meet, with policy accept.
func baseChain(m *nfnetlink.Buffer, table, name string, b base) {
	m.String(unix.NFTA_CHAIN_TABLE, table)
	m.String(unix.NFTA_CHAIN_NAME, name)
	m.Nested(unix.NFTA_CHAIN_HOOK, func() {
		m.Uint32(unix.NFTA_HOOK_HOOKNUM, b.Hook)
		m.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(b.Priority)) //nolint:gosec // two's complement
	})
	m.Uint32(unix.NFTA_CHAIN_POLICY, expression.Accept)
	m.String(unix.NFTA_CHAIN_TYPE, b.Kind)
}

func (w *writer) appendRule(name, spec string) error {
	c, err := w.chain(name)
	if err != nil {
		return err
	}
	c.rules = append(c.rules, stored{spec: spec})
	return w.newRule(c, spec, unix.NLM_F_APPEND, 0)
}

// insertRule puts a rule at the n-th place, counted from 1.
func (w *writer) insertRule(name string, n int, spec string) error {
	c, err := w.chain(name)
	switch {
	case err != nil:
		return err
	case n < 1 || n > len(c.rules)+1:
		return fmt.Errorf("place %d is none of the chain's %d rules", n, len(c.rules))
	case n == len(c.rules)+1:
		return w.appendRule(name, spec)
	}
	before := c.rules[n-1].handle
	if before == 0 {
		return errors.New("a rule cannot be put ahead of one that the same transaction made")
	}
	c.rules = slices.Insert(c.rules, n-1, stored{spec: spec})
	return w.newRule(c, spec, 0, before)
}

// newRule adds a rule at the end, or ahead of the one with the handle.
func (w *writer) newRule(c *chain, spec string, flags uint16, before uint64) error {
	var err error
	w.add(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|flags, note{w.at, c.name, spec}, func(b *nfnetlink.Buffer) {
		b.String(unix.NFTA_RULE_TABLE, w.at.table)
		b.String(unix.NFTA_RULE_CHAIN, c.name)
		if before != 0 {
			b.Uint64(unix.NFTA_RULE_POSITION, before)
		}
		err = xtables.Encode(b, w.at.family, spec)
	})
	return err
}

// deleteRule takes away the first rule that reads so.
func (w *writer) deleteRule(name, spec string) error {
	c, there := w.tables[w.at].chains[name]
	if !there {
		return fmt.Errorf("there is no chain %q", name)
	}
	handle, found := c.removeFirst(spec)
	if !found {
		return errors.New("there is no such rule")
	}
	if handle == 0 {
		return errors.New("a rule that the same transaction made cannot be taken away")
	}
	w.add(unix.NFT_MSG_DELRULE, 0, note{w.at, name, spec}, func(b *nfnetlink.Buffer) {
		b.String(unix.NFTA_RULE_TABLE, w.at.table)
		b.String(unix.NFTA_RULE_CHAIN, c.name)
		b.Uint64(unix.NFTA_RULE_HANDLE, handle)
	})
	return nil
}

func (w *writer) deleteChain(name string) error {
	c, there := w.tables[w.at].chains[name]
	switch {
	case !there:
		return fmt.Errorf("there is no chain %q", name)
	case ruleset.Builtin(w.at.table, name):
		return errors.New("a built-in chain is never removed")
	}
	delete(w.tables[w.at].chains, name)
	w.add(unix.NFT_MSG_DELCHAIN, 0, note{place: w.at, chain: name}, func(b *nfnetlink.Buffer) {
		b.String(unix.NFTA_CHAIN_TABLE, w.at.table)
		b.String(unix.NFTA_CHAIN_NAME, c.name)
	})
	return nil
}
