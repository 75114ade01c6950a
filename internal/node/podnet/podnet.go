// Package podnet makes a network namespace redirect what a Spec captures: rules, addresses and routes together.
//
// It promises that Apply may be repeated, also over what an earlier or half-finished run left; that rules in place
// before it which are not the mesh's stay; and that Verify and Plan write nothing. It never decides what to capture and
// never touches the host's namespace unless it was told to work in the current one.
//
// Start at Namespace.
package podnet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
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
	// Path is the file of the namespace.
	Path string
	// Current means the namespace of the caller, and Path must be empty then: by hand on a node that is the node's own. It
	// has to be said, so that a path that got lost programs nothing.
	Current bool
	// Backend is the way by which rules are read and written; "" is redirect.Auto.
	Backend redirect.Backend
	// PreferTools says that auto is Tools on this node, where it is not Native: a self-test found that netlink does not do.
	PreferTools bool
	// Tools says how iptables is found, where it is needed.
	Tools iptables.Host
	Log   *slog.Logger

	means means
}

// means is what is used in a namespace.
type means uint8

const (
	netlinkAlone    means = iota
	netlinkAndTools       // the tools for what netlink does not reach: the legacy tables
	toolsAlone
)

// errUnnamed is a namespace that nobody named, or named twice.
var errUnnamed = errors.New("it is not said which network namespace is meant")

// Conduct says what Apply does with rules of the mesh that are there and are not those wanted.
type Conduct uint8

// Reconcile replaces them; Refuse leaves all as it is and reports ErrOtherRules.
const (
	Reconcile Conduct = iota
	Refuse
)

// ErrOtherRules says that the namespace already redirects in another way.
var ErrOtherRules = errors.New("the namespace already holds other rules of the mesh")

// Report is what was found and done in a namespace.
type Report struct {
	Families redirect.Families
	// Mesh says that rules of the mesh were there before anything was done, the wanted ones or others.
	Mesh bool
	// Tools are the programs that write each family's rules.
	Tools []string
	// Diffs tell how each family departed from what was wanted, before anything was done; empty ones are left out.
	Diffs []ruleset.Diff
	// Routing tells the same of addresses, policy rules and routes, as sentences. Only Verify fills it.
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
	// Of is the family: IPv4, IPv6 or, for both together, inet. By is what carries it out.
	Of, By string
	// Text is what "iptables-restore --noflush" or, where By is native, "nft -f" would take. Dialect is the variant of the
	// tool that shows the rules.
	Text, Dialect string
}

// Clean reports whether everything was as wanted.
func (r Report) Clean() bool { return len(r.Diffs) == 0 && len(r.Routing) == 0 }

// Apply brings the namespace to the Spec.
func (n Namespace) Apply(ctx context.Context, spec redirect.Spec, conduct Conduct) (Report, error) {
	var r Report
	err := n.alone(ctx, func(n Namespace) error {
		w, err := n.inspect(ctx, &spec)
		if err != nil {
			return err
		}
		defer w.close()
		defer func() { r = w.done() }()
		if conduct == Refuse && w.otherRules() {
			return ErrOtherRules
		}
		if err := w.apply(ctx); err != nil {
			return n.instead(err)
		}
		return w.setRouting(route.For(spec.Routing(w.report.Families)))
	})
	return r, err
}

// setRouting brings addresses, routes and policy rules to what is wanted. What an earlier configuration left goes, too.
func (w *work) setRouting(want route.Want) error {
	left, err := w.stale(want)
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

// stale finds routing of the mesh that is not wanted. A namespace in which no rule of the mesh was found has none: a new
// pod pays nothing for this.
func (w *work) stale(want route.Want) (route.Want, error) {
	if !w.report.Mesh {
		return route.Want{}, nil
	}
	left, err := leftovers(w.marks)
	left.PassthroughV6 = left.PassthroughV6 && !want.PassthroughV6
	left.Policy = slices.DeleteFunc(left.Policy, func(p route.Policy) bool { return slices.Contains(want.Policy, p) })
	return left, err
}

// Verify compares the namespace with the Spec and writes nothing.
func (n Namespace) Verify(ctx context.Context, spec redirect.Spec) (Report, error) {
	var r Report
	err := n.do(ctx, func(n Namespace) error {
		w, err := n.inspect(ctx, &spec)
		if err != nil {
			return err
		}
		defer w.close()
		r = w.done()
		want := route.For(spec.Routing(r.Families))
		if r.Routing, err = route.Check(want); err != nil {
			return err
		}
		left, err := w.stale(want)
		for _, p := range left.Policy {
			r.Routing = append(r.Routing, fmt.Sprintf("policy rule %s is left over", p))
		}
		if left.PassthroughV6 {
			r.Routing = append(r.Routing, "address ::6/128 on lo is left over")
		}
		return err
	})
	return r, err
}

// Clean removes everything that is the mesh's, of whatever configuration. The Spec only says which mark and table are
// known to be the mesh's besides those that rules found here use.
func (n Namespace) Clean(ctx context.Context, spec redirect.Spec) (Report, error) {
	var r Report
	err := n.alone(ctx, func(n Namespace) error {
		w, err := n.inspect(ctx, nil)
		if err != nil {
			return err
		}
		defer w.close()
		defer func() { r = w.done() }()
		left, err := leftovers(append(w.marks, spec.Mark))
		if err != nil {
			return err
		}
		for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
			// The configured table's route goes even where the rule that led to it is gone already.
			left.Policy = append(left.Policy, route.Policy{Family: f, Mark: spec.Mark, Table: spec.Table})
		}
		if err := w.apply(ctx); err != nil {
			return err
		}
		if err := route.Remove(left); err != nil {
			return fmt.Errorf("removing routing: %w", err)
		}
		return nil
	})
	return r, err
}

// PlanClean gives the Programs that Clean would run, and runs none.
func (n Namespace) PlanClean(ctx context.Context) (Report, error) {
	var r Report
	err := n.do(ctx, func(n Namespace) error {
		w, err := n.inspect(ctx, nil)
		if err != nil {
			return err
		}
		defer w.close()
		w.didNative()
		for _, s := range w.steps {
			w.did(s)
		}
		r = w.done()
		return nil
	})
	return r, err
}

// leftovers finds routing that belongs to the mesh: policy rules have the shape of anybody's TPROXY, so only those for a
// mark that the mesh is known to use count.
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

// Ours reports whether the namespace holds any rule or chain of the mesh.
func (n Namespace) Ours(ctx context.Context) (bool, error) {
	ours := false
	err := n.do(ctx, func(n Namespace) error {
		w, err := n.inspect(ctx, nil)
		if err != nil {
			return err
		}
		defer w.close()
		ours = len(w.steps) > 0 || w.nativeWant != nil
		return nil
	})
	return ours, err
}

// Families says which families of the namespace would be treated how.
func (n Namespace) Families(spec redirect.Spec) (redirect.Families, error) {
	var f redirect.Families
	if (n.Path == "") != n.Current {
		return f, errUnnamed
	}
	err := netns.Do(n.Path, func() (err error) {
		f, err = families(spec)
		return err
	})
	return f, err
}

func families(spec redirect.Spec) (redirect.Families, error) {
	all, err := route.Addresses()
	if err != nil {
		return redirect.Families{}, err
	}
	var addresses []netip.Addr
	for _, a := range all {
		addresses = append(addresses, a.Addr())
	}
	return spec.FamiliesOf(addresses)
}

// alone is do for those who write: no other run of this program works on the namespace meanwhile. Whoever else changes
// its rules meanwhile makes that it begins again.
func (n Namespace) alone(ctx context.Context, fn func(Namespace) error) error {
	return n.do(ctx, func(n Namespace) error {
		if n.means == netlinkAlone {
			// One transaction of the kernel tells by itself that somebody else changed the rules. A lock could be held by
			// whoever is in the pod.
			return again(ctx, n, fn)
		}
		held, err := lock(ctx)
		if err != nil {
			return err
		}
		n.Tools.Held = held
		return errors.Join(again(ctx, n, fn), held.Close())
	})
}

// again does the work, and anew where somebody else changed the rules meanwhile.
func again(ctx context.Context, n Namespace, fn func(Namespace) error) error {
	err := fn(n)
	for try := 0; errors.Is(err, nftables.ErrChanged) && try < retries && ctx.Err() == nil; try++ {
		err = fn(n)
	}
	return err
}

// retries bounds how often a namespace that somebody else is changing is begun again.
const retries = 10

// do runs fn in the namespace with the means that it takes: netlink alone, which is enough for nearly all, or with tools.
func (n Namespace) do(ctx context.Context, fn func(Namespace) error) error {
	if (n.Path == "") != n.Current {
		return errUnnamed
	}
	tools, err := n.byTools()
	if err != nil {
		return err
	}
	if tools {
		n.means = toolsAlone
		return n.isolated(ctx, fn)
	}
	n.means = netlinkAlone
	err = netns.Do(n.Path, func() error { return fn(n) })
	for errors.Is(err, errTools) && n.means != toolsAlone {
		n.means = netlinkAndTools
		if errors.Is(err, nftables.ErrUnsupported) {
			n.means = toolsAlone
			n.Log.WarnContext(ctx, "the kernel does not do by netlink what is needed; using the iptables tools of the host", "cause", err.Error())
		}
		err = n.isolated(ctx, fn)
	}
	return err
}

// byTools tells whether the tools of the host are the way from the beginning.
func (n Namespace) byTools() (bool, error) {
	if wants := n.wants(); wants != redirect.Auto || !n.PreferTools {
		return wants == redirect.Tools, nil
	}
	others, err := netns.OfOtherUsers(n.Path)
	return !others, err
}

// isolated runs fn in the namespace, with the pod's own iptables lock and without name service: the tools would ask it
// for the names of user ids, which can take a minute (a node with a directory service) or deadlock.
func (n Namespace) isolated(ctx context.Context, fn func(Namespace) error) error {
	binds := existing(netns.Bind{Source: "/dev/null", Target: "/etc/nsswitch.conf"})
	if n.Path != "" {
		// Legacy tools from 1.8.6 on are told the lock by their environment, earlier ones know this path only.
		binds = append(binds, existing(netns.Bind{Source: n.Path, Target: "/run/xtables.lock"})...)
	}
	isolation, err := netns.DoIsolated(n.Path, binds, func() error { return fn(n) })
	if isolation != nil {
		level := slog.LevelDebug
		if n.Path != "" {
			level = slog.LevelWarn
		}
		n.Log.Log(ctx, level, "running iptables without full isolation from the node", "cause", isolation.Error())
	}
	return err
}

// existing leaves out a bind whose target is not there: then there is nothing to hide.
func existing(b netns.Bind) []netns.Bind {
	if _, err := os.Stat(b.Target); err != nil {
		return nil
	}
	return []netns.Bind{b}
}
