package native

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/nftables/expression"
)

// term is a match or a statement of a rule.
type term interface {
	fmt.Stringer
	encode(e *encoder)
}

// encoder adds the expressions of a rule's terms.
type encoder struct {
	expression.Writer
	protocol uint8 // what the rule asked for already
	set      Set
}

func not(negated bool) string {
	if negated {
		return "!= "
	}
	return ""
}

// Numbers of protocols (include/uapi/linux/in.h).
const (
	tcp = 6
	udp = 17
)

// protocols are those that rules name.
var protocols = []struct { //nolint:gochecknoglobals // a constant table
	name   string
	number uint8
}{{"tcp", tcp}, {"udp", udp}}

func protocolName(number uint8) string {
	for _, p := range protocols {
		if p.number == number {
			return p.name
		}
	}
	return ""
}

// linkTerm compares the name of an interface.
type linkTerm struct {
	key  uint32
	name string
}

// linkLength is IFNAMSIZ: nft compares a name with all zeros behind it.
const linkLength = 16

func (l linkTerm) String() string {
	key := "iifname"
	if l.key == unix.NFT_META_OIFNAME {
		key = "oifname"
	}
	return key + ` "` + l.name + `"`
}

func (l linkTerm) encode(e *encoder) {
	e.Meta(l.key)
	e.Compare(false, append([]byte(l.name), make([]byte, linkLength-len(l.name))...))
}

// protocolTerm is an explicit "meta l4proto".
type protocolTerm struct{ number uint8 }

func (p protocolTerm) String() string { return "meta l4proto " + protocolName(p.number) }

func (p protocolTerm) encode(e *encoder) { e.needProtocol(p.number) }

// needProtocol asks for a protocol if the rule has not yet.
func (e *encoder) needProtocol(number uint8) {
	if e.protocol != number {
		e.protocol = number
		e.Meta(unix.NFT_META_L4PROTO)
		e.Compare(false, []byte{number})
	}
}

// familyTerm is an explicit "meta nfproto".
type familyTerm struct{ ipv6 bool }

func (f familyTerm) String() string {
	return "meta nfproto " + map[bool]string{false: "ipv4", true: "ipv6"}[f.ipv6]
}

func (f familyTerm) encode(e *encoder) {
	e.Meta(unix.NFT_META_NFPROTO)
	e.Compare(false, []byte{familyNumber(f.ipv6)})
}

func familyNumber(ipv6 bool) byte {
	if ipv6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// addressTerm compares an address. Its family is asked for by itself.
type addressTerm struct {
	source, negated bool
	prefix          netip.Prefix
}

func (a addressTerm) String() string {
	side := "daddr"
	if a.source {
		side = "saddr"
	}
	return address(a.prefix, strings.TrimSuffix(side+" "+not(a.negated), " "))
}

func (a addressTerm) encode(e *encoder) {
	ipv6 := a.prefix.Addr().Is6()
	familyTerm{ipv6}.encode(e)
	source, destination, _ := expression.AddressOffsets(ipv6)
	if a.source {
		destination = source
	}
	e.Network(destination, a.negated, a.prefix)
}

// portTerm compares a port, or looks for it in a set. Its protocol is asked for by itself.
type portTerm struct {
	protocol             uint8
	source, negated, set bool
	ports                []uint16
}

// canonical has the ports of a set in order and once each.
func (p portTerm) canonical() portTerm {
	p.ports = slices.Compact(slices.Sorted(slices.Values(p.ports)))
	return p
}

func (p portTerm) String() string {
	side := "dport"
	if p.source {
		side = "sport"
	}
	ports := fmt.Sprint(p.ports[0])
	if p.set {
		ports = "{ " + strings.Trim(strings.Join(strings.Fields(fmt.Sprint(p.ports)), ", "), "[]") + " }"
	}
	return protocolName(p.protocol) + " " + side + " " + not(p.negated) + ports
}

func (p portTerm) encode(e *encoder) {
	e.needProtocol(p.protocol)
	offset := uint32(2)
	if p.source {
		offset = 0
	}
	e.Payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, offset, 2)
	if !p.set {
		e.Compare(p.negated, binary.BigEndian.AppendUint16(nil, p.ports[0]))
		return
	}
	flags := uint32(0)
	if p.negated {
		flags = unix.NFT_LOOKUP_F_INV
	}
	e.Expression("lookup", func() {
		e.Uint32(unix.NFTA_LOOKUP_SREG, expression.Register)
		e.String(unix.NFTA_LOOKUP_SET, anonymousSet)
		e.Uint32(unix.NFTA_LOOKUP_SET_ID, e.set.ID)
		e.Uint32(unix.NFTA_LOOKUP_FLAGS, flags)
	})
}

// resetTerm is "tcp flags & rst == rst".
type resetTerm struct{}

// Place and bit of the flag in the header of TCP.
const (
	tcpFlagsOffset = 13
	tcpReset       = 4
)

const resetText = "tcp flags & rst == rst"

func (resetTerm) String() string { return resetText }

func (resetTerm) encode(e *encoder) {
	e.needProtocol(tcp)
	e.Payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, tcpFlagsOffset, 1)
	e.And([]byte{tcpReset})
	e.Compare(false, []byte{tcpReset})
}

// numberTerm compares one of the numbers below.
type numberTerm struct {
	name    string
	negated bool
	value   uint32
}

// numbers are what is loaded for each name: a key of meta or of ct.
var numbers = []struct { //nolint:gochecknoglobals // a constant table
	name, expression string
	key              uint32
	hex              bool
}{
	{"meta skuid", "meta", unix.NFT_META_SKUID, false},
	{"meta skgid", "meta", unix.NFT_META_SKGID, false},
	{"meta mark", "meta", unix.NFT_META_MARK, true},
	{"ct mark", "ct", unix.NFT_CT_MARK, true},
}

func (n numberTerm) String() string {
	for _, k := range numbers {
		if k.name == n.name && k.hex {
			return fmt.Sprintf("%s %s0x%08x", n.name, not(n.negated), n.value)
		}
	}
	return fmt.Sprintf("%s %s%d", n.name, not(n.negated), n.value)
}

func (n numberTerm) encode(e *encoder) {
	for _, k := range numbers {
		if k.name != n.name {
			continue
		}
		if k.expression == "ct" {
			e.loadCT(k.key)
		} else {
			e.Meta(k.key)
		}
	}
	e.Compare(n.negated, binary.NativeEndian.AppendUint32(nil, n.value))
}

func (e *encoder) loadCT(key uint32) {
	e.Expression("ct", func() {
		e.Uint32(unix.NFTA_CT_KEY, key)
		e.Uint32(unix.NFTA_CT_DREG, expression.Register)
	})
}

// stateTerm is "ct state", which is any of the states.
type stateTerm struct{ bits uint32 }

// states in the order of nft with their bits (NF_CT_STATE_BIT of include/uapi/linux/netfilter/nf_conntrack_common.h).
var states = []struct { //nolint:gochecknoglobals // a constant table
	name string
	bit  uint32
}{{"invalid", 1}, {"established", 2}, {"related", 4}, {"new", 8}, {"untracked", 64}}

func (s stateTerm) String() string {
	var names []string
	for _, state := range states {
		if s.bits&state.bit != 0 {
			names = append(names, state.name)
		}
	}
	return "ct state " + strings.Join(names, ",")
}

func (s stateTerm) encode(e *encoder) {
	e.loadCT(unix.NFT_CT_STATE)
	e.And(binary.NativeEndian.AppendUint32(nil, s.bits))
	e.Compare(true, make([]byte, 4))
}

// counterTerm counts.
type counterTerm struct{}

func (counterTerm) String() string { return "counter" }

func (counterTerm) encode(e *encoder) { e.Counter() }

// verdictTerm ends the rule.
type verdictTerm expression.Verdict

func (v verdictTerm) String() string {
	switch v.Code {
	case expression.Drop:
		return "drop"
	case expression.Accept:
		return "accept"
	case expression.Return:
		return "return"
	case expression.Goto:
		return "goto " + v.Chain
	}
	return "jump " + v.Chain
}

func (v verdictTerm) encode(e *encoder) { e.Verdict(expression.Verdict(v)) }

// immediate loads a value.
func (e *encoder) immediate(value []byte) {
	e.Expression("immediate", func() {
		e.Uint32(unix.NFTA_IMMEDIATE_DREG, expression.Register)
		e.Data(unix.NFTA_IMMEDIATE_DATA, value)
	})
}

// redirectTerm sends a connection to a port of the pod.
type redirectTerm struct{ port uint16 }

// rangeProto is NF_NAT_RANGE_PROTO_SPECIFIED.
const rangeProto = 2

func (r redirectTerm) String() string { return fmt.Sprintf("redirect to :%d", r.port) }

func (r redirectTerm) encode(e *encoder) {
	e.immediate(binary.BigEndian.AppendUint16(nil, r.port))
	e.Expression("redir", func() {
		e.Uint32(unix.NFTA_REDIR_REG_PROTO_MIN, expression.Register)
		e.Uint32(unix.NFTA_REDIR_FLAGS, rangeProto)
	})
}

// tproxyTerm gives a packet to a local socket.
type tproxyTerm struct {
	ipv6 bool
	port uint16
}

// Kinds of the attributes of a tproxy expression (NFTA_TPROXY_…).
const (
	tproxyFamily = 1
	tproxyPort   = 3
)

func (t tproxyTerm) String() string {
	return fmt.Sprintf("tproxy %s to :%d", map[bool]string{false: "ip", true: "ip6"}[t.ipv6], t.port)
}

func (t tproxyTerm) encode(e *encoder) {
	e.immediate(binary.BigEndian.AppendUint16(nil, t.port))
	e.Expression("tproxy", func() {
		e.Uint32(tproxyFamily, uint32(familyNumber(t.ipv6)))
		e.Uint32(tproxyPort, expression.Register)
	})
}

// setTerm sets the packet's mark, the connection's mark or its zone: to a value, or to the other mark.
type setTerm struct {
	name  string // meta mark, ct mark, ct zone
	from  string // meta mark, ct mark, or "" for the value
	value uint32
}

func (s setTerm) String() string {
	switch {
	case s.from != "":
		return s.name + " set " + s.from
	case s.name == "ct zone":
		return fmt.Sprintf("ct zone set %d", s.value)
	}
	return fmt.Sprintf("%s set 0x%08x", s.name, s.value)
}

func (s setTerm) encode(e *encoder) {
	switch {
	case s.from == "meta mark":
		e.Meta(unix.NFT_META_MARK)
	case s.from == "ct mark":
		e.loadCT(unix.NFT_CT_MARK)
	case s.name == "ct zone":
		e.immediate(binary.NativeEndian.AppendUint16(nil, uint16(s.value))) //nolint:gosec // a zone has 16 bits
	default:
		e.immediate(binary.NativeEndian.AppendUint32(nil, s.value))
	}
	if s.name == "meta mark" {
		e.Expression("meta", func() {
			e.Uint32(unix.NFTA_META_KEY, unix.NFT_META_MARK)
			e.Uint32(unix.NFTA_META_SREG, expression.Register)
		})
		return
	}
	key := uint32(unix.NFT_CT_MARK)
	if s.name == "ct zone" {
		key = unix.NFT_CT_ZONE
	}
	e.Expression("ct", func() {
		e.Uint32(unix.NFTA_CT_KEY, key)
		e.Uint32(unix.NFTA_CT_SREG, expression.Register)
	})
}

// rejectTerm refuses a packet.
type rejectTerm struct{ kind, code uint32 }

// rejections are those that rules use: type and code (enum nft_reject_types, ICMPv6's codes).
var rejections = []struct { //nolint:gochecknoglobals // a constant table
	text string
	term rejectTerm
}{
	{"reject with tcp reset", rejectTerm{unix.NFT_REJECT_TCP_RST, 0}},
	{"reject with icmpv6 port-unreachable", rejectTerm{unix.NFT_REJECT_ICMP_UNREACH, 4}},
}

func (r rejectTerm) String() string {
	for _, known := range rejections {
		if known.term == r {
			return known.text
		}
	}
	return ""
}

func (r rejectTerm) encode(e *encoder) {
	e.Expression("reject", func() {
		e.Uint32(unix.NFTA_REJECT_TYPE, r.kind)
		e.Uint8(unix.NFTA_REJECT_ICMP_CODE, uint8(r.code)) //nolint:gosec // one of the table
	})
}
