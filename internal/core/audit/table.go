package audit

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Style is the look of a table.
type Style struct {
	// Width is the number of columns of the terminal, 0 for no limit. A narrow table is without BACKEND and CHECKED, has shorter
	// names, and its lines are truncated.
	Width int
	// Paint colours the cell of a state; it may be nil.
	Paint func(state State, cell string) string
	// Selected reports whether the pods were selected by their state, so that their number is not that of all pods.
	Selected bool
}

// Columns of the table.
const (
	nodeColumn = iota
	podColumn
	stateColumn
	sinceColumn
	checkedColumn
	backendColumn
	whyColumn
)

// gap separates columns.
const gap = 2

// Table prints the pods as a table, a line each, and a last line that counts them. now is the time from which ages are counted.
func Table(w io.Writer, all []Status, style Style, now time.Time) error {
	lines := [][]string{{"NODE", "POD", "STATE", "SINCE", "CHECKED", "BACKEND", "WHY"}}
	for _, s := range all {
		lines = append(lines, []string{
			Cell(s.Node), Cell(s.Namespace + "/" + s.Pod), Cell(string(s.State)), age(s.Since, now), age(s.Checked, now), Cell(s.Backend),
			printable.Text(cmp.Or(s.Why(), "-"), maxDetail),
		})
	}
	widths := make([]int, whyColumn)
	for _, cells := range lines {
		for i := range widths {
			widths[i] = max(widths[i], utf8.RuneCountInString(cells[i]))
		}
	}
	if !slices.ContainsFunc(all, func(s Status) bool { return s.Node != "" }) {
		widths[nodeColumn] = 0
	}
	fit(widths, style.Width)
	for i, cells := range lines {
		var paint func(string) string
		if i > 0 && style.Paint != nil {
			paint = func(cell string) string { return style.Paint(all[i-1].State, cell) }
		}
		if _, err := io.WriteString(w, line(cells, widths, style.Width, paint)); err != nil {
			return err
		}
	}
	_, err := io.WriteString(w, count(all, style.Selected)+"\n")
	return err
}

// count is a line with the number of pods that are not as wanted.
func count(all []Status, selected bool) string {
	var mesh, faulty, unknown int
	for _, s := range all {
		switch {
		case s.State == Outside:
			continue
		case s.State == NotInspected:
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

// fit makes columns narrower until the reason has some room as well. A column of width 0 is left out.
func fit(widths []int, width int) {
	const leastName = 8
	leastWhy := width / 4
	spare := func() int {
		rest := width - leastWhy
		for _, w := range widths {
			if w > 0 {
				rest -= w + gap
			}
		}
		return rest
	}
	for _, column := range []int{backendColumn, checkedColumn} {
		if width > 0 && spare() < 0 {
			widths[column] = 0
		}
	}
	if missing := -spare(); width > 0 && missing > 0 {
		names := widths[nodeColumn] + widths[podColumn] - missing
		pod := widths[podColumn]
		if widths[nodeColumn] > 0 {
			widths[nodeColumn] = min(widths[nodeColumn], max(names/3, names-pod, leastName))
		}
		widths[podColumn] = min(pod, max(names-widths[nodeColumn], leastName))
	}
}

// line is a line of the table. Each printable rune counts as one column.
func line(cells []string, widths []int, width int, paint func(string) string) string {
	var b strings.Builder
	column := 0
	for i, w := range widths {
		if w == 0 {
			continue
		}
		cell := shorten(cells[i], w)
		pad := strings.Repeat(" ", w-utf8.RuneCountInString(cell)+gap)
		if i == stateColumn && paint != nil {
			cell = paint(cell)
		}
		b.WriteString(cell + pad)
		column += w + gap
	}
	why := []rune(cells[whyColumn])
	if room := max(width-column, 1); width > 0 && len(why) > room {
		why = append(why[:room-1], '…')
	}
	return b.String() + string(why) + "\n"
}

// shorten replaces the middle of a name: names of pods differ at the end.
func shorten(name string, width int) string {
	runes := []rune(name)
	if len(runes) <= width {
		return name
	}
	head := width / 2
	return string(runes[:head]) + "…" + string(runes[len(runes)-(width-head-1):])
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
