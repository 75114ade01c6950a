package redirector

import (
	"fmt"

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

// wanted has the wanted rules, as a document and as text: with reasons or, for a dry run, for the programs that set them up.
func (r run) wanted(families redirect.Families) (report document.RuleReport, text string) {
	sets := r.spec.Sets(families)
	if r.backend == redirect.Native {
		sets = []ruleset.Set{r.spec.NativeSet(families)}
	}
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
		switch {
		case set.Empty():
			reason := map[redirect.Treatment]string{
				redirect.Unused: "the namespace has no such address", redirect.Bypassed: "it bypasses the mesh",
			}[families.IPv6]
			text += fmt.Sprintf("# %s: no rules: %s\n", set.Family, reason)
		case r.explain:
			text += set.Explain() + "\n"
		default:
			by, program := r.program(set)
			text += addProgram(&report, set.Family.String(), by, program)
		}
	}
	if r.dryRun {
		report.Routing = routing(r.spec.Routing(families))
	}
	for _, command := range report.Routing {
		text += "# then: " + command + "\n"
	}
	return report, text
}

// addProgram adds a program to a report and returns it as text.
func addProgram(report *document.RuleReport, family, by, text string) string {
	report.Programs = append(report.Programs, document.RuleProgram{Family: family, By: by, Text: text})
	return fmt.Sprintf("# %s: %s\n%s", family, by, text)
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
