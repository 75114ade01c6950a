package nftables_test

import (
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// structOf is a struct of 16-bit or 32-bit numbers and then bytes, filled up to 16 bytes.
func structOf[T uint16 | uint32](numbers []T, bytes ...byte) []byte {
	out, _ := binary.Append(nil, binary.NativeEndian, numbers)
	out = append(out, bytes...)
	return append(out, make([]byte, 16-len(out))...)
}

// older are rules as versions of iptables-nft before 1.8.8 wrote them, which compared ports and marks by x_tables, the
// protocol of IPv4 in its header, and networks always with a mask.
func older() map[string]func(*nfnetlink.Buffer) {
	match := func(b *nfnetlink.Buffer, name string, revision uint32, info []byte) {
		b.Expression("match", func() {
			b.String(unix.NFTA_MATCH_NAME, name)
			b.Uint32(unix.NFTA_MATCH_REV, revision)
			b.Attribute(unix.NFTA_MATCH_INFO, info)
		})
	}
	tcpStruct := func(numbers []uint16, bytes ...byte) func(*nfnetlink.Buffer) {
		return func(b *nfnetlink.Buffer) {
			b.Payload(unix.NFT_PAYLOAD_NETWORK_HEADER, 9, 1)
			b.Compare(false, []byte{ruleset.TCP})
			match(b, "tcp", 0, structOf(numbers, bytes...))
		}
	}
	return map[string]func(*nfnetlink.Buffer){
		"-p tcp -m tcp --dport 80 -j ACCEPT":          tcpStruct([]uint16{0, 65535, 80, 80}),
		"-p tcp -m tcp ! --sport 3 -j ACCEPT":         tcpStruct([]uint16{3, 3, 0, 65535}, 0, 0, 0, 1),
		"-p tcp -m tcp --tcp-flags RST RST -j ACCEPT": tcpStruct([]uint16{0, 65535, 0, 65535}, 0, 4, 4, 0),
		"-p udp -m udp --dport 53 -j ACCEPT": func(b *nfnetlink.Buffer) {
			b.Meta(unix.NFT_META_L4PROTO)
			b.Compare(false, []byte{ruleset.UDP})
			match(b, "udp", 0, structOf([]uint16{0, 65535, 53, 53}))
		},
		"-m mark --mark 0x539 -j ACCEPT": func(b *nfnetlink.Buffer) { match(b, "mark", 1, structOf([]uint32{0x539, 0xffffffff})) },
		"-m mark ! --mark 0x1 -j ACCEPT": func(b *nfnetlink.Buffer) { match(b, "mark", 1, structOf([]uint32{1, 0xffffffff}, 1)) },
		"-d 10.0.0.0/8 -j ACCEPT": func(b *nfnetlink.Buffer) {
			b.Payload(unix.NFT_PAYLOAD_NETWORK_HEADER, 16, 4)
			b.And([]byte{255, 0, 0, 0})
			b.Compare(false, []byte{10, 0, 0, 0})
		},
		"-i eth0 -j ACCEPT": func(b *nfnetlink.Buffer) {
			b.Meta(unix.NFT_META_IIFNAME)
			b.Compare(false, append([]byte("eth0"), make([]byte, 12)...))
		},
	}
}

// TestRead_RulesOfOlderVersions writes such rules and reads them with iptables and the code under test.
func TestRead_RulesOfOlderVersions(t *testing.T) {
	for want, fill := range older() {
		p := newPod(t)
		p.restore(t, ruleset.IPv4, "*mangle\n-A PREROUTING -j RETURN\nCOMMIT\n")
		protocol := uint32(ruleset.TCP)
		if strings.Contains(want, "udp") {
			protocol = uint32(ruleset.UDP)
		}
		p.do(t, func() error { return writeRaw(protocol, fill) })
		for who, set := range map[string]ruleset.Set{"iptables": p.save(t, ruleset.IPv4), "this package": p.read(t, ruleset.IPv4)} {
			chain, _ := set.Table("mangle").Chain("PREROUTING")
			if len(chain.Rules) != 2 || chain.Rules[1].String() != want {
				t.Errorf("%s reads %q, want %q", who, specs(chain.Rules), want)
			}
		}
	}
}

// writeRaw appends a rule that accepts packets of a protocol to mangle PREROUTING.
func writeRaw(protocol uint32, fill func(*nfnetlink.Buffer)) error {
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
			fill(b)
			b.Verdict(nfnetlink.Verdict{Code: nfnetlink.Accept})
		})
		b.Nested(unix.NFTA_RULE_COMPAT, func() {
			b.Uint32(unix.NFTA_RULE_COMPAT_PROTO, protocol)
			b.Uint32(unix.NFTA_RULE_COMPAT_FLAGS, 0)
		})
	})
	return errors.Join(batch.Commit(), conn.Close())
}
