package xtables_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/expression/expressiontest"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/node/nftables/spectest"
	"github.com/meshcni/istio-cni/internal/node/nftables/xtables"
)

// encode gives the expressions of a rule.
func encode(f ruleset.Family, spec string) (nfnetlink.Attributes, error) {
	var b nfnetlink.Buffer
	if err := xtables.Encode(&b, f, spec); err != nil {
		return nil, err
	}
	data, err := b.Bytes()
	for a := range nfnetlink.Attributes(data).All() {
		if a.Kind == unix.NFTA_RULE_EXPRESSIONS {
			return a.Value, err
		}
	}
	return nil, fmt.Errorf("there are no expressions in %x (%w)", data, err)
}

// rulesOf are all rules of a Spec.
func rulesOf(f ruleset.Family, s redirect.Spec) []string {
	var out []string
	for _, set := range []ruleset.Set{redirect.Rules(s, f), redirect.RejectAll(f)} {
		for _, table := range set.Tables {
			for _, chain := range table.Chains {
				for _, r := range chain.Rules {
					out = append(out, r.Spec)
				}
			}
		}
	}
	return out
}

var families = []ruleset.Family{ruleset.IPv4, ruleset.IPv6}

// more are rules that no Spec makes and that can be written all the same.
var more = []string{
	"", "-m owner --uid-owner 5-7 ! --gid-owner 8 -j RETURN", "-m conntrack ! --ctstate NEW,UNTRACKED,SNAT,DNAT -j DROP",
	"-p tcp -m tcp --sport 1:2 ! --dport 3:4 ! --tcp-flags SYN,ACK NONE -j ACCEPT", "-p udp -m udp -j ACCEPT",
	"-p sctp -m multiport --sports 1,2:3 -j ACCEPT", "-p 99 -m mark --mark 0x1/0x3 -g CHAIN", "-i eth+ ! -o a+ -j X",
	"-m connmark ! --mark 0x0/0x0 -j CONNMARK --set-xmark 0x1/0x2", "-p tcp -j REDIRECT --to-ports 1-2",
	"! -p tcp -j MARK --set-xmark 0x0/0x0",
}

// FuzzRulesComeBack takes rules to expressions and back: all rules of a Spec, and any text that is accepted.
func FuzzRulesComeBack(f *testing.F) {
	for seed := range uint64(50) {
		f.Add(seed, "")
	}
	for _, spec := range more {
		f.Add(uint64(0), spec)
	}
	f.Fuzz(func(t *testing.T, seed uint64, text string) {
		for _, family := range families {
			for _, spec := range rulesOf(family, spectest.Random(seed)) {
				comesBack(t, family, spec)
			}
			if _, err := encode(family, text); err == nil {
				comesBack(t, family, text)
			}
		}
	})
}

func comesBack(t *testing.T, f ruleset.Family, spec string) {
	t.Helper()
	expressions, err := encode(f, spec)
	if err != nil {
		t.Fatalf("%s: %q: %v", f, spec, err)
	}
	if got, ok := xtables.Decode(f, expressions, nil); !ok || got != spec {
		t.Fatalf("%s: %q came back as %q (understood: %v)", f, spec, got, ok)
	}
}

func TestWhatNoSpecMakesComesBack(t *testing.T) {
	for _, f := range families {
		for _, spec := range more {
			comesBack(t, f, spec)
		}
		for _, s := range spectest.Special() {
			for _, spec := range rulesOf(f, s) {
				comesBack(t, f, spec)
			}
		}
	}
}

// FuzzExpressionsAreReadOnce reads any bytes as expressions. What is understood and can be written must be read as the
// same rule again when it is.
func FuzzExpressionsAreReadOnce(f *testing.F) {
	for _, family := range families {
		for _, spec := range append(rulesOf(family, spectest.Random(1)), more...) {
			expressions, err := encode(family, spec)
			if err != nil {
				f.Fatal(err)
			}
			f.Add([]byte(expressions), []byte("\x00\x03abc"))
		}
	}
	f.Fuzz(func(t *testing.T, expressions, userdata []byte) {
		for _, family := range families {
			text, ok := xtables.Decode(family, expressions, userdata)
			if strings.HasPrefix(text, "[not understood: ") == ok {
				t.Fatalf("%q: understood: %v", text, ok)
			}
			if strings.ContainsAny(text, "\n\r") {
				t.Fatalf("%q is more than one line", text)
			}
			again, err := encode(family, text)
			if err != nil {
				continue // it can be read only
			}
			if got, ok := xtables.Decode(family, again, nil); !ok || got != text {
				t.Fatalf("%q was written and is read as %q", text, got)
			}
		}
	})
}

// TestEachBitOfARuleIsRead changes every single bit of every value of every rule: whatever comes of it, it is not the rule
// that it was. Counters do not count.
func TestEachBitOfARuleIsRead(t *testing.T) {
	spec := redirect.Default()
	spec.Mode, spec.DNS, spec.DropInvalid = redirect.TPROXY, redirect.DNSAll, true
	for _, f := range families {
		for _, want := range append(rulesOf(f, spec), more...) {
			expressions, err := encode(f, want)
			if err != nil {
				t.Fatal(err)
			}
			for _, at := range expressiontest.Values(expressions) {
				for bit := range 8 {
					changed := slices.Clone(expressions)
					changed[at] ^= 1 << bit
					if got, _ := xtables.Decode(f, changed, nil); got == want {
						t.Fatalf("%s: %q is read as before when bit %d of byte %d is changed: %x", f, want, bit, at, changed)
					}
				}
			}
		}
	}
}

func TestWhatCannotBeWrittenIsRefused(t *testing.T) {
	tests := map[string]string{
		"-p tcp -m tcp --dport 0x":                 `reading "0x" as a number of 16 bits: invalid syntax`,
		"-p tcp -m tcp --dport 65536":              `reading "65536" as a number of 16 bits: value out of range`,
		"-m tcp --dport 5":                         `match "tcp" needs -p tcp`,
		"-p udp -m tcp --dport 5":                  `match "tcp" needs -p tcp`,
		"-p tcp --dport 5":                         `nothing is known of "--dport"`,
		"-d 10.1.2.3/8 -j RETURN":                  `network "10.1.2.3/8" has bits behind its prefix`,
		"-d fd00::/8 -j RETURN":                    `network "fd00::/8" is not one of IPv4`,
		"-d 10.0.0.0 -j RETURN":                    `reading network "10.0.0.0"`,
		"! -d 0.0.0.0/0 -j RETURN":                 "no match for a network that is everything",
		"-i abcdefghijklmnop -j RETURN":            `"abcdefghijklmnop" can be no interface`,
		"-i + -j RETURN":                           `"+" can be no interface`,
		"-m owner -j RETURN":                       `match "owner" has neither --uid-owner nor --gid-owner`,
		"-m owner --uid-owner root -j RETURN":      `reading "root" as a number of 32 bits`,
		"-m conntrack --ctstate NEW,OLD -j RETURN": `nothing is known of connection state "OLD"`,
		"-m conntrack --ctstate ESTABLISHED,NEW":   `it is not spelled as iptables-save prints it, which is "-m conntrack --ctstate NEW,ESTABLISHED"`,
		"-m mark --mark 5 -j RETURN":               `which is "-m mark --mark 0x5 -j RETURN"`,
		"-m quota --quota 5":                       `nothing is known of match "quota"`,
		"-m":                                       "the rule ends too early",
		"-j":                                       "the rule ends too early",
		"-j REDIRECT":                              `target "REDIRECT" has no --to-ports`,
		"-j CT --notrack":                          `target "CT" has no --zone`,
		"-j TPROXY --on-port 5 --on-ip ::":         `"::" behind --on-ip is no address of IPv4`,
		"-j REJECT --reject-with icmp6-no-route":   `nothing is known of refusing with "icmp6-no-route" in IPv4`,
		"-j CONNMARK --left-shift-mark 5":          `nothing is known of "--left-shift-mark" behind target "CONNMARK"`,
		"-j RETURN -p tcp":                         `nothing is known of "-p" behind the target`,
		"-m multiport --dports 1,2,3,4,5,6,7,8,9:10,11:12,13:14,15:16": "holds 15 ports at most (a range counts as two), not 16",
		"[not understood: x] -j X":                                     `nothing is known of "[not"`,
	}
	for spec, want := range tests {
		_, err := encode(ruleset.IPv4, spec)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q in it", spec, err, want)
		}
	}
}
