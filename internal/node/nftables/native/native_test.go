package native_test

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
	"github.com/meshcni/istio-cni/internal/node/nftables/native"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink/nfnetlinktest"
)

// encode returns the expressions of a rule.
func encode(tb testing.TB, r ruleset.Rule) nfnetlink.Attributes {
	tb.Helper()
	var b nfnetlink.Buffer
	if err := native.Encode(&b, r, 1); err != nil {
		tb.Fatalf("%q: %v", r, err)
	}
	data, err := b.Bytes()
	if err != nil {
		tb.Fatal(err)
	}
	return data[unix.SizeofNlAttr:]
}

// rulesOf are all rules of a Spec.
func rulesOf(s redirect.Spec) []ruleset.Rule {
	var out []ruleset.Rule
	for _, t := range []redirect.Treatment{redirect.Captured, redirect.Rejected, redirect.Unused, redirect.Bypassed} {
		out = append(out, rulesettest.Rules(redirect.NativeRules(s, redirect.Families{IPv6: t, HasIPv4: true}))...)
	}
	return out
}

// setsOf are the sets of a rule by the name that it gives them.
func setsOf(r ruleset.Rule) map[string]native.Set {
	return map[string]native.Set{"__set%d": native.SetOf(r)}
}

// FuzzRulesHaveTheFingerprintOfTheirText: a rule that was written is recognized, and two rules of different texts have
// different fingerprints.
func FuzzRulesHaveTheFingerprintOfTheirText(f *testing.F) {
	for seed := range uint64(50) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		texts := map[string]string{}
		for _, r := range rulesOf(spectest.Random(seed)) {
			want := native.WantedFingerprint(r)
			if got := native.Fingerprint(encode(t, r), setsOf(r)); got != want || got == "" {
				t.Fatalf("%q has fingerprint %q when it is written and %q when it is wanted", r, got, want)
			}
			if other, twice := texts[want]; twice && other != r.String() && !sameConditions(r) {
				t.Fatalf("%q and %q have one fingerprint", r, other)
			}
			texts[want] = r.String()
		}
	})
}

// FuzzDecodeIsTheReverseOfEncode: a rule that was written is understood, as one with the same expressions.
func FuzzDecodeIsTheReverseOfEncode(f *testing.F) {
	for seed := range uint64(50) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		for _, r := range rulesOf(spectest.Random(seed)) {
			got, ok := native.Decode(encode(t, r), setsOf(r))
			if !ok || native.WantedFingerprint(got) != native.WantedFingerprint(r) {
				t.Fatalf("%q is read as %q (%v)", r, got, ok)
			}
		}
	})
}

// TestWhatIsNotUnderstoodIsNotDecoded changes every single bit of every rule: whatever is read then has other expressions than the
// rule, so that no rule is taken for another.
func TestWhatIsNotUnderstoodIsNotDecoded(t *testing.T) {
	spec := redirect.Default()
	spec.Mode, spec.DNS, spec.DropInvalid = redirect.TPROXY, redirect.DNSAll, true
	for _, r := range rulesOf(spec) {
		expressions := encode(t, r)
		for at, changed := range nfnetlinktest.Flips(expressions) {
			got, ok := native.Decode(changed, setsOf(r))
			if ok && native.WantedFingerprint(got) == native.WantedFingerprint(r) && !setID(expressions, at) && native.Fingerprint(changed, setsOf(r)) != native.WantedFingerprint(r) &&
				!harmless(r) {
				t.Fatalf("%q is read as before when byte %d is changed: %x", r, at, changed)
			}
		}
	}
}

// harmless reports whether attributes of the target are left out that change nothing about the way of a packet: the code of a
// refusal, and flags of a redirection.
func harmless(r ruleset.Rule) bool {
	switch r.Target.(type) {
	case ruleset.Reject, ruleset.RedirectTo:
		return true
	}
	return false
}

// sameConditions reports whether a rule may do the same as one that reads otherwise: a set of one port, in whatever order.
func sameConditions(r ruleset.Rule) bool {
	return slices.ContainsFunc(r.Matches, func(m ruleset.Match) bool {
		p, ok := m.(ruleset.Ports)
		return ok && len(p.Distinct()) == 1
	})
}

// TestEachBitOfARuleIsRead changes every single bit of every value of every rule: whatever comes of it, it is not the rule
// that it was. Counters do not count.
func TestEachBitOfARuleIsRead(t *testing.T) {
	spec := redirect.Default()
	spec.Mode, spec.DNS, spec.DropInvalid = redirect.TPROXY, redirect.DNSAll, true
	for _, r := range rulesOf(spec) {
		expressions := encode(t, r)
		want := native.Fingerprint(expressions, setsOf(r))
		for at, changed := range nfnetlinktest.Flips(expressions) {
			if native.Fingerprint(changed, setsOf(r)) == want && !setID(expressions, at) {
				t.Fatalf("%q is read as before when byte %d is changed: %x", r, at, changed)
			}
		}
	}
}

// setID reports whether the byte is in the number of a set in its transaction, which the kernel forgets.
func setID(expressions nfnetlink.Attributes, at int) bool {
	id := binary.NativeEndian.AppendUint16(binary.NativeEndian.AppendUint16(nil, 8), unix.NFTA_LOOKUP_SET_ID)
	id = binary.BigEndian.AppendUint32(id, 1)
	found := bytes.Index(expressions, id)
	return found >= 0 && at >= found && at < found+len(id)
}

// TestAttributesThatTheKernelAddsAreNoDifference: it adds attributes to the rules that it lists, and leaves some out.
func TestAttributesThatTheKernelAddsAreNoDifference(t *testing.T) {
	expression := func(name string, fill func(*nfnetlink.Buffer)) nfnetlink.Attributes {
		var b nfnetlink.Buffer
		b.Expression(name, func() { fill(&b) })
		data, _ := b.Bytes()
		return data
	}
	number := func(kind uint16, value uint32) func(*nfnetlink.Buffer) {
		return func(b *nfnetlink.Buffer) { b.Uint32(kind, value) }
	}
	none := func(*nfnetlink.Buffer) {}
	for _, tt := range []struct {
		name string
		fill func(*nfnetlink.Buffer)
		same bool
	}{
		{"bitwise", number(6, 0), true},
		{"bitwise", number(6, 1), false},
		{"redir", number(unix.NFTA_REDIR_REG_PROTO_MAX, 1), true},
		{"redir", number(unix.NFTA_REDIR_REG_PROTO_MAX, 2), false},
		{"counter", number(unix.NFTA_COUNTER_PACKETS, 5), true},
		{"lookup", number(unix.NFTA_LOOKUP_SET_ID, 7), true},
		{"reject", func(b *nfnetlink.Buffer) { b.Attribute(unix.NFTA_REJECT_ICMP_CODE, []byte{0}) }, true},
		{"reject", func(b *nfnetlink.Buffer) { b.Attribute(unix.NFTA_REJECT_ICMP_CODE, []byte{4}) }, false},
		{"meta", number(unix.NFTA_META_KEY, 0), false},
		{"lookup", func(b *nfnetlink.Buffer) { b.String(unix.NFTA_LOOKUP_SET, "unknown") }, false},
	} {
		got, bare := native.Fingerprint(expression(tt.name, tt.fill), nil), native.Fingerprint(expression(tt.name, none), nil)
		if same := got == bare; same != tt.same {
			t.Errorf("%s: fingerprint %q, without the attribute %q", tt.name, got, bare)
		}
	}
}

// FuzzFingerprint reads any bytes as expressions.
func FuzzFingerprint(f *testing.F) {
	for _, r := range rulesOf(spectest.Random(1)) {
		f.Add([]byte(encode(f, r)))
	}
	f.Fuzz(func(t *testing.T, expressions []byte) {
		text := native.Fingerprint(expressions, map[string]native.Set{"__set%d": {53, 15008}})
		if bytes.ContainsAny([]byte(text), "\n\r") {
			t.Errorf("%q is more than one line", text)
		}
	})
}

func TestRulesWithoutExpressionsAreRefused(t *testing.T) {
	for _, r := range []ruleset.Rule{
		ruleset.NFT("", ruleset.DNAT{}), {Target: ruleset.Return, Matches: []ruleset.Match{nil}}, ruleset.Opaque("x"),
	} {
		if native.WantedFingerprint(r) != "" {
			t.Errorf("%q is written", r)
		}
	}
}

func TestSetsHoldPortsOnly(t *testing.T) {
	var b nfnetlink.Buffer
	native.Set{53, 15008}.Fill(&b, "table", 1)
	data, err := b.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	elements := nfnetlink.Attributes(data).Get(unix.NFTA_SET_ELEM_LIST_ELEMENTS).Value
	if ports, ok := native.Ports(elements); !ok || !slices.Equal(ports, native.Set{53, 15008}) {
		t.Errorf("read %v (%v)", ports, ok)
	}
	if _, ok := native.Ports(elements[:len(elements)-1]); ok {
		t.Error("a list that is cut off is read")
	}
}
