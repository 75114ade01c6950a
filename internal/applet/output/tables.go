package output

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// maxWhy bounds the reason for a state in bytes.
const maxWhy = 1 << 10

// Pods prints one line for each pod, with the node if it is known, and a last line with the number of pods. selected reports that the
// caller selected the pods by state, so that the number is not the number of all pods.
func Pods(w io.Writer, all []audit.Status, selected bool) error {
	hasNode := func(s audit.Status) bool { return s.Node != "" }
	first := 1
	if slices.ContainsFunc(all, hasNode) {
		first = 0
	}
	rows := [][]string{[]string{"NODE", "POD", "STATE", "SINCE", "CHECKED", "BACKEND", "WHY"}[first:]}
	for _, s := range all {
		rows = append(rows, []string{
			Cell(s.Node), Cell(s.Namespace + "/" + s.Pod), Cell(string(s.State)), age(s.Since), age(s.Checked), Cell(s.Backend),
			printable.Text(cmp.Or(s.Why(), "-"), maxWhy),
		}[first:])
	}
	if err := Columns(w, rows); err != nil {
		return err
	}
	_, err := io.WriteString(w, count(all, selected)+"\n")
	return err
}

// count returns the line with the number of pods that are not redirected as wanted.
func count(all []audit.Status, selected bool) string {
	var mesh, faulty, unknown int
	for _, s := range all {
		switch {
		case s.State == audit.Outside:
			continue
		case s.State == audit.NotInspected:
			unknown++
		case s.Faulty():
			faulty++
		}
		mesh++
	}
	kind, verb, more := "mesh pods", "are", ""
	if selected {
		kind = "listed mesh pods"
	}
	if faulty == 1 {
		verb = "is"
	}
	if unknown > 0 {
		more = fmt.Sprintf(", %d not inspected", unknown)
	}
	return fmt.Sprintf("%d of %d %s %s not redirected as wanted%s", faulty, mesh, kind, verb, more)
}

// Columns prints rows of printable cells.
func Columns(w io.Writer, rows [][]string) error {
	const gap = 2
	table := tabwriter.NewWriter(w, 0, 0, gap, ' ', 0)
	for _, cells := range rows {
		_, _ = io.WriteString(table, strings.Join(cells, "\t")+"\n") // Flush returns the first error
	}
	return table.Flush()
}

// maxCell bounds a cell in bytes: a Kubernetes name has at most 253.
const maxCell = 512

// Cell makes a text safe for a table: it cannot imitate another cell.
func Cell(text string) string {
	return cmp.Or(strings.ReplaceAll(printable.Text(text, maxCell), " ", `\x20`), "-")
}

// age formats the time since then as kubectl does, by its largest unit.
func age(then time.Time) string {
	if then.IsZero() {
		return "-"
	}
	d := max(0, time.Since(then))
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

type (
	// Check is a check of the doctor.
	Check = document.Check
	// Result is the outcome of a check.
	Result = document.Result
)

// The values of Result.
const (
	OK   = document.OK
	Warn = document.Warn
	Fail = document.Fail
)

// Checks prints a line for each check, whose texts are printable, below it the remedy of what is not in order, and a last line that
// counts the results.
func Checks(w io.Writer, all []Check) error {
	count := map[Result]int{}
	var b strings.Builder
	for _, c := range all {
		count[c.Result]++
		sign := cmp.Or(map[Result]string{OK: "✓", Warn: "!", Fail: "✗"}[c.Result], "?")
		fmt.Fprintf(&b, "%s %s: %s\n", sign, c.Name, c.Text)
		if c.Result != OK && c.Remedy != "" {
			fmt.Fprintf(&b, "    %s\n", c.Remedy)
		}
	}
	fmt.Fprintf(&b, "%d ok, %s, %s\n", count[OK], Plural(count[Warn], "warning"), Plural(count[Fail], "failure"))
	_, err := io.WriteString(w, b.String())
	return err
}

// Plural returns a number with a noun.
func Plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
