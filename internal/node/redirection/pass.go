package redirection

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/nftables"
	"github.com/meshcni/istio-cni/internal/node/route"
)

// pass is one reading of a namespace, with the changes that lead to the desired state.
type pass struct {
	mode    mode
	owner   redirect.Owner
	clean   bool // all rules of the mode are removed
	log     *slog.Logger
	tools   *iptables.Host
	session *nftables.Session
	// view has the rules read by netlink, nil if the kernel has no nf_tables.
	view   *nftables.View
	report Report
	// changes are applied in this order: the netlink changes in one transaction, then the others.
	changes []change
	// conflict: the changes replace or remove existing rules of the mesh.
	conflict bool
	// marks are the packet marks in the existing rules of the mesh.
	marks []uint32
	// legacy has the rules of the legacy tables that were read. own has the addresses, and policy the policy rules with marks, once
	// they were read.
	legacy []ruleset.Set
	own    []netip.Addr
	policy *route.Want
}

// addresses returns the addresses of the namespace.
func (p *pass) addresses() (own []netip.Addr, err error) {
	if p.own == nil {
		p.own, err = route.Addresses()
	}
	return p.own, err
}

// policyRouting returns the result of [route.Leftovers].
func (p *pass) policyRouting() (route.Want, error) {
	if p.policy == nil {
		found, err := route.Leftovers(p.owner.Mask)
		if err != nil {
			return found, fmt.Errorf("looking for routing of an earlier configuration: %w", err)
		}
		p.policy = &found
	}
	left := *p.policy
	left.Policy = slices.Clone(left.Policy)
	return left, nil
}

// place is one of the kernel's rule stores for a family. A packet traverses the rules of every place.
type place struct {
	by, dialect string
	tool        *iptables.Tool // nil for netlink
}

// change turns the rules of a place into a wanted Set.
type change struct {
	Program

	tool       *iptables.Tool // nil for netlink
	operations ruleset.Program
	native     *ruleset.Set // replaces operations for the native tables
}

// readLimit bounds the reading of existing rules, also by tools. A namespace of usual size takes a millisecond.
const readLimit = 10 * time.Second

var (
	errSlow = fmt.Errorf("%w: reading the rules takes more than %s", ErrUninspectable, readLimit)
	// errLegacy prevents a second set of rules beside the one in the legacy tables.
	errLegacy = fmt.Errorf("%w: there are rules of the mesh in the legacy iptables tables, and no iptables-legacy here that could "+
		"remove them", iptables.ErrMissing)
)

// inspect reads all places and compares them with the wanted rules; nil means no rules of the owner. The caller closes the pass.
func (n Namespace) inspect(ctx context.Context, m mode, owner redirect.Owner, want redirect.Wanted) (*pass, error) {
	tools := n.Tools
	tools.Lock = n.lockFile()
	p := &pass{mode: m, owner: owner, clean: want == nil, log: n.Log, tools: &tools}
	ctx, cancel := context.WithTimeoutCause(ctx, readLimit, errSlow)
	defer cancel()
	if err := p.compareAll(ctx, want); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

// close ends the session.
func (p *pass) close() {
	if p.session != nil {
		_ = p.session.Close() // no message is in flight
	}
}

func (p *pass) compareAll(ctx context.Context, want redirect.Wanted) error {
	legacy, err := p.read(ctx)
	if err != nil {
		return err
	}
	wanted := []ruleset.Set{{Family: ruleset.Inet}, {Family: ruleset.IPv4}, {Family: ruleset.IPv6}}
	if want != nil {
		f, err := p.families(want)
		if err != nil {
			return err
		}
		p.report.Families = f
		if p.mode.backend == redirect.Native {
			wanted[0] = want.NativeSet(f)
		} else {
			wanted = append(wanted[:1], want.Sets(f)...)
		}
	}
	for _, want := range wanted {
		if err := p.family(ctx, want, slices.Contains(legacy, want.Family)); err != nil {
			return err
		}
	}
	return nil
}

// read reads, at one moment, the rules that need no tool. It returns the families with rules of the mesh in legacy tables.
func (p *pass) read(ctx context.Context) (legacy []ruleset.Family, err error) {
	if p.session, err = nftables.Open(); err == nil {
		p.view, err = p.session.Read(ctx, p.owner)
	}
	switch {
	case errors.Is(err, nftables.ErrUnsupported) && p.mode.backend == redirect.Tools:
		return nil, nil // the tools read all rules
	case err != nil:
		return nil, fmt.Errorf("reading rules by netlink: %w", err)
	}
	if legacy, err = legacyOf(p.owner); len(legacy) > 0 && !p.mode.tools {
		return nil, errNeedsTools
	}
	return legacy, err
}

// legacyOf returns the families whose legacy tables hold chains of the owner.
func legacyOf(owner redirect.Owner) (legacy []ruleset.Family, err error) {
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		found, err := iptables.LegacyHas(f, owner.ChainPrefix)
		if err != nil {
			return nil, err
		}
		if found {
			legacy = append(legacy, f)
		}
	}
	return legacy, nil
}

// family compares the places of one family: the first place gets the wanted rules, the others no rules of the mesh. If want
// is empty, missing tools for the family are not an error because this program cannot have written rules there.
func (p *pass) family(ctx context.Context, want ruleset.Set, legacy bool) error {
	places, err := p.places(ctx, want.Family, legacy)
	if err != nil && want.Empty() && !errors.Is(err, errLegacy) {
		p.log.DebugContext(ctx, "skipping a family", "family", want.Family.String(), "cause", err.Error())
		return nil
	}
	if err != nil {
		return err
	}
	for i, at := range places {
		if native := want.Family == ruleset.Inet; i == 0 && native == (p.mode.backend == redirect.Native) {
			p.report.Tools = append(p.report.Tools, at.by)
		}
		if err := p.compare(ctx, at, want); err != nil {
			return err
		}
		want = ruleset.Set{Family: want.Family}
	}
	return nil
}

func (p *pass) places(ctx context.Context, f ruleset.Family, legacy bool) ([]place, error) {
	switch {
	case f == ruleset.Inet && p.view == nil:
		return nil, nil
	case f == ruleset.Inet:
		return []place{{by: string(redirect.Native), dialect: string(redirect.Native)}}, nil
	case p.mode.backend == redirect.Tools:
		tools, err := iptables.Choose(ctx, f, p.tools)
		if err != nil {
			return nil, err
		}
		var all []place
		for _, tool := range tools {
			all = append(all, ofTool(tool))
		}
		return all, nil
	}
	all := []place{{by: string(redirect.Netlink), dialect: string(iptables.NFT)}}
	if legacy {
		tool, found := p.tools.Legacy(f)
		if !found {
			return nil, fmt.Errorf("%s: %w", f, errLegacy)
		}
		all = append(all, ofTool(tool))
	}
	return all, nil
}

func ofTool(t iptables.Tool) place { return place{by: t.Name(), dialect: string(t.Variant), tool: &t} }

// owned marks the existing rules that belong to the mesh.
func (p *pass) owned(want, have ruleset.Set) ruleset.Ownership {
	switch {
	case want.Family == ruleset.Inet:
		return redirect.OwnedNative(have)
	case p.clean:
		return p.owner.AllOwned(have)
	}
	return p.owner.Owned(want, have)
}

// compare reads a place and adds the change to the wanted rules.
func (p *pass) compare(ctx context.Context, at place, want ruleset.Set) (err error) {
	var have ruleset.Set
	if at.tool == nil {
		have = p.view.Set(want.Family)
	} else if have, err = at.tool.Read(ctx); err != nil {
		return err
	}
	ours := p.owned(want, have)
	if at.dialect == string(iptables.Legacy) {
		have.Tool = at.dialect
		p.legacy = append(p.legacy, have)
	}
	p.marks = append(p.marks, redirect.Marks(have, ours)...)
	diff := ruleset.Compare(want, have, ours)
	for _, rule := range diff.Others {
		p.report.Notes = append(p.report.Notes, fmt.Sprintf("%s: foreign rule behind ours, left alone: %s", want.Family, rule))
	}
	present := !ruleset.Compare(ruleset.Set{Family: want.Family}, have, ours).Empty()
	p.report.Mesh = p.report.Mesh || present
	if diff.Empty() {
		return nil
	}
	diff.Tool = at.dialect
	p.report.Diffs = append(p.report.Diffs, diff)
	p.conflict = p.conflict || present
	c := change{tool: at.tool, Program: Program{Of: want.Family.String(), By: at.by}}
	if want.Family == ruleset.Inet {
		c.native, c.Text = &want, p.owner.NativeScript(want)
	} else {
		c.operations = ruleset.Reconcile(want, have, ours)
		c.Text = c.operations.String()
	}
	p.changes = append(p.changes, c)
	return nil
}

// apply applies the changes.
func (p *pass) apply(ctx context.Context) error {
	var transaction nftables.Plan
	for _, c := range p.changes {
		switch {
		case c.native != nil:
			transaction.Native = c.native
		case c.tool == nil:
			transaction.Programs = append(transaction.Programs, c.operations)
		}
	}
	if transaction.Native != nil || len(transaction.Programs) > 0 {
		if err := p.view.Apply(transaction); err != nil {
			return fmt.Errorf("writing rules by netlink: %w", err)
		}
	}
	for _, c := range p.changes {
		if c.tool != nil {
			if err := c.tool.Apply(ctx, c.operations); err != nil {
				return err
			}
		}
		p.report.Programs = append(p.report.Programs, c.Program)
	}
	return nil
}
