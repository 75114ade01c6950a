// Package redirection sets up the traffic redirection of a network namespace: rules, addresses and routes.
//
// It promises that Apply may be repeated, also after an earlier or incomplete run; that it keeps the rules of other
// software; and that Verify and PlanClean write nothing. The caller decides what to capture, opens the namespace, and
// checks that it is not the node's.
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
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/nftables"
	"github.com/meshcni/istio-cni/internal/node/route"
)

// Namespace is a network namespace with the settings for working in it.
type Namespace struct {
	// NetNS is the namespace. The caller has opened and checked it, and closes it. Nil is an error.
	NetNS *netns.Namespace
	// Backend selects the mechanism that reads and writes rules; "" means redirect.Auto.
	Backend redirect.Backend
	// Auto is the backend that the self-test chose for auto on this node; "" means Netlink.
	Auto redirect.Backend
	// Sandboxed is set for a pod with its own network stack (sidecar.Sandbox), into which native tables are not copied.
	Sandboxed bool
	// Tools has the search path of the iptables programs.
	Tools iptables.Host
	Log   *slog.Logger
}

// ConflictPolicy selects the action of Apply on existing rules of the mesh that differ from the wanted ones.
type ConflictPolicy uint8

// Reconcile replaces them; FailOnConflict changes nothing and reports ErrConflict.
const (
	Reconcile ConflictPolicy = iota
	FailOnConflict
)

// ErrConflict means that the namespace already redirects in another way.
var ErrConflict = errors.New("the namespace already holds other rules of the mesh")

// ErrUninspectable means that the rules or routes of the namespace exceed the bounds, or that reading them takes too long: a
// process in the namespace may have filled it. Routes are read after the rules are written.
var ErrUninspectable = nftables.ErrUninspectable

// Report is the result of a run in a namespace.
type Report struct {
	Families redirect.Families
	// Mesh: the namespace had rules of the mesh before the run, whether the wanted ones or not.
	Mesh bool
	// Tools are the programs that write each family's rules.
	Tools []string
	// Diffs are the differences of each family from the wanted rules before the run. Empty ones are left out.
	Diffs []ruleset.Diff
	// Routing lists the differences of addresses, policy rules and routes, one sentence each. Only Verify fills it.
	Routing []string
	// Ways are the packet ways that differ from the wanted rules, see walk.Namespace.Deviations. Only Audit fills it.
	Ways []walk.Deviation
	// Notes are foreign rules behind ours, and other facts for the log that are not differences.
	Notes []string
	// Programs are the applied changes.
	Programs []Program
	// Processes is the number of processes that the run started.
	Processes int
}

// Program is a change of rules that was applied or, from PlanClean, would be applied.
type Program struct {
	// Of is the family: IPv4, IPv6 or, for both together, inet. By is a backend, or the name of an iptables program.
	Of, By string
	// Text is the input for "iptables-restore --noflush" or, if By is native, for "nft -f".
	Text string
}

// Clean reports whether there were no differences.
func (r Report) Clean() bool { return len(r.Diffs) == 0 && len(r.Routing) == 0 }

// Apply sets up the wanted redirection in the namespace.
func (n Namespace) Apply(ctx context.Context, want redirect.Wanted, policy ConflictPolicy) (Report, error) {
	return n.run(ctx, exclusive, want.Owner(), want, func(p *pass) error {
		if policy == FailOnConflict && p.conflict {
			return ErrConflict
		}
		if err := p.apply(ctx); err != nil {
			return err
		}
		return p.setRouting(routing(want, p.report.Families))
	})
}

// Verify compares the namespace with the wanted redirection and writes nothing.
func (n Namespace) Verify(ctx context.Context, want redirect.Wanted) (Report, error) {
	return n.look(ctx, want, func(p *pass) error { return p.checkRouting(routing(want, p.report.Families)) })
}

// Audit is Verify, and also walks packets through all rules of the namespace.
func (n Namespace) Audit(ctx context.Context, want redirect.Wanted) (Report, error) {
	return n.look(ctx, want, func(p *pass) error {
		if p.report.Mesh {
			if err := p.walk(ctx, want); err != nil {
				return err
			}
		}
		return p.checkRouting(routing(want, p.report.Families))
	})
}

// AuditAny is Audit with the backend of n or, if another backend's rules are complete in the namespace, with that one: a pod keeps
// the rules of the backend that it started with. It also returns the Namespace with that backend.
func (n Namespace) AuditAny(ctx context.Context, want redirect.Wanted) (Namespace, Report, error) {
	return n.byAny(ctx, want, Namespace.Audit)
}

// VerifyAny is Verify with the backend that AuditAny selects.
func (n Namespace) VerifyAny(ctx context.Context, want redirect.Wanted) (Report, error) {
	_, report, err := n.byAny(ctx, want, Namespace.Verify)
	return report, err
}

func (n Namespace) byAny(
	ctx context.Context, want redirect.Wanted, compare func(Namespace, context.Context, redirect.Wanted) (Report, error),
) (Namespace, Report, error) {
	report, err := compare(n, ctx, want)
	if err != nil || report.Clean() || !report.Mesh {
		return n, report, err
	}
	backends := []redirect.Backend{redirect.Netlink, redirect.Native}
	if legacy, err := n.HasLegacy(want.Owner()); err == nil && legacy { // tools start processes, so only if there is something to read
		backends = append(backends, redirect.Tools)
	}
	for _, backend := range backends {
		other := n
		other.Backend, other.Auto, other.Tools.Force = backend, "", iptables.Legacy
		if found, err := compare(other, ctx, want); err == nil && found.Clean() {
			return other, found, nil
		}
	}
	return n, report, nil
}

// HasLegacy reports whether the legacy tables of the namespace hold chains of the owner. It starts no process.
func (n Namespace) HasLegacy(owner redirect.Owner) (bool, error) {
	found, err := netns.In(n.NetNS, func() ([]ruleset.Family, error) { return legacyOf(owner) })
	return len(found) > 0, err
}

// VerifyRouting compares the addresses, policy rules and routes of the namespace with the wanted ones, for the families of an
// earlier report. It reads no rule.
func (n Namespace) VerifyRouting(want redirect.Wanted, earlier Report) (differences []string, err error) {
	err = n.NetNS.Do(func() (err error) {
		differences, err = route.Check(routing(want, earlier.Families))
		return err
	})
	return differences, err
}

// Clean removes all rules and routing of a mode of the mesh, whatever its configuration. Of it, Clean uses only the owner, and the mark
// and table in addition to the ones in the rules found here.
func (n Namespace) Clean(ctx context.Context, of redirect.Wanted) (Report, error) {
	return n.run(ctx, exclusive, of.Owner(), nil, func(p *pass) error {
		configured := of.Routing(redirect.Families{})
		left, err := p.leftovers(append(p.marks, configured.Mark))
		if err != nil {
			return err
		}
		// The configured table's route is removed even if its policy rule is gone.
		configured.MarkFamilies, configured.PassthroughV6 = []ruleset.Family{ruleset.IPv4, ruleset.IPv6}, false
		left.Policy = append(left.Policy, route.For(configured).Policy...)
		if err := p.apply(ctx); err != nil {
			return err
		}
		if err := route.Remove(left); err != nil {
			return fmt.Errorf("removing routing: %w", err)
		}
		return nil
	})
}

// PlanClean returns the Programs that Clean would run, and runs none of them.
func (n Namespace) PlanClean(ctx context.Context) (Report, error) {
	return n.look(ctx, nil, func(p *pass) error {
		for _, c := range p.changes {
			p.report.Programs = append(p.report.Programs, c.Program)
		}
		return nil
	})
}

// Version identifies the rules of a namespace. Equal versions of one namespace mean equal rules. The kernel counts the
// changes of nf_tables; for legacy tables, the version has a digest of their content.
type Version struct {
	Namespace  netns.Inode
	Generation uint32
	Legacy     [2]iptables.Digest
}

// Version returns the version of the rules in the namespace. It reads no nf_tables rule.
func (n Namespace) Version() (v Version, err error) {
	if n.NetNS == nil {
		return v, errNoNamespace
	}
	v.Namespace = n.NetNS.Inode()
	err = n.NetNS.Do(func() (err error) {
		if v.Generation, err = nftables.Generation(); err != nil {
			return err
		}
		for i, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
			if v.Legacy[i], err = iptables.LegacyDigest(f); err != nil {
				return err
			}
		}
		return nil
	})
	return v, err
}

// HasRules reports whether the namespace holds any rule or chain of the mesh.
func (n Namespace) HasRules(ctx context.Context) (bool, error) {
	r, err := n.PlanClean(ctx)
	return len(r.Programs) > 0, err
}

// Families returns the treatment of each family of the namespace.
func (n Namespace) Families(want redirect.Wanted) (redirect.Families, error) {
	if n.NetNS == nil {
		return redirect.Families{}, errNoNamespace
	}
	return netns.In(n.NetNS, func() (redirect.Families, error) { return new(pass).families(want) })
}

func (p *pass) families(want redirect.Wanted) (redirect.Families, error) {
	addresses, err := p.addresses()
	if err != nil {
		return redirect.Families{}, err
	}
	return want.FamiliesOf(addresses, route.KernelHasIPv6())
}

// routing returns the wanted addresses, policy rules and routes. If IPv6 is disabled on lo and the namespace has no IPv6
// address, the kernel accepts no IPv6 routing. The IPv6 rules are for addresses that come later; the packets that these
// rules pass to the proxy are then dropped.
func routing(of redirect.Wanted, f redirect.Families) route.Want {
	want := route.For(of.Routing(f))
	if f.HasIPv6 || route.LoopbackHasIPv6() {
		return want
	}
	want.PassthroughV6 = false
	want.Policy = slices.DeleteFunc(want.Policy, func(p route.Policy) bool { return p.Family == ruleset.IPv6 })
	return want
}

// setRouting sets up the wanted addresses, routes and policy rules, and removes the ones of an earlier configuration.
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

// stale finds unwanted routing of the mesh. A namespace without rules of the mesh has no such routing, so stale sends
// no request for a new pod.
func (p *pass) stale(want route.Want) (route.Want, error) {
	if !p.report.Mesh {
		return route.Want{}, nil
	}
	left, err := p.leftovers(p.marks)
	left.PassthroughV6 = left.PassthroughV6 && !want.PassthroughV6
	left.Policy = slices.DeleteFunc(left.Policy, func(p route.Policy) bool { return slices.ContainsFunc(want.Policy, p.Same) })
	return left, err
}

// leftovers finds routing that belongs to the mesh. The policy rules of any TPROXY look the same, so it selects the ones
// with the mesh's marks and mask, and those of a sidecar's usual mark: ztunnel's packets have that mark too.
func (p *pass) leftovers(marks []uint32) (route.Want, error) {
	left, err := p.policyRouting()
	if err != nil {
		return route.Want{}, err
	}
	owner, sidecar := p.owner, redirect.Sidecar()
	left.Policy = slices.DeleteFunc(left.Policy, func(p route.Policy) bool {
		ours := p.Mask == owner.Mask && (slices.Contains(marks, p.Mark) || p.Mark == owner.Mark)
		return !ours && (p.Mask != sidecar.Mask || p.Mark != sidecar.Mark)
	})
	return left, nil
}
