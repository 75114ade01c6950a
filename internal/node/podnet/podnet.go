// Package podnet makes a network namespace redirect what a Spec captures: rules, addresses and routes together.
//
// It promises that Apply may be repeated, also over what an earlier or half-finished run left; that rules in place
// before it which are not the mesh's stay; and that Verify and Plan write nothing. It never decides what to capture and
// opens a namespace: which one it is, and that it
// is not the node's, is checked by who opened it.
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
	// NetNS is the namespace, which the caller has opened and checked, and closes. Nil is an error, so that one that got
	// lost programs nothing.
	NetNS *netns.Namespace
	// Backend is the way by which rules are read and written; "" is redirect.Auto.
	Backend redirect.Backend
	// PreferTools says that auto is Tools on this node, where it is not Native: a self-test found that netlink does not do.
	PreferTools bool
	// Tools says how iptables is found, where it is needed.
	Tools iptables.Host
	Log   *slog.Logger

	mode mode
}

// mode is what is used in a namespace. A later one does what those before it do not.
type mode uint8

const (
	netlinkAlone    mode = iota
	netlinkAndTools      // the tools for what netlink does not reach: the legacy tables
	toolsAlone
)

// errNoNamespace is a missing network namespace.
var errNoNamespace = errors.New("no network namespace is given")

// insufficient is an attempt that took more than its mode has. Nothing was changed.
type insufficient struct {
	needs mode
	cause error
}

func (e *insufficient) Error() string { return e.cause.Error() }
func (e *insufficient) Unwrap() error { return e.cause }

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
	err := n.run(ctx, exclusive, func(n Namespace) error {
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
			return n.insteadByTools(err)
		}
		return w.setRouting(routing(spec, w.report.Families))
	})
	return r, err
}

// routing is what is wanted besides rules. A namespace without an IPv6 address whose lo has IPv6 switched off takes none
// of IPv6, and its rules do without: they are there for addresses that come later, and what they hand to the proxy then
// goes no further.
func routing(spec redirect.Spec, f redirect.Families) route.Want {
	want := route.For(spec.Routing(f))
	if f.HasIPv6 || route.LoopbackHasIPv6() {
		return want
	}
	want.PassthroughV6 = false
	want.Policy = slices.DeleteFunc(want.Policy, func(p route.Policy) bool { return p.Family == ruleset.IPv6 })
	return want
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
	err := n.run(ctx, shared, func(n Namespace) error {
		w, err := n.inspect(ctx, &spec)
		if err != nil {
			return err
		}
		defer w.close()
		r = w.done()
		want := routing(spec, r.Families)
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
	err := n.run(ctx, exclusive, func(n Namespace) error {
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
	err := n.run(ctx, shared, func(n Namespace) error {
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
	err := n.run(ctx, shared, func(n Namespace) error {
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
	if n.NetNS == nil {
		return f, errNoNamespace
	}
	err := n.NetNS.Do(func() (err error) {
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
	return spec.FamiliesOf(addresses, route.KernelHasIPv6())
}

// access says whether other runs of this program may work on the namespace meanwhile.
type access bool

const (
	shared    access = false
	exclusive access = true
)

// attempts bounds how often the work on a namespace begins, for whatever reason it begins anew.
const attempts = 10

// run runs fn in the namespace: by netlink alone, which is enough for nearly all, or in the mode that an attempt turned
// out to need. It begins anew where the rules changed in between, as often as the bound allows.
func (n Namespace) run(ctx context.Context, a access, fn func(Namespace) error) error {
	if n.NetNS == nil {
		return errNoNamespace
	}
	tools, err := n.byTools()
	if err != nil {
		return err
	}
	if tools {
		n.mode = toolsAlone
	}
	for range attempts {
		err = n.attempt(ctx, a, fn)
		more, short := errors.AsType[*insufficient](err)
		switch {
		case ctx.Err() != nil:
			return err
		case short && more.needs > n.mode:
			n.fallBack(ctx, more)
			n.mode = more.needs
		case !changed(err):
			return err
		}
	}
	return fmt.Errorf("retries exhausted: the rules of the namespace keep changing (%d attempts): %w", attempts, err)
}

// changed reports whether the rules changed between reading and writing, so that nothing was done.
func changed(err error) bool {
	return errors.Is(err, nftables.ErrChanged) || errors.Is(err, iptables.ErrChanged)
}

func (n Namespace) fallBack(ctx context.Context, why *insufficient) {
	if why.needs == toolsAlone {
		n.Log.WarnContext(ctx, "the kernel does not do by netlink what is needed; using the iptables tools of the host", "cause", why.Error())
	}
}

// attempt runs fn once. Netlink alone needs no lock: one transaction of the kernel tells by itself that somebody else
// changed the rules, and a lock could be held by whoever is in the pod.
func (n Namespace) attempt(ctx context.Context, a access, fn func(Namespace) error) error {
	if n.mode == netlinkAlone {
		return n.NetNS.Do(func() error { return fn(n) })
	}
	return n.isolated(ctx, func() error {
		if a == shared {
			return fn(n)
		}
		held, err := lock(ctx)
		if err != nil {
			return err
		}
		n.Tools.Held = held
		return errors.Join(fn(n), held.Close())
	})
}

// byTools tells whether the tools of the host are the way from the beginning.
func (n Namespace) byTools() (bool, error) {
	if wants := n.wants(); wants != redirect.Auto || !n.PreferTools {
		return wants == redirect.Tools, nil
	}
	others, err := n.NetNS.OfOtherUsers()
	return !others, err
}

// isolated runs fn in the namespace, with the pod's own iptables lock and without name service: the tools would ask it
// for the names of user ids, which can take a minute (a node with a directory service) or deadlock.
func (n Namespace) isolated(ctx context.Context, fn func() error) error {
	binds := existing(netns.Bind{Source: "/dev/null", Target: "/etc/nsswitch.conf"})
	level := slog.LevelDebug
	if lock := n.lockFile(); lock != "" {
		// Legacy tools from 1.8.6 on are told the lock by their environment, earlier ones know this path only.
		binds = append(binds, existing(netns.Bind{Source: lock, Target: "/run/xtables.lock"})...)
		level = slog.LevelWarn
	}
	isolation, err := n.NetNS.DoIsolated(binds, fn)
	if isolation != nil {
		n.Log.Log(ctx, level, "running iptables without full isolation from the node", "cause", isolation.Error())
	}
	return err
}

// lockFile is what legacy tools lock: the namespace's own file, or "" for the host's lock in the current namespace.
func (n Namespace) lockFile() string {
	if n.NetNS.Current() {
		return ""
	}
	return n.NetNS.Path()
}

// existing leaves out a bind whose target is not there: then there is nothing to hide.
func existing(b netns.Bind) []netns.Bind {
	if _, err := os.Stat(b.Target); err != nil {
		return nil
	}
	return []netns.Bind{b}
}
