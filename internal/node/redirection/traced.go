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
