package ruleset

import (
	"fmt"
	"strings"
)

// Explain prints the Set for people: each rule of each table and chain, with its reason below. It omits chains without rules.
func (s Set) Explain() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", s.Family)
	for _, t := range s.Tables {
		for _, c := range t.Chains {
			if len(c.Rules) == 0 {
				continue
			}
			fmt.Fprintf(&b, "\n  table %s, chain %s\n", t.Name, c.Name)
			for _, r := range c.Rules {
				fmt.Fprintf(&b, "    %s\n", r.appendTo(c.Name))
				if r.Why != "" {
					fmt.Fprintf(&b, "        %s\n", r.Why)
				}
			}
		}
	}
	return b.String()
}
