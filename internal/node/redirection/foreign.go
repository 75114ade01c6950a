package redirection

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
)

// foreign finds the foreign rules in chains and tables that have no rule of the mesh, of every mechanism.
func (p *pass) foreign(ctx context.Context, spec redirect.Spec) error {
	for _, c := range p.compared {
		p.report.Foreign = append(p.report.Foreign, audit.Foreign(spec, c.have, c.owned, c.dialect)...)
	}
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		if err := p.foreignLegacy(ctx, spec, f); err != nil {
			return err
		}
	}
	if p.view == nil {
		return nil
	}
	more, err := p.view.Foreign(ctx, spec.Mode == redirect.TPROXY)
	p.report.Foreign = append(p.report.Foreign, more...)
	return err
}

// foreignLegacy reads the legacy tables of a family if they have rules and were not compared.
func (p *pass) foreignLegacy(ctx context.Context, spec redirect.Spec, f ruleset.Family) error {
	read := func(c compared) bool { return c.have.Family == f && c.dialect == string(iptables.Legacy) }
	if slices.ContainsFunc(p.compared, read) {
		return nil
	}
	filled, err := iptables.LegacyRules(f)
	if err != nil || len(filled) == 0 {
		return err
	}
	if !p.mode.tools {
		return errNeedsTools
	}
	tool, found := p.tools.Legacy(f)
	if !found {
		p.report.Foreign = append(p.report.Foreign,
			fmt.Sprintf("%s (legacy): rules in table %s, which cannot be read without iptables-legacy", f, strings.Join(filled, ", ")))
		return nil
	}
	have, err := tool.Read(ctx)
	if err == nil {
		p.report.Foreign = append(p.report.Foreign, audit.Foreign(spec, have, ruleset.Ownership{}, string(iptables.Legacy))...)
	}
	return err
}
