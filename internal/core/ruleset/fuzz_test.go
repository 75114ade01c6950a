package ruleset_test

import (
	"math/rand"
	"regexp"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
)

// FuzzParse reads any text. An accepted one must print as a text that is read as the same; a refused one gives an error of
// a readable length.
func FuzzParse(f *testing.F) {
	// Small ones: the fuzzer spends its time on making large ones smaller.
	for _, text := range []string{
		"*nat\n:OUTPUT ACCEPT [0:0]\n:A - [0:0]\n-A OUTPUT -j A\n-A A -p tcp -j DROP\nCOMMIT\n",
		"*other\n:A -\n:B - [1:2]\n[0:0] -A A   -j B \n-A B\nCOMMIT\n# end",
		"*raw\r\n:OUTPUT DROP [0:0]\r\nCOMMIT",
		"# x\n*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -m comment --comment \"a \\\"b\\\" -A INPUT\" -j DROP\nCOMMIT\n*raw\nCOMMIT\n",
		"*nat\n:A - [0:0]\n",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		set, err := ruleset.Parse(ruleset.IPv4, text)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "parsing IPv4 rules") {
				t.Errorf("error is %v", err)
			}
			return
		}
		again, err := ruleset.Parse(ruleset.IPv4, set.String())
		if err != nil || again.String() != set.String() {
			t.Errorf("%q was read as\n%q, and that as\n%q (error %v)", text, set, again, err)
		}
		if set.Empty() != again.Empty() || len(set.Tables) != len(again.Tables) {
			t.Error("tables are lost")
		}
	})
}

// FuzzCounters compares the counters that Parse accepts, behind a chain and before a rule, with their pattern.
func FuzzCounters(f *testing.F) {
	pattern := regexp.MustCompile(`^\[\d+:\d+\]$`)
	for _, text := range []string{
		"[0:0]", "[12:3456]", "[99999999999999999999:1]", "", "[]", "[:]", "[1:]", "[:1]", "[1]", "[1:2:3]", "[1:2", "1:2]", "[[1:2]]", "[1:2]]",
		"[-1:2]", "[1:+2]", "[1:0x2]", "[1:2]x", "x[1:2]", "[\u0661:2]", "[1 :2]", "]1:2[", "[", "]", "-A", "COMMIT",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if text == "" || strings.ContainsAny(text, " \t\r\n") || strings.ContainsAny(text[:1], "#*:") {
			return // no single word, or the beginning of another kind of line
		}
		want := pattern.MatchString(text)
		for _, where := range []string{"*other\n:A - " + text + "\nCOMMIT\n", "*other\n:A -\n" + text + " -A A -j B\nCOMMIT\n"} {
			if _, err := ruleset.Parse(ruleset.IPv4, where); (err == nil) != want {
				t.Errorf("%q: counters %v, want %v: %v", where, err == nil, want, err)
			}
		}
	})
}

// FuzzReconcile goes from any Set to any other, and to nothing, chosen by a seed.
func FuzzReconcile(f *testing.F) {
	for seed := range int64(200) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed int64) {
		r := rand.New(rand.NewSource(seed))
		want, have := randomSet(r, nil), randomSet(r, otherChains)
		for _, want := range []ruleset.Set{want, {Family: ruleset.IPv4}} {
			rulesettest.NewNamespace(have).Reach(t, want, own)
		}
	})
}
