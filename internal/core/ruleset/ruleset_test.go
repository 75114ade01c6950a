package ruleset_test

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestNew_Order also checks that New adds the missing built-in chains.
func TestNew_Order(t *testing.T) {
	table := func(name string, chains ...string) ruleset.Table {
		out := ruleset.Table{Name: name}
		for _, c := range chains {
			chain := ruleset.Chain{Name: c, Policy: ruleset.NoPolicy, Rules: []ruleset.Rule{ruleset.Read(c)}}
			if ruleset.Builtin(name, c) {
				chain.Policy = "DROP"
			}
			out.Chains = append(out.Chains, chain)
		}
		return out
	}
	set := ruleset.New(ruleset.IPv6, table("raw", "OUTPUT", "B"), table("filter"), table("nat", "Z", "A", "OUTPUT", "PREROUTING"), table("security"),
		table("mangle"), table("other", "B", "A"))
	var got []string
	for _, t := range set.Tables {
		line := t.Name + ":"
		for _, c := range t.Chains {
			line += fmt.Sprintf(" %s %s %s", c.Name, c.Policy, c.Rules)
		}
		got = append(got, line)
	}
	want := []string{
		"filter: INPUT ACCEPT [] FORWARD ACCEPT [] OUTPUT ACCEPT []",
		"mangle: PREROUTING ACCEPT [] INPUT ACCEPT [] FORWARD ACCEPT [] OUTPUT ACCEPT [] POSTROUTING ACCEPT []",
		"nat: PREROUTING DROP [PREROUTING] INPUT ACCEPT [] OUTPUT DROP [OUTPUT] POSTROUTING ACCEPT [] A - [A] Z - [Z]",
		"other: A - [A] B - [B]",
		"raw: PREROUTING ACCEPT [] OUTPUT DROP [OUTPUT] B - [B]",
		"security: INPUT ACCEPT [] FORWARD ACCEPT [] OUTPUT ACCEPT []",
	}
	check.Diff(t, "tables", want, got)
}

func TestNew_Arguments(t *testing.T) {
	given := func() []ruleset.Table {
		chains := func() []ruleset.Chain {
			return append(make([]ruleset.Chain, 0, 9), ruleset.Chain{Name: "B", Policy: "-"}, ruleset.Chain{Name: "A", Policy: "-"})
		}
		return append(make([]ruleset.Table, 0, 9), ruleset.Table{Name: "nat", Chains: chains()}, ruleset.Table{Name: "filter", Chains: chains()})
	}
	tables := given()
	ruleset.New(ruleset.IPv4, tables...)
	if diff := cmp.Diff(given(), tables); diff != "" {
		t.Errorf("New changed what it was given:\n%s", diff)
	}
}

func TestSet_EmptyAndEqual(t *testing.T) {
	dropped := nat("OUTPUT -j DROP # one reason")
	for _, test := range []struct {
		name         string
		set          ruleset.Set
		empty, equal bool // compared with dropped
	}{
		{"no table", ruleset.Set{}, true, false},
		{"built-in chains only", nat(), true, false},
		{"an own chain without rules", nat("OWN_A:"), false, false},
		{"the same rules for another reason", nat("OUTPUT -j DROP # another"), false, true},
		{"another rule", nat("OUTPUT -j ACCEPT # one reason"), false, false},
		{"another family", ruleset.Set{Family: ruleset.IPv6, Tables: dropped.Tables}, false, false},
		{"a chain more", nat("OUTPUT -j DROP", "OWN_A:"), false, false},
	} {
		if empty, equal := test.set.Empty(), dropped.Equal(test.set); empty != test.empty || equal != test.equal {
			t.Errorf("%s: Empty is %t, Equal is %t", test.name, empty, equal)
		}
	}
}

// TestParse_OutputOfTheTools reads the output of the nft and the legacy tools (1.8.9) for the same commands, with
// and without counters: each tool orders the tables differently, and the meaning is the same.
func TestParse_OutputOfTheTools(t *testing.T) {
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		family := strings.ToLower(f.String())
		files, err := filepath.Glob(filepath.Join("testdata", "save", "*-"+family+"*.txt"))
		if err != nil || len(files) != 4 {
			t.Fatalf("found %d files for %s, want 4 (error %v)", len(files), f, err)
		}
		for _, file := range files {
			t.Run(filepath.Base(file), func(t *testing.T) {
				text, err := os.ReadFile(file)
				check.OK(t, err)
				set, err := ruleset.Parse(f, string(text))
				check.OK(t, err)
				rulesettest.Golden(t, filepath.Join("canonical", family+".txt"), set.String())

				rules := func(line string) bool { return strings.Contains(line, "-A ") }
				for _, line := range slices.DeleteFunc(strings.Split(string(text), "\n"), func(l string) bool { return !rules(l) }) {
					_, rule, _ := strings.Cut(line, "-A ")
					if !strings.Contains(set.String(), "\n-A "+rule+"\n") {
						t.Errorf("rule %q is missing", line)
					}
				}
			})
		}
	}
}

func TestParse_QuotedText(t *testing.T) {
	rules := []string{
		`-m comment --comment "say \"hi\"  to C:\\dir\\ and it\'s *done" -j RETURN`, `-m comment --comment "*nat" -j RETURN`,
		`-m comment --comment "[1:2] -A INPUT -j DROP" -j RETURN`, `-m comment --comment COMMIT -j RETURN`,
	}
	set := parse(t, "*filter\n:INPUT ACCEPT [12:3456]\n:OUTPUT DROP [0:0]\n[12:3456] -A INPUT "+strings.Join(rules, "\n[0:0] -A INPUT ")+"\nCOMMIT\n")
	want := ":OUTPUT DROP [0:0]\n-A INPUT " + strings.Join(rules, "\n-A INPUT ") + "\nCOMMIT\n"
	if !strings.HasSuffix(set.String(), want) {
		t.Errorf("read as\n%s, want at the end\n%s", set, want)
	}
}

func TestParse_OtherLines(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"nothing", "", ""},
		{"blank lines and comments", "\n# Generated by iptables-save\n  \n# Warning: iptables-legacy tables present\n", ""},
		{"line ends of another system", "*other\r\n:A - [0:0]\r\n-A A -j DROP\r\nCOMMIT\r\n", "*other\n:A - [0:0]\n-A A -j DROP\nCOMMIT\n"},
		{"no line end at the end", "*other\nCOMMIT", "*other\nCOMMIT\n"},
		{"a chain without counters", "*other\n:A -\nCOMMIT\n", "*other\n:A - [0:0]\nCOMMIT\n"},
		{"chains that are not declared but built in", "*raw\n:OUTPUT DROP [0:0]\nCOMMIT\n", "*raw\n:PREROUTING ACCEPT [0:0]\n:OUTPUT DROP [0:0]\nCOMMIT\n"},
		{"a rule with blanks around it", "*other\n:A - [0:0]\n-A A   -j DROP  \nCOMMIT\n", "*other\n:A - [0:0]\n-A A -j DROP\nCOMMIT\n"},
		{"a rule that matches all and does nothing", "*other\n:A - [0:0]\n[1:2] -A A\nCOMMIT\n", "*other\n:A - [0:0]\n-A A\nCOMMIT\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			check.Diff(t, "read as", test.want, parse(t, test.text).String())
		})
	}
}

// TestParse_Refusals: every error names the line and the cause, and a text with an error never yields a smaller Set.
func TestParse_Refusals(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"a rule outside a table", "-A OUTPUT -j DROP\n", `parsing IPv6 rules, line 1 "-A OUTPUT -j DROP": is outside any table`},
		{"a chain outside a table", "\n:OUTPUT ACCEPT [0:0]\n", `line 2 ":OUTPUT ACCEPT [0:0]": is outside any table`},
		{"a COMMIT too many", "*nat\nCOMMIT\nCOMMIT\n", `line 3 "COMMIT": is outside any table`},
		{"a message of the tool", "iptables-save: Permission denied\n", `line 1 "iptables-save: Permission denied": is outside any table`},
		{"a text that is cut off", "*nat\n:OUTPUT ACCEPT [0:0]\n", `parsing IPv6 rules: table "nat" has no COMMIT: the text is cut off`},
		{"a text that is cut off within COMMIT", "*nat\nCOMM", `line 2 "COMM": is not *TABLE, :CHAIN, -A or COMMIT`},
		{"a table in a table", "*nat\n*raw\nCOMMIT\n", `line 2 "*raw": table "nat" is still open`},
		{"a table twice", "*nat\nCOMMIT\n*nat\nCOMMIT\n", `line 3 "*nat": table "nat" is declared twice`},
		{"a table without name", "*\nCOMMIT\n", `line 1 "*": has no table name`},
		{"a table with a blank", "* nat\nCOMMIT\n", `line 1 "* nat": has no table name`},
		{"a chain without policy", "*nat\n:OUTPUT\nCOMMIT\n", `line 2 ":OUTPUT": want :CHAIN POLICY [packets:bytes]`},
		{"a chain without name", "*nat\n: - [0:0]\nCOMMIT\n", `line 2 ": - [0:0]": want :CHAIN POLICY [packets:bytes]`},
		{"a chain with bad counters", "*nat\n:OUTPUT ACCEPT [0:x]\nCOMMIT\n", `line 2 ":OUTPUT ACCEPT [0:x]": want :CHAIN POLICY [packets:bytes]`},
		{"a chain with more behind it", "*nat\n:OUTPUT ACCEPT [0:0] x\nCOMMIT\n", `want :CHAIN POLICY [packets:bytes]`},
		{"a chain twice", "*nat\n:A - [0:0]\n:A - [0:0]\nCOMMIT\n", `line 3 ":A - [0:0]": chain "A" is declared twice`},
		{"a built-in chain without policy", "*nat\n:OUTPUT - [0:0]\nCOMMIT\n", `line 2 ":OUTPUT - [0:0]": policy "-" does not fit chain "OUTPUT"`},
		{"an own chain with a policy", "*nat\n:A DROP [0:0]\nCOMMIT\n", `policy "DROP" does not fit chain "A"`},
		{"another table's built-in chain", "*nat\n:FORWARD ACCEPT [0:0]\nCOMMIT\n", `policy "ACCEPT" does not fit chain "FORWARD"`},
		{"a rule of a chain that is not declared", "*nat\n-A A -j DROP\nCOMMIT\n", `line 2 "-A A -j DROP": chain "A" is not declared`},
		{"a rule of a chain declared later", "*nat\n-A A -j DROP\n:A - [0:0]\nCOMMIT\n", `line 2 "-A A -j DROP": chain "A" is not declared`},
		{"an insertion", "*nat\n:A - [0:0]\n-I A -j DROP\nCOMMIT\n", `line 3 "-I A -j DROP": is not *TABLE, :CHAIN, -A or COMMIT`},
		{"bad counters before a rule", "*nat\n:A - [0:0]\n[0:] -A A -j DROP\nCOMMIT\n", `is not *TABLE, :CHAIN, -A or COMMIT`},
		{"an -A alone", "*nat\n-A\nCOMMIT\n", `line 2 "-A": is not *TABLE, :CHAIN, -A or COMMIT`},
		{"a chain without a name", "*nat\n-A  -j DROP\nCOMMIT\n", `chain "" is not declared`},
		{"a blank before a line", "*nat\n COMMIT\n", `line 2 " COMMIT": is not *TABLE`},
		{"garbage is shown in part", "*nat\n" + strings.Repeat("x", 300) + "\nCOMMIT\n", `line 2 "` + strings.Repeat("x", 178) + `… (122 bytes more)": is not *TABLE`},
	} {
		t.Run(test.name, func(t *testing.T) {
			set, err := ruleset.Parse(ruleset.IPv6, test.text)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Fatalf("error is\n%v, want\n%s", err, test.want)
			}
			if !strings.HasPrefix(err.Error(), "parsing IPv6 rules") || len(err.Error()) > 400 {
				t.Errorf("error is %v", err)
			}
			if diff := cmp.Diff(ruleset.Set{}, set); diff != "" {
				t.Errorf("Parse returned a Set with the error:\n%s", diff)
			}
		})
	}
}

// TestParse_CommentOfSeveralLines: iptables-save prints line ends of a comment unchanged, within its quotes.
func TestParse_CommentOfSeveralLines(t *testing.T) {
	t.Parallel()
	text := "*nat\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -p tcp -m comment --comment \"a\n#\" -j REDIRECT --to-ports 9090\nCOMMIT\n"
	s, err := ruleset.Parse(ruleset.IPv4, text)
	check.OK(t, err)
	c, _ := s.Table("nat").Chain("OUTPUT")
	if len(c.Rules) != 1 || c.Rules[0].Target != ruleset.Target(ruleset.RedirectTo(9090)) {
		t.Errorf("read %+v", c.Rules)
	}
	for _, broken := range []string{
		"*nat\n:OUTPUT ACCEPT [0:0]\n# -A OUTPUT -j DROP\nCOMMIT\n", "*nat\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -m comment --comment \"a\nCOMMIT\n",
	} {
		if _, err := ruleset.Parse(ruleset.IPv4, broken); err == nil {
			t.Errorf("%q is read", broken)
		}
	}
}

func TestAddress_PrintedAsByTheTools(t *testing.T) {
	t.Parallel()
	for given, want := range map[string]string{
		"10.0.0.1": "10.0.0.1", "0.0.0.0": "0.0.0.0", "fd00:0:0:1::5": "fd00:0:0:1::5", "::": "::", "::1": "::1", "::6": "::6",
		"::ffff":        "::ffff",
		"::1:0":         "::0.1.0.0",
		"::a00:1":       "::10.0.0.1",
		"::ffff:a00:1":  "::ffff:10.0.0.1",
		"0:1::a00:1":    "0:1::a00:1",
		"::1:0:a00:1":   "::1:0:a00:1",
		"64:ff9b::a0:1": "64:ff9b::a0:1",
	} {
		check.Equal(t, ruleset.Address(netip.MustParseAddr(given)), want, given, "is printed")
	}
}

func parse(tb testing.TB, text string) ruleset.Set {
	tb.Helper()
	set, err := ruleset.Parse(ruleset.IPv4, text)
	check.OK(tb, err)
	return set
}

// nat makes a Set of table nat from lines for rulesettest.Set without the table's name.
func nat(lines ...string) ruleset.Set {
	all := []string{"nat"}
	for _, l := range lines {
		all = append(all, "nat "+l)
	}
	return rulesettest.Set(all...)
}

// own marks chains whose name begins with OWN_, jumps to them, rules with the mark 0x99, and wanted rules.
func own(want, have ruleset.Set) ruleset.Ownership {
	owned := ruleset.Ownership{Chains: map[string]map[string]bool{}, Rules: map[string]map[string][]bool{}}
	for _, t := range have.Tables {
		owned.Chains[t.Name], owned.Rules[t.Name] = map[string]bool{}, map[string][]bool{}
		for _, c := range t.Chains {
			owned.Chains[t.Name][c.Name] = strings.HasPrefix(c.Name, "OWN_")
			wanted, _ := want.Table(t.Name).Chain(c.Name)
			marks := make([]bool, len(c.Rules))
			for i, r := range c.Rules {
				marks[i] = strings.Contains(r.String(), "-j OWN_") || strings.Contains(r.String(), "--mark 0x99")
				for _, w := range wanted.Rules {
					marks[i] = marks[i] || w.String() == r.String()
				}
			}
			owned.Rules[t.Name][c.Name] = marks
		}
	}
	return owned
}
