package nftables

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Handle is the kernel's number of a rule in its table.
type Handle struct {
	Family ruleset.Family
	Table  string
	Number uint64
}

// liveFamilies has the families whose packets the mesh sees, by the kernel's number.
var liveFamilies = map[uint8]ruleset.Family{ //nolint:gochecknoglobals // a constant table
	unix.NFPROTO_IPV4: ruleset.IPv4, unix.NFPROTO_IPV6: ruleset.IPv6, unix.NFPROTO_INET: ruleset.Inet, unix.NFPROTO_NETDEV: ruleset.Netdev,
}

// Live returns the rules of all tables that IP packets traverse, at the time of the View: the View's own rules and other
// programs' rules. It leaves out dormant tables. The error is ErrChanged if the rules have changed since.
func (v *View) Live(ctx context.Context) ([]ruleset.Set, error) {
	v.session.conn.Budget = budget
	var others tables
	if len(v.others) > 0 {
		var err error
		if others, err = v.otherTables(ctx); err != nil {
			return nil, err
		}
	}
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		if err := v.lookedUp(ctx, f); err != nil {
			return nil, err
		}
	}
	all := v.sets(others)
	if len(v.others) == 0 {
		return all, nil
	}
	now, err := v.session.conn.Generation()
	if err == nil && now != v.generation {
		err = ErrChanged
	}
	return all, err
}

// sets returns the rules of the View and of other tables, by family.
func (v *View) sets(others tables) (all []ruleset.Set) {
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6, ruleset.Inet, ruleset.Netdev} {
		set := v.Set(f)
		set.Tables = append(set.Tables, others.rules(f)...)
		slices.SortStableFunc(set.Tables, func(a, b ruleset.Table) int { return strings.Compare(a.Name, b.Name) })
		if len(set.Tables) > 0 {
			all = append(all, set)
		}
	}
	return all
}

// lookedUp reads the rules of a family again if some rules look up sets. Rules of the mesh and of iptables use no sets, so Read does not
// read sets.
func (v *View) lookedUp(ctx context.Context, f ruleset.Family) error {
	names := v.tables.names(f, func(t *table) bool { return len(t.reader.Sets) > 0 })
	if len(names) == 0 {
		return nil
	}
	for _, name := range names {
		for _, c := range v.tables.of(f)(name).chains {
			c.rules = nil
		}
	}
	if err := v.session.readSets(ctx, protocolFamily(f), v.tables.of(f)); err != nil {
		return err
	}
	return v.session.readRules(ctx, f, v.tables, names...)
}

// otherTables reads the tables that are not in the View.
func (v *View) otherTables(ctx context.Context) (tables, error) {
	all := tables{}
	for _, at := range v.others {
		all[at] = newTable(at, false, false)
	}
	err := v.session.dump(ctx, unix.NFT_MSG_GETCHAIN, unix.AF_UNSPEC, nil, func(m nfnetlink.Message) error {
		f, seen := liveFamilies[m.Family]
		if t := all[tableKey{f, m.Attributes.Get(unix.NFTA_CHAIN_TABLE).Text()}]; seen && t != nil {
			t.addChain(m.Family, m.Attributes)
			v.session.conn.Budget.Bytes -= (chainWeight - 1) * len(m.Attributes)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("listing chains: %w", err)
	}
	return all, v.otherRules(ctx, all)
}

// addChain adds a chain of another program's table.
func (t *table) addChain(family uint8, attributes nfnetlink.Attributes) {
	c, hook, drops := readChain(family, attributes)
	if hook.Name != "" {
		c.hook, c.policy = &hook, policyName(drops)
	}
	t.chains[c.shown], t.byName[c.name] = c, c
}

// otherRules reads the sets and the rules of tables.
func (v *View) otherRules(ctx context.Context, all tables) error {
	for _, f := range liveFamilies {
		names := all.names(f, every)
		if len(names) == 0 {
			continue
		}
		if err := v.session.readSets(ctx, protocolFamily(f), all.of(f)); err != nil {
			return err
		}
		if err := v.session.readRules(ctx, f, all, names...); err != nil {
			return err
		}
	}
	return nil
}
