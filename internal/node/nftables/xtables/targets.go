package xtables

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/expression"
)

// verdict ends a rule without an extension: ACCEPT, DROP, RETURN, or a chain.
type verdict expression.Verdict

func verdictCode(name string) (int32, bool) {
	code, ok := map[string]int32{"DROP": expression.Drop, "ACCEPT": expression.Accept, "RETURN": expression.Return}[name]
	return code, ok
}

// String is part of target.
func (v verdict) String() string {
	switch v.Code {
	case expression.Drop:
		return "-j DROP"
	case expression.Accept:
		return "-j ACCEPT"
	case expression.Return:
		return "-j RETURN"
	case expression.Goto:
		return "-g " + v.Chain
	}
	return "-j " + v.Chain
}

func (v verdict) encode(e *encoder) { e.Verdict(expression.Verdict(v)) }

// Bits of the field flags of struct nf_nat_range and its relatives (nf_nat.h).
const (
	natAddresses = 1 << iota
	natPorts
)

// redirect is REDIRECT: for IPv4 struct nf_nat_ipv4_multi_range_compat, for IPv6 struct nf_nat_range (nf_nat.h).
type redirect struct {
	family ruleset.Family
	ports  span
}

// String is part of target.
func (r redirect) String() string { return "-j REDIRECT --to-ports " + r.ports.text("-") }

func (w *words) redirect(f ruleset.Family) target {
	if !w.take("--to-ports") {
		w.fail("target \"REDIRECT\" has no --to-ports")
	}
	return redirect{f, w.span(w.next(), "-")}
}

func (r redirect) encode(e *encoder) { e.xtTarget(r.xt()) }

func (r redirect) xt() xt {
	n := natRange{flags: natPorts, ports: r.ports}
	if r.family == ruleset.IPv4 {
		return xt{name: "REDIRECT", info: n.multiRange()}
	}
	return xt{name: "REDIRECT", info: n.range1()}
}

func decodeRedirect(f ruleset.Family, info []byte) (target, bool) {
	if len(info) < 24 {
		return nil, false
	}
	at := 16
	if f == ruleset.IPv6 {
		at = len(info) - 4
	}
	r := redirect{f, span{binary.BigEndian.Uint16(info[at:]), binary.BigEndian.Uint16(info[at+2:])}}
	return r, bytes.Equal(r.xt().info, info)
}

// setMark is MARK: struct xt_mark_tginfo2 (xt_mark.h), which is mark and mask.
type setMark struct{ value, mask uint32 }

// String is part of target.
func (m setMark) String() string {
	return fmt.Sprintf("-j MARK --set-xmark 0x%x/0x%x", m.value, m.mask)
}

func (w *words) setMark() target {
	if !w.take("--set-xmark") {
		w.fail("target \"MARK\" has no --set-xmark")
	}
	value, mask := w.masked()
	return setMark{value, mask}
}

func (m setMark) encode(e *encoder) { e.xtTarget(m.xt()) }

func (m setMark) xt() xt { return xt{"MARK", 2, record{}.u32(m.value, m.mask).align()} }

func decodeSetMark(info []byte) (target, bool) {
	if len(info) != 8 {
		return nil, false
	}
	return setMark{binary.NativeEndian.Uint32(info), binary.NativeEndian.Uint32(info[4:])}, true
}

// setConnmark is CONNMARK: struct xt_connmark_tginfo2 (xt_connmark.h), which is ctmark, ctmask, nfmask, shift_dir,
// shift_bits and mode. Revision 1 lacks the shifts.
type setConnmark struct {
	mode                  uint8
	value, ctMask, nfMask uint32
	withoutShift          bool // revision 1
}

// Values of the field mode.
const (
	connmarkSet = iota
	connmarkSave
	connmarkRestore
)

// String is part of target.
func (c setConnmark) String() string {
	switch c.mode {
	case connmarkSave:
		return fmt.Sprintf("-j CONNMARK --save-mark --nfmask 0x%x --ctmask 0x%x", c.nfMask, c.ctMask)
	case connmarkRestore:
		return fmt.Sprintf("-j CONNMARK --restore-mark --nfmask 0x%x --ctmask 0x%x", c.nfMask, c.ctMask)
	}
	return fmt.Sprintf("-j CONNMARK --set-xmark 0x%x/0x%x", c.value, c.ctMask)
}

func (w *words) setConnmark() target {
	c := setConnmark{}
	switch word := w.next(); word {
	case "--set-xmark":
		c.value, c.ctMask = w.masked()
		c.nfMask = allBits // as iptables writes it; nothing reads it
		return c
	case "--save-mark":
		c.mode = connmarkSave
	case "--restore-mark":
		c.mode = connmarkRestore
	default:
		w.fail("nothing is known of %q behind target \"CONNMARK\"", word)
	}
	if !w.take("--nfmask") {
		w.fail("target \"CONNMARK\" has no --nfmask")
	}
	c.nfMask = w.uint32()
	if !w.take("--ctmask") {
		w.fail("target \"CONNMARK\" has no --ctmask")
	}
	c.ctMask = w.uint32()
	return c
}

func (c setConnmark) encode(e *encoder) { e.xtTarget(c.xt()) }

func (c setConnmark) xt() xt {
	info := record{}.u32(c.value, c.ctMask, c.nfMask)
	if c.withoutShift {
		return xt{"CONNMARK", 1, info.u8(c.mode).align()}
	}
	return xt{"CONNMARK", 2, info.u8(0, 0, c.mode).align()}
}

func decodeSetConnmark(withoutShift bool, info []byte) (target, bool) {
	if len(info) != 16 {
		return nil, false
	}
	c := setConnmark{
		value: binary.NativeEndian.Uint32(info), ctMask: binary.NativeEndian.Uint32(info[4:]),
		nfMask: binary.NativeEndian.Uint32(info[8:]), mode: info[14], withoutShift: withoutShift,
	}
	if withoutShift {
		c.mode = info[12]
	}
	// What has no meaning in a mode is not printed, and must be as iptables writes it.
	usual := c.mode == connmarkSet && c.nfMask == allBits || c.mode != connmarkSet && c.value == 0
	return c, c.mode <= connmarkRestore && usual && bytes.Equal(c.xt().info, info)
}

// tproxy is TPROXY: struct xt_tproxy_target_info_v1 (xt_TPROXY.h), which is mark_mask, mark_value, laddr and lport.
type tproxy struct {
	port        uint16
	address     netip.Addr
	value, mask uint32
}

// String is part of target.
func (t tproxy) String() string {
	return fmt.Sprintf("-j TPROXY --on-port %d --on-ip %s --tproxy-mark 0x%x/0x%x", t.port, ruleset.Address(t.address), t.value, t.mask)
}

func (w *words) tproxy(f ruleset.Family) target {
	t := tproxy{}
	if !w.take("--on-port") {
		w.fail("target \"TPROXY\" has no --on-port")
	}
	t.port = w.uint16()
	if !w.take("--on-ip") {
		w.fail("target \"TPROXY\" has no --on-ip")
	}
	word := w.next()
	a, err := netip.ParseAddr(word)
	if w.err == nil && (err != nil || a.Is4() != (f == ruleset.IPv4)) {
		w.fail("%q behind --on-ip is no address of %s", word, f)
	}
	t.address = a
	if !w.take("--tproxy-mark") {
		w.fail("target \"TPROXY\" has no --tproxy-mark")
	}
	t.value, t.mask = w.masked()
	return t
}

func (t tproxy) encode(e *encoder) { e.xtTarget(t.xt()) }

func (t tproxy) xt() xt {
	info := record{}.u32(t.mask, t.value).u8(t.address.AsSlice()...).fill(24).be16(t.port)
	return xt{"TPROXY", 1, info.align()}
}

func decodeTPROXY(f ruleset.Family, info []byte) (target, bool) {
	if len(info) != 32 {
		return nil, false
	}
	t := tproxy{
		mask: binary.NativeEndian.Uint32(info), value: binary.NativeEndian.Uint32(info[4:]),
		address: addressIn(f, info[8:]), port: binary.BigEndian.Uint16(info[24:]),
	}
	return t, bytes.Equal(t.xt().info, info)
}

// addressIn reads a union nf_inet_addr.
func addressIn(f ruleset.Family, info []byte) netip.Addr {
	if f == ruleset.IPv4 {
		return netip.AddrFrom4([4]byte(info))
	}
	return netip.AddrFrom16([16]byte(info))
}

// ct is CT --zone: struct xt_ct_target_info_v1 (xt_CT.h), which is flags, zone, ct_events, exp_events, helper[16],
// timeout[32] and a pointer of the kernel's.
type ct struct{ zone uint16 }

const ctLength = 72

// String is part of target.
func (c ct) String() string { return fmt.Sprintf("-j CT --zone %d", c.zone) }

func (w *words) ct() target {
	if !w.take("--zone") {
		w.fail("target \"CT\" has no --zone")
	}
	return ct{w.uint16()}
}

func (c ct) encode(e *encoder) { e.xtTarget(c.xt()) }

func (c ct) xt() xt { return xt{"CT", 2, record{}.u16(0, c.zone).fill(ctLength).align()} }

func decodeCT(info []byte) (target, bool) {
	if len(info) != ctLength {
		return nil, false
	}
	c := ct{binary.NativeEndian.Uint16(info[2:])}
	return c, c.zone != 0 && bytes.Equal(c.xt().info, info)
}

// reject is REJECT: struct ipt_reject_info or ip6t_reject_info (netfilter_ipv4/ipt_REJECT.h,
// netfilter_ipv6/ip6t_REJECT.h), whose only field is an enum of its own in each family.
type reject struct {
	family ruleset.Family
	with   uint32
}

// rejectWith names the values of the enums. Those without a name cannot be asked for any more.
var rejectWith = map[ruleset.Family][]string{ //nolint:gochecknoglobals // a constant table
	ruleset.IPv4: {
		"icmp-net-unreachable", "icmp-host-unreachable", "icmp-proto-unreachable", "icmp-port-unreachable", "",
		"icmp-net-prohibited", "icmp-host-prohibited", "tcp-reset", "icmp-admin-prohibited",
	},
	ruleset.IPv6: {
		"icmp6-no-route", "icmp6-adm-prohibited", "", "icmp6-addr-unreachable", "icmp6-port-unreachable", "",
		"tcp-reset", "icmp6-policy-fail", "icmp6-reject-route",
	},
}

// String is part of target.
func (r reject) String() string { return "-j REJECT --reject-with " + rejectWith[r.family][r.with] }

func (w *words) reject(f ruleset.Family) target {
	if !w.take("--reject-with") {
		w.fail("target \"REJECT\" has no --reject-with")
	}
	word := w.next()
	at := indexOf(rejectWith[f], word)
	if word == "" || at < 0 {
		w.fail("nothing is known of refusing with %q in %s", word, f)
		at = 0
	}
	return reject{f, uint32(at)}
}

func (r reject) encode(e *encoder) { e.xtTarget(r.xt()) }

func (r reject) xt() xt { return xt{name: "REJECT", info: record{}.u32(r.with).align()} }

func decodeReject(f ruleset.Family, info []byte) (target, bool) {
	if len(info) != 8 {
		return nil, false
	}
	r := reject{f, binary.NativeEndian.Uint32(info)}
	if int64(r.with) >= int64(len(rejectWith[f])) || rejectWith[f][r.with] == "" {
		return nil, false
	}
	return r, bytes.Equal(r.xt().info, info)
}
