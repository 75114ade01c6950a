package decode

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// verdict returns a verdict of nf_tables as a target, nil for an unknown one.
func verdict(v *nfnetlink.Verdict) ruleset.Target {
	if v == nil {
		return nil
	}
	switch v.Code {
	case nfnetlink.Drop:
		return ruleset.Drop
	case nfnetlink.Accept:
		return ruleset.Accept
	case nfnetlink.Return:
		return ruleset.Return
	case nfnetlink.Jump, nfnetlink.Goto:
		return ruleset.Jump{Chain: Name(v.Chain), Goto: v.Code == nfnetlink.Goto}
	case unix.NFT_CONTINUE:
		return ruleset.Neutral{Text: "continue"}
	}
	return ruleset.Other{Text: fmt.Sprintf("[verdict %d]", v.Code)}
}

// reserved reports whether the name of a chain means something else in the text of iptables: a verdict, an option or a target.
func reserved(chain string) bool {
	return slices.Contains([]string{string(ruleset.Accept), string(ruleset.Drop), string(ruleset.Return)}, chain) ||
		strings.HasPrefix(chain, "-") || strings.HasPrefix(chain, "!") || ruleset.NeutralTarget(chain) && chain != ""
}

// immediate reads a verdict or a constant.
func (d *decoder) immediate(f nfnetlink.Fields) {
	if v, ok := f.ReadVerdict(); ok {
		if n := len(d.parts) - 1; v.Code == nfnetlink.Accept && n >= 0 && d.tproxied() {
			return
		}
		d.nft = d.nft || reserved(v.Chain)
		d.target(verdict(&v))
		return
	}
	register, ok := f.Number(unix.NFTA_IMMEDIATE_DREG)
	value, ok2 := f.Value(unix.NFTA_IMMEDIATE_DATA)
	if !ok || register == unix.NFT_REG_VERDICT {
		d.target(d.other("a verdict"))
		return
	}
	d.put(register, load{from: "constant", constant: value, length: uint32(len(value))}, ok2) //nolint:gosec // a register bounds the length
}

// tproxied reports whether the last parts are the mesh's tproxy (tproxy, a mark, a counter), and merges them into one part.
func (d *decoder) tproxied() bool {
	n := len(d.parts)
	if n < 3 || d.parts[n-1].match != ruleset.Match(ruleset.Counter{}) {
		return false
	}
	t, is := d.parts[n-3].target.(ruleset.TProxy)
	m, marks := d.parts[n-2].target.(ruleset.SetMark)
	if !is || !marks || m.Connection || m.Mask != 0 {
		return false
	}
	d.parts = append(d.parts[:n-3], part{target: ruleset.TProxy{Family: t.Family, Port: t.Port, Mark: m.Value}})
	return true
}

// Trace is the target of a rule that marks packets for tracing.
var Trace = ruleset.Neutral{Text: "meta nftrace set 1"} //nolint:gochecknoglobals // a constant

// store reads an assignment from a constant or from another mark.
func (d *decoder) store(name string, key uint32, l load) {
	d.nft = true
	connection := name == "ct" && key == unix.NFT_CT_MARK
	switch {
	case name == "meta" && key == unix.NFT_META_MARK || connection:
		d.setMark(l, connection)
	case name == "ct" && key == unix.NFT_CT_ZONE && len(l.constant) == 2 && binary.NativeEndian.Uint16(l.constant) != 0:
		d.target(ruleset.Zone(binary.NativeEndian.Uint16(l.constant)))
	case name == "ct" && (key == unix.NFT_CT_LABELS || key == unix.NFT_CT_SECMARK || key == unix.NFT_CT_EVENTMASK):
		d.target(ruleset.Neutral{Text: "ct set"})
	case name == "meta" && (key == unix.NFT_META_NFTRACE || key == unix.NFT_META_PRIORITY || key == unix.NFT_META_SECMARK):
		t := ruleset.Neutral{Text: "meta priority set"}
		if key == unix.NFT_META_NFTRACE {
			t = Trace
		}
		d.target(t)
	default:
		d.target(d.other(name + " set"))
	}
}

// setMark reads the new value of a mark: a constant, the other mark, or bits of the same mark.
func (d *decoder) setMark(l load, connection bool) {
	packet := l.from == "meta" && l.key == unix.NFT_META_MARK
	other := l.from == "ct" && l.key == unix.NFT_CT_MARK
	switch {
	case l.swapped:
	case len(l.constant) == 4:
		d.target(ruleset.SetMark{Value: binary.NativeEndian.Uint32(l.constant), Connection: connection})
		return
	case packet && connection && l.mask == nil || other && !connection && l.mask == nil:
		d.target(ruleset.CopyMark{Restore: !connection})
		return
	case (packet && !connection || other && connection) && len(l.mask) == 4:
		m := ruleset.SetMark{Mask: ^binary.NativeEndian.Uint32(l.mask), Connection: connection}
		if l.xor != nil {
			m.Value = binary.NativeEndian.Uint32(l.xor)
		}
		if m.Mask == 0 && m.Value == 0 {
			d.target(ruleset.Neutral{Text: "meta mark set meta mark"})
			return
		} else if m.Mask != 0 {
			d.target(m)
			return
		}
	}
	d.target(d.other("a mark is set"))
}

// rewrite reads a change of the packet: its traffic class, its hop limit, or anything else.
func (d *decoder) rewrite(base, offset, length uint32) {
	d.nft = true
	end := offset + length
	harmless := base == unix.NFT_PAYLOAD_NETWORK_HEADER &&
		(d.family == ruleset.IPv4 && (offset == 1 && end == 2 || offset == 8 && end == 9) || d.family == ruleset.IPv6 && (end <= 4 || offset == 7 && end == 8))
	if harmless {
		d.target(ruleset.Neutral{Text: "the packet's class or hops set"})
		return
	}
	d.target(d.other("a header of the packet is rewritten"))
}

// dynsetElements is an attribute that golang.org/x/sys/unix lacks.
const dynsetElements = 10

// act reads an expression with an effect. iptables writes only log and limit.
func (d *decoder) act(name string, f nfnetlink.Fields) {
	d.nft = d.nft || name != "log" && name != "limit"
	switch name {
	case "log":
		d.match(ruleset.Neutral{Text: d.logText(f)})
	case "last", "exthdr", "dup", "flow_offload", "dynset", "objref":
		d.neutral(name, f)
	case "limit", "quota", "connlimit", "socket", "osf", "numgen", "hash", "rt", "xfrm", "tunnel", "inner":
		d.unknown(name, f)
	case "notrack":
		d.target(ruleset.NoTrack{})
	case "masq":
		d.target(ruleset.NAT{Source: true, Range: true, Text: "masquerade"})
	case "redir":
		d.redirect(f)
	case "nat":
		d.nat(f)
	case "tproxy":
		d.tproxy(f)
	case "reject":
		d.target(d.reject(f))
	default: // queue, fwd, synproxy, and newer expressions
		d.target(d.other(name))
	}
}

func (d *decoder) logText(f nfnetlink.Fields) string {
	const prefix = 2 // NFTA_LOG_PREFIX
	if d.table.IPTables {
		return "-j NFLOG"
	}
	if text := f.Text(prefix); text != "" {
		return fmt.Sprintf("log prefix %q", text)
	}
	return "log"
}

// neutral reads expressions that do not change the packet and have no condition.
func (d *decoder) neutral(name string, f nfnetlink.Fields) {
	kind, _ := f.Number(unix.NFTA_OBJREF_IMM_TYPE)
	_, bySet := f.Number(unix.NFTA_OBJREF_SET_SREG)
	_, extractsTo := f.Number(1) // NFTA_EXTHDR_DREG
	conditional := name == "dynset" && (f.Raw(unix.NFTA_DYNSET_EXPR) != nil || f.Raw(dynsetElements) != nil) ||
		name == "objref" && (bySet || kind == unix.NFT_OBJECT_QUOTA || kind == unix.NFT_OBJECT_LIMIT || kind == unix.NFT_OBJECT_CONNLIMIT || kind == unix.NFT_OBJECT_SYNPROXY)
	switch {
	case name == "exthdr" && extractsTo:
		d.unknown(name, f)
	case conditional:
		d.match(d.other(name))
	case name == "dup":
		d.target(ruleset.Neutral{Text: name, Copies: true})
	default:
		d.match(ruleset.Neutral{Text: "[" + name + "]"})
	}
}

// unknown reads a condition or a load that the decoder does not know.
func (d *decoder) unknown(name string, f nfnetlink.Fields) {
	register := map[string]uint16{"socket": 2, "numgen": 1, "hash": 2, "rt": 1, "xfrm": 1, "tunnel": 2, "osf": 1, "exthdr": 1}
	if kind, loads := register[name]; loads {
		if into, ok := f.Number(kind); ok {
			d.put(into, load{}, false)
			return
		}
	}
	rate, ok := f.Number(unix.NFTA_LIMIT_RATE)
	if name == "limit" && !ok { // an attribute of 8 bytes
		rate = 0
		if raw := f.Raw(unix.NFTA_LIMIT_RATE); len(raw) == 8 {
			rate = uint32(binary.BigEndian.Uint64(raw)) //nolint:gosec // for display only
		}
	}
	if name == "limit" && d.table.IPTables {
		d.match(ruleset.Other{Text: fmt.Sprintf("-m limit --limit %d [see rule handle %d]", rate, d.handle)})
		return
	}
	d.match(d.other(name))
}

// constant returns the value of the register that an attribute names. The end of a range can be equal to its start.
func (d *decoder) constant(f *nfnetlink.Fields, kind uint16) (value []byte, named bool) {
	register, named := f.Number(kind)
	if l := d.registers[word(register)]; named && l != nil {
		value = l.constant
	}
	return value, named
}

// ports returns the ports of a translation: the first one (0 if it is not known), whether it has ports, and whether it has several
// or unknown ones.
func (d *decoder) ports(f *nfnetlink.Fields, first, last uint16) (port uint16, named, several bool) {
	value, named := d.constant(f, first)
	end, ranged := d.constant(f, last)
	if len(value) == 2 {
		port = binary.BigEndian.Uint16(value)
	}
	return port, named, named && len(value) != 2 || ranged && string(end) != string(value)
}

func (d *decoder) redirect(f nfnetlink.Fields) {
	port, named, several := d.ports(&f, unix.NFTA_REDIR_REG_PROTO_MIN, unix.NFTA_REDIR_REG_PROTO_MAX)
	n := ruleset.NAT{Local: true, Port: port, Range: several}
	flags, _ := f.Number(unix.NFTA_REDIR_FLAGS)
	if named && !n.Range && flags == nfnetlink.NATPorts {
		d.target(ruleset.RedirectTo(n.Port))
		return
	}
	if n.Text = natText(n); flags&^nfnetlink.NATPorts != 0 || named && flags == 0 {
		n.Text += fmt.Sprintf(" flags %d", flags)
	}
	d.target(n)
}

func (d *decoder) nat(f nfnetlink.Fields) {
	kind, _ := f.Number(unix.NFTA_NAT_TYPE)
	family, _ := f.Number(unix.NFTA_NAT_FAMILY)
	n := ruleset.NAT{Source: kind == unix.NFT_NAT_SNAT}
	if d.family == ruleset.Inet { // the rule does not match packets of the other family
		of := ruleset.IPv4
		if family == unix.NFPROTO_IPV6 {
			of = ruleset.IPv6
		}
		d.match(ruleset.OfFamily(of))
	}
	n.Port, _, n.Range = d.ports(&f, unix.NFTA_NAT_REG_PROTO_MIN, unix.NFTA_NAT_REG_PROTO_MAX)
	first, named := d.constant(&f, unix.NFTA_NAT_REG_ADDR_MIN)
	last, ranged := d.constant(&f, unix.NFTA_NAT_REG_ADDR_MAX)
	n.To, _ = netip.AddrFromSlice(first)
	n.Range = n.Range || named && !n.To.IsValid() || ranged && string(last) != string(first)
	n.Text = natText(n)
	d.target(n)
}

// natText returns the text in the syntax of nft.
func natText(n ruleset.NAT) string {
	text := "dnat to "
	switch {
	case n.Local:
		text = "redirect to "
	case n.Source:
		text = "snat to "
	}
	if n.To.IsValid() {
		text += n.To.String()
	}
	if n.Port != 0 {
		text += fmt.Sprintf(":%d", n.Port)
	}
	if n.Range {
		text += " (one of several)"
	}
	return text
}

func (d *decoder) tproxy(f nfnetlink.Fields) {
	family, _ := f.Number(nfnetlink.TProxyFamily)
	register, ported := f.Number(nfnetlink.TProxyPort)
	_, addressed := f.Number(nfnetlink.TProxyAddress)
	port := d.take(register).constant
	t := ruleset.TProxy{Family: ruleset.IPv4}
	if family == unix.NFPROTO_IPV6 {
		t.Family = ruleset.IPv6
	}
	if !ported || addressed || len(port) != 2 || family != unix.NFPROTO_IPV4 && family != unix.NFPROTO_IPV6 {
		d.target(d.other("tproxy"))
		return
	}
	t.Port, t.Continues = binary.BigEndian.Uint16(port), true
	d.target(t)
}

// reject reads the answer: a type and a code (enum nft_reject_types).
func (d *decoder) reject(f nfnetlink.Fields) ruleset.Target {
	kind, _ := f.Number(unix.NFTA_REJECT_TYPE)
	code := byte(0)
	if raw := f.Raw(unix.NFTA_REJECT_ICMP_CODE); len(raw) == 1 {
		code = raw[0]
	}
	switch {
	case kind == unix.NFT_REJECT_TCP_RST && code == 0:
		return ruleset.TCPReset
	case kind == unix.NFT_REJECT_ICMP_UNREACH && d.family == ruleset.IPv6 && code == 4:
		return ruleset.PortUnreachableV6
	case kind == unix.NFT_REJECT_ICMP_UNREACH && d.family != ruleset.IPv6 && code == 3:
		return ruleset.PortUnreachable
	}
	return ruleset.Reject(fmt.Sprintf("type %d code %d", kind, code))
}
