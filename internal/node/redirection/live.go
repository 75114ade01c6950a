package redirection

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/nftables"
	"github.com/meshcni/istio-cni/internal/node/route"
)

// Live reads everything that decides about packets in the namespace, and writes nothing. want explains the rules; without it, rules
// have no reasons.
func (n Namespace) Live(ctx context.Context, want redirect.Wanted) (walk.Namespace, error) {
	var live walk.Namespace
	_, err := n.look(ctx, want, func(p *pass) (err error) {
		live, err = p.live(ctx, want)
		return err
	})
	return live, err
}

// look is run for reading. If want is nil, it looks for a sidecar's rules.
func (n Namespace) look(ctx context.Context, want redirect.Wanted, fn func(*pass) error) (Report, error) {
	owner := redirect.Sidecar()
	if want != nil {
		owner = want.Owner()
	}
	return n.run(ctx, shared, owner, want, fn)
}

// live also reads the tables that the comparison did not need.
func (p *pass) live(ctx context.Context, want redirect.Wanted) (out walk.Namespace, err error) {
	out = walk.Namespace{
		Owner: p.owner, Wanted: walk.WantedOf(want, p.report.Families, p.mode.backend == redirect.Native),
		Delivered: map[ruleset.Family][]ruleset.Mark{}, Selected: map[ruleset.Family][]ruleset.Mark{},
		Tables: map[uint32]uint32{}, Unread: map[ruleset.Family][]string{},
	}
	if p.view != nil {
		if out.Live, err = p.view.Live(ctx); err != nil {
			return out, fmt.Errorf("reading the rules of other programs: %w", err)
		}
	}
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		if err = p.liveLegacy(ctx, f, &out); err != nil {
			return out, err
		}
		if out.Selected[f], err = route.MarkSelectors(f); err != nil {
			return out, err
		}
	}
	if out.Loopback, err = route.Loopback(); err != nil {
		return out, err
	}
	if out.Links, err = route.Links(); err != nil {
		return out, err
	}
	if out.Own, err = p.addresses(); err != nil {
		return out, err
	}
	routing, err := p.policyRouting()
	if err != nil {
		return out, err
	}
	for _, policy := range routing.Policy {
		out.Delivered[policy.Family] = append(out.Delivered[policy.Family], ruleset.Mark{Value: policy.Mark, Mask: policy.Mask})
		out.Tables[policy.Mark] = policy.Table
	}
	return out, nil
}

// liveLegacy reads the legacy tables of a family.
func (p *pass) liveLegacy(ctx context.Context, f ruleset.Family, out *walk.Namespace) error {
	if i := slices.IndexFunc(p.legacy, func(s ruleset.Set) bool { return s.Family == f }); i >= 0 {
		out.Live = append(out.Live, p.legacy[i])
		return nil
	}
	filled, err := iptables.LegacyRules(f)
	if err != nil || len(filled) == 0 {
		return err
	}
	if !p.mode.tools {
		return errNeedsTools
	}
	tool, found := p.tools.Legacy(f)
	if !found {
		out.Unread[f] = []string{fmt.Sprintf("%s (legacy): rules in the legacy tables %s without iptables-legacy", f, strings.Join(filled, ", "))}
		return nil
	}
	have, err := tool.Read(ctx)
	have.Tool = string(iptables.Legacy)
	out.Live = append(out.Live, have)
	return err
}

// walk compares the ways of packets with the wanted ones.
func (p *pass) walk(ctx context.Context, want redirect.Wanted) error {
	live, err := p.live(ctx, want)
	if err != nil {
		return err
	}
	p.report.Ways = live.Deviations()
	return nil
}

// Traceable has the rules that explain a packet trace.
type Traceable struct {
	walk.Namespace

	// Rules has the place, text and reason of nf_tables rules by the kernel's numbers.
	Rules map[nftables.Handle]walk.Hop
	// Legacy reports whether there are legacy tables. The kernel does not trace their rules.
	Legacy bool
}

// Traceable reads the rules at one moment, and writes nothing. For want, see Live.
func (n Namespace) Traceable(ctx context.Context, want redirect.Wanted) (out Traceable, err error) {
	_, err = n.look(ctx, want, func(p *pass) error {
		out = Traceable{Rules: map[nftables.Handle]walk.Hop{}}
		if out.Namespace, err = p.live(ctx, want); err != nil {
			return err
		}
		for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
			out.Legacy = out.Legacy || iptables.LegacyInUse(f)
		}
		out.number()
		return nil
	})
	return out, err
}

// number fills Rules.
func (t *Traceable) number() {
	reason := t.Reasons()
	for i, s := range t.Live {
		for _, table := range s.Tables {
			for _, c := range table.Chains {
				for n, r := range c.Rules {
					if r.Handle == 0 { // of a legacy table
						continue
					}
					hop := t.HopOf(s.Family, table.Name, c, n)
					hop.Set, hop.Why = i, reason(table.Name, c.Name, r.String())
					t.Rules[nftables.Handle{Family: s.Family, Table: table.Name, Number: r.Handle}] = hop
				}
			}
		}
	}
}

// LegacyCounts returns the counters of the rules in legacy tables, read with the host's tools.
func (n Namespace) LegacyCounts(ctx context.Context) (all []iptables.Count, err error) {
	tools := n.Tools
	tools.Lock = n.lockFile()
	err = n.isolated(ctx, func() error {
		for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
			if !iptables.LegacyInUse(f) {
				continue
			}
			tool, found := tools.Legacy(f)
			if !found {
				return fmt.Errorf("%s: %w", f, errLegacy)
			}
			counted, failed := tool.Counts(ctx)
			if failed != nil {
				return failed
			}
			all = append(all, counted...)
		}
		return nil
	})
	return all, err
}
