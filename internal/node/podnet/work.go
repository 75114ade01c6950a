package podnet

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
)

// work is one pass over a namespace: what was found in it, and the programs that would put it right.
type work struct {
	log    *slog.Logger
	tools  *iptables.Host
	report Report
	steps  []step
	// cleaning says that everything of the mesh is to go.
	cleaning bool
	// marks are those that rules of the mesh were found to use.
	marks []uint32
}

type step struct {
	tool    iptables.Tool
	program ruleset.Program
	// residue says that rules of the mesh were there, and not those wanted.
	residue bool
}

// inspect reads both families and compares them with the Spec; without one nothing is wanted.
func (n Namespace) inspect(ctx context.Context, spec *redirect.Spec) (*work, error) {
	tools := n.Tools
	tools.Lock = n.Path
	w := &work{log: n.Log, tools: &tools, cleaning: spec == nil}
	wanted := []ruleset.Set{{Family: ruleset.IPv4}, {Family: ruleset.IPv6}}
	if spec != nil {
		f, err := families(*spec)
		if err != nil {
			return nil, err
		}
		w.report.Families = f
		wanted = spec.Sets(f)
	}
	for _, want := range wanted {
		if err := w.family(ctx, want); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// family looks at one family. If nothing is wanted of it, a host without tools for it is no error: then nothing that
// this program could have written is there.
func (w *work) family(ctx context.Context, want ruleset.Set) error {
	choice, err := iptables.Choose(ctx, want.Family, w.tools)
	if err != nil && want.Empty() {
		w.log.DebugContext(ctx, "leaving a family alone", "family", want.Family.String(), "cause", err.Error())
		return nil
	}
	if err != nil {
		return err
	}
	w.report.Tools = append(w.report.Tools, choice.Name())
	if err := w.compare(ctx, choice.Tool, want); err != nil {
		return err
	}
	// The other variant's rules would be met by every packet as well: none of ours may stay there.
	for _, other := range choice.Others {
		if err := w.compare(ctx, other, ruleset.Set{Family: want.Family}); err != nil {
			return err
		}
	}
	return nil
}

func (w *work) compare(ctx context.Context, tool iptables.Tool, want ruleset.Set) error {
	have, err := tool.Read(ctx)
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
	diff.Tool = string(tool.Variant)
	w.report.Diffs = append(w.report.Diffs, diff)
	program := ruleset.Reconcile(want, have, claim)
	w.steps = append(w.steps, step{tool: tool, program: program, residue: residue})
	return nil
}

// otherRules reports whether rules of the mesh would have to be replaced.
func (w *work) otherRules() bool {
	for _, s := range w.steps {
		if s.residue {
			return true
		}
	}
	return false
}

// apply runs the programs, IPv4 first.
func (w *work) apply(ctx context.Context) error {
	for _, s := range w.steps {
		if err := s.tool.Apply(ctx, s.program); err != nil {
			return err
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
	w.report.Programs = append(w.report.Programs, s.program)
	w.report.Ran = append(w.report.Ran, s.tool.Name())
}
