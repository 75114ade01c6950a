package ruleset_test

import (
	"math/rand"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// FuzzParse reads any text. What is taken must print as something that is read as the same; what is refused must be said
// to be so in a line of a readable length.
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

// FuzzReconcile goes from any Set to any other, chosen by a seed.
func FuzzReconcile(f *testing.F) {
	f.Add(int64(1))
	f.Fuzz(func(t *testing.T, seed int64) {
		r := rand.New(rand.NewSource(seed))
		want, have := randomSet(r, nil), randomSet(r, otherChains)
		if problem := reaches(want, have); problem != "" {
			t.Errorf("%s\nwant\n%s\nhave\n%s", problem, want, have)
		}
	})
}
