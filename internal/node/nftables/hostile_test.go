package nftables_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nftablestest"
)

// TestRead_ChainNames: the kernel takes blanks and control characters in a chain's name. No such chain passes
// for one of ours, none hides another one, and all that have our prefix go.
func TestRead_ChainNames(t *testing.T) {
	names := []string{
		"ISTIO_OUTPUT", "ISTIO_OUTPUT ", "ISTIO OUTPUT", "ISTIO\tOUTPUT", "ISTIO_\x1b[31m", "ISTIO_OUTPUT\nCOMMIT", `ISTIO_OUTPUT\x20`, `ISTIO_"`, "ISTIO_é", "ISTIO_\xff", " ",
	}
	p := newPod(t)
	for _, name := range names {
		nftablestest.Fill(t, string(p), unix.NFPROTO_IPV4, "nat", name, 1, 1)
	}
	var seen []string
	for _, c := range p.read(t, ruleset.IPv4).Table("nat").Chains {
		if ruleset.Builtin("nat", c.Name) {
			continue
		}
		seen = append(seen, c.Name)
		if len(c.Rules) != 1 || strings.ContainsFunc(c.Name, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
			t.Errorf("chain %q has %d rules", c.Name, len(c.Rules))
		}
	}
	slices.Sort(seen)
	if len(slices.Compact(seen)) != len(names) {
		t.Errorf("%d chains are %q", len(names), seen)
	}
	want := redirect.Rules(redirect.Default(), ruleset.IPv4)
	p.apply(t, reconcile(want))
	for _, c := range p.read(t, ruleset.IPv4).Table("nat").Chains {
		if _, wanted := want.Table("nat").Chain(c.Name); strings.HasPrefix(c.Name, "ISTIO_") && !wanted {
			t.Errorf("chain %q is left", c.Name)
		}
	}
}

// TestRead_SetOfManyPorts for each rule that looks into it.
func TestRead_SetOfManyPorts(t *testing.T) {
	var ports []string
	for i := range 60000 {
		ports = append(ports, fmt.Sprint(i+1))
	}
	p := newPod(t)
	p.run(t, "add table inet istio-proxy-nat\nadd chain inet istio-proxy-nat istio-output\n"+
		"add set inet istio-proxy-nat many { type inet_service; }\nadd element inet istio-proxy-nat many { "+strings.Join(ports, ", ")+" }\n"+
		strings.Repeat("add rule inet istio-proxy-nat istio-output tcp dport @many accept\n", 100), "nft", "-f", "-")
	chain, _ := p.read(t, 0).Table("istio-proxy-nat").Chain("istio-output")
	size := 0
	for _, r := range chain.Rules {
		size += len(r.String())
	}
	if len(chain.Rules) != 100 || size > 100<<10 {
		t.Errorf("%d rules take %d bytes", len(chain.Rules), size)
	}
}

// TestApply_ManyRulesRemoved: each is found, also where others read the same, and foreign rules stay.
func TestApply_ManyRulesRemoved(t *testing.T) {
	const n = 2000
	text := "*nat\n:ISTIO_A - [0:0]\n:ISTIO_B - [0:0]\n"
	for i := range n {
		text += fmt.Sprintf("-A OUTPUT -j ISTIO_%c\n-A OUTPUT -p tcp -m tcp --dport %d -j ACCEPT\n", "AB"[i%2], i+1)
	}
	p := newPod(t)
	p.restore(t, ruleset.IPv4, text+"COMMIT\n")
	want := redirect.Rules(redirect.Default(), ruleset.IPv4)
	p.apply(t, reconcile(want))
	rules := p.chain(t, "OUTPUT")
	first, _ := want.Table("nat").Chain("OUTPUT")
	if len(rules) != len(first.Rules)+n || rules[0] != first.Rules[0].String() || rules[n] != fmt.Sprintf("-p tcp -m tcp --dport %d -j ACCEPT", n) {
		t.Errorf("%d rules, the first is %q, the last %q", len(rules), rules[0], rules[len(rules)-1])
	}
}
