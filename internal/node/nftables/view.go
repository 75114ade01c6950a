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
	// unread are the other tables of these families.
	unread []tableKey
}

// Unread names the tables whose rules are not read, and the chains that iptables or the native tables do not have.
func (v *View) Unread() []string {
	var names []string
	for _, at := range v.unread {
		names = append(names, fmt.Sprintf("table %s %s", at.family, escaped(at.table)))
	}
	names = append(names, v.otherChains(func(tableKey, *chain) bool { return true })...)
	slices.Sort(names)
	return names
}

// otherChains names the chains that iptables or the native tables do not have.
func (v *View) otherChains(which func(tableKey, *chain) bool) (names []string) {
	for at, t := range v.tables {
		for shown, c := range t.chains {
			if shown != escaped(c.name) && which(at, c) {
				names = append(names, fmt.Sprintf("chain %s of table %s %s", shown, at.family, at.table))
			}
		}
	}
	return names
}

// Hooked names, by family, the tables and chains that Read does not read and that may do something to a packet, at whatever hook; Inet
// are those of both families, the hooks of an interface (netdev) among them. A table whose rules only match, count, log or accept is left out.
func (v *View) Hooked(ctx context.Context) (map[ruleset.Family][]string, error) {
	found := map[ruleset.Family][]string{}
	for _, f := range families() {
		found[f] = v.otherChains(func(at tableKey, c *chain) bool { return at.family == f && !v.tables[at].dormant && c.hooked })
	}
	v.session.conn.Budget = budget
	if err := v.session.hookedTables(ctx, found); err != nil {
		return nil, fmt.Errorf("listing chains of other programs: %w", err)
	}
	for f := range found {
		slices.Sort(found[f])
	}
	return found, nil
}

// hookedTables adds the tables that Read does not read. It reads the rules of a table once, whatever number of chains it has.
func (s *Session) hookedTables(ctx context.Context, found map[ruleset.Family][]string) error {
	chains, called, err := s.hookedChains(ctx, func(c hookedChain) bool {
		return c.passed() && !keyOf(c.family, c.table).known() && !strings.HasPrefix(c.table, redirect.TraceTable)
	})
	if err != nil {
		return err
	}
	drops := map[chainKey]bool{}
	for _, c := range chains {
		called[chainKey{c.family, c.table, c.name}] = true
		at := chainKey{c.family, c.table, ""}
		drops[at] = drops[at] || c.drops
	}
	for _, c := range chains {
		at := chainKey{c.family, c.table, ""}
		dropping, first := drops[at]
		if delete(drops, at); !first {
			continue
		}
		takes, err := s.takers(ctx, c, called, true)
		if err != nil {
			return err
		}
		if dropping || len(takes) > 0 {
			f := keyOf(c.family, c.table).family
			name := f.String()
			if f == otherFamily {
				f, name = ruleset.Inet, "netdev"
			}
			found[f] = append(found[f], fmt.Sprintf("table %s %s", name, escaped(c.table)))
		}
	}
	return nil
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
	return k.family != otherFamily && redirect.KnownTable(k.family, k.table)
}

// base returns the hook of a base chain.
func (k tableKey) base(chain string) (ruleset.Hook, bool) {
	return redirect.HookOf(k.family, k.table, chain)
}

// hooks are the kernel's numbers.
var hooks = map[string]uint32{ //nolint:gochecknoglobals // a constant table
	"prerouting": unix.NF_INET_PRE_ROUTING, "input": unix.NF_INET_LOCAL_IN, "forward": unix.NF_INET_FORWARD,
	"output": unix.NF_INET_LOCAL_OUT, "postrouting": unix.NF_INET_POST_ROUTING,
}

type chain struct {
	name   string // the kernel's
	shown  string // in a Set
	hooked bool
	policy string
	rules  []installedRule
	// byText has the places of rules by their text, from the first removal of one. A chain can have very many of them.
	byText map[string][]int
	head   int // of the first rule that may not be removed
}

// removeFirst marks the first rule with that text as removed and returns its handle.
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

// first returns the handle of the first rule that is not removed, 0 if there is none.
func (c *chain) first() uint64 {
	for ; c.head < len(c.rules); c.head++ {
		if r := c.rules[c.head]; !r.removed {
			return r.handle
		}
	}
	return 0
}

// installedRule is a rule with the number that the kernel knows it by.
type installedRule struct {
	handle  uint64
	text    string
	removed bool
	// meaning has the parts of a native rule that is understood.
	meaning ruleset.Rule
}

// Set returns the rules of one family. A chain with the name of a built-in one but another hook or type, or in a dormant
// table, gets a name with these: packets would not reach our rules there.
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
				rules[i].Matches, rules[i].Target = r.meaning.Matches, r.meaning.Target
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
		flags, _ := m.Attributes.Get(unix.NFTA_TABLE_FLAGS).Uint32()
		f, ours := byProtocol[m.Family]
		if at := (tableKey{f, m.Attributes.Get(unix.NFTA_TABLE_NAME).Text()}); ours && at.known() {
			v.tables[at] = &table{dormant: flags&unix.NFT_TABLE_F_DORMANT != 0, chains: map[string]*chain{}, byName: map[string]*chain{}, sets: map[string]native.Set{}}
		} else if ours {
			others[f] = true
			v.unread = append(v.unread, at)
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
	at := tableKey{f, attributes.Get(unix.NFTA_CHAIN_TABLE).Text()}
	t, known := v.tables[at]
	if !known {
		return
	}
	c := &chain{name: attributes.Get(unix.NFTA_CHAIN_NAME).Text(), policy: ruleset.NoPolicy}
	kind, hook := attributes.Get(unix.NFTA_CHAIN_TYPE).Text(), nfnetlink.Attributes(attributes.Get(unix.NFTA_CHAIN_HOOK).Value)
	number, hooked := hook.Get(unix.NFTA_HOOK_HOOKNUM).Uint32()
	priority, _ := hook.Get(unix.NFTA_HOOK_PRIORITY).Uint32()
	policy, hasPolicy := attributes.Get(unix.NFTA_CHAIN_POLICY).Uint32()
	drops := hasPolicy && policy == nfnetlink.Drop

	want, builtin := at.base(c.name)
	asWanted := builtin == hooked &&
		(!builtin || kind == want.Type && number == hooks[want.Name] && int32(priority) == want.Priority) //nolint:gosec // two's complement
	if f == ruleset.Inet {
		asWanted = asWanted && !drops && !t.dormant
	} else {
		asWanted = asWanted && !t.dormant || !builtin // other chains are foreign
		if builtin && asWanted {
			c.policy = policyName(drops)
		}
	}
	c.hooked, c.shown = hooked, escaped(c.name)
	if !asWanted {
		c.shown += fmt.Sprintf("(%s,hook:%d,priority:%d)", kind, number, int32(priority)) //nolint:gosec // as above
	}
	t.chains[c.shown], t.byName[c.name] = c, c
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

func policyName(drops bool) string {
	if drops {
		return "DROP"
	}
	return "ACCEPT"
}

func (v *View) addRule(f ruleset.Family, attributes nfnetlink.Attributes) {
	at := tableKey{f, attributes.Get(unix.NFTA_RULE_TABLE).Text()}
	t, known := v.tables[at]
	if !known {
		return
	}
	if c := t.byName[attributes.Get(unix.NFTA_RULE_CHAIN).Text()]; c != nil {
		handle, _ := attributes.Get(unix.NFTA_RULE_HANDLE).Uint64()
		r := v.decode(at, attributes.Get(unix.NFTA_RULE_EXPRESSIONS).Value, attributes.Get(unix.NFTA_RULE_USERDATA).Value)
		r.handle = handle
		c.rules = append(c.rules, r)
	}
}

// decode returns the text of a rule of iptables, or the fingerprint of a native one.
func (v *View) decode(at tableKey, expressions, userdata nfnetlink.Attributes) (out installedRule) {
	if at.family != ruleset.Inet {
		r, _ := xtables.Decode(at.family, expressions, userdata)
		out.text = r.String()
		return out
	}
	sets := v.tables[at].sets
	out.meaning, _ = native.Decode(expressions, sets)
	if out.text = native.Fingerprint(expressions, sets); out.text == "" {
		out.text = xtables.Opaque(expressions, userdata)
	}
	return out
}

// readSets reads the sets that rules of the native tables look up.
func (v *View) readSets(ctx context.Context, tables []string) error {
	names := map[string][]string{} // of sets, by table
	err := v.session.dump(ctx, unix.NFT_MSG_GETSET, unix.NFPROTO_INET, nil, func(m nfnetlink.Message) error {
		table := m.Attributes.Get(unix.NFTA_SET_TABLE).Text()
		names[table] = append(names[table], m.Attributes.Get(unix.NFTA_SET_NAME).Text())
		return nil
	})
	if err != nil {
		return err
	}
	for _, table := range tables {
		for _, name := range names[table] {
			if err := v.readSet(ctx, tableKey{ruleset.Inet, table}, name); err != nil {
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
		more, ok := native.Ports(m.Attributes.Get(unix.NFTA_SET_ELEM_LIST_ELEMENTS).Value)
		ports, whole = append(ports, more...), whole && ok && len(ports)+len(more) <= maxPorts
		return nil
	})
	if err == nil && whole {
		v.tables[at].sets[name] = ports
	}
	return err
}
