package referencetest

import (
	"fmt"
	"slices"
	"strings"
)

// text puts the lines into a section for each table, tables by name; within one, the chains that are made, then the
// rules in the order of emission.
func (d *document) text() string {
	var b strings.Builder
	for _, table := range []string{"filter", "mangle", "nat", "raw"} {
		var own []rule
		for _, r := range d.rules {
			if r.table == table {
				own = append(own, r)
			}
		}
		if len(own) > 0 {
			section(&b, table, own)
		}
	}
	return b.String()
}

func section(b *strings.Builder, table string, rules []rule) {
	fmt.Fprintf(b, "* %s\n", table)
	for _, name := range made(rules) {
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

// neverMade are the names for which the reference writes no -N.
const neverMade = " INPUT OUTPUT FORWARD PREROUTING POSTROUTING ACCEPT RETURN DROP "

// made lists the chains to make: those that have rules, in the order of their first one, then those that are only
// jumped to. A jump is a rule whose second-last word is -j.
func made(rules []rule) []string {
	var names []string
	name := func(chain string) {
		if !strings.Contains(neverMade, " "+chain+" ") && !slices.Contains(names, chain) {
			names = append(names, chain)
		}
	}
	for _, r := range rules {
		name(r.chain)
	}
	for _, r := range rules {
		if f := strings.Fields(r.text); len(f) >= 2 && f[len(f)-2] == "-j" {
			name(f[len(f)-1])
		}
	}
	return names
}
