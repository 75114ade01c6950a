package ruleset

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// syntax prints a part of a rule in both dialects, as iptables-save and "nft list ruleset" do. A part that a dialect
// implies or lacks is "".
type syntax interface {
	iptables() string
	nft() string
}

// Match is a condition of a rule: one of the types below.
type Match interface{ syntax }

// Numbers of protocols (include/uapi/linux/in.h).
const (
	TCP uint8 = 6
	UDP uint8 = 17
)

// Interface matches the input interface of a packet or, with Out, its output interface. In iptables a Name that ends with "+"
// matches all names with that prefix.
type Interface struct {
	Name     string
	Out, Not bool
}

// Of reports whether an interface has the name, without regard to Not.
func (i Interface) Of(name string) bool {
	begin, open := strings.CutSuffix(i.Name, "+")
	return name == i.Name || open && strings.HasPrefix(name, begin)
}

// Network matches the destination address or, with Source, the source address.
type Network struct {
	Prefix      netip.Prefix
	Source, Not bool
}

// Protocol matches the transport protocol.
type Protocol struct {
	Number uint8
	Not    bool
}

// Header names a protocol's match without a condition, as in "-p tcp -m tcp". Only iptables has it.
type Header uint8

// PortRange is the ports from First to Last; both are equal for one port.
type PortRange struct{ First, Last uint16 }

// OnePort returns the range of one port.
func OnePort(number uint16) PortRange { return PortRange{number, number} }

// PortList returns a range for each port.
func PortList(numbers ...uint16) []PortRange {
	list := make([]PortRange, len(numbers))
	for i, number := range numbers {
		list[i] = OnePort(number)
	}
	return list
}

// String returns the number of one port, or "8000-8100" as in an annotation and in nft.
func (p PortRange) String() string { return p.text("-") }

func (p PortRange) text(between string) string {
	if p.First == p.Last {
		return strconv.Itoa(int(p.First))
	}
	return fmt.Sprint(p.First, between, p.Last)
}

// Port matches the destination port or, with Source, the source port, and the protocol.
type Port struct {
	Protocol    uint8
	Range       PortRange
	Source, Not bool
}

// Side names a port of a packet, or both.
type Side uint8

// The sides of AnyPort.
const (
	DestinationPort Side = iota
	SourcePort
	EitherPort
)

// AnyPort matches one of several ports and the protocol; protocol 0 is any protocol with ports.
type AnyPort struct {
	Protocol uint8
	List     []PortRange
	Side     Side
	Not      bool
}

// TCPFlags matches TCP packets whose flags under Mask equal Set.
type TCPFlags struct {
	Mask, Set uint8
	Not       bool
}

const tcpReset = 4

// Reset matches TCP packets with the flag RST.
var Reset = TCPFlags{Mask: tcpReset, Set: tcpReset} //nolint:gochecknoglobals // a constant

// Owner matches the user or, with Group, the group of the sending socket: from ID to Last; a Last of 0 means ID.
type Owner struct {
	ID, Last   uint32
	Group, Not bool
}

// Mark matches the mark of a packet or, with Connection, of its connection, under Mask: all bits if 0.
type Mark struct {
	Value, Mask     uint32
	Connection, Not bool
}

// Of reports whether the mark has the bits, without regard to Not.
func (m Mark) Of(mark uint32) bool { return mark&WholeMark(m.Mask) == m.Value }

// States matches packets whose connection is in any of the states.
type States uint8

// States of a connection, with the bits of IP_CT_… and NF_CT_STATE_… (nf_conntrack_common.h). A packet that conntrack does not track
// is untracked. The last two say that the connection's source or destination is translated; only iptables matches them.
const (
	StateInvalid States = 1 << iota
	StateEstablished
	StateRelated
	StateNew
	StateUntracked
	StateSNAT
	StateDNAT
)

// OfFamily matches packets of the family. Rules of iptables imply it.
type OfFamily Family

func (i Interface) iptables() string {
	return sign("! ", i.Not) + pick("-o ", "-i ", i.Out) + i.Name
}

func (i Interface) nft() string {
	return pick("oifname ", "iifname ", i.Out) + sign("!= ", i.Not) + `"` + i.Name + `"`
}

// iptables-save prints no match for a network with prefix length 0.
func (n Network) iptables() string {
	if n.Prefix.Bits() == 0 && !n.Not {
		return ""
	}
	p := n.Prefix.Masked()
	return fmt.Sprintf("%s%s%s/%d", sign("! ", n.Not), pick("-s ", "-d ", n.Source), Address(p.Addr()), p.Bits())
}

func (n Network) nft() string {
	p := n.Prefix.Masked()
	text := pick("ip6 ", "ip ", p.Addr().Is6()) + pick("saddr ", "daddr ", n.Source) + sign("!= ", n.Not) + Address(p.Addr())
	if !p.IsSingleIP() {
		text += fmt.Sprintf("/%d", p.Bits())
	}
	return text
}

// protocolNames are the names that iptables-save prints instead of numbers.
var protocolNames = map[uint8]string{ //nolint:gochecknoglobals // a constant table
	1: "icmp", TCP: "tcp", UDP: "udp", 33: "dccp", 47: "gre", 50: "esp", 51: "ah", 58: "ipv6-icmp", 132: "sctp", 136: "udplite",
}

func protocolName(number uint8) string {
	if name, ok := protocolNames[number]; ok {
		return name
	}
	return fmt.Sprint(number)
}

func (p Protocol) iptables() string { return sign("! ", p.Not) + "-p " + protocolName(p.Number) }

func (p Protocol) nft() string { return "meta l4proto " + sign("!= ", p.Not) + protocolName(p.Number) }

func (h Header) iptables() string { return "-m " + protocolName(uint8(h)) }

func (Header) nft() string { return "" }

func (p Port) iptables() string {
	return fmt.Sprintf("-m %s %s%s%s", protocolName(p.Protocol), sign("! ", p.Not), pick("--sport ", "--dport ", p.Source), p.Range.text(":"))
}

// headerName returns nft's name of a header with ports, "th" for 0.
func headerName(protocol uint8) string {
	if protocol == 0 {
		return "th"
	}
	return protocolName(protocol)
}

func (p Port) nft() string {
	return fmt.Sprintf("%s %s%s%s", headerName(p.Protocol), pick("sport ", "dport ", p.Source), sign("!= ", p.Not), p.Range)
}

func texts(list []PortRange, between, separator string) string {
	all := make([]string, len(list))
	for i, r := range list {
		all[i] = r.text(between)
	}
	return strings.Join(all, separator)
}

func (p AnyPort) iptables() string {
	option := [...]string{"--dports", "--sports", "--ports"}[p.Side]
	return fmt.Sprintf("-m multiport %s%s %s", sign("! ", p.Not), option, texts(p.List, ":", ","))
}

func (p AnyPort) nft() string {
	list := p.Distinct()
	if len(list) == 1 && p.Side != EitherPort {
		return Port{Protocol: p.Protocol, Range: list[0], Source: p.Side == SourcePort, Not: p.Not}.nft()
	}
	side := [...]string{"dport", "sport", "port"}[p.Side]
	return fmt.Sprintf("%s %s %s{ %s }", headerName(p.Protocol), side, sign("!= ", p.Not), texts(list, "-", ", "))
}

// Distinct returns the ports sorted, without duplicates, as nft writes them.
func (p AnyPort) Distinct() []PortRange {
	return slices.Compact(slices.SortedFunc(slices.Values(p.List), func(a, b PortRange) int {
		return cmp.Or(cmp.Compare(a.First, b.First), cmp.Compare(a.Last, b.Last))
	}))
}

// tcpFlagNames are in the order of their bits.
var tcpFlagNames = []string{"FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR"} //nolint:gochecknoglobals // a constant table

func (f TCPFlags) iptables() string {
	return fmt.Sprintf("-m tcp %s--tcp-flags %s %s", sign("! ", f.Not), flagNames(f.Mask, ","), flagNames(f.Set, ","))
}

func (f TCPFlags) nft() string {
	return strings.ToLower(fmt.Sprintf("tcp flags & %s %s %s", parens(flagNames(f.Mask, " | ")), pick("!=", "==", f.Not), flagNames(f.Set, " | ")))
}

func flagNames(bits uint8, between string) string {
	return cmp.Or(bitNames(tcpFlagNames, uint16(bits), between), "NONE")
}

// bitNames joins the names of the set bits, in the order of the bits; bitsOf reads such names between commas.
func bitNames(names []string, bits uint16, between string) string {
	var set []string
	for i, name := range names {
		if bits&(1<<i) != 0 {
			set = append(set, name)
		}
	}
	return strings.Join(set, between)
}

func bitsOf(names []string, text string) (bits uint16, ok bool) {
	for name := range strings.SplitSeq(text, ",") {
		i := slices.Index(names, name)
		if i < 0 {
			return 0, false
		}
		bits |= 1 << i
	}
	return bits, true
}

func parens(text string) string {
	if strings.Contains(text, " ") {
		return "(" + text + ")"
	}
	return text
}

// Range returns the first and the last ID.
func (o Owner) Range() (first, last uint32) { return o.ID, cmp.Or(o.Last, o.ID) }

func (o Owner) ids() string {
	first, last := o.Range()
	if first == last {
		return fmt.Sprint(first)
	}
	return fmt.Sprintf("%d-%d", first, last)
}

func (o Owner) iptables() string {
	return fmt.Sprintf("-m owner %s%s%s", sign("! ", o.Not), pick("--gid-owner ", "--uid-owner ", o.Group), o.ids())
}

func (o Owner) nft() string {
	return fmt.Sprintf("meta %s%s%s", pick("skgid ", "skuid ", o.Group), sign("!= ", o.Not), o.ids())
}

func (m Mark) iptables() string {
	text := fmt.Sprintf("-m %s %s--mark 0x%x", pick("connmark", "mark", m.Connection), sign("! ", m.Not), m.Value)
	if m.Mask != 0 {
		text += fmt.Sprintf("/0x%x", m.Mask)
	}
	return text
}

func (m Mark) nft() string {
	name := pick("ct mark ", "meta mark ", m.Connection)
	if m.Mask != 0 {
		return fmt.Sprintf("%s& 0x%08x %s 0x%08x", name, m.Mask, pick("!=", "==", m.Not), m.Value)
	}
	return fmt.Sprintf("%s%s0x%08x", name, sign("!= ", m.Not), m.Value)
}

// stateNames are in the order of the bits.
var stateNames = []string{"INVALID", "ESTABLISHED", "RELATED", "NEW", "UNTRACKED", "SNAT", "DNAT"} //nolint:gochecknoglobals // a constant table

// iptables-save prints the states in its own order.
func (s States) iptables() string {
	var names []string
	for _, one := range []States{StateInvalid, StateNew, StateRelated, StateEstablished, StateUntracked, StateSNAT, StateDNAT} {
		if s&one != 0 {
			names = append(names, bitNames(stateNames, uint16(one), ""))
		}
	}
	return "-m conntrack --ctstate " + strings.Join(names, ",")
}

func (s States) nft() string {
	const translated = StateSNAT | StateDNAT
	if s&translated == s {
		return "ct status " + strings.ToLower(bitNames(stateNames, uint16(s), ","))
	}
	return "ct state " + strings.ToLower(bitNames(stateNames, uint16(s&^translated), ","))
}

func (OfFamily) iptables() string { return "" }

func (f OfFamily) nft() string { return fmt.Sprintf("meta nfproto ipv%d", f) }

// sign returns the text if it applies.
func sign(text string, applies bool) string {
	if applies {
		return text
	}
	return ""
}

func pick(yes, no string, condition bool) string {
	if condition {
		return yes
	}
	return no
}
