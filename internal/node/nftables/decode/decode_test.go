package decode_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ambient/ambienttest"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
	"github.com/meshcni/istio-cni/internal/node/nftables/decode"
	"github.com/meshcni/istio-cni/internal/node/nftables/native"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink/nfnetlinktest"
	"github.com/meshcni/istio-cni/internal/node/nftables/xtables"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// encode returns the expressions of a rule.
func encode(f ruleset.Family, r ruleset.Rule) (nfnetlink.Attributes, error) {
	var b nfnetlink.Buffer
	if err := xtables.Encode(&b, f, r); err != nil {
		return nil, err
	}
	data, err := b.Bytes()
	return nfnetlink.Attributes(data).Get(unix.NFTA_RULE_EXPRESSIONS).Value, err
}

// read returns the rule that the expressions encode.
func read(f ruleset.Family, expressions nfnetlink.Attributes, userdata []byte) ruleset.Rule {
	return decode.Table{Family: f, IPTables: f != ruleset.Inet}.Rule(7, expressions, userdata)
}

// rulesOf returns all rules of a Spec.
func rulesOf(f ruleset.Family, s redirect.Spec) []ruleset.Rule {
	return rulesettest.Rules(redirect.Rules(s, f), redirect.RejectAll(f))
}

// ambientRules returns all rules of an ambient pod: of a family, or of the native tables.
func ambientRules(f ruleset.Family) []ruleset.Rule {
	s := ambienttest.Specs()["default, virtual interfaces, DNS, IPv6"]
	sets := map[ruleset.Family]ruleset.Set{ruleset.Inet: s.NativeSet(ambienttest.Families(s))}
	for _, set := range s.Sets(ambienttest.Families(s)) {
		sets[set.Family] = set
	}
	return rulesettest.Rules(sets[f])
}

var families = []ruleset.Family{ruleset.IPv4, ruleset.IPv6}

// more returns rules that no Spec makes but that can be encoded.
func more() []ruleset.Rule {
	tcp := ruleset.Protocol{Number: ruleset.TCP}
	return []ruleset.Rule{
		ruleset.IPTables("", nil),
		ruleset.IPTables("", ruleset.Drop, ruleset.StateNew|ruleset.StateInvalid|ruleset.StateRelated),
		ruleset.IPTables("", ruleset.Accept, ruleset.Port{Protocol: ruleset.TCP, Range: ruleset.OnePort(1), Source: true, Not: true}),
		ruleset.IPTables("", ruleset.Jump{Chain: "CHAIN", Goto: true}, ruleset.Protocol{Number: 99}, ruleset.Mark{Value: 1}),
		ruleset.IPTables("", ruleset.Jump{Chain: "X"}, ruleset.Interface{Name: "eth+"}, ruleset.Interface{Name: "a+", Out: true, Not: true}),
		ruleset.IPTables("", ruleset.Return, ruleset.Mark{Value: 0, Connection: true, Not: true}),
		ruleset.IPTables("", ruleset.SetMark{}, ruleset.Protocol{Number: ruleset.TCP, Not: true}),
		ruleset.IPTables("", ruleset.Return, tcp, ruleset.Reset, ruleset.Owner{ID: 1}, ruleset.Owner{ID: 2, Group: true, Not: true}),
	}
}

func comesBack(t *testing.T, f ruleset.Family, r ruleset.Rule) {
	t.Helper()
	expressions, err := encode(f, r)
	check.OK(t, err, f, r)
	if got := read(f, expressions, nil); !got.Equal(r) {
		t.Fatalf("%s: %q came back as %q", f, r, got)
	}
}

func TestRule_Unusual(t *testing.T) {
	for _, f := range families {
		for _, r := range more() {
			comesBack(t, f, r)
		}
		for _, s := range spectest.Special() {
			for _, r := range rulesOf(f, s) {
				comesBack(t, f, r)
			}
		}
	}
}

// FuzzExpressionsAreReadOnce reads any bytes as expressions. A rule that can be encoded must be read with the same matches and target
// again, and a rule of iptables' dialect with the same text. Encode writes one counter, after the matches, and not the table's own family.
func FuzzExpressionsAreReadOnce(f *testing.F) {
	for _, family := range families {
		for _, r := range slices.Concat(rulesOf(family, spectest.Random(1)), ambientRules(family), more()) {
			expressions, err := encode(family, r)
			check.OK(f, err)
			f.Add([]byte(expressions), []byte("\x00\x03abc"))
			f.Add([]byte(expressions), []byte("\x01\x03abc"))
		}
	}
	for _, r := range append(nativeRules(spectest.Random(1)), ambientRules(ruleset.Inet)...) {
		f.Add([]byte(encodeNative(f, r)), []byte(nil))
	}
	f.Fuzz(func(t *testing.T, expressions, userdata []byte) {
		for _, family := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6, ruleset.Inet} {
			r := read(family, expressions, userdata)
			if strings.ContainsAny(r.String(), "\n\r") {
				t.Fatalf("%q is more than one line", r)
			}
			again, err := encode(family, r)
			if family == ruleset.Inet || err != nil {
				continue
			}
			got := read(family, again, nil)
			if parts(got) != parts(r) || r.Equal(ruleset.IPTables("", r.Target, r.Matches...)) && !got.Equal(r) {
				t.Fatalf("%q was written and is read as %q", r, got)
			}
		}
	})
}

// parts are the matches, in any order, and the target of a rule as Go values.
func parts(r ruleset.Rule) string {
	var all []string
	for _, m := range r.Matches {
		switch m.(type) {
		case ruleset.Counter, ruleset.OfFamily:
		default:
			all = append(all, fmt.Sprintf("%#v", m))
		}
	}
	slices.Sort(all)
	return strings.Join(append(all, fmt.Sprintf("%#v", r.Target)), " ")
}

// TestRule_EachBit changes every single bit of every value of every rule: the result must never be the same rule.
// It ignores counters.
func TestRule_EachBit(t *testing.T) {
	spec := redirect.Default()
	spec.Mode, spec.DNS, spec.DropInvalid = redirect.TPROXY, redirect.DNSAll, true
	for _, f := range families {
		for _, want := range slices.Concat(rulesOf(f, spec), ambientRules(f), more()) {
			expressions, err := encode(f, want)
			check.OK(t, err)
			for at, changed := range nfnetlinktest.Flips(expressions) {
				if got := read(f, changed, nil); got.Equal(want) {
					t.Fatalf("%s: %q is read as before when byte %d is changed: %x", f, want, at, changed)
				}
			}
		}
	}
}

// TestRule_OpaqueIsNotWritten: Encode refuses rules that were read, and matches that the kernel does not have.
func TestRule_OpaqueIsNotWritten(t *testing.T) {
	everything := netip.MustParsePrefix("0.0.0.0/0")
	for _, tt := range []struct {
		rule ruleset.Rule
		want string
	}{
		{ruleset.Read("-m quota --quota 5"), "cannot encode match"},
		{ruleset.Read("-j QUEUE"), "cannot encode target"},
		{ruleset.IPTables("", ruleset.Return, ruleset.Network{Prefix: everything, Not: true}), "a match of all addresses"},
	} {
		check.Fails(t, check.Err(encode(ruleset.IPv4, tt.rule)), tt.want)
	}
}

// nativeRules returns all rules of a Spec in the native tables.
func nativeRules(s redirect.Spec) []ruleset.Rule {
	var out []ruleset.Rule
	for _, t := range []redirect.Treatment{redirect.Captured, redirect.Rejected, redirect.Unused, redirect.Bypassed} {
		out = append(out, rulesettest.Rules(s.NativeSet(redirect.Families{IPv6: t, HasIPv4: true}))...)
	}
	return out
}

func encodeNative(tb testing.TB, r ruleset.Rule) nfnetlink.Attributes {
	tb.Helper()
	var b nfnetlink.Buffer
	check.OK(tb, native.Encode(&b, r, 1), r)
	data, err := b.Bytes()
	check.OK(tb, err)
	return data[unix.SizeofNlAttr:]
}

// readNative returns the rule that the expressions of a native table encode, with the set of another rule.
func readNative(tb testing.TB, expressions nfnetlink.Attributes, of ruleset.Rule) ruleset.Rule {
	tb.Helper()
	t := decode.Table{Sets: map[string]*decode.Set{}}
	if set := native.SetOf(of); set != nil {
		var declared, filled nfnetlink.Buffer
		set.Declare(&declared, "table", 1)
		set.Fill(&filled, "table", 1)
		head, err := declared.Bytes()
		elements, err2 := filled.Bytes()
		if err != nil || err2 != nil {
			tb.Fatal(err, err2)
		}
		s := decode.NewSet(head)
		s.Add(nfnetlink.Attributes(elements).Get(unix.NFTA_SET_ELEM_LIST_ELEMENTS).Value)
		t.Sets["__set%d"] = s
	}
	return t.Rule(7, expressions, nil)
}

// TestNativeRules_EachBit changes every single bit of every value of every rule of the native tables: the result must never be the
// same rule. It ignores counters and a set's number in its transaction, which the kernel forgets.
func TestNativeRules_EachBit(t *testing.T) {
	spec := redirect.Default()
	spec.Mode, spec.DNS, spec.DropInvalid = redirect.TPROXY, redirect.DNSAll, true
	for _, r := range append(nativeRules(spec), ambientRules(ruleset.Inet)...) {
		expressions := encodeNative(t, r)
		for at, changed := range nfnetlinktest.Flips(expressions) {
			if got := readNative(t, changed, r); got.Equal(r) && !setID(expressions, at) {
				t.Fatalf("%q is read as before when byte %d is changed: %x", r, at, changed)
			}
		}
	}
}

// setID reports whether the byte is in the number of a set in its transaction.
func setID(expressions nfnetlink.Attributes, at int) bool {
	id := binary.NativeEndian.AppendUint16(binary.NativeEndian.AppendUint16(nil, 8), unix.NFTA_LOOKUP_SET_ID)
	id = binary.BigEndian.AppendUint32(id, 1)
	found := bytes.Index(expressions, id)
	return found >= 0 && at >= found && at < found+len(id)
}

// TestRule_OverlappingRegisters: no comparison uses an overwritten value.
func TestRule_OverlappingRegisters(t *testing.T) {
	var b nfnetlink.Buffer
	b.Nested(unix.NFTA_RULE_EXPRESSIONS, func() {
		b.Expression("payload", func() {
			b.Uint32(unix.NFTA_PAYLOAD_DREG, unix.NFT_REG32_00+1)
			b.Uint32(unix.NFTA_PAYLOAD_BASE, unix.NFT_PAYLOAD_NETWORK_HEADER)
			b.Uint32(unix.NFTA_PAYLOAD_OFFSET, 16)
			b.Uint32(unix.NFTA_PAYLOAD_LEN, 4)
		})
		b.Expression("immediate", func() { // of 16 bytes
			b.Uint32(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_1)
			b.Data(unix.NFTA_IMMEDIATE_DATA, []byte{0, 0, 0, 0, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0})
		})
		b.Expression("cmp", func() {
			b.Uint32(unix.NFTA_CMP_SREG, unix.NFT_REG32_00+1)
			b.Uint32(unix.NFTA_CMP_OP, unix.NFT_CMP_EQ)
			b.Data(unix.NFTA_CMP_DATA, []byte{127, 0, 0, 1})
		})
		b.Verdict(nfnetlink.Verdict{Code: nfnetlink.Return})
	})
	data, err := b.Bytes()
	check.OK(t, err)
	r := read(ruleset.IPv4, data[unix.SizeofNlAttr:], nil)
	if _, other := r.Matches[0].(ruleset.Other); !other {
		t.Errorf("read as %q", r)
	}
}

// TestSet_ElementsWithConditions: an element with its own limit matches only within that limit.
func TestSet_ElementsWithConditions(t *testing.T) {
	for name, known := range map[string]bool{"counter": true, "quota": false} {
		var head, b nfnetlink.Buffer
		head.String(unix.NFTA_SET_NAME, "s")
		b.Nested(unix.NFTA_LIST_ELEM, func() {
			b.Data(unix.NFTA_SET_ELEM_KEY, []byte{ruleset.TCP})
			b.Nested(unix.NFTA_SET_ELEM_EXPR, func() { b.String(unix.NFTA_EXPR_NAME, name) })
		})
		attributes, err := head.Bytes()
		elements, err2 := b.Bytes()
		if err != nil || err2 != nil {
			t.Fatal(err, err2)
		}
		s := decode.NewSet(attributes)
		s.Add(elements)
		check.Equal(t, s.Unknown, !known, name)
	}
}
