package nftables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/native"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/node/nftables/xtables"
)

// View is the rules of a namespace at one moment.
type View struct {
	session    *Session
	generation uint32
	tables     map[tableKey]*table
}

// tableKey names a table.
type tableKey struct {
	family ruleset.Family
	table  string
}

// table is one of those that iptables knows, or a native one. Its chains are by the name they have in a Set.
type table struct {
	dormant bool
	chains  map[string]*chain
	byName  map[string]*chain     // by the kernel's name: rules come with it
	sets    map[string]native.Set // of ports, in a native table
}

// known reports whether a table is one that is read.
func (k tableKey) known() bool {
	if k.family == ruleset.Inet {
		return slices.Contains(redirect.NativeTables(), k.table)
	}
	return ruleset.KnownTable(k.table)
}

// base returns the hook of a base chain.
func (k tableKey) base(chain string) (ruleset.Hook, bool) {
	if k.family == ruleset.Inet {
		return redirect.NativeHook(k.table, chain)
	}
	return ruleset.HookOf(k.table, chain)
}

// hooks are the kernel's numbers.
var hooks = map[string]uint32{ //nolint:gochecknoglobals // a constant table
	"prerouting": unix.NF_INET_PRE_ROUTING, "input": unix.NF_INET_LOCAL_IN, "forward": unix.NF_INET_FORWARD,
	"output": unix.NF_INET_LOCAL_OUT, "postrouting": unix.NF_INET_POST_ROUTING,
}

type chain struct {
	name   string // the kernel's
	policy string
	rules  []installedRule
	// byText has the places of rules by their text, from the first removal of one until compact.
	byText map[string][]int
}

// removeFirst removes the first rule with that text and returns its handle. A chain can have very many that are removed one
// by one: the rest stays at its tableKey until compact.
func (c *chain) removeFirst(text string) (handle uint64, found bool) {
	if c.byText == nil {
		c.byText = map[string][]int{}
		for i, r := range c.rules {
			c.byText[r.text] = append(c.byText[r.text], i)
		}
	}
	places := c.byText[text]
	if len(places) == 0 {
		return 0, false
	}
	c.byText[text] = places[1:]
	r := &c.rules[places[0]]
	r.removed = true
	return r.handle, true
}

// compact closes the gaps of removed rules.
func (c *chain) compact() {
	if c.byText != nil {
		c.rules = slices.DeleteFunc(c.rules, func(r installedRule) bool { return r.removed })
		c.byText = nil
	}
}

// installedRule is a rule with the number that the kernel knows it by.
type installedRule struct {
	handle  uint64
	text    string
	removed bool
}

// Set returns the rules of one family. A chain with the name of a built-in one but another hook or type gets a name with
// these: packets would not reach our rules there.
func (v *View) Set(f ruleset.Family) ruleset.Set {
	var tables []ruleset.Table
	for at, t := range v.tables {
		if at.family != f {
			continue
		}
		out := ruleset.Table{Name: at.table}
		for shown, c := range t.chains {
			rules := make([]ruleset.Rule, len(c.rules))
			for i, r := range c.rules {
				rules[i] = ruleset.Opaque(r.text)
			}
			out.Chains = append(out.Chains, ruleset.Chain{Name: shown, Policy: c.policy, Rules: rules})
		}
		tables = append(tables, out)
	}
	return ruleset.New(f, tables...)
}

// Read returns a consistent View of the namespace. It returns ErrChanged if the rules changed while they were read. After
// ErrUninspectable, and when the context ended, the Session can only be closed. In a namespace without tables Read sends one
// request besides that for the generation.
func (s *Session) Read(ctx context.Context) (*View, error) {
	s.conn.Budget = budget
	generation, err := s.conn.Generation()
	if err != nil {
		return nil, unsupported(err)
	}
	v := &View{session: s, generation: generation, tables: map[tableKey]*table{}}
	others, err := v.readTables(ctx)
	if err != nil || len(v.tables) == 0 {
		return v, err
	}
	for _, f := range families() {
		if err = v.readFamily(ctx, f, others[f]); err != nil {
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

// readTables records the tables that are known, and reports in which families there are others.
func (v *View) readTables(ctx context.Context) (others map[ruleset.Family]bool, err error) {
	others = map[ruleset.Family]bool{}
	byProtocol := map[uint8]ruleset.Family{}
	for _, f := range families() {
		byProtocol[protocolFamily(f)] = f
	}
	err = v.session.dump(ctx, unix.NFT_MSG_GETTABLE, unix.AF_UNSPEC, nil, func(m nfnetlink.Message) error {
		name, flags := "", uint32(0)
		for a := range m.Attributes.All() {
			switch a.Kind {
			case unix.NFTA_TABLE_NAME:
				name = a.Text()
			case unix.NFTA_TABLE_FLAGS:
				flags, _ = a.Uint32()
			}
		}
		f, ours := byProtocol[m.Family]
		if at := (tableKey{f, name}); ours && at.known() {
			v.tables[at] = &table{dormant: flags&unix.NFT_TABLE_F_DORMANT != 0, chains: map[string]*chain{}, byName: map[string]*chain{}}
		} else if ours {
			others[f] = true
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("listing nf_tables tables: %w", err)
	}
	return others, nil
}

// readFamily reads chains and rules. Tables of others may be huge: beside such, the rules are listed table by table.
func (v *View) readFamily(ctx context.Context, f ruleset.Family, others bool) error {
	var names []string
	for at := range v.tables {
		if at.family == f {
			names = append(names, at.table)
		}
	}
	if len(names) == 0 {
		return nil
	}
	err := v.session.dump(ctx, unix.NFT_MSG_GETCHAIN, protocolFamily(f), nil, func(m nfnetlink.Message) error {
		v.addChain(f, m.Attributes)
		v.session.conn.Budget.Bytes -= (chainWeight - 1) * len(m.Attributes)
		return nil
	})
	if err != nil {
		return fmt.Errorf("listing chains of %s: %w", f, err)
	}
	if f == ruleset.Inet {
		if err := v.readSets(ctx, names); err != nil {
			return fmt.Errorf("listing sets of ports: %w", err)
		}
	}
	if !others {
		names = []string{""}
	}
	for _, name := range names {
		if err := v.readRules(ctx, f, name); err != nil {
			return fmt.Errorf("listing rules of %s: %w", f, err)
		}
	}
	return nil
}

// readRules reads the rules of a table, or of all if the name is "".
func (v *View) readRules(ctx context.Context, f ruleset.Family, name string) error {
	narrow := func(b *nfnetlink.Buffer) {
		if name != "" {
			b.String(unix.NFTA_RULE_TABLE, name)
		}
	}
	return v.session.dump(ctx, unix.NFT_MSG_GETRULE, protocolFamily(f), narrow, func(m nfnetlink.Message) error {
		v.addRule(f, m.Attributes)
		return nil
	})
}

func (v *View) addChain(f ruleset.Family, attributes nfnetlink.Attributes) {
	var found struct {
		table, chain string
		kind         string
		hook, policy uint32
		priority     int32
		hooked       bool
	}
	found.policy = nfnetlink.Accept
	for a := range attributes.All() {
		switch a.Kind {
		case unix.NFTA_CHAIN_TABLE:
			found.table = a.Text()
		case unix.NFTA_CHAIN_NAME:
			found.chain = a.Text()
		case unix.NFTA_CHAIN_TYPE:
			found.kind = a.Text()
		case unix.NFTA_CHAIN_POLICY:
			found.policy, _ = a.Uint32()
		case unix.NFTA_CHAIN_HOOK:
			found.hooked = true
			found.hook, found.priority = readHook(a.Value)
		}
	}
	at := tableKey{f, found.table}
	t, known := v.tables[at]
	if !known {
		return
	}
	c := &chain{name: found.chain, policy: ruleset.NoPolicy}
	want, builtin := at.base(found.chain)
	asWanted := builtin == found.hooked &&
		(!builtin || found.kind == want.Type && found.hook == hooks[want.Name] && found.priority == want.Priority)
	if f == ruleset.Inet {
		asWanted = asWanted && found.policy == nfnetlink.Accept && !t.dormant
	} else {
		asWanted = asWanted || !builtin // other chains are foreign
		if builtin && asWanted {
			c.policy = policyName(found.policy)
		}
	}
	shown := escaped(c.name)
	if !asWanted {
		shown = fmt.Sprintf("%s(%s,hook:%d,priority:%d)", shown, found.kind, found.hook, found.priority)
	}
	t.chains[shown], t.byName[c.name] = c, c
}

// escaped returns a chain's name as one word of plain characters. The kernel accepts any bytes; the escaped names are distinct.
func escaped(name string) string {
	odd := func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '\\' || r == '"' }
	if strings.IndexFunc(name, odd) < 0 {
		return name
	}
	quoted := strconv.QuoteToASCII(name)
	return strings.ReplaceAll(quoted[1:len(quoted)-1], " ", `\x20`)
}

func policyName(policy uint32) string {
	if policy == nfnetlink.Drop {
		return "DROP"
	}
	return "ACCEPT"
}

func readHook(attributes nfnetlink.Attributes) (hook uint32, priority int32) {
	for a := range attributes.All() {
		n, _ := a.Uint32()
		switch a.Kind {
		case unix.NFTA_HOOK_HOOKNUM:
			hook = n
		case unix.NFTA_HOOK_PRIORITY:
			priority = int32(n) //nolint:gosec // two's complement
		}
	}
	return hook, priority
}

func (v *View) addRule(f ruleset.Family, attributes nfnetlink.Attributes) {
	var r installedRule
	var expressions, userdata nfnetlink.Attributes
	tableName, chainName := "", ""
	for a := range attributes.All() {
		switch a.Kind {
		case unix.NFTA_RULE_TABLE:
			tableName = a.Text()
		case unix.NFTA_RULE_CHAIN:
			chainName = a.Text()
		case unix.NFTA_RULE_HANDLE:
			r.handle, _ = a.Uint64()
		case unix.NFTA_RULE_EXPRESSIONS:
			expressions = a.Value
		case unix.NFTA_RULE_USERDATA:
			userdata = a.Value
		}
	}
	t, known := v.tables[tableKey{f, tableName}]
	if !known {
		return
	}
	r.text = v.decode(tableKey{f, tableName}, expressions, userdata)
	if c := t.byName[chainName]; c != nil {
		c.rules = append(c.rules, r)
	}
}

// decode returns the text of a rule of iptables, or the fingerprint of a native one.
func (v *View) decode(at tableKey, expressions, userdata nfnetlink.Attributes) string {
	if at.family != ruleset.Inet {
		r, _ := xtables.Decode(at.family, expressions, userdata)
		return r.String()
	}
	if fingerprint := native.Fingerprint(expressions, v.tables[at].sets); fingerprint != "" {
		return fingerprint
	}
	return xtables.Opaque(expressions, userdata)
}

// readSets reads the sets that rules of the native tables look up.
func (v *View) readSets(ctx context.Context, tables []string) error {
	var found []tableKey
	names := map[tableKey][]string{}
	err := v.session.dump(ctx, unix.NFT_MSG_GETSET, unix.NFPROTO_INET, nil, func(m nfnetlink.Message) error {
		table, name := "", ""
		for a := range m.Attributes.All() {
			switch a.Kind {
			case unix.NFTA_SET_TABLE:
				table = a.Text()
			case unix.NFTA_SET_NAME:
				name = a.Text()
			}
		}
		if slices.Contains(tables, table) {
			at := tableKey{ruleset.Inet, table}
			found = append(found, at)
			names[at] = append(names[at], name)
		}
		return nil
	})
	if err != nil {
		return err
	}
	slices.SortFunc(found, func(a, b tableKey) int { return strings.Compare(a.table, b.table) })
	for _, at := range slices.Compact(found) {
		v.tables[at].sets = map[string]native.Set{}
		for _, name := range names[at] {
			if err := v.readSet(ctx, at, name); err != nil {
				return err
			}
		}
	}
	return nil
}

// maxPorts bounds a set: those of the mesh have two ports, and the text of each rule with a lookup has all ports of the set.
const maxPorts = 16

// readSet reads the ports in a set. It leaves out a set with other elements or with more, so that rules that look it up stay
// opaque.
func (v *View) readSet(ctx context.Context, at tableKey, name string) error {
	narrow := func(b *nfnetlink.Buffer) {
		b.String(unix.NFTA_SET_ELEM_LIST_TABLE, at.table)
		b.String(unix.NFTA_SET_ELEM_LIST_SET, name)
	}
	var ports native.Set
	whole := true
	err := v.session.dump(ctx, unix.NFT_MSG_GETSETELEM, unix.NFPROTO_INET, narrow, func(m nfnetlink.Message) error {
		for a := range m.Attributes.All() {
			if a.Kind == unix.NFTA_SET_ELEM_LIST_ELEMENTS {
				more, ok := native.Ports(a.Value)
				ports, whole = append(ports, more...), whole && ok && len(ports)+len(more) <= maxPorts
			}
		}
		return nil
	})
	if err == nil && whole {
		v.tables[at].sets[name] = ports
	}
	return err
}
