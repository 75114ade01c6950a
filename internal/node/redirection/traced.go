package redirection

import (
	"context"
	"fmt"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/nftables"
)

// Traceable is what explains a packet trace.
type Traceable struct {
	walk.Namespace

	// Rules are those of nf_tables by the kernel's numbers: place, text and reason.
	Rules map[nftables.Handle]walk.Hop
	// Legacy says that there are legacy tables, whose rules the kernel does not trace.
	Legacy bool
}

// Traceable reads the rules at one moment, and writes nothing. The Spec explains the rules, see Live.
func (n Namespace) Traceable(ctx context.Context, spec *redirect.Spec) (out Traceable, err error) {
	_, err = n.run(ctx, shared, spec, func(p *pass) error {
		out = Traceable{Rules: map[nftables.Handle]walk.Hop{}}
		if out.Namespace, err = p.live(ctx, spec); err != nil {
			return err
		}
		for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
			out.Legacy = out.Legacy || iptables.LegacyInUse(f)
		}
		if p.view != nil {
			out.number(p.view, spec)
		}
		return nil
	})
	return out, err
}

// number fills Rules. Those of iptables have the text of the View, whatever tool read them for Live.
func (t *Traceable) number(v *nftables.View, spec *redirect.Spec) {
	native := ruleset.Set{Family: ruleset.Inet}
	if spec != nil {
		native = redirect.NativeRules(*spec, t.Wanted.Families)
	}
	type key struct {
		family       ruleset.Family
		table, chain string
	}
	rules := map[key][]ruleset.Rule{}
	for _, s := range []ruleset.Set{v.Set(ruleset.IPv4), v.Set(ruleset.IPv6), v.Native(native)} {
		for _, table := range s.Tables {
			for _, c := range table.Chains {
				rules[key{s.Family, table.Name, c.Name}] = c.Rules
			}
		}
	}
	reason := t.Reasons()
	for handle, at := range v.Places() {
		text := rules[key{handle.Family, handle.Table, at.Chain}][at.Number-1].String()
		t.Rules[handle] = walk.Hop{
			Table: handle.Table, Chain: at.Chain, Number: at.Number, Rule: text, Answer: walk.Yes, Why: reason(handle.Table, at.Chain, text),
		}
	}
}

// Count is how many packets have matched a rule of a legacy table.
type Count struct {
	Family  ruleset.Family
	Rule    walk.Hop
	Packets uint64
}

// LegacyCounts returns the counters of the rules in legacy tables, by the host's tools.
func (n Namespace) LegacyCounts(ctx context.Context) (all []Count, err error) {
	tools := n.Tools
	tools.Lock = n.lockFile()
	err = n.isolated(ctx, func() (err error) {
		for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
			if !iptables.LegacyInUse(f) {
				continue
			}
			tool, found := tools.Legacy(f)
			if !found {
				return fmt.Errorf("%s: %w", f, errLegacy)
			}
			var counted []iptables.Count
			if counted, err = tool.Counts(ctx); err != nil {
				return err
			}
			for _, c := range counted {
				all = append(all, Count{f, walk.Hop{Table: c.Table, Chain: c.Chain, Number: c.Number, Rule: c.Rule, Answer: walk.Yes}, c.Packets})
			}
		}
		return nil
	})
	return all, err
}
