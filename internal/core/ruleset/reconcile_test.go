package ruleset_test

import (
	"math/rand"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestReconcile_Operations checks the input for iptables-restore, case by case.
func TestReconcile_Operations(t *testing.T) {
	base := nat("OUTPUT -j OWN_A # out", "PREROUTING -p tcp -j OWN_A", "OWN_A -p tcp -j RETURN # tcp", "OWN_A -j OWN_B", "OWN_B -j DROP")
	fresh := program("nat",
		":OWN_A - [0:0]", ":OWN_B - [0:0]", "-A OWN_A -p tcp -j RETURN", "-A OWN_A -j OWN_B", "-A OWN_B -j DROP",
		"-A PREROUTING -p tcp -j OWN_A", "-A OUTPUT -j OWN_A")
	for _, test := range []struct {
		name       string
		want, have ruleset.Set
		program    string
	}{
		{name: "as wanted", want: base, have: nat("OUTPUT -j OWN_A", "OUTPUT -j LOG", "PREROUTING -p tcp -j OWN_A", "OWN_A -p tcp -j RETURN", "OWN_A -j OWN_B", "OWN_B -j DROP")},
		{name: "nothing wanted and nothing of ours there", want: ruleset.Set{Family: ruleset.IPv4}, have: nat("OUTPUT -j DROP", "CNI-A:")},
		{name: "a fresh namespace", want: base, have: ruleset.Set{Family: ruleset.IPv4}, program: fresh},
		{
			name: "an own chain that drifted: jumps stay", want: base,
			have:    nat("OUTPUT -j OWN_A", "PREROUTING -p tcp -j OWN_A", "OWN_A -j OWN_B", "OWN_A -p tcp -j RETURN", "OWN_B -j DROP"),
			program: program("nat", ":OWN_A - [0:0]", ":OWN_B - [0:0]", "-A OWN_A -p tcp -j RETURN", "-A OWN_A -j OWN_B", "-A OWN_B -j DROP"),
		},
		{
			name: "a foreign rule ahead of ours: ours is moved", want: base,
			have: nat("OUTPUT -d 10.0.0.0/8 -j ACCEPT", "OUTPUT -j OWN_A", "PREROUTING -p tcp -j OWN_A", "OWN_A -p tcp -j RETURN", "OWN_A -j OWN_B", "OWN_B -j DROP"),
			program: program("nat",
				":OWN_A - [0:0]", ":OWN_B - [0:0]", "-A OWN_A -p tcp -j RETURN", "-A OWN_A -j OWN_B", "-A OWN_B -j DROP",
				"-D OUTPUT -j OWN_A", "-I OUTPUT 1 -j OWN_A"),
		},
		{
			name:    "foreign rules where ours are missing: ours go ahead, in order",
			want:    nat("OUTPUT -o eth1 -j RETURN", "OUTPUT -j OWN_A", "OWN_A -j DROP"),
			have:    nat("OUTPUT -p udp -j DROP", "OUTPUT -p tcp -j DROP"),
			program: program("nat", ":OWN_A - [0:0]", "-A OWN_A -j DROP", "-I OUTPUT 1 -o eth1 -j RETURN", "-I OUTPUT 2 -j OWN_A"),
		},
		{
			name: "a jump twice: both go, one comes back", want: nat("OUTPUT -j OWN_A", "OWN_A -j DROP"),
			have:    nat("OUTPUT -j OWN_A", "OUTPUT -j OWN_A", "OWN_A -j DROP"),
			program: program("nat", ":OWN_A - [0:0]", "-A OWN_A -j DROP", "-D OUTPUT -j OWN_A", "-D OUTPUT -j OWN_A", "-A OUTPUT -j OWN_A"),
		},
		{
			name: "a left-over chain: emptied first, removed last", want: nat("OUTPUT -j OWN_A", "OWN_A -j DROP"),
			have: nat("OUTPUT -p udp -j OWN_OLD", "OUTPUT -j OWN_A", "CNI-A -j OWN_OLD", "CNI-A -j ACCEPT", "OWN_A -j OWN_OLD", "OWN_OLD -j OWN_OLDER", "OWN_OLDER -j DROP"),
			program: program("nat",
				":OWN_A - [0:0]", ":OWN_OLD - [0:0]", ":OWN_OLDER - [0:0]", "-A OWN_A -j DROP", "-D OUTPUT -p udp -j OWN_OLD",
				"-D OUTPUT -j OWN_A", "-A OUTPUT -j OWN_A", "-D CNI-A -j OWN_OLD", "-X OWN_OLD", "-X OWN_OLDER"),
		},
		{
			name: "nothing wanted: all of ours goes, all else stays", want: ruleset.Set{Family: ruleset.IPv4},
			have: nat("PREROUTING -p tcp -j OWN_A", "OUTPUT -p udp -j DROP", "OUTPUT -j OWN_A", "OUTPUT -m mark --mark 0x99 -j RETURN", "OWN_A -j OWN_B", "OWN_B:", "CNI-A -j ACCEPT"),
			program: program("nat",
				":OWN_A - [0:0]", ":OWN_B - [0:0]", "-D PREROUTING -p tcp -j OWN_A", "-D OUTPUT -j OWN_A",
				"-D OUTPUT -m mark --mark 0x99 -j RETURN", "-X OWN_A", "-X OWN_B"),
		},
		{
			name: "a rule that matches all and does nothing", want: nat("OWN_A "), have: ruleset.Set{Family: ruleset.IPv4},
			program: program("nat", ":OWN_A - [0:0]", "-A OWN_A"),
		},
		{
			name:    "only the tables that are not right are written, by name",
			want:    rulesettest.Set("nat OUTPUT -j OWN_A", "nat OWN_A -j DROP", "raw OUTPUT -j OWN_R", "raw OWN_R -j DROP", "mangle OWN_M:"),
			have:    rulesettest.Set("nat OUTPUT -j OWN_A", "nat OWN_A -j DROP", "raw OUTPUT -j OWN_R", "raw OWN_R -j ACCEPT"),
			program: program("mangle", ":OWN_M - [0:0]") + program("raw", ":OWN_R - [0:0]", "-A OWN_R -j DROP"),
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := ruleset.Reconcile(test.want, test.have, own(test.want, test.have))
			check.Diff(t, "program", test.program, p.String())
			if p.Empty() != (test.program == "") || p.Family != ruleset.IPv4 {
				t.Errorf("Empty is %t, Family is %s", p.Empty(), p.Family)
			}
			rulesettest.NewNamespace(test.have).Reach(t, test.want, own)
		})
	}
}

// program returns the input for iptables-restore from a table's operations.
func program(table string, lines ...string) string {
	return "*" + table + "\n" + strings.Join(lines, "\n") + "\nCOMMIT\n"
}

var (
	tables       = []string{"filter", "mangle", "nat", "raw"}
	ownChains    = []string{"OWN_A", "OWN_B", "OWN_C", "OWN_D"}
	otherChains  = []string{"CNI-A", "KUBE-B", "Z"}
	ownRules     = []string{"-p tcp -j RETURN", "-p tcp -j DROP", "-j ACCEPT", "", "-j OWN_A", "-p udp -j OWN_B", "-j OWN_C", "-g OWN_D"}
	ownBuiltin   = []string{"-m mark --mark 0x99 -j RETURN", "-m connmark --mark 0x99 -j DROP", "-o eth1 -j RETURN", "-j OWN_A", "-p tcp -j OWN_B", "-j OWN_C"}
	foreignRules = []string{"-p tcp -j DROP", "-o eth1 -j RETURN", "-s 10.0.0.0/8 -j ACCEPT", `-m comment --comment "a  \"b\"" -j LOG`, "", "-j CNI-A", "-p udp -j KUBE-B"}
)

// randomSet makes a Set: with foreign chains a possible present Set, without them a possible wanted Set.
func randomSet(r *rand.Rand, foreigners []string) ruleset.Set {
	var out []ruleset.Table
	for _, name := range tables {
		if r.Intn(2) == 0 {
			continue
		}
		t := ruleset.New(ruleset.IPv4, ruleset.Table{Name: name}).Tables[0]
		for _, c := range append(append([]string{}, ownChains...), foreigners...) {
			if r.Intn(2) == 0 {
				t.Chains = append(t.Chains, ruleset.Chain{Name: c, Policy: ruleset.NoPolicy})
			}
		}
		for i := range t.Chains {
			fill(r, t, &t.Chains[i], foreigners != nil)
		}
		out = append(out, t)
	}
	return ruleset.New(ruleset.IPv4, out...)
}

// fill puts rules into a chain, with jumps only to chains that exist.
func fill(r *rand.Rand, t ruleset.Table, c *ruleset.Chain, there bool) {
	pool := ownBuiltin
	switch {
	case strings.HasPrefix(c.Name, "OWN_"):
		pool = ownRules
	case there:
		pool = append(append([]string{}, ownBuiltin...), foreignRules...)
	}
	if there && c.Policy == "ACCEPT" && r.Intn(4) == 0 {
		c.Policy = "DROP"
	}
	for range r.Intn(6) {
		spec := pool[r.Intn(len(pool))]
		words := strings.Fields(spec)
		if len(words) > 0 {
			target := words[len(words)-1]
			if _, exists := t.Chain(target); strings.ContainsAny(target, "_-") && !exists {
				continue
			}
		}
		c.Rules = append(c.Rules, ruleset.Read(spec))
	}
}

// FuzzParse reads any text. An accepted text must survive printing and reading; a refused text gives an error of readable
// length.
func FuzzParse(f *testing.F) {
	// Small texts: the fuzzer spends its time minimizing large ones.
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
			t.Error("tables are missing")
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
