package ruleset_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
)

// wanted returns the wanted rules of most cases.
func wanted() ruleset.Set {
	return nat(
		"OUTPUT -j OWN_OUT # all that is sent", "PREROUTING -p tcp -j OWN_IN # all that comes in",
		"OWN_IN -p tcp -m tcp --dport 15008 -j RETURN # tunnels", "OWN_IN -p tcp -j OWN_TO # the rest",
		"OWN_OUT -o lo -j RETURN # loopback", "OWN_OUT -j OWN_TO # the rest",
		"OWN_TO -p tcp -j REDIRECT --to-ports 15001 # to the proxy",
	)
}

// TestDiff_Text prints each kind of difference: in full, in one line, and with the foreign rules behind ours.
func TestDiff_Text(t *testing.T) {
	const out, in, tunnels, rest = "OUTPUT -j OWN_OUT", "PREROUTING -p tcp -j OWN_IN", "OWN_IN -p tcp -m tcp --dport 15008 -j RETURN", "OWN_IN -p tcp -j OWN_TO"
	const lo, all, proxy, foreign = "OWN_OUT -o lo -j RETURN", "OWN_OUT -j OWN_TO", "OWN_TO -p tcp -j REDIRECT --to-ports 15001", "OUTPUT -d 10.0.0.0/8 -j ACCEPT"
	const leftover = "OUTPUT -m mark --mark 0x99 -j RETURN"
	none := ruleset.Set{Family: ruleset.IPv4}
	for _, test := range []struct {
		name       string // of the golden file
		want, have ruleset.Set
	}{
		{"nothing-there", wanted(), none},
		{"rule-missing", wanted(), nat(out, in, rest, lo, all, proxy)},
		{"rule-changed", wanted(), nat(out, in, tunnels, rest, lo, all, "OWN_TO -p tcp -j REDIRECT --to-ports 15101")},
		{"rule-too-many", wanted(), nat(out, in, tunnels, "OWN_IN -j ACCEPT", rest, lo, all, proxy)},
		{"rule-twice", wanted(), nat(out, out, in, tunnels, rest, lo, all, proxy)},
		{"wrong-order", wanted(), nat(out, in, rest, tunnels, lo, all, proxy)},
		{"foreign-ahead", wanted(), nat(foreign, out, in, tunnels, rest, lo, all, proxy)},
		{"foreign-behind", wanted(), nat(out, foreign, in, "POSTROUTING -j MASQUERADE", tunnels, rest, lo, all, proxy)},
		{"chain-left-over", wanted(), nat(out, "OUTPUT -p udp -j OWN_OLD", in, tunnels, rest, lo, all, proxy, "OWN_OLD -j DROP")},
		{"foreign-between-ours-and-a-left-over", wanted(), nat(out, foreign, leftover, in, tunnels, rest, lo, all, proxy)},
		{"nothing-wanted", none, nat(out, foreign, leftover, lo, "OWN_EMPTY:")},
		{"as-wanted", wanted(), wanted()},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := ruleset.Compare(test.want, test.have, own(test.want, test.have))
			var b strings.Builder
			fmt.Fprintf(&b, "%s\nin one line: %s\n", d, d.Summary(3))
			for _, o := range d.Others {
				fmt.Fprintf(&b, "besides: %s\n", o)
			}
			rulesettest.Golden(t, filepath.Join("diff", test.name+".txt"), b.String())
			if d.Empty() != (d.String() == "") || d.Empty() != (d.Summary(3) == "") {
				t.Errorf("Empty is %t", d.Empty())
			}
		})
	}
}

// TestDiff_HostileNames: the kernel accepts any bytes as a name, and people read differences.
func TestDiff_HostileNames(t *testing.T) {
	const hostile = "OWN_X\n+ -A FORGED\x1b[2J\u009b\u202e"
	have := ruleset.New(ruleset.IPv4, ruleset.Table{Name: "nat", Chains: []ruleset.Chain{
		{Name: hostile, Policy: ruleset.NoPolicy, Rules: []ruleset.Rule{ruleset.Read(hostile)}},
		{Name: "OUTPUT", Policy: "ACCEPT", Rules: []ruleset.Rule{ruleset.Read("-j OWN_A"), ruleset.Read(hostile)}},
		{Name: "OWN_A", Policy: ruleset.NoPolicy, Rules: []ruleset.Rule{ruleset.Read(hostile + strings.Repeat("x", 1<<20))}},
	}})
	want := nat("OWN_A -j RETURN", "OUTPUT -j OWN_A")
	d := ruleset.Compare(want, have, own(want, have))
	for what, text := range map[string]string{"String": d.String(), "Summary": d.Summary(9), "Others": strings.Join(d.Others, "\n")} {
		if text == "" || strings.Contains(text, "\n+ -A FORGED") || len(text) > 32<<10 {
			t.Errorf("%s: %d bytes: %.2000q", what, len(text), text)
		}
		if strings.ContainsFunc(strings.ReplaceAll(text, "\n", ""), func(r rune) bool { return !printable.Is(r) }) {
			t.Errorf("%s is not printable: %.2000q", what, text)
		}
	}
}
