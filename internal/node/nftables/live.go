package nftables

import (
	"context"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
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
	others := tables{}
	for _, at := range v.others {
		others[at] = newTable(at, false, false)
	}
	for _, f := range liveFamilies {
		if err := v.readFamily(ctx, f, others, true); err != nil {
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
	again := tables{}
	for at, t := range v.tables {
		if at.family != f || len(t.reader.Sets) == 0 {
			continue
		}
		for _, c := range t.chains {
			c.rules = nil
		}
		again[at] = t
	}
	if len(again) == 0 {
		return nil
	}
	if err := v.session.readSets(ctx, f, again); err != nil {
		return err
	}
	return v.session.readRules(ctx, f, again, again.names(f)...)
}
