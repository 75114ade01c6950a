package referencetest

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// chains are the names of the chains to create.
var chains = regexp.MustCompile(`ISTIO_\w+`)

// restore writes a section for each table, sorted by name: the chains that its rules name, then the rules in the order
// of emission.
func (d *document) restore() string {
	var b strings.Builder
	for _, table := range []string{"filter", "mangle", "nat", "raw"} {
		var made, lines []string
		for _, r := range d.rules {
			switch {
			case r.table != table:
				continue
			case r.position == 0:
				lines = append(lines, fmt.Sprintf("-A %s %s", r.chain, r.text))
			default:
				lines = append(lines, fmt.Sprintf("-I %s %d %s", r.chain, r.position, r.text))
			}
			made = append(made, chains.FindAllString(r.chain+" "+r.text, -1)...)
		}
		if len(lines) == 0 {
			continue
		}
		fmt.Fprintf(&b, "* %s\n", table)
		slices.Sort(made)
		for _, name := range slices.Compact(made) {
			fmt.Fprintf(&b, "-N %s\n", name)
		}
		b.WriteString(strings.Join(lines, "\n") + "\nCOMMIT\n")
	}
	return b.String()
}

// byChain returns the texts of the rules by table and chain, each at its position.
func (d *document) byChain() map[string][]string {
	all := map[string][]string{}
	for _, r := range d.rules {
		at := r.table + " " + r.chain
		place := len(all[at])
		if r.position > 0 {
			place = min(place, r.position-1)
		}
		all[at] = slices.Insert(all[at], place, r.text)
	}
	return all
}

// script puts the rules into native tables, in the order in which the reference makes their chains.
func (d *document) script() string {
	bases := map[string]string{
		"nat PREROUTING": "nat hook prerouting priority -100", "nat OUTPUT": "nat hook output priority -100",
		"mangle PREROUTING": "filter hook prerouting priority -150", "mangle OUTPUT": "route hook output priority -150",
		"raw PREROUTING": "filter hook prerouting priority -300", "raw OUTPUT": "filter hook output priority -300",
	}
	order := map[string]string{
		"nat":    "PREROUTING OUTPUT ISTIO_INBOUND ISTIO_REDIRECT ISTIO_IN_REDIRECT ISTIO_OUTPUT ISTIO_OUTPUT_DNS",
		"mangle": "PREROUTING OUTPUT ISTIO_DIVERT ISTIO_TPROXY ISTIO_INBOUND ISTIO_DROP",
		"raw":    "PREROUTING OUTPUT ISTIO_INBOUND ISTIO_OUTPUT_DNS",
	}
	byChain := d.byChain()
	var b strings.Builder
	for _, table := range []string{"nat", "mangle", "raw"} {
		var chains, rules strings.Builder
		for chain := range strings.FieldsSeq(order[table]) {
			at := table + " " + chain
			if len(byChain[at]) == 0 {
				continue
			}
			name, base := fmt.Sprintf("istio-proxy-%s %s", table, strings.ReplaceAll(strings.ToLower(chain), "_", "-")), ""
			if hook, ok := bases[at]; ok {
				base = "{ type " + hook + " ; }"
			}
			fmt.Fprintf(&chains, "add chain inet %s %s\n", name, base)
			for _, rule := range byChain[at] {
				fmt.Fprintf(&rules, "add rule inet %s %s\n", name, rule)
			}
		}
		if chains.Len() > 0 {
			fmt.Fprintf(&b, "add table inet istio-proxy-%s\nflush table inet istio-proxy-%s\n%s%s", table, table, &chains, &rules)
		}
	}
	return b.String()
}
