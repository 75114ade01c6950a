package redirection

import (
	"context"
	"errors"
	"fmt"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/route"
)

// Live reads what decides about packets in the namespace, and writes nothing. The Spec explains the rules; without one, rules
// have no reasons, and those of native tables no meaning.
func (n Namespace) Live(ctx context.Context, spec *redirect.Spec) (walk.Namespace, error) {
	var live walk.Namespace
	_, err := n.run(ctx, shared, spec, func(p *pass) (err error) {
		live, err = p.live(ctx, spec)
		return err
	})
	return live, err
}

// live reads every place once more, the legacy tables of others as well.
func (p *pass) live(ctx context.Context, spec *redirect.Spec) (walk.Namespace, error) {
	out := walk.Namespace{Delivered: map[ruleset.Family][]uint32{}, Tables: map[uint32]uint32{}, Hooked: map[ruleset.Family][]string{}}
	native := ruleset.Set{Family: ruleset.Inet}
	if spec != nil {
		out.Wanted = &walk.Wanted{Spec: *spec, Families: p.report.Families, Native: p.mode.backend == redirect.Native}
		native = redirect.NativeRules(*spec, p.report.Families)
	}
	if p.view != nil {
		out.Live, out.Unread = append(out.Live, p.view.Native(native)), p.view.Unread()
		var err error
		if out.Hooked, err = p.view.Hooked(ctx); err != nil {
			return out, err
		}
	}
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		if err := p.liveFamily(ctx, f, &out); err != nil {
			return out, err
		}
	}
	routing, err := route.Leftovers()
	if err != nil {
		return out, fmt.Errorf("reading the routing by marks: %w", err)
	}
	for _, policy := range routing.Policy {
		out.Delivered[policy.Family] = append(out.Delivered[policy.Family], policy.Mark)
		out.Tables[policy.Mark] = policy.Table
	}
	return out, nil
}

// liveFamily reads the places of iptables' rules of a family.
func (p *pass) liveFamily(ctx context.Context, f ruleset.Family, out *walk.Namespace) error {
	legacy := iptables.LegacyInUse(f)
	if legacy && !p.mode.tools {
		return errNeedsTools
	}
	places, err := p.places(ctx, f, legacy)
	if errors.Is(err, errLegacy) {
		name := "legacy tables of " + f.String()
		out.Unread, out.Hooked[f] = append(out.Unread, name), append(out.Hooked[f], name)
		places, err = p.places(ctx, f, false)
	}
	for _, at := range places {
		var have ruleset.Set
		if at.tool == nil {
			have = p.view.Set(f)
		} else if have, err = at.tool.Read(ctx); err != nil {
			return err
		}
		out.Live = append(out.Live, have)
	}
	return err
}
