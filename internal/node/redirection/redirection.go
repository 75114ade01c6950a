// Package redirection makes a network namespace redirect what a Spec captures: rules, addresses and routes together.
//
// It promises that Apply may be repeated, also over what an earlier or half-finished run left; that rules of other software
// stay; and that Verify and PlanClean write nothing. It never decides what to capture and never opens a namespace: the
// caller does, and checks that it is not the node's.
//
// Start at Namespace; run.go has modes, fallback and retries, pass.go the reading, comparing and writing of rules.
package redirection

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/nftables"
	"github.com/meshcni/istio-cni/internal/node/route"
)

// Namespace is a network namespace and how to work in it.
type Namespace struct {
	// NetNS is the namespace, which the caller has opened and checked, and closes. Nil is an error.
	NetNS *netns.Namespace
	// Backend is the way by which rules are read and written; "" is redirect.Auto.
	Backend redirect.Backend
	// PreferTools resolves auto to Tools where it is not Native: the self-test found that netlink does not work on this node.
	PreferTools bool
	// Tools says how iptables is found, where it is needed.
	Tools iptables.Host
	Log   *slog.Logger
}

// ConflictPolicy says what Apply does with rules of the mesh that are there and are not those wanted.
type ConflictPolicy uint8

// Reconcile replaces them; FailOnConflict changes nothing and reports ErrConflict.
const (
	Reconcile ConflictPolicy = iota
	FailOnConflict
)

// ErrConflict says that the namespace already redirects in another way.
var ErrConflict = errors.New("the namespace already holds other rules of the mesh")

// ErrUninspectable says that the namespace holds more rules or routes than are read, or that reading them takes too long:
// a process in it may have filled it. Routes are read after the rules are written.
var ErrUninspectable = nftables.ErrUninspectable

// Report is what was found and done in a namespace.
type Report struct {
	Families redirect.Families
	// Mesh says that rules of the mesh were there before anything was done, the wanted ones or others.
	Mesh bool
	// Tools are the programs that write each family's rules.
	Tools []string
	// Diffs are the differences of each family from what is wanted, before anything was done; empty ones are left out.
	Diffs []ruleset.Diff
	// Routing are those of addresses, policy rules and routes, a sentence each. Only Verify fills it.
	Routing []string
	// Notes are foreign rules behind ours, and what else is worth knowing and no difference.
	Notes []string
	// Programs are what was carried out.
	Programs []Program
	// Processes is how many were started for all of it.
	Processes int
}

// Program is a change of rules that was carried out, or would be.
type Program struct {
	// Of is the family: IPv4, IPv6 or, for both together, inet. By is a backend, or the program of iptables.
	Of, By string
	// Text is what "iptables-restore --noflush" or, where By is native, "nft -f" takes.
	Text string
}

// Clean reports whether everything was as wanted.
func (r Report) Clean() bool { return len(r.Diffs) == 0 && len(r.Routing) == 0 }

// Apply brings the namespace to the Spec.
func (n Namespace) Apply(ctx context.Context, spec redirect.Spec, policy ConflictPolicy) (Report, error) {
	return n.run(ctx, exclusive, &spec, func(p *pass) error {
		if policy == FailOnConflict && p.conflict {
			return ErrConflict
		}
		if err := p.apply(ctx); err != nil {
			return err
		}
		return p.setRouting(routing(spec, p.report.Families))
	})
}

// Verify compares the namespace with the Spec and writes nothing.
func (n Namespace) Verify(ctx context.Context, spec redirect.Spec) (Report, error) {
	return n.run(ctx, shared, &spec, func(p *pass) error { return p.checkRouting(routing(spec, p.report.Families)) })
}

// Clean removes everything that is the mesh's, of whatever configuration. The Spec only names the mark and table that are
// the mesh's besides those of the rules found here.
func (n Namespace) Clean(ctx context.Context, spec redirect.Spec) (Report, error) {
	return n.run(ctx, exclusive, nil, func(p *pass) error {
		left, err := leftovers(append(p.marks, spec.Mark))
		if err != nil {
			return err
		}
		for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
			// The configured table's route goes even where the policy rule for it is gone already.
			left.Policy = append(left.Policy, route.Policy{Family: f, Mark: spec.Mark, Table: spec.Table})
		}
		if err := p.apply(ctx); err != nil {
			return err
		}
		if err := route.Remove(left); err != nil {
			return fmt.Errorf("removing routing: %w", err)
		}
		return nil
	})
}

// PlanClean gives the Programs that Clean would run, and runs none.
func (n Namespace) PlanClean(ctx context.Context) (Report, error) {
	return n.run(ctx, shared, nil, func(p *pass) error {
		for _, c := range p.changes {
			p.report.Programs = append(p.report.Programs, c.Program)
		}
		return nil
	})
}

// HasRules reports whether the namespace holds any rule or chain of the mesh.
func (n Namespace) HasRules(ctx context.Context) (bool, error) {
	r, err := n.PlanClean(ctx)
	return len(r.Programs) > 0, err
}

// Families gives the treatment of each family of the namespace.
func (n Namespace) Families(spec redirect.Spec) (f redirect.Families, err error) {
	if n.NetNS == nil {
		return f, errNoNamespace
	}
	err = n.NetNS.Do(func() (err error) {
		f, err = families(spec)
		return err
	})
	return f, err
}

func families(spec redirect.Spec) (redirect.Families, error) {
	addresses, err := route.Addresses()
	if err != nil {
		return redirect.Families{}, err
	}
	return spec.FamiliesOf(addresses, route.KernelHasIPv6())
}

// routing is what is wanted besides rules. Where lo has IPv6 switched off and there is no IPv6 address, nothing of IPv6 can
// be set up; its rules are there for addresses that come later, and what they hand to the proxy then goes no further.
func routing(spec redirect.Spec, f redirect.Families) route.Want {
	want := route.For(spec.Routing(f))
	if f.HasIPv6 || route.LoopbackHasIPv6() {
		return want
	}
	want.PassthroughV6 = false
	want.Policy = slices.DeleteFunc(want.Policy, func(p route.Policy) bool { return p.Family == ruleset.IPv6 })
	return want
}

// setRouting brings addresses, routes and policy rules to what is wanted, and removes those of an earlier configuration.
func (p *pass) setRouting(want route.Want) error {
	left, err := p.stale(want)
	if err != nil {
		return err
	}
	if err := route.Remove(left); err != nil {
		return fmt.Errorf("removing routing of an earlier configuration: %w", err)
	}
	if err := route.Apply(want); err != nil {
		return fmt.Errorf("setting up routing: %w", err)
	}
	return nil
}

func (p *pass) checkRouting(want route.Want) (err error) {
	if p.report.Routing, err = route.Check(want); err != nil {
		return err
	}
	left, err := p.stale(want)
	for _, policy := range left.Policy {
		p.report.Routing = append(p.report.Routing, fmt.Sprintf("policy rule %s is left over", policy))
	}
	if left.PassthroughV6 {
		p.report.Routing = append(p.report.Routing, "address ::6/128 on lo is left over")
	}
	return err
}

// stale finds routing of the mesh that is not wanted. A namespace in which no rule of the mesh was found has none: a new
// pod pays nothing for this.
func (p *pass) stale(want route.Want) (route.Want, error) {
	if !p.report.Mesh {
		return route.Want{}, nil
	}
	left, err := leftovers(p.marks)
	left.PassthroughV6 = left.PassthroughV6 && !want.PassthroughV6
	left.Policy = slices.DeleteFunc(left.Policy, func(p route.Policy) bool { return slices.Contains(want.Policy, p) })
	return left, err
}

// leftovers finds routing that belongs to the mesh. Policy rules of any TPROXY have the same shape, so only those for the
// mesh's marks count.
func leftovers(marks []uint32) (route.Want, error) {
	left, err := route.Leftovers()
	if err != nil {
		return route.Want{}, fmt.Errorf("looking for routing of an earlier configuration: %w", err)
	}
	left.Policy = slices.DeleteFunc(left.Policy, func(p route.Policy) bool {
		return !slices.Contains(marks, p.Mark) && p.Mark != redirect.DefaultMark
	})
	return left, nil
}
