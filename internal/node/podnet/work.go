package podnet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/nftables"
	"github.com/meshcni/istio-cni/internal/node/nftables/native"
)

// work is one pass over a namespace: what was found in it, and the programs that would put it right.
type work struct {
	log    *slog.Logger
	tools  *iptables.Host
	report Report
	steps  []step
	// session and view are how the rules are read and written by netlink; nil where that is for tools.
	session *nftables.Session
	view    *nftables.View
	// legacy are the families of which the legacy tables hold rules of the mesh.
	legacy []ruleset.Family
	// direct says that the rules are written by netlink, native that they are in tables of nf_tables' own.
	direct, native bool
	// nativeWant is what the native tables are to be, nil where they are as wanted; nativeResidue says that there are some.
	nativeWant    *ruleset.Set
	nativeResidue bool
	// cleaning says that everything of the mesh is to go.
	cleaning bool
	// marks are those that rules of the mesh were found to use.
	marks []uint32
}

type step struct {
	store   store
	program ruleset.Program
	// residue says that rules of the mesh were there, and not those wanted.
	residue bool
}

// readLimit bounds reading what is there, by tools as well. A namespace of usual size is read in a millisecond.
const readLimit = 10 * time.Second

// ErrUninspectable says that the namespace holds more rules or routes than are read, or that reading them takes too long:
// whoever is in it may have filled it. Routes are read after the rules are written.
var ErrUninspectable = nftables.ErrUninspectable

var errSlow = fmt.Errorf("%w: reading the rules takes more than %s", ErrUninspectable, readLimit)

// inspect reads both families and compares them with the Spec; without one nothing is wanted. What it gives must be closed.
func (n Namespace) inspect(ctx context.Context, spec *redirect.Spec) (*work, error) {
	tools := n.Tools
	tools.Lock = n.lockFile()
	w := &work{log: n.Log, tools: &tools, cleaning: spec == nil}
	reading, cancel := context.WithTimeoutCause(ctx, readLimit, errSlow)
	defer cancel()
	err := n.compare(reading, w, spec)
	if err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

func (n Namespace) compare(ctx context.Context, w *work, spec *redirect.Spec) error {
	if err := n.open(ctx, w); err != nil {
		return err
	}
	wanted := []ruleset.Set{{Family: ruleset.IPv4}, {Family: ruleset.IPv6}}
	tables := ruleset.Set{Family: native.Inet}
	if spec != nil {
		f, err := families(*spec)
		if err != nil {
			return err
		}
		w.report.Families = f
		if w.native {
			tables = native.Rules(*spec, f)
		} else {
			wanted = spec.Sets(f)
		}
	}
	w.tables(tables)
	for _, want := range wanted {
		if err := w.family(ctx, want); err != nil {
			return err
		}
	}
	return nil
}

// close lets go of the kernel.
func (w *work) close() {
	if w.session != nil {
		_ = w.session.Close() // nothing is on its way
		w.session = nil
	}
}

// family looks at one family. If nothing is wanted of it, a host without tools for it is no error: then nothing that
// this program could have written is there.
func (w *work) family(ctx context.Context, want ruleset.Set) error {
	main, others, err := w.stores(ctx, want.Family)
	if err != nil && want.Empty() && !errors.Is(err, errLegacy) {
		w.log.DebugContext(ctx, "leaving a family alone", "family", want.Family.String(), "cause", err.Error())
		return nil
	}
	if err != nil {
		return err
	}
	if w.native {
		w.report.Tools = []string{string(redirect.Native)}
	} else {
		w.report.Tools = append(w.report.Tools, main.Name())
	}
	if err := w.compare(ctx, main, want); err != nil {
		return err
	}
	// The rules of other stores would be met by every packet as well: none of ours may stay there.
	for _, other := range others {
		if err := w.compare(ctx, other, ruleset.Set{Family: want.Family}); err != nil {
			return err
		}
	}
	return nil
}

func (w *work) compare(ctx context.Context, at store, want ruleset.Set) error {
	have, err := at.Read(ctx)
	if err != nil {
		return err
	}
	claim := redirect.Claim(want, have)
	if w.cleaning {
		claim = redirect.ClaimAll(have)
	}
	w.marks = append(w.marks, redirect.Marks(have, claim)...)
	diff := ruleset.Compare(want, have, claim)
	for _, rule := range diff.Others {
		w.report.Notes = append(w.report.Notes, fmt.Sprintf("%s: not ours, behind ours, left alone: %s", want.Family, rule))
	}
	residue := !ruleset.Compare(ruleset.Set{Family: want.Family}, have, claim).Empty()
	w.report.Mesh = w.report.Mesh || residue
	if diff.Empty() {
		return nil
	}
	diff.Tool = at.Dialect()
	w.report.Diffs = append(w.report.Diffs, diff)
	program := ruleset.Reconcile(want, have, claim)
	w.steps = append(w.steps, step{store: at, program: program, residue: residue})
	return nil
}

// otherRules reports whether rules of the mesh would have to be replaced.
func (w *work) otherRules() bool {
	if w.nativeResidue {
		return true
	}
	for _, s := range w.steps {
		if s.residue {
			return true
		}
	}
	return false
}

// apply carries out the programs: what goes by netlink in one transaction, then what goes by tools, IPv4 first.
func (w *work) apply(ctx context.Context) error {
	plan := nftables.Plan{Native: w.nativeWant}
	for _, s := range w.steps {
		if _, byNetlink := s.store.(kernel); byNetlink {
			plan.Programs = append(plan.Programs, s.program)
		}
	}
	if plan.Native != nil || len(plan.Programs) > 0 {
		if err := w.view.Apply(plan); err != nil {
			return fmt.Errorf("writing rules by netlink: %w", err)
		}
	}
	w.didNative()
	for _, s := range w.steps {
		if program, byTool := s.store.(tool); byTool {
			if err := program.Apply(ctx, s.program); err != nil {
				return err
			}
		}
		w.did(s)
	}
	return nil
}

// done is the report.
func (w *work) done() Report {
	w.report.Processes = w.tools.Started()
	return w.report
}

// did notes a step in the report.
func (w *work) did(s step) {
	w.report.Programs = append(w.report.Programs, Program{
		Of: s.program.Family.String(), By: s.store.Name(), Dialect: s.store.Dialect(), Text: s.program.String(),
	})
}

func (w *work) didNative() {
	if w.nativeWant != nil {
		w.report.Programs = append(w.report.Programs, Program{
			Of: "inet", By: string(redirect.Native), Dialect: "nft", Text: native.Script(*w.nativeWant),
		})
	}
}
