package redirector

import (
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// Bounds of a report: a pod can have very many chains and rules. maxRule is in bytes.
const (
	maxChains = 1000
	maxRules  = 500
	maxRule   = 4 << 10
)

// print prints a report as JSON or YAML, or as the text.
func (r run) print(report document.RuleReport, text string) error {
	report.Time = output.NewHead(r.Getenv).Time // the host's name can be a pod's here
	return output.Print(r.Stdout, report, r.output, func() error { return output.Show(r.Call, text) })
}

// wanted has the wanted rules and, for a dry run, the programs that set them up.
func (r run) wanted(sets []ruleset.Set, families redirect.Families) document.RuleReport {
	report := document.RuleReport{}
	for _, set := range sets {
		for _, table := range set.Tables {
			for _, c := range table.Chains {
				lines := make([]ruleset.Line, len(c.Rules))
				for i, rule := range c.Rules {
					lines[i].Rule = rule
				}
				add(&report, set.Family, ruleset.ChainDiff{Table: table.Name, Chain: c.Name, Lines: lines})
			}
		}
		if r.dryRun && !r.explain && !set.Empty() {
			by, text := r.program(set)
			report.Programs = append(report.Programs, document.RuleProgram{Family: set.Family.String(), By: by, Text: text})
		}
	}
	if r.dryRun {
		report.Routing = routing(r.spec.Routing(families))
	}
	return report
}

// verified has the differences that a comparison has found.
func verified(r redirection.Report) document.RuleReport {
	clean := r.Clean()
	report := document.RuleReport{UpToDate: &clean, Routing: r.Routing, Notes: r.Notes}
	for _, diff := range r.Diffs {
		for _, c := range diff.Chains {
			add(&report, diff.Family, c)
		}
	}
	return report
}

// removal has the programs that would remove all rules of the mesh.
func removal(r redirection.Report) document.RuleReport {
	report := document.RuleReport{}
	for _, p := range r.Programs {
		report.Programs = append(report.Programs, document.RuleProgram{Family: p.Of, By: feeding(p), Text: p.Text})
	}
	return report
}

// add adds a chain within the bounds.
func add(report *document.RuleReport, family ruleset.Family, c ruleset.ChainDiff) {
	if len(report.Items) == maxChains {
		report.Omitted++
		return
	}
	hook, _ := redirect.Sidecar().HookOf(family, c.Table, c.Chain)
	chain := walk.Chain{
		Family: family.String(), Table: printable.Text(c.Table, maxRule), Chain: printable.Text(c.Chain, maxRule), Hook: hook.Name,
		Rules: make([]walk.Rule, 0, len(c.Lines)), Omitted: max(0, len(c.Lines)-maxRules),
	}
	for _, l := range c.Lines[:min(len(c.Lines), maxRules)] {
		op := [...]string{ruleset.Same: "", ruleset.Missing: "missing", ruleset.Extra: "extra", ruleset.Foreign: "foreign"}[l.Op]
		chain.Rules = append(chain.Rules, walk.Rule{Text: printable.Text(l.Rule.String(), maxRule), Why: l.Rule.Why, Op: op})
	}
	report.Items = append(report.Items, chain)
}
