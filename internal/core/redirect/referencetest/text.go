package referencetest

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// chains are the names of those to make.
var chains = regexp.MustCompile(`ISTIO_\w+`)

// text puts the lines into a section for each table, tables by name; within one, the chains that its rules name, then the
// rules in the order of emission.
func (d *document) text() string {
	var b strings.Builder
	for _, table := range []string{"filter", "mangle", "nat", "raw"} {
		own := slices.DeleteFunc(slices.Clone(d.rules), func(r rule) bool { return r.table != table })
		if len(own) > 0 {
			section(&b, table, own)
		}
	}
	return b.String()
}

func section(b *strings.Builder, table string, rules []rule) {
	fmt.Fprintf(b, "* %s\n", table)
	var made []string
	for _, r := range rules {
		made = append(made, chains.FindAllString(r.chain+" "+r.text, -1)...)
	}
	slices.Sort(made)
	for _, name := range slices.Compact(made) {
		fmt.Fprintf(b, "-N %s\n", name)
	}
	for _, r := range rules {
		if r.position == 0 {
			fmt.Fprintf(b, "-A %s %s\n", r.chain, r.text)
		} else {
			fmt.Fprintf(b, "-I %s %d %s\n", r.chain, r.position, r.text)
		}
	}
	b.WriteString("COMMIT\n")
}
