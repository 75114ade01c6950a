package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/decode"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/node/route"
)

// View holds the rules of a namespace at one moment.
type View struct {
	session    *Session
	owner      redirect.Owner
	generation uint32
	tables     tables
	// others are the tables of other programs that IP packets traverse. Read does not read their content.
	others []tableKey
}

// tableKey identifies a table.
type tableKey struct {
	family ruleset.Family
	table  string
}

// tables holds tables by their keys.
type tables map[tableKey]*table

// names returns the names of a family's tables.
func (t tables) names(f ruleset.Family) (names []string) {
	for at := range t {
		if at.family == f {
			names = append(names, at.table)
		}
	}
	return names
}

// table is an iptables table or a native one. Its chains are stored under their names in a Set.
type table struct {
	dormant bool
	chains  map[string]*chain
	byName  map[string]*chain // by the kernel's name, which the messages of rules have
	reader  decode.Table
}

func newTable(at tableKey, dormant, iptables bool) *table {
	return &table{
		dormant: dormant, chains: map[string]*chain{}, byName: map[string]*chain{},
		reader: decode.Table{Family: at.family, IPTables: iptables, Sets: map[string]*decode.Set{}, Links: route.LinkName, Expanded: new(int)},
	}
}

// known reports whether a table is one that Read reads.
func (v *View) known(k tableKey) bool { return v.owner.KnownTable(k.family, k.table) }

// base returns the hook of a base chain.
func (v *View) base(k tableKey, chain string) (ruleset.Hook, bool) {
	return v.owner.HookOf(k.family, k.table, chain)
}

// hooks maps names to the kernel's numbers.
var hooks = map[string]uint32{ //nolint:gochecknoglobals // a constant table
	"prerouting": unix.NF_INET_PRE_ROUTING, "input": unix.NF_INET_LOCAL_IN, "forward": unix.NF_INET_FORWARD,
	"output": unix.NF_INET_LOCAL_OUT, "postrouting": unix.NF_INET_POST_ROUTING,
}

type chain struct {
	name   string // the kernel's name
	shown  string // the name in a Set
	handle uint64
	// hook is the hook of a base chain if it does not follow from the name.
	hook   *ruleset.Hook
	policy string
	rules  []ruleset.Rule
	// removed has the handles of the rules that a Program removes.
	removed map[uint64]bool
}

// first returns the handle of the first remaining rule, 0 if there are no rules.
func (c *chain) first() uint64 {
	for _, r := range c.rules {
		if !c.removed[r.Handle] {
			return r.Handle
		}
	}
	return 0
}

// Set returns the rules of one family. A chain that has the name of a built-in chain but another hook or type, or is in
// a dormant table, gets a name that says so: packets would not reach our rules there.
func (v *View) Set(f ruleset.Family) ruleset.Set {
	return ruleset.New(f, v.tables.rules(f)...)
}

// rules returns the rules of a family.
func (t tables) rules(f ruleset.Family) (all []ruleset.Table) {
	for at, one := range t {
		if at.family == f {
			all = append(all, one.rules(at.table))
		}
	}
	return all
}

// rules returns the rules of a table.
func (t *table) rules(name string) ruleset.Table {
	out := ruleset.Table{Name: name}
	for _, shown := range slices.Sorted(maps.Keys(t.chains)) {
		c := t.chains[shown]
		out.Chains = append(out.Chains, ruleset.Chain{
			Name: shown, Policy: c.policy, Rules: slices.Clone(c.rules), Hook: c.hook, Handle: c.handle,
		})
	}
	return out
}

// Read returns a consistent View of the namespace: iptables' tables and the owner's native ones. It returns ErrChanged if the rules
// changed meanwhile. After ErrUninspectable, and when the context ended, the Session can only be closed. In a namespace without
// tables Read sends one request besides the one for the generation.
func (s *Session) Read(ctx context.Context, owner redirect.Owner) (*View, error) {
	s.conn.Budget = budget
	generation, err := s.conn.Generation()
	if err != nil {
		return nil, unsupported(err)
	}
	v := &View{session: s, owner: owner, generation: generation, tables: tables{}}
	others, err := v.readTables(ctx)
	if err != nil || len(v.tables) == 0 {
		return v, err
	}
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6, ruleset.Inet} { // of iptables, and of the native tables
		if err = v.readFamily(ctx, f, v.tables, others[f]); err != nil {
			return nil, err
		}
	}
	now, err := s.conn.Generation()
	if err == nil && now != generation {
		err = ErrChanged
	}
	return v, err
}

// dump lists objects. The error for too many names the bound.
func (s *Session) dump(ctx context.Context, kind uint16, family uint8, fill func(*nfnetlink.Buffer), each func(nfnetlink.Message) error) error {
	err := s.conn.Dump(ctx, kind, family, fill, each)
	if errors.Is(err, nfnetlink.ErrUninspectable) {
		err = fmt.Errorf("%w: it holds more than %d tables, chains, rules and sets, or more than %d MiB of them", err, maxObjects, maxBytes>>20)
	}
	return err
}

// readTables records the known tables, and reports the families that have other tables.
func (v *View) readTables(ctx context.Context) (others map[ruleset.Family]bool, err error) {
	others = map[ruleset.Family]bool{}
	err = v.session.dump(ctx, unix.NFT_MSG_GETTABLE, unix.AF_UNSPEC, nil, func(m nfnetlink.Message) error {
		flags, _ := m.Attributes.Get(unix.NFTA_TABLE_FLAGS).Uint32()
		f, live := liveFamilies[m.Family]
		at, dormant := tableKey{f, m.Attributes.Get(unix.NFTA_TABLE_NAME).Text()}, flags&unix.NFT_TABLE_F_DORMANT != 0
		switch {
		case !live:
		case v.known(at):
			v.tables[at] = newTable(at, dormant, f != ruleset.Inet)
		default:
			if others[f] = true; !dormant {
				v.others = append(v.others, at)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("listing nf_tables tables: %w", err)
	}
	return others, nil
}

// readFamily reads the chains and rules of tables. Other programs' tables may be huge: beside them it lists the rules table by table.
func (v *View) readFamily(ctx context.Context, f ruleset.Family, all tables, others bool) error {
	names := all.names(f)
	if len(names) == 0 {
		return nil
	}
	if err := v.readChains(ctx, f, all); err != nil {
		return fmt.Errorf("listing chains of %s: %w", f, err)
	}
	if !all[tableKey{f, names[0]}].reader.IPTables { // iptables' rules look up no sets, see lookedUp
		if err := v.session.readSets(ctx, f, all); err != nil {
			return err
		}
	}
	if !others {
		names = []string{""}
	}
	return v.session.readRules(ctx, f, all, names...)
}

// readRules reads the rules of tables by their names; "" means all tables.
func (s *Session) readRules(ctx context.Context, f ruleset.Family, all tables, names ...string) error {
	for _, name := range names {
		narrow := func(b *nfnetlink.Buffer) {
			if name != "" {
				b.String(unix.NFTA_RULE_TABLE, name)
			}
		}
		err := s.dump(ctx, unix.NFT_MSG_GETRULE, protocolFamily(f), narrow, func(m nfnetlink.Message) error {
			of := m.Attributes.Get(unix.NFTA_RULE_TABLE).Text()
			if t := all[tableKey{f, of}]; t != nil && (name == "" || name == of) {
				t.add(m.Attributes)
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("listing rules of %s: %w", f, err)
		}
	}
	return nil
}

// readChains reads the chains of tables.
func (v *View) readChains(ctx context.Context, f ruleset.Family, all tables) error {
	return v.session.dump(ctx, unix.NFT_MSG_GETCHAIN, protocolFamily(f), nil, func(m nfnetlink.Message) error {
		at := tableKey{f, m.Attributes.Get(unix.NFTA_CHAIN_TABLE).Text()}
		if t := all[at]; t != nil {
			c := v.readChain(at, t.dormant, m.Attributes)
			t.chains[c.shown], t.byName[c.name] = c, c
		}
		v.session.conn.Budget.Bytes -= (chainWeight - 1) * len(m.Attributes)
		return nil
	})
}

// readChain reads a chain of a table.
func (v *View) readChain(at tableKey, dormant bool, attributes nfnetlink.Attributes) *chain {
	c := &chain{name: attributes.Get(unix.NFTA_CHAIN_NAME).Text(), policy: ruleset.NoPolicy}
	c.shown = decode.Name(c.name)
	c.handle, _ = attributes.Get(unix.NFTA_CHAIN_HANDLE).Uint64()
	hook, drops := readHook(protocolFamily(at.family), attributes)
	want, builtin := v.base(at, c.name)
	known, hooked := v.known(at), hook.Name != ""
	native := known && at.family == ruleset.Inet
	asWanted := !hooked // other chains are foreign
	if builtin = builtin && known; builtin {
		asWanted = hook == want && !dormant
	}
	if native {
		asWanted = asWanted && !drops && !dormant
	}
	if builtin && asWanted && !native {
		c.policy = policyName(drops)
	}
	if hooked && !asWanted && !dormant {
		c.hook, c.policy = &hook, policyName(drops)
	}
	if !asWanted && (builtin || native) {
		c.shown += fmt.Sprintf("(%s,hook:%s,priority:%d)", hook.Type, hook.Name, hook.Priority)
	}
	return c
}

// readHook reads the hook of a chain. It has no name if the chain is not a base chain.
func readHook(family uint8, attributes nfnetlink.Attributes) (hook ruleset.Hook, drops bool) {
	h, drops, base := nfnetlink.ReadHook(attributes)
	if !base {
		return hook, false
	}
	hook = ruleset.Hook{Type: h.Type, Priority: h.Priority, Device: devices(attributes.Get(unix.NFTA_CHAIN_HOOK).Value)}
	for name, n := range hooks {
		if n == h.Number {
			hook.Name = name
		}
	}
	const inetIngress = 5 // NF_INET_INGRESS, linux/netfilter.h
	switch {
	case h.Number == inetIngress, family == unix.NFPROTO_NETDEV && h.Number == 0:
		hook.Name = "ingress"
	case family == unix.NFPROTO_NETDEV:
		hook.Name = "egress"
	}
	return hook, drops
}

// devices returns the interfaces of a hook, with commas between them.
func devices(hook nfnetlink.Attributes) string {
	const list = 4 // NFTA_HOOK_DEVS
	var names []string
	if name := hook.Get(unix.NFTA_HOOK_DEV).Text(); name != "" {
		names = append(names, name)
	}
	for a := range nfnetlink.Attributes(hook.Get(list).Value).All() {
		if name := a.Text(); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return strings.Join(names, ",")
}

func policyName(drops bool) string {
	if drops {
		return "DROP"
	}
	return "ACCEPT"
}

// add decodes a rule.
func (t *table) add(attributes nfnetlink.Attributes) {
	c := t.byName[attributes.Get(unix.NFTA_RULE_CHAIN).Text()]
	if c == nil {
		return
	}
	handle, _ := attributes.Get(unix.NFTA_RULE_HANDLE).Uint64()
	r := t.reader.Rule(handle, attributes.Get(unix.NFTA_RULE_EXPRESSIONS).Value, attributes.Get(unix.NFTA_RULE_USERDATA).Value)
	r.Handle = handle
	c.rules = append(c.rules, r)
}

// readSets reads the sets of the tables of a family.
func (s *Session) readSets(ctx context.Context, f ruleset.Family, all tables) error {
	type named struct{ table, set string }
	family, sets := protocolFamily(f), map[named]*decode.Set{}
	err := s.dump(ctx, unix.NFT_MSG_GETSET, family, nil, func(m nfnetlink.Message) error {
		at := named{m.Attributes.Get(unix.NFTA_SET_TABLE).Text(), m.Attributes.Get(unix.NFTA_SET_NAME).Text()}
		if t := all[tableKey{f, at.table}]; t != nil && m.Family == family {
			sets[at] = decode.NewSet(m.Attributes)
			t.reader.Sets[at.set] = sets[at]
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("listing sets: %w", err)
	}
	for at, set := range sets {
		narrow := func(b *nfnetlink.Buffer) { b.In(at.table, at.set) }
		err := s.dump(ctx, unix.NFT_MSG_GETSETELEM, family, narrow, func(m nfnetlink.Message) error {
			set.Add(m.Attributes.Get(unix.NFTA_SET_ELEM_LIST_ELEMENTS).Value)
			return nil
		})
		if err != nil {
			return fmt.Errorf("listing the elements of a set: %w", err)
		}
	}
	return nil
}
