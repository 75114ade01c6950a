package ruleset

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// The types below occur only in rules of other programs, never in rules of the mesh. Their text is for people.

// Other is an unknown match or target with its text, one line.
type Other struct{ Text string }

func (o Other) iptables() string { return o.Text }
func (o Other) nft() string      { return o.Text }

// Not inverts its Match.
type Not struct{ Match }

func (n Not) iptables() string { return strings.Replace(n.Match.iptables(), "--", "! --", 1) }
func (n Not) nft() string      { return "not (" + n.Match.nft() + ")" }

// StateAlias is States in iptables' match "state".
type StateAlias States

func (s StateAlias) iptables() string {
	return strings.Replace(States(s).iptables(), "-m conntrack --ctstate", "-m state --state", 1)
}
func (s StateAlias) nft() string { return States(s).nft() }

// Comment matches everything.
type Comment struct{ Text string }

func (c Comment) iptables() string { return "-m comment --comment " + quoted(c.Text) }
func (c Comment) nft() string      { return fmt.Sprintf("comment %q", c.Text) }

// quoted returns a word as iptables-save prints it: in quotes if it has characters outside of names. It is one line.
func quoted(text string) string {
	if strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return strconv.Quote(text)
	}
	plain := func(r rune) bool {
		return r == '_' || r == '-' || r == '.' || r == '/' || r == ':' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z'
	}
	if text != "" && strings.Trim(text, "-") == text && strings.IndexFunc(text, func(r rune) bool { return !plain(r) }) < 0 {
		return text
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(text) + `"`
}

// Addresses matches the destination addresses from First to Last or, with Source, the source addresses.
type Addresses struct {
	First, Last netip.Addr
	Source, Not bool
}

func (a Addresses) iptables() string {
	return fmt.Sprintf("-m iprange %s%s %s-%s", sign("! ", a.Not), pick("--src-range", "--dst-range", a.Source), a.First, a.Last)
}

func (a Addresses) nft() string {
	return fmt.Sprintf("%s %s %s%s-%s", pick("ip6", "ip", a.First.Is6()), pick("saddr", "daddr", a.Source), sign("!= ", a.Not), a.First, a.Last)
}

// AddressType matches the type of the destination address or, with Source, of the source address: the bits of XT_ADDRTYPE_…
// (linux/netfilter/xt_addrtype.h), numbered like RTN_….
type AddressType struct {
	Types       uint16
	Source, Not bool
}

// addressTypes has the names in the order of the bits.
var addressTypes = []string{ //nolint:gochecknoglobals // a constant table
	"UNSPEC", "UNICAST", "LOCAL", "BROADCAST", "ANYCAST", "MULTICAST", "BLACKHOLE", "UNREACHABLE", "PROHIBIT", "THROW", "NAT", "XRESOLVE",
}

// Has reports whether Types includes the named type.
func (a AddressType) Has(name string) bool {
	i := slices.Index(addressTypes, name)
	return i >= 0 && a.Types&(1<<i) != 0
}

func (a AddressType) names() string { return bitNames(addressTypes, a.Types, ",") }

func (a AddressType) iptables() string {
	return fmt.Sprintf("-m addrtype %s%s %s", sign("! ", a.Not), pick("--src-type", "--dst-type", a.Source), a.names())
}

func (a AddressType) nft() string {
	return fmt.Sprintf("fib %s type %s%s", pick("saddr", "daddr", a.Source), sign("!= ", a.Not), strings.ToLower(a.names()))
}

// SocketExists matches packets that come from a socket of the namespace.
type SocketExists struct{}

func (SocketExists) iptables() string { return "-m owner --socket-exists" }
func (SocketExists) nft() string      { return "" }

// ReversePath matches packets whose source has a route through their input interface or, with Missing, has no such route. ByMark
// includes the packet's mark in the lookup.
type ReversePath struct{ Missing, ByMark bool }

func (r ReversePath) iptables() string {
	return "-m rpfilter" + sign(" --validmark", r.ByMark) + sign(" --invert", r.Missing)
}

func (r ReversePath) nft() string {
	return "fib saddr . " + sign("mark . ", r.ByMark) + "iif oif " + pick("missing", "exists", r.Missing)
}

// Absent matches a part that the first packet of a TCP or UDP connection never has: an extension header of IPv6, a fragment, a
// type of ICMP.
type Absent struct{ Text string }

func (a Absent) iptables() string { return a.Text }
func (a Absent) nft() string      { return a.Text }

// Reply matches packets in the reply direction of a connection.
type Reply struct{}

func (Reply) iptables() string { return "-m conntrack --ctdir REPLY" }
func (Reply) nft() string      { return "ct direction reply" }

// AnyOf matches if all matches of one alternative do: a lookup in a set of nf_tables. Name is the set's name, "" if anonymous.
type AnyOf struct {
	Of, Name string
	List     [][]Match
	Not      bool
	// Changes reports whether packets add elements.
	Changes bool
}

func (a AnyOf) iptables() string { return a.nft() }

func (a AnyOf) nft() string {
	what := "@" + a.Name
	if a.Name == "" {
		what = fmt.Sprintf("{ %d elements }", len(a.List))
	}
	return a.Of + " " + sign("!= ", a.Not) + what
}

// NAT translates an address in a way that RedirectTo cannot express. Its first address and port are invalid and 0 if the
// kernel chooses or keeps them.
type NAT struct {
	// Source is set for a translation of the source.
	Source bool
	To     netip.Addr
	Port   uint16
	// Text is the text of its tool. Local is set for a redirection to the namespace itself.
	Text  string
	Local bool
	// Range is set if the kernel chooses among several addresses or ports.
	Range bool
}

func (n NAT) iptables() string { return n.Text }
func (n NAT) nft() string      { return n.Text }

// Neutral leaves the packet unchanged, as far as rules and sockets can see. With Copies it sends a copy elsewhere.
type Neutral struct {
	Text   string
	Copies bool
}

func (n Neutral) iptables() string { return n.Text }
func (n Neutral) nft() string      { return n.Text }

// NoTrack exempts the packet from conntrack.
type NoTrack struct{}

func (NoTrack) iptables() string { return "-j CT --notrack" }
func (NoTrack) nft() string      { return "notrack" }

// VerdictMap applies the verdict of the first entry that matches; without a match the packet continues with the next rule.
type VerdictMap struct {
	Of, Name string
	List     []VerdictOf
}

// VerdictOf is an entry of a VerdictMap. All its matches must hold.
type VerdictOf struct {
	Matches []Match
	Target  Target
}

func (m VerdictMap) iptables() string { return m.nft() }

func (m VerdictMap) nft() string {
	if m.Name != "" {
		return m.Of + " vmap @" + m.Name
	}
	return fmt.Sprintf("%s vmap { %d elements }", m.Of, len(m.List))
}

// Then applies several targets in order.
type Then []Target

func (t Then) iptables() string { return t.nft() }

func (t Then) nft() string {
	var b strings.Builder
	for _, one := range t {
		add(&b, one.nft())
	}
	return b.String()
}

// Counter counts packets.
type Counter struct{}

func (Counter) iptables() string { return "" }
func (Counter) nft() string      { return "counter" }
