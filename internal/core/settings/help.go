package settings

import (
	"cmp"
	"fmt"
	"io"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Group is a section of the help.
type Group struct {
	Title string
	Rows  []Setting
}

// All returns the rows of all groups.
func All(groups []Group) []Setting {
	var rows []Setting
	for _, g := range groups {
		rows = append(rows, g.Rows...)
	}
	return rows
}

// Help prints groups for people: for each setting its names on a line and the rest below.
func Help(w io.Writer, groups ...Group) {
	for i, g := range groups {
		if i > 0 {
			_, _ = fmt.Fprintln(w)
		}
		_, _ = fmt.Fprintf(w, "%s:\n", strings.ToUpper(g.Title))
		for _, s := range g.Rows {
			s.describe(w)
		}
	}
}

func (s Setting) describe(w io.Writer) {
	var names []string
	for _, flag := range s.flags() {
		names = append(names, strings.TrimSpace(dashed(flag)+" "+s.Arg))
	}
	for _, variable := range s.Env {
		names = append(names, "$"+variable)
	}
	const columns = 106
	for _, line := range printable.Wrap("   ", 3, strings.Join(names, ", "), columns) {
		_, _ = fmt.Fprintln(w, line)
	}
	use := strings.Join(strings.Fields(s.Use), " ")
	if shown := cmp.Or(s.Shown, s.Default); shown != "" {
		use += " (default: " + shown + ")"
	}
	for _, line := range printable.Wrap("      ", 6, use, columns) {
		_, _ = fmt.Fprintln(w, line)
	}
}
