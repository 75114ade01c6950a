package ruleset

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Target is the action of a rule on a matching packet: one of the types below.
type Target interface{ syntax }

// Verdict ends a packet's walk through a chain.
type Verdict string

// The verdicts.
const (
	Accept Verdict = "ACCEPT"
	Drop   Verdict = "DROP"
	Return Verdict = "RETURN"
)

// Jump continues in another chain; with Goto the packet does not return.
type Jump struct {
	Chain string
	Goto  bool
}

// RedirectTo rewrites the destination to a port of the namespace itself.
type RedirectTo uint16

// SetMark copies the bits of Value under Mask to the mark of the packet or, with Connection, of its connection. A Mask of 0 is all bits.
type SetMark struct {
	Value, Mask uint32
	Connection  bool
}

// CopyMark copies the mark of the packet to its connection or, with Restore, back, each under its mask: all bits if 0.
type CopyMark struct {
	Restore                    bool
	PacketMask, ConnectionMask uint32
}

// TProxy gives the packet to the socket that listens on a port, keeps both addresses, sets the mark under a mask (all bits if 0) and
// accepts the packet.
type TProxy struct {
	Family     Family
	Port       uint16
	Mark, Mask uint32
	// Continues is for nf_tables only: TProxy sets no mark, and the next target of the rule follows.
	Continues bool
}

// Zone puts the connection into a zone of conntrack.
type Zone uint16

// Reject refuses the packet, with an answer in iptables' spelling.
type Reject string

// The answers.
const (
	TCPReset          Reject = "tcp-reset"
	PortUnreachable   Reject = "icmp-port-unreachable"
	PortUnreachableV6 Reject = "icmp6-port-unreachable"
)

func (v Verdict) iptables() string { return "-j " + string(v) }
func (v Verdict) nft() string      { return strings.ToLower(string(v)) }

func (j Jump) iptables() string { return pick("-g ", "-j ", j.Goto) + j.Chain }
func (j Jump) nft() string      { return pick("goto ", "jump ", j.Goto) + j.Chain }

func (r RedirectTo) iptables() string { return fmt.Sprintf("-j REDIRECT --to-ports %d", r) }
func (r RedirectTo) nft() string      { return fmt.Sprintf("redirect to :%d", r) }

// WholeMark returns the mask, all bits for 0.
func WholeMark(mask uint32) uint32 { return cmp.Or(mask, 1<<32-1) }

func (m SetMark) iptables() string {
	return fmt.Sprintf("-j %s --set-xmark 0x%x/0x%x", pick("CONNMARK", "MARK", m.Connection), m.Value, WholeMark(m.Mask))
}

// nft lists a set bit as kept and added.
func (m SetMark) nft() string {
	name := pick("ct mark", "meta mark", m.Connection)
	if m.Mask == 0 {
		return fmt.Sprintf("%s set 0x%08x", name, m.Value)
	}
	text, added := name+" set "+name, m.Value&m.Mask
	for _, part := range []struct {
		operator string
		bits     uint32
		none     uint32
	}{{"&", ^m.Mask | added, 1<<32 - 1}, {"^", m.Value &^ m.Mask, 0}, {"|", added, 0}} {
		if part.bits != part.none {
			text += fmt.Sprintf(" %s 0x%08x", part.operator, part.bits)
		}
	}
	return text
}

func (c CopyMark) iptables() string {
	return fmt.Sprintf("-j CONNMARK %s --nfmask 0x%x --ctmask 0x%x", pick("--restore-mark", "--save-mark", c.Restore), WholeMark(c.PacketMask), WholeMark(c.ConnectionMask))
}

func (c CopyMark) nft() string {
	return pick("meta mark set ct mark", "ct mark set meta mark", c.Restore)
}

func (t TProxy) iptables() string {
	anyone := pick("::", "0.0.0.0", t.Family == IPv6)
	return fmt.Sprintf("-j TPROXY --on-port %d --on-ip %s --tproxy-mark 0x%x/0x%x", t.Port, anyone, t.Mark, WholeMark(t.Mask))
}

func (t TProxy) nft() string {
	if t.Continues {
		return fmt.Sprintf("tproxy %s to :%d", pick("ip6", "ip", t.Family == IPv6), t.Port)
	}
	return fmt.Sprintf("tproxy %s to :%d meta mark set 0x%08x counter accept", pick("ip6", "ip", t.Family == IPv6), t.Port, t.Mark)
}

func (z Zone) iptables() string { return fmt.Sprintf("-j CT --zone %d", z) }
func (z Zone) nft() string      { return fmt.Sprintf("ct zone set %d", z) }

func (r Reject) iptables() string { return "-j REJECT --reject-with " + string(r) }

func (r Reject) nft() string {
	return "reject with " + map[Reject]string{
		TCPReset: "tcp reset", PortUnreachable: "icmp port-unreachable", PortUnreachableV6: "icmpv6 port-unreachable",
	}[r]
}

// neutral are the iptables targets that leave a packet unchanged, as far as rules and sockets can see.
var neutral = []string{ //nolint:gochecknoglobals // a constant table
	"", "LOG", "NFLOG", "ULOG", "TRACE", "AUDIT", "TEE", "LED", "IDLETIMER", "RATEEST", "SET", "CLASSIFY", "CHECKSUM", "CONNSECMARK",
	"SECMARK", "TCPMSS", "TTL", "HL", "DSCP", "TOS", "ECN",
}

// NeutralTarget reports whether an iptables target leaves a packet unchanged; "" is a rule without a target.
func NeutralTarget(name string) bool { return slices.Contains(neutral, name) }
