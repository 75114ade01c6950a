package native

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Fingerprint returns a line that identifies a rule's attribute NFTA_RULE_EXPRESSIONS, the same for Encode's output and the
// kernel's listing: the names of the expressions and a digest of these with all their attributes, without the counts of
// counters, and with the ports of a set in place of its name. Sets has the ports by the set's name. It returns "" for broken
// attributes and for an unknown set.
func Fingerprint(expressions nfnetlink.Attributes, sets map[string]Set) string {
	var names []string
	var whole strings.Builder
	for e := range expressions.All() {
		name, f, ok := nfnetlink.SplitExpression(e)
		if !ok {
			return ""
		}
		names = append(names, nfnetlink.Label(name, f))
		fmt.Fprintf(&whole, "%q", name)
		for kind, value := range f.All() {
			if !usual(name, kind, value) && !field(&whole, name, kind, value, sets) {
				return ""
			}
		}
	}
	if expressions.Check() != nil {
		return ""
	}
	digest := sha256.Sum256([]byte(whole.String()))
	return fmt.Sprintf("[nf_tables: %s %x]", strings.Join(names, " "), digest[:16])
}

// WantedFingerprint returns the fingerprint of a rule to write; "" if the rule cannot be encoded.
func WantedFingerprint(r ruleset.Rule) string {
	var b nfnetlink.Buffer
	err := Encode(&b, r, 0)
	data, err2 := b.Bytes()
	if err != nil || err2 != nil {
		return ""
	}
	return Fingerprint(data[unix.SizeofNlAttr:], map[string]Set{anonymousSet: SetOf(r)})
}

// usual reports whether the fingerprint leaves an attribute out: counts, the number of a set in a transaction, and
// attributes that the kernel adds in listings. From Linux 5.6 on it adds the operation of a bitwise expression, of which 0
// is the only one of earlier kernels; and it repeats the port of a redirection as the end of a range.
func usual(name string, kind uint16, value []byte) bool {
	switch name {
	case "counter":
		return true
	case "bitwise":
		return kind == nfnetlink.BitwiseOp && len(value) == 4 && !slices.ContainsFunc(value, func(b byte) bool { return b != 0 })
	case "lookup":
		return kind == unix.NFTA_LOOKUP_SET_ID
	case "reject": // the kernel lists no code with a reset of TCP
		return kind == unix.NFTA_REJECT_ICMP_CODE && slices.Equal(value, []byte{0})
	case "redir":
		n, ok := nfnetlink.Attribute{Value: value}.Uint32()
		return kind == unix.NFTA_REDIR_REG_PROTO_MAX && ok && n == nfnetlink.Register
	}
	return false
}

// nested are the attributes that hold others; older kernels do not mark them.
var nested = map[string][]uint16{ //nolint:gochecknoglobals // a constant table
	"immediate": {unix.NFTA_IMMEDIATE_DATA},
	"cmp":       {unix.NFTA_CMP_DATA},
	"bitwise":   {unix.NFTA_BITWISE_MASK, unix.NFTA_BITWISE_XOR},
}

// field adds an attribute. Names may or may not end with a zero byte.
func field(b *strings.Builder, name string, kind uint16, value nfnetlink.Attributes, sets map[string]Set) bool {
	if name == "lookup" && kind == unix.NFTA_LOOKUP_SET {
		ports := sets[nfnetlink.Attribute{Value: value}.Text()]
		fmt.Fprintf(b, " set=%v", slices.Sorted(slices.Values(ports)))
		return len(ports) > 0
	}
	if !slices.Contains(nested[name], kind) {
		fmt.Fprintf(b, " %d=%x", kind, value)
		return true
	}
	fmt.Fprintf(b, " %d={", kind)
	inner, ok := nfnetlink.ReadFields(value)
	for kind, value := range inner.All() {
		if kind != unix.NFTA_DATA_VERDICT {
			fmt.Fprintf(b, " %d=%x", kind, value)
			continue
		}
		verdict, whole := nfnetlink.ReadFields(value)
		ok = ok && whole
		code, _ := verdict.Number(unix.NFTA_VERDICT_CODE)
		fmt.Fprintf(b, " verdict %d attributes, %x %q", verdict.Count(), code, verdict.Text(unix.NFTA_VERDICT_CHAIN))
	}
	b.WriteString(" }")
	return ok
}
