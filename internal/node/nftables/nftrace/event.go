package nftrace

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Kind is the kind of an event.
type Kind string

// A packet meets a rule, reaches the end of a called chain, or meets the policy of a base chain.
const (
	Rule   Kind = "rule"
	Return Kind = "return"
	Policy Kind = "policy"
)

// Event is one step of a packet.
type Event struct {
	// ID is the packet's number: the same for all events of a packet until it arrives again by lo.
	ID   uint32
	Kind Kind
	// Own marks an event of the trace's own table. Its chains have the names of their hooks: the packet begins in prerouting
	// or output, and ends in input or postrouting.
	Own bool
	// Family is the table's family, an NFPROTO_… number.
	Family       uint8
	Table, Chain string
	// Handle is the kernel's number of the rule. With kind Rule, 0 is the end of a base chain.
	Handle uint64
	// Verdict is the name of the kernel's verdict: accept, drop, continue, return, jump, goto, queue, stolen.
	Verdict string
	Packet  Packet
}

// Packet is the part of a packet in an event. Only the first event of a table has it.
type Packet struct {
	Source, Destination netip.AddrPort
	Protocol            uint8
	// In and Out are interface indexes, 0 for none.
	In, Out uint32
}

// Present reports whether the event carries the packet.
func (p Packet) Present() bool { return p.Destination.IsValid() }

// Attributes of enum nft_trace_attributes, linux/netfilter/nf_tables.h.
const (
	attrTable     = 1
	attrChain     = 2
	attrHandle    = 3
	attrType      = 4
	attrVerdict   = 5
	attrID        = 6
	attrNetwork   = 8
	attrTransport = 9
	attrIn        = 10
	attrOut       = 12
	attrPolicy    = 16
)

// messageTrace is NFT_MSG_TRACE.
const messageTrace = unix.NFNL_SUBSYS_NFTABLES<<8 | 17

// kinds maps enum nft_trace_types.
var kinds = map[uint32]Kind{1: Policy, 2: Return, 3: Rule} //nolint:gochecknoglobals // a constant table

// parse reads a message of the trace group.
func parse(m nfnetlink.Message) (e Event, ok bool) {
	if m.Type != messageTrace {
		return e, false
	}
	var network, transport []byte
	e.Family = m.Family
	for a := range m.Attributes.All() {
		number, _ := a.Uint32()
		switch a.Kind {
		case attrTable:
			e.Table = a.Text()
		case attrChain:
			e.Chain = a.Text()
		case attrHandle:
			e.Handle, _ = a.Uint64()
		case attrType:
			e.Kind = kinds[number]
		case attrVerdict:
			code, _ := nfnetlink.Attributes(a.Value).Get(unix.NFTA_VERDICT_CODE).Uint32()
			e.Verdict = verdictName(code)
		case attrPolicy:
			e.Verdict = verdictName(number)
		case attrID:
			e.ID = number
		case attrNetwork:
			network = a.Value
		case attrTransport:
			transport = a.Value
		case attrIn:
			e.Packet.In = number
		case attrOut:
			e.Packet.Out = number
		}
	}
	e.Packet.addresses(network, transport)
	return e, e.Kind != ""
}

// verdictName returns the name of a verdict of linux/netfilter.h or enum nft_verdicts. The verdicts of nf_tables are negative;
// an iptables target that drops or queues adds numbers in the upper half.
func verdictName(code uint32) string {
	names := map[int32]string{
		0: "drop", 1: "accept", 2: "stolen", 3: "queue", 4: "repeat",
		-1: "continue", -2: "break", -3: "jump", -4: "goto", -5: "return",
	}
	if name := names[int32(code)]; name != "" { //nolint:gosec // two's complement
		return name
	}
	return names[int32(code&0xff)]
}

// addresses reads the headers of IPv4 or IPv6, and the ports of TCP or UDP.
func (p *Packet) addresses(network, transport []byte) {
	var source, destination netip.Addr
	switch {
	case len(network) >= 20 && network[0]>>4 == 4:
		p.Protocol = network[9]
		source, destination = netip.AddrFrom4([4]byte(network[12:])), netip.AddrFrom4([4]byte(network[16:]))
	case len(network) >= 40 && network[0]>>4 == 6:
		p.Protocol = network[6]
		source, destination = netip.AddrFrom16([16]byte(network[8:])), netip.AddrFrom16([16]byte(network[24:]))
	default:
		return
	}
	var ports [2]uint16
	if len(transport) >= 4 && (p.Protocol == unix.IPPROTO_TCP || p.Protocol == unix.IPPROTO_UDP) {
		ports = [2]uint16{binary.BigEndian.Uint16(transport), binary.BigEndian.Uint16(transport[2:])}
	}
	p.Source, p.Destination = netip.AddrPortFrom(source, ports[0]), netip.AddrPortFrom(destination, ports[1])
}
