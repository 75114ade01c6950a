// Package xtables translates between rules as iptables-save prints them and the expressions of nf_tables that
// iptables-nft writes for them.
//
// It promises that Encode gives what iptables-nft 1.8.9 sends for a rule, or an error that names what it does not know;
// and that Decode gives exactly what iptables-nft-save prints, or says that it cannot: an expression, attribute or bit
// it does not understand is never passed over. It touches nothing: no socket, no file, no process.
//
// Start reading at Encode and Decode. The layouts of matches and targets are the structs of the kernel's headers below
// include/uapi/linux/netfilter; each type names its own.
package xtables

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// rule is a rule taken apart.
type rule struct {
	family              ruleset.Family
	source, destination network
	in, out             link
	protocol            protocol
	matches             []match
	target              target // nil: the rule only counts
}

// match is what stands behind an -m.
type match interface {
	fmt.Stringer
	encode(e *encoder)
}

// target is what stands at the end: a verdict, a chain or an extension.
type target interface {
	fmt.Stringer
	encode(e *encoder)
}

// String prints the rule as iptables-save does.
func (r rule) String() string {
	parts := []string{
		r.source.option("-s"), r.destination.option("-d"), r.in.option("-i"), r.out.option("-o"), r.protocol.option(),
	}
	for _, m := range r.matches {
		parts = append(parts, m.String())
	}
	if r.target != nil {
		parts = append(parts, r.target.String())
	}
	return strings.Join(slices.DeleteFunc(parts, func(p string) bool { return p == "" }), " ")
}

// not is the sign of a negated option.
func not(negated bool) string {
	if negated {
		return "! "
	}
	return ""
}

// network is -s or -d; the zero one is no match.
type network struct {
	prefix  netip.Prefix
	negated bool
}

func (n network) option(name string) string {
	if !n.prefix.IsValid() {
		return ""
	}
	return fmt.Sprintf("%s%s %s/%d", not(n.negated), name, ruleset.Address(n.prefix.Addr()), n.prefix.Bits())
}

// link is -i or -o; a name that ends with "+" stands for all that begin so. The zero one is no match.
type link struct {
	name    string
	negated bool
}

func (l link) option(name string) string {
	if l.name == "" {
		return ""
	}
	return not(l.negated) + name + " " + l.name
}

// protocol is -p; the zero one is no match.
type protocol struct {
	number  uint8
	set     bool
	negated bool
}

// Numbers of protocols that have options of their own (include/uapi/linux/in.h).
const (
	icmp   = 1
	tcp    = 6
	udp    = 17
	icmpv6 = 58
)

// protocols are the names that iptables-save prints instead of numbers.
var protocols = map[uint8]string{ //nolint:gochecknoglobals // a constant table
	icmp: "icmp", tcp: "tcp", udp: "udp", 33: "dccp", 47: "gre", 50: "esp", 51: "ah", icmpv6: "ipv6-icmp", 132: "sctp", 136: "udplite",
}

func protocolName(number uint8) string {
	if name, ok := protocols[number]; ok {
		return name
	}
	return strconv.Itoa(int(number))
}

func (p protocol) option() string {
	if !p.set {
		return ""
	}
	return not(p.negated) + "-p " + protocolName(p.number)
}
