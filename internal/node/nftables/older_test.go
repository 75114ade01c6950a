package nftables_test

import (
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// expression is one of a rule that is written byte by byte.
type expression struct {
	name string
	fill func(*nfnetlink.Buffer)
}

func number(kind uint16, value uint32) func(*nfnetlink.Buffer) {
	return func(b *nfnetlink.Buffer) { b.Uint32(kind, value) }
}

func value(kind uint16, bytes ...byte) func(*nfnetlink.Buffer) {
	return func(b *nfnetlink.Buffer) { b.Nested(kind, func() { b.Attribute(unix.NFTA_DATA_VALUE, bytes) }) }
}

func all(name string, fills ...func(*nfnetlink.Buffer)) expression {
	return expression{name, func(b *nfnetlink.Buffer) {
		for _, fill := range fills {
			fill(b)
		}
	}}
}

// match is one of x_tables.
func match(name string, revision uint32, info ...byte) expression {
	return all("match", func(b *nfnetlink.Buffer) { b.String(unix.NFTA_MATCH_NAME, name) },
		number(unix.NFTA_MATCH_REV, revision),
		func(b *nfnetlink.Buffer) { b.Attribute(unix.NFTA_MATCH_INFO, info) })
}

func payload(base, offset, length uint32) expression {
	return all("payload", number(unix.NFTA_PAYLOAD_DREG, 1), number(unix.NFTA_PAYLOAD_BASE, base),
		number(unix.NFTA_PAYLOAD_OFFSET, offset), number(unix.NFTA_PAYLOAD_LEN, length))
}

func meta(key uint32) expression {
	return all("meta", number(unix.NFTA_META_KEY, key), number(unix.NFTA_META_DREG, 1))
}

func is(bytes ...byte) expression {
	return all("cmp", number(unix.NFTA_CMP_SREG, 1), number(unix.NFTA_CMP_OP, unix.NFT_CMP_EQ), value(unix.NFTA_CMP_DATA, bytes...))
}

func and(mask ...byte) expression {
	return all("bitwise", number(unix.NFTA_BITWISE_SREG, 1), number(unix.NFTA_BITWISE_DREG, 1),
		number(unix.NFTA_BITWISE_LEN, uint32(len(mask))), value(unix.NFTA_BITWISE_MASK, mask...),
		value(unix.NFTA_BITWISE_XOR, make([]byte, len(mask))...))
}

// struct16 is a struct of 16-bit numbers, then bytes, filled up to 16 bytes.
func struct16(numbers []uint16, bytes ...byte) []byte {
	var out []byte
	for _, n := range numbers {
		out = binary.NativeEndian.AppendUint16(out, n)
	}
	out = append(out, bytes...)
	return append(out, make([]byte, 16-len(out))...)
}

func struct32(numbers []uint32, bytes ...byte) []byte {
	var out []byte
	for _, n := range numbers {
		out = binary.NativeEndian.AppendUint32(out, n)
	}
	out = append(out, bytes...)
	return append(out, make([]byte, 16-len(out))...)
}

// older are rules as versions of iptables-nft before 1.8.8 wrote them, which compared ports and marks by x_tables, the
// protocol of IPv4 in its header, and networks always with a mask.
func older() map[string][]expression {
	isTCP := []expression{payload(unix.NFT_PAYLOAD_NETWORK_HEADER, 9, 1), is(tcp)}
	accept := all("immediate", number(unix.NFTA_IMMEDIATE_DREG, 0), func(b *nfnetlink.Buffer) {
		b.Nested(unix.NFTA_IMMEDIATE_DATA, func() {
			b.Nested(unix.NFTA_DATA_VERDICT, func() { b.Uint32(unix.NFTA_VERDICT_CODE, 1) })
		})
	})
	rule := func(parts ...expression) []expression { return append(slices.Clone(isTCP), parts...) }
	return map[string][]expression{
		"-p tcp -m tcp --dport 80 -j ACCEPT":          rule(match("tcp", 0, struct16([]uint16{0, 65535, 80, 80})...), accept),
		"-p tcp -m tcp ! --sport 3 -j ACCEPT":         rule(match("tcp", 0, struct16([]uint16{3, 3, 0, 65535}, 0, 0, 0, 1)...), accept),
		"-p tcp -m tcp --tcp-flags RST RST -j ACCEPT": rule(match("tcp", 0, struct16([]uint16{0, 65535, 0, 65535}, 0, 4, 4, 0)...), accept),
		"-p udp -m udp --dport 53 -j ACCEPT": {
			meta(unix.NFT_META_L4PROTO), is(udp), match("udp", 0, struct16([]uint16{0, 65535, 53, 53})...), accept,
		},
		"-m mark --mark 0x539 -j ACCEPT": {match("mark", 1, struct32([]uint32{0x539, 0xffffffff})...), accept},
		"-m mark ! --mark 0x1 -j ACCEPT": {match("mark", 1, struct32([]uint32{1, 0xffffffff}, 1)...), accept},
		"-d 10.0.0.0/8 -j ACCEPT":        {payload(unix.NFT_PAYLOAD_NETWORK_HEADER, 16, 4), and(255, 0, 0, 0), is(10, 0, 0, 0), accept},
		"-i eth0 -j ACCEPT":              {meta(unix.NFT_META_IIFNAME), is(append([]byte("eth0"), make([]byte, 12)...)...), accept},
	}
}

const tcp, udp = 6, 17

// TestRulesOfOlderVersionsAreReadAsTheyWereMeant writes such rules and reads them with iptables and the code under test.
func TestRulesOfOlderVersionsAreReadAsTheyWereMeant(t *testing.T) {
	for want, expressions := range older() {
		p := newPod(t)
		p.restore(t, ruleset.IPv4, "*mangle\n-A PREROUTING -j RETURN\nCOMMIT\n")
		protocol := uint32(tcp)
		if strings.Contains(want, "udp") {
			protocol = udp
		}
		p.do(t, func() error { return writeRaw(protocol, expressions) })
		for who, set := range map[string]ruleset.Set{"iptables": p.save(t, ruleset.IPv4), "this package": p.read(t, ruleset.IPv4)} {
			chain, _ := set.Table("mangle").Chain("PREROUTING")
			if len(chain.Rules) != 2 || chain.Rules[1].String() != want {
				t.Errorf("%s reads %q, want %q", who, specs(chain.Rules), want)
			}
		}
	}
}

// writeRaw appends a rule for a protocol to mangle PREROUTING.
func writeRaw(protocol uint32, expressions []expression) error {
	conn, err := nfnetlink.Open()
	if err != nil {
		return err
	}
	generation, err := conn.Generation()
	if err != nil {
		return err
	}
	batch := conn.Batch(generation)
	batch.Add(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, unix.NFPROTO_IPV4, func(b *nfnetlink.Buffer) {
		b.String(unix.NFTA_RULE_TABLE, "mangle")
		b.String(unix.NFTA_RULE_CHAIN, "PREROUTING")
		b.Nested(unix.NFTA_RULE_EXPRESSIONS, func() {
			for _, e := range expressions {
				b.Nested(unix.NFTA_LIST_ELEM, func() {
					b.String(unix.NFTA_EXPR_NAME, e.name)
					b.Nested(unix.NFTA_EXPR_DATA, func() { e.fill(b) })
				})
			}
		})
		b.Nested(unix.NFTA_RULE_COMPAT, func() {
			b.Uint32(unix.NFTA_RULE_COMPAT_PROTO, protocol)
			b.Uint32(unix.NFTA_RULE_COMPAT_FLAGS, 0)
		})
	})
	return errors.Join(batch.Commit(), conn.Close())
}
