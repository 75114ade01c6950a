package ruleset

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Target is the action of a rule on a matching packet: one of the types below.
type Target interface{ syntax }

// Verdict ends the walk of a packet through a chain.
type Verdict string

// The verdicts.
const (
	Accept Verdict = "ACCEPT"
	Drop   Verdict = "DROP"
	Return Verdict = "RETURN"
)

// Jump continues in a chain; with Goto the packet does not return to this chain.
type Jump struct {
	Chain string
	Goto  bool
}

// RedirectTo rewrites the destination to a port of the namespace itself.
type RedirectTo uint16

// SetMark sets the mark of the packet.
type SetMark uint32

// SaveMark copies the packet's mark to its connection.
type SaveMark struct{}

// RestoreMark copies the connection's mark to the packet.
type RestoreMark struct{}

// TProxy gives the packet to the socket that listens on a port, both addresses kept, marks it and accepts it.
type TProxy struct {
	Family Family
	Port   uint16
	Mark   uint32
}

// Zone puts the connection into a zone of conntrack.
type Zone uint16

// Reject refuses the packet, with an answer that is spelled as iptables does.
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

func (m SetMark) iptables() string {
	return fmt.Sprintf("-j MARK --set-xmark 0x%x/0xffffffff", uint32(m))
}
func (m SetMark) nft() string { return fmt.Sprintf("meta mark set 0x%08x", uint32(m)) }

func (SaveMark) iptables() string {
	return "-j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff"
}
func (SaveMark) nft() string { return "ct mark set meta mark" }

func (RestoreMark) iptables() string {
	return "-j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff"
}
func (RestoreMark) nft() string { return "meta mark set ct mark" }

func (t TProxy) iptables() string {
	anyone := pick("::", "0.0.0.0", t.Family == IPv6)
	return fmt.Sprintf("-j TPROXY --on-port %d --on-ip %s --tproxy-mark 0x%x/0xffffffff", t.Port, anyone, t.Mark)
}

func (t TProxy) nft() string {
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

// DNAT rewrites the destination. Only rules of earlier versions of the reference have it.
type DNAT netip.AddrPort

// SNAT rewrites the source. Only rules of earlier versions of the reference have it.
type SNAT netip.Addr

func (d DNAT) iptables() string { return "-j DNAT --to-destination " + netip.AddrPort(d).String() }
func (s SNAT) iptables() string { return "-j SNAT --to-source " + netip.Addr(s).String() }
func (DNAT) nft() string        { return "" }
func (SNAT) nft() string        { return "" }

// neutral are the targets of iptables after which a packet goes on as it was, as far as rules and sockets can see.
var neutral = []string{ //nolint:gochecknoglobals // a constant table
	"", "LOG", "NFLOG", "ULOG", "TRACE", "AUDIT", "TEE", "LED", "IDLETIMER", "RATEEST", "SET", "CLASSIFY", "CHECKSUM", "CONNSECMARK",
	"SECMARK", "TCPMSS", "TTL", "HL", "DSCP", "TOS", "ECN",
}

// Neutral reports whether a packet goes on behind a target of iptables as it was; "" is a rule without a target.
func Neutral(target string) bool { return slices.Contains(neutral, target) }
