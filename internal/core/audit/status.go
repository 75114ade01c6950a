package audit

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Outside is the state of a pod that the plugin does not redirect by its own decision. It is listed on request only.
const Outside State = "outside"

// Status is the redirection of a pod as the node agent knows it.
type Status struct {
	// Node is filled by a command for several nodes.
	Node      string `json:"node,omitempty"`
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	UID       string `json:"uid"`

	State State `json:"state"`
	// Sentence explains the state, as the end of "the pod …", Remedy is an instruction.
	Sentence string `json:"sentence"`
	Remedy   string `json:"remedy,omitempty"`
	// Since is the time from which on the pod has the state, Checked that of the last inspection.
	Since   time.Time `json:"since,omitzero"`
	Checked time.Time `json:"checked,omitzero"`
	// Backend is the mechanism whose rules are in the namespace, for each family.
	Backend    string      `json:"backend,omitempty"`
	Problems   []Problem   `json:"problems,omitempty"`
	Exceptions []Exception `json:"exceptions,omitempty"`
}

// Why is one line about the state: its first problem, with the number of the others, or the sentence.
func (s Status) Why() string {
	switch len(s.Problems) {
	case 0:
		if s.State == Captured && len(s.Exceptions) > 0 {
			return fmt.Sprintf("%d exceptions by its own settings", len(s.Exceptions))
		}
		return s.Sentence
	case 1:
		return s.Problems[0].Detail
	}
	return fmt.Sprintf("%s (and %d more)", s.Problems[0].Detail, len(s.Problems)-1)
}

// Faulty reports whether the pod is not redirected as wanted.
func (s Status) Faulty() bool { return s.State != Captured && s.State != Outside }

// Sort orders the pods: the most serious state first, then by name.
func Sort(all []Status) {
	rank := func(s State) int {
		if at := severity(s); at >= 0 {
			return at
		}
		return len(rows)
	}
	slices.SortFunc(all, func(a, b Status) int {
		return cmp.Or(rank(a.State)-rank(b.State), strings.Compare(a.Node, b.Node), strings.Compare(a.Namespace, b.Namespace),
			strings.Compare(a.Pod, b.Pod))
	})
}

// Table prints the pods as a table, a line each. Lines are truncated to width columns, 0 for no limit. now is the time from
// which ages are counted.
func Table(w io.Writer, all []Status, width int, now time.Time) error {
	nodes := slices.ContainsFunc(all, func(s Status) bool { return s.Node != "" })
	var b strings.Builder
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	row := func(node string, cells ...string) {
		if nodes {
			cells = append([]string{node}, cells...)
		}
		_, _ = fmt.Fprintln(table, strings.Join(cells, "\t"))
	}
	row("NODE", "POD", "STATE", "SINCE", "CHECKED", "BACKEND", "WHY")
	for _, s := range all {
		row(Cell(s.Node), Cell(s.Namespace+"/"+s.Pod), Cell(string(s.State)), age(s.Since, now), age(s.Checked, now), Cell(s.Backend),
			printable.Text(cmp.Or(s.Why(), "-"), maxDetail))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for line := range strings.Lines(b.String()) {
		if _, err := io.WriteString(w, truncate(strings.TrimRight(line, " \n"), width)+"\n"); err != nil {
			return err
		}
	}
	return nil
}

// maxCell bounds a name in the table: the names of Kubernetes have 253 bytes at most.
const maxCell = 512

// Cell returns a text that cannot imitate another cell.
func Cell(text string) string {
	return cmp.Or(strings.ReplaceAll(printable.Text(text, maxCell), " ", `\x20`), "-")
}

// age formats a duration as kubectl does, by its largest unit.
func age(since, now time.Time) string {
	if since.IsZero() {
		return "-"
	}
	d := max(0, now.Sub(since))
	switch {
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// truncate cuts a line to so many columns; each printable rune counts as one.
func truncate(line string, width int) string {
	runes := []rune(line)
	if width <= 1 || len(runes) <= width {
		return line
	}
	return string(runes[:width-1]) + "…"
}
