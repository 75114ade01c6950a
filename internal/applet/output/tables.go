package output

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// maxWhy bounds the reason for a state in bytes.
const maxWhy = 1 << 10

// Pods prints one line for each pod, with the node if it is known, and a last line with the number of pods. selected reports that the
// caller selected the pods by state, so that the number is not the number of all pods.
func Pods(c applet.Call, all []audit.Status, selected bool) error {
	return Show(c, pods(c.Columns(), all, selected))
}

func pods(columns int, all []audit.Status, selected bool) string {
	rows := [][]string{{"NODE", "POD", "STATE", "SINCE", "CHECKED", "BACKEND", "WHY"}}
	for _, s := range all {
		rows = append(rows, []string{
			Cell(s.Node), Cell(s.Namespace + "/" + s.Pod), Cell(string(s.State)), Age(s.Since), Age(s.Checked), Cell(s.Backend),
			printable.Text(cmp.Or(s.Why(), "-"), maxWhy),
		})
	}
	if !slices.ContainsFunc(all, func(s audit.Status) bool { return s.Node != "" }) {
		drop(rows, 0)
	}
	if columns > 0 && columns < roomy {
		drop(rows, len(rows[0])-2) // BACKEND
		drop(rows, len(rows[0])-2) // CHECKED
	}
	return Columns(rows, columns) + count(all, selected) + "\n"
}

// roomy is the number of columns from which Pods prints all columns.
const roomy = 100

// drop removes a column.
func drop(rows [][]string, column int) {
	for i := range rows {
		rows[i] = slices.Delete(rows[i], column, column+1)
	}
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

// Columns formats rows of printable cells, at least one. It cuts the widest cells until the rows fit a number of columns, 0 for no limit.
func Columns(rows [][]string, columns int) string {
	const gap, least = 2, 4
	widths := make([]int, len(rows[0]))
	room := columns - gap*(len(widths)-1)
	for _, cells := range rows {
		for i, cell := range cells {
			widths[i] = max(widths[i], printable.Width(cell))
		}
	}
	for _, width := range widths {
		room -= width
	}
	for ; columns > 0 && room < 0 && slices.Max(widths) > least; room++ {
		last := len(widths) - 1
		widest := slices.Index(widths, slices.Max(widths))
		if widths[last] > widths[widest]/2 { // the reason in the last column is a sentence, of which less suffices
			widest = last
		}
		widths[widest]--
	}
	var b strings.Builder
	for _, cells := range rows {
		for i, cell := range cells {
			if cell = printable.Cut(cell, widths[i]); i < len(cells)-1 {
				cell += strings.Repeat(" ", widths[i]-printable.Width(cell)+gap)
			}
			b.WriteString(cell)
		}
		b.WriteString("\n")
	}
	return b.String()
}

// Decisions prints one line for each decision, if there are any, below a head if that is set: with the node if it is known, else with the duration.
func Decisions(c applet.Call, some []document.Decision, head bool) error {
	if len(some) == 0 {
		return nil
	}
	rows := [][]string{{"NODE", "AGE", "POD", "CAPTURED", "REASON", "SOURCE", "MS", "DETAIL"}}
	for _, d := range some {
		rows = append(rows, []string{
			Cell(d.Node), Age(d.Time), quoted(d.Namespace+"/"+d.Pod, maxCell), strconv.FormatBool(d.Captured), quoted(d.Reason, maxCell),
			quoted(d.Source, maxCell), fmt.Sprintf("%.0f", 1000*d.DurationSeconds), quoted(cmp.Or(d.Error, d.Detail), math.MaxInt),
		})
	}
	if some[0].Node == "" {
		drop(rows, 0)
	} else {
		drop(rows, len(rows[0])-2) // MS
	}
	if !head {
		rows = rows[1:]
	}
	return Show(c, Columns(rows, c.Columns()))
}

// quoted formats a text as one cell that cannot imitate another. It quotes the text unless it is a single plain word.
func quoted(text string, most int) string {
	special := func(r rune) bool { return r > 0x7e || r <= ' ' || r == '"' || r == '\\' }
	switch {
	case text == "":
		return "-"
	case len(text) > most || strings.ContainsFunc(text, special):
		return printable.Quote(text, min(most, 2*len(text)+2))
	}
	return text
}

// maxCell bounds a cell in bytes: a Kubernetes name has at most 253.
const maxCell = 512

// Cell makes a text safe for a table: it cannot imitate another cell.
func Cell(text string) string {
	return cmp.Or(strings.ReplaceAll(printable.Text(text, maxCell), " ", `\x20`), "-")
}

// Age formats the time since then as kubectl does.
func Age(then time.Time) string {
	if then.IsZero() {
		return "-"
	}
	return duration.HumanDuration(max(0, time.Since(then)))
}

// docs is where hints lead.
const docs = "https://github.com/meshcni/istio-cni/blob/main/docs/"

// Group is a group of checks in the order of the output.
type Group struct {
	Name string
	// Hints has the page, with its anchor, that explains each check.
	Hints map[string]string
}

// Groups returns the groups of all checks.
func Groups() []Group {
	ambient := map[string]string{"ambient": "ambient.md#troubleshooting"}
	for _, name := range []string{"kernel", "limits", "policies", "versions", "istiod", "sidecars", "injection"} {
		ambient["ambient-"+name] = ambient["ambient"]
	}
	return []Group{
		{"node", map[string]string{"directories": "install.md#platforms"}},
		{"configuration", map[string]string{"primary": "agent.md#rewrite-conflicts"}},
		{"kernel", map[string]string{"self-test": "bypass.md#the-self-test", "socket-lb": "install.md#platforms"}},
		{"agent", map[string]string{"token": "security.md#rights", "rights": "security.md#rights"}},
		{"injection", map[string]string{"injection": "install.md#before"}},
		{"ambient", ambient},
		{Name: "other"}, // of a newer agent
	}
}

// Checks prints the checks, whose texts are printable, by group: a line for each, below it the remedy of what is not in order and the
// address of a page about it. The last line counts the results.
func Checks(c applet.Call, all []document.Check) error {
	count := map[document.Result]int{}
	groups := Groups()
	rest := len(groups) - 1
	found := make([]string, len(groups))
	for _, one := range all {
		at := slices.IndexFunc(groups[:rest], func(g Group) bool { return g.Hints[one.Name] != "" })
		if at < 0 {
			at = rest
		}
		count[one.Result]++
		found[at] += checkText(one, groups[at].Hints[one.Name], c.Columns())
	}
	var b strings.Builder
	for i, g := range groups {
		if found[i] != "" {
			fmt.Fprintf(&b, "%s\n%s\n%s\n", g.Name, strings.Repeat("-", len(g.Name)), found[i])
		}
	}
	fmt.Fprintf(&b, "%s: %d failed, %s a look\n", Plural(len(all), "check"), count[document.Fail], need(count[document.Warn]))
	return Show(c, b.String())
}

func need(n int) string {
	if n == 1 {
		return "1 needs"
	}
	return fmt.Sprintf("%d need", n)
}

// checkText returns the lines of a check.
func checkText(k document.Check, hint string, columns int) string {
	const indent = 2
	sign := cmp.Or(map[document.Result]string{document.OK: "✓", document.Warn: "!", document.Fail: "✗"}[k.Result], "?")
	blank := strings.Repeat(" ", indent)
	lines := printable.Wrap(sign+" ", indent, printable.CutWords(k.Name+": "+k.Text, columns-indent), columns)
	if k.Result != document.OK && k.Remedy != "" {
		lines = append(lines, printable.Wrap(blank, indent, k.Remedy, columns)...)
	}
	if k.Result != document.OK && hint != "" {
		lines = append(lines, blank+docs+hint)
	}
	return strings.Join(lines, "\n") + "\n"
}

// Plural returns a number with a noun.
func Plural[N int | uint64](n N, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
