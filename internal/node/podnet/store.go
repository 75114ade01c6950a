package podnet

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/nftables"
	"github.com/meshcni/istio-cni/internal/node/nftables/native"
)

// store is a place where the kernel keeps rules of one family: a packet meets those of all of them.
type store interface {
	// Name is what writes the rules, for people. Dialect is the variant of iptables that shows them.
	Name() string
	Dialect() string
	Read(ctx context.Context) (ruleset.Set, error)
}

// tool is a store that programs of the host read and write.
type tool struct{ iptables.Tool }

func (t tool) Dialect() string { return string(t.Variant) }

// kernel is the store that is read and written by netlink.
type kernel struct {
	view   *nftables.View
	family ruleset.Family
}

func (k kernel) Name() string                              { return string(redirect.Netlink) }
func (k kernel) Dialect() string                           { return string(iptables.NFT) }
func (k kernel) Read(context.Context) (ruleset.Set, error) { return k.view.Set(k.family), nil }

// errTables are rules of the mesh in the legacy tables, to be moved over, which netlink does not reach.
var errTables = errors.New("the iptables tools of the host are needed for the legacy tables")

// errLegacy keeps rules from being doubled.
var errLegacy = fmt.Errorf("%w: there are rules of the mesh in the legacy iptables tables, and no iptables-legacy here that could "+
	"take them away", iptables.ErrMissing)

// wants is the backend that was asked for: to force a variant of the tools is to ask for them.
func (n Namespace) wants() redirect.Backend {
	if n.Tools.Force != "" && (n.Backend == "" || n.Backend == redirect.Auto) {
		return redirect.Tools
	}
	if n.Backend == "" {
		return redirect.Auto
	}
	return n.Backend
}

// native reports whether the rules are to be in tables of nf_tables' own. Without being told they are where the kernel
// refuses to look at users for us: it does so for iptables in a namespace that belongs to another user namespace (a pod with
// hostUsers: false; net/netfilter/xt_owner.c, owner_check).
func (n Namespace) native() (bool, error) {
	if wants := n.wants(); wants != redirect.Auto || n.mode == toolsAlone {
		return wants == redirect.Native, nil
	}
	return n.NetNS.OfOtherUsers()
}

// open finds out about the namespace what takes no tool. Both families are read at one moment.
func (n Namespace) open(ctx context.Context, w *work) error {
	session, err := nftables.Open()
	if err == nil {
		w.session = session
		w.view, err = session.Read(ctx)
	}
	switch {
	case err != nil && n.mode == toolsAlone && errors.Is(err, nftables.ErrUnsupported):
		return nil // there is nothing that a tool would not see
	case err != nil:
		return n.insteadByTools(fmt.Errorf("reading rules by netlink: %w", err))
	}
	w.direct = n.mode != toolsAlone
	if w.native, err = n.native(); err != nil {
		return err
	}
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		there, err := iptables.LegacyMesh(f)
		if err != nil {
			return err
		}
		if there {
			w.legacy = append(w.legacy, f)
		}
	}
	if n.mode == netlinkAlone && len(w.legacy) > 0 {
		return &insufficient{needs: netlinkAndTools, cause: errTables}
	}
	return nil
}

// insteadByTools lets the tools take over what the kernel does not do by netlink, where netlink alone was not asked for.
func (n Namespace) insteadByTools(err error) error {
	if n.wants() == redirect.Auto && errors.Is(err, nftables.ErrUnsupported) {
		return &insufficient{needs: toolsAlone, cause: err}
	}
	return err
}

// stores gives the place for what is wanted of a family, and those where nothing of the mesh may be.
func (w *work) stores(ctx context.Context, f ruleset.Family) (main store, others []store, err error) {
	if w.direct {
		main = kernel{w.view, f}
		if !slices.Contains(w.legacy, f) {
			return main, nil, nil
		}
		legacy, found := w.tools.Legacy(f)
		if !found {
			return nil, nil, fmt.Errorf("%s: %w", f, errLegacy)
		}
		return main, []store{tool{legacy}}, nil
	}
	choice, err := iptables.Choose(ctx, f, w.tools)
	if err != nil {
		return nil, nil, err
	}
	for _, other := range choice.Others {
		others = append(others, tool{other})
	}
	return tool{choice.Tool}, others, nil
}

// tables compares the native tables with what is wanted of them, which is nothing where the rules are iptables'.
func (w *work) tables(want ruleset.Set) {
	if w.view == nil {
		return
	}
	have := w.view.Native()
	w.report.Mesh = w.report.Mesh || !have.Empty()
	diff := ruleset.Compare(want, have, native.Claim(have))
	if diff.Empty() {
		return
	}
	diff.Tool = string(redirect.Native)
	w.report.Diffs = append(w.report.Diffs, diff)
	w.nativeWant, w.nativeResidue = &want, !have.Empty()
}
