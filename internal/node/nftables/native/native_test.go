package native_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/expression/expressiontest"
	"github.com/meshcni/istio-cni/internal/node/nftables/native"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/node/nftables/spectest"
)

// setName is what the tests call the set of a rule.
const setName = "__set%d"

// encode gives the expressions of a rule, and the ports of the set that it needs.
func encode(spec string) (nfnetlink.Attributes, map[string][]uint16, error) {
	r, err := native.Parse(spec, 1)
	if err != nil {
		return nil, nil, err
	}
	sets := map[string][]uint16{}
	if s, needed := r.Set(); needed {
		sets[setName] = s.Ports
	}
	var b nfnetlink.Buffer
	r.Encode(&b)
	data, err := b.Bytes()
	for a := range nfnetlink.Attributes(data).All() {
		if a.Kind == unix.NFTA_RULE_EXPRESSIONS {
			return withoutSetID(a.Value), sets, err
		}
	}
	return nil, nil, fmt.Errorf("there are no expressions in %x (%w)", data, err)
}

// withoutSetID takes the set's number in the transaction away, which the kernel forgets.
func withoutSetID(expressions []byte) nfnetlink.Attributes {
	var b nfnetlink.Buffer
	for e := range nfnetlink.Attributes(expressions).All() {
		lookup := bytes.Contains(e.Value, []byte("lookup\x00"))
		if !lookup {
			b.Nested(e.Kind, func() { copyAll(&b, e.Value) })
			continue
		}
		b.Nested(e.Kind, func() {
			for part := range nfnetlink.Attributes(e.Value).All() {
				if part.Kind != unix.NFTA_EXPR_DATA {
					b.Attribute(part.Kind, part.Value)
					continue
				}
				b.Nested(part.Kind, func() {
					for a := range nfnetlink.Attributes(part.Value).All() {
						if a.Kind != unix.NFTA_LOOKUP_SET_ID {
							b.Attribute(a.Kind, a.Value)
						}
					}
				})
			}
		})
	}
	data, _ := b.Bytes()
	return data
}

func copyAll(b *nfnetlink.Buffer, attributes nfnetlink.Attributes) {
	for rest := attributes; len(rest) > 0; {
		n, kind := binary.NativeEndian.Uint16(rest), binary.NativeEndian.Uint16(rest[2:])
		b.Attribute(kind, rest[4:n])
		rest = rest[min((int(n)+3)&^3, len(rest)):]
	}
}

// rulesOf are all rules of a Spec.
func rulesOf(s redirect.Spec) []string {
	var out []string
	for _, t := range []redirect.Treatment{redirect.Captured, redirect.Rejected, redirect.Unused} {
		for _, table := range native.Rules(s, redirect.Families{IPv6: t, HasIPv4: true}).Tables {
			for _, chain := range table.Chains {
				for _, r := range chain.Rules {
					out = append(out, r.Spec)
				}
			}
		}
	}
	return out
}

// more are rules that no Spec makes and that can be written all the same.
var more = []string{
	"ip saddr != 10.0.0.0/9 udp sport != { 1, 2, 3 } counter goto x", "ct mark != 0x00000001 accept", "meta nfproto ipv4 drop",
	"ct state invalid,established,related,new,untracked counter", "ip6 daddr ::/0 counter return", "ip daddr 0.0.0.0/0 return",
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
		for _, spec := range rulesOf(spectest.Random(seed)) {
			comesBack(t, spec)
		}
		expressions, sets, err := encode(text)
		if err != nil {
			return
		}
		// A text may ask for what cannot be told apart from another, or for nothing sensible: then it must not be taken for
		// something else.
		if got, ok := native.Decode(expressions, sets); ok && got != text && !redundant(text) {
			t.Fatalf("%q came back as %q", text, got)
		}
	})
}

// redundant reports whether a rule says something twice, or nothing by a mask that is none.
func redundant(text string) bool {
	return strings.Contains(text, "meta l4proto") || strings.Contains(text, "meta nfproto") || strings.Contains(text, "{") ||
		strings.Contains(text, "/")
}

func comesBack(t *testing.T, spec string) {
	t.Helper()
	expressions, sets, err := encode(spec)
	if err != nil {
		t.Fatalf("%q: %v", spec, err)
	}
	if got, ok := native.Decode(expressions, sets); !ok || got != spec {
		t.Fatalf("%q came back as %q (understood: %v)", spec, got, ok)
	}
}

func TestRulesComeBack(t *testing.T) {
	for _, spec := range more {
		comesBack(t, spec)
	}
	for _, s := range spectest.Special() {
		for _, spec := range rulesOf(s) {
			comesBack(t, spec)
		}
	}
}

// FuzzExpressionsAreReadOnce reads any bytes as expressions. What is understood must be written as a rule that is read so
// again.
func FuzzExpressionsAreReadOnce(f *testing.F) {
	for _, spec := range append(rulesOf(spectest.Random(1)), more...) {
		expressions, _, err := encode(spec)
		if err != nil {
			f.Fatal(err)
		}
		f.Add([]byte(expressions))
	}
	f.Fuzz(func(t *testing.T, expressions []byte) {
		text, ok := native.Decode(expressions, map[string][]uint16{setName: {53, 15008}})
		if !ok {
			return
		}
		again, sets, err := encode(text)
		if err != nil {
			return // nft could have made it, and Parse does not write it
		}
		if got, ok := native.Decode(again, sets); !ok || got != text {
			t.Fatalf("%q was written and is read as %q (understood: %v)", text, got, ok)
		}
	})
}

// TestEachBitOfARuleIsRead changes every single bit of every value of every rule: whatever comes of it, it is not the rule
// that it was. Counters do not count.
func TestEachBitOfARuleIsRead(t *testing.T) {
	spec := redirect.Default()
	spec.Mode, spec.DNS, spec.DropInvalid = redirect.TPROXY, redirect.DNSAll, true
	for _, want := range append(rulesOf(spec), more...) {
		expressions, sets, err := encode(want)
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range expressiontest.Values(expressions) {
			for bit := range 8 {
				changed := slices.Clone(expressions)
				changed[at] ^= 1 << bit
				if got, ok := native.Decode(changed, sets); ok && got == want {
					t.Fatalf("%q is read as before when bit %d of byte %d is changed: %x", want, bit, at, changed)
				}
			}
		}
	}
}

func TestWhatCannotBeWrittenIsRefused(t *testing.T) {
	for spec, want := range map[string]string{
		"tcp dport 65536 accept":            `reading "65536" as a number of 16 bits: value out of range`,
		"tcp dport x accept":                `reading "x" as a number of 16 bits: invalid syntax`,
		"tcp dport  5 accept":               `it is not spelled as nft lists it, which is "tcp dport 5 accept"`,
		"tcp port 5 accept":                 `nothing is known of "port"`,
		"sctp dport 5 accept":               `nothing is known of "sctp"`,
		"meta l4proto sctp accept":          `nothing is known of "sctp"`,
		"meta nfproto arp accept":           `nothing is known of "arp"`,
		"meta cpu 5 accept":                 `nothing is known of "meta cpu"`,
		"meta mark 5 accept":                `which is "meta mark 0x00000005 accept"`,
		"meta skuid set 5":                  `nothing is known of "meta skuid set"`,
		"ct mark set ct mark":               `nothing is known of "ct mark set"`,
		"ct zone set 65536":                 `reading "65536" as a number of 16 bits`,
		"ct state new,old accept":           `nothing is known of "connection state old"`,
		"ip daddr fd00::1 accept":           `network "fd00::1" is of the other family`,
		"ip daddr 10.0.0.300 accept":        `reading network "10.0.0.300"`,
		"ip ttl 5 accept":                   `nothing is known of "ttl"`,
		"ip daddr 10.1.2.3/8 accept":        `which is "ip daddr 10.0.0.0/8 accept"`,
		"ip daddr 10.0.0.1/32 accept":       `which is "ip daddr 10.0.0.1 accept"`,
		"iifname lo accept":                 `"lo" can be no interface: want 1 to 15 characters in quotes`,
		`iifname "abcdefghijklmnop" accept`: "can be no interface",
		"redirect :5":                       `nothing is known of ":5"`,
		"tproxy inet to :5":                 `nothing is known of "inet"`,
		"reject with icmp host-unreachable": `nothing is known of "reject"`,
		"counter jump":                      "the rule ends too early",
		"tcp dport { 5":                     "the rule ends too early",
		"tcp dport { 5 } tcp sport { 6 }":   "a rule with two sets cannot be written",
	} {
		_, _, err := encode(spec)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q in it", spec, err, want)
		}
	}
}

// TestNoChainIsJumpedToThatIsNotThere holds what the reference fails at: DNS servers of a family that is not captured.
func TestNoChainIsJumpedToThatIsNotThere(t *testing.T) {
	for seed := range uint64(2000) {
		for _, family := range []redirect.Treatment{redirect.Captured, redirect.Unused} {
			set := native.Rules(spectest.Random(seed), redirect.Families{IPv6: family})
			for _, table := range set.Tables {
				missing(t, seed, table)
			}
		}
	}
}

func missing(t *testing.T, seed uint64, table ruleset.Table) {
	t.Helper()
	for _, c := range table.Chains {
		if len(c.Rules) == 0 {
			t.Errorf("seed %d: chain %s of table %s is empty", seed, c.Name, table.Name)
		}
		for _, r := range c.Rules {
			_, to, jumps := strings.Cut(r.Spec, "jump ")
			if _, there := table.Chain(to); jumps && !there {
				t.Errorf("seed %d: %q of table %s jumps to a chain that is not there", seed, r.Spec, table.Name)
			}
		}
	}
}

func TestEveryRuleSaysWhy(t *testing.T) {
	for seed := range uint64(200) {
		for _, table := range native.Rules(spectest.Random(seed), redirect.Families{IPv6: redirect.Captured}).Tables {
			for _, c := range table.Chains {
				for _, r := range c.Rules {
					if r.Why == "" {
						t.Errorf("%q says not why", r.Spec)
					}
				}
			}
		}
	}
}
