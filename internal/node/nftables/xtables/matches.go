package xtables

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// owner is "-m owner": struct xt_owner_match_info (xt_owner.h), which is uid_min, uid_max, gid_min, gid_max, match and
// invert.
type owner struct{ user, group idMatch }

// idMatch is --uid-owner or --gid-owner; nothing if it is not set.
type idMatch struct {
	first, last uint32
	set         bool
	negated     bool
}

// Bits of the fields match and invert.
const (
	ownerUID = 1 << iota
	ownerGID
)

func (i idMatch) option(name string) string {
	switch {
	case !i.set:
		return ""
	case i.first == i.last:
		return fmt.Sprintf(" %s%s %d", not(i.negated), name, i.first)
	}
	return fmt.Sprintf(" %s%s %d-%d", not(i.negated), name, i.first, i.last)
}

// String is part of match.
func (o owner) String() string {
	return "-m owner" + o.user.option("--uid-owner") + o.group.option("--gid-owner")
}

func (w *words) owner() match {
	o := owner{}
	for {
		name, negated := w.option("--uid-owner", "--gid-owner")
		if name == "" {
			break
		}
		first, last, ok := strings.Cut(w.next(), "-")
		if !ok {
			last = first
		}
		//nolint:gosec // parseNumber keeps to the bits
		id := idMatch{uint32(w.parseNumber(first, 32)), uint32(w.parseNumber(last, 32)), true, negated}
		if name == "--uid-owner" {
			o.user = id
		} else {
			o.group = id
		}
	}
	if o == (owner{}) {
		w.fail("match \"owner\" has neither --uid-owner nor --gid-owner")
	}
	return o
}

func (o owner) encode(e *encoder) { e.xtMatch(o.xt()) }

func (o owner) xt() xt {
	info := record{}.u32(o.user.first, o.user.last, o.group.first, o.group.last).
		u8(bit[uint8](o.user.set, ownerUID) | bit[uint8](o.group.set, ownerGID)).
		u8(bit[uint8](o.user.negated, ownerUID) | bit[uint8](o.group.negated, ownerGID))
	return xt{"owner", 1, info.align()}
}

func decodeOwner(info []byte) (match, bool) {
	if len(info) != 24 {
		return nil, false
	}
	read := func(at int, bit uint8) idMatch {
		if info[16]&bit == 0 {
			return idMatch{}
		}
		return idMatch{binary.NativeEndian.Uint32(info[at:]), binary.NativeEndian.Uint32(info[at+4:]), true, info[17]&bit != 0}
	}
	o := owner{read(0, ownerUID), read(8, ownerGID)}
	return o, o != owner{} && bytes.Equal(o.xt().info, info)
}

// allBits is the mask that lets a whole mark through. iptables does not print it with a match.
const allBits = 1<<32 - 1

// mark is "-m mark" and "-m connmark". The first is a comparison of the packet's mark since version 1.8.8 of
// iptables-nft, before that struct xt_mark_mtinfo1 (xt_mark.h); the second is struct xt_connmark_mtinfo1
// (xt_connmark.h), which has the same fields: mark, mask, invert.
type mark struct {
	match       string
	value, mask uint32
	negated     bool
}

// String is part of match.
func (m mark) String() string {
	mask := ""
	if m.mask != allBits {
		mask = fmt.Sprintf("/0x%x", m.mask)
	}
	return fmt.Sprintf("-m %s %s--mark 0x%x%s", m.match, not(m.negated), m.value, mask)
}

func (w *words) mark(name string) match {
	option, negated := w.option("--mark")
	if option == "" {
		w.fail("match %q has no --mark", name)
	}
	m := mark{match: name, negated: negated}
	m.value, m.mask = w.masked()
	return m
}

func (m mark) encode(e *encoder) {
	if m.match != "mark" {
		e.xtMatch(m.xt())
		return
	}
	e.Meta(unix.NFT_META_MARK)
	if m.mask != allBits {
		e.And(record{}.u32(m.mask))
	}
	e.Compare(m.negated, record{}.u32(m.value))
}

func (m mark) xt() xt {
	return xt{m.match, 1, record{}.u32(m.value, m.mask).u8(bit[uint8](m.negated, 1)).align()}
}

func decodeMark(name string, info []byte) (match, bool) {
	if len(info) != 16 {
		return nil, false
	}
	m := mark{name, binary.NativeEndian.Uint32(info), binary.NativeEndian.Uint32(info[4:]), info[8] != 0}
	return m, bytes.Equal(m.xt().info, info)
}

// conntrack is "-m conntrack --ctstate", or "-m state --state", which iptables writes as the former with a bit set:
// struct xt_conntrack_mtinfo3 (xt_conntrack.h).
type conntrack struct {
	states  uint16
	negated bool
	alias   bool
}

// Places in the struct.
const (
	conntrackMatch  = 146 // match_flags, then invert_flags
	conntrackState  = 150 // state_mask
	conntrackLength = 162
)

// Bits of match_flags and invert_flags.
const (
	conntrackByState = 1 << 0
	conntrackAlias   = 1 << 13
)

// states in the order of iptables-save with their bits (XT_CONNTRACK_STATE_…).
var states = []struct { //nolint:gochecknoglobals // a constant table
	name string
	bit  uint16
}{
	{"INVALID", 1 << 0},
	{"NEW", 1 << 3},
	{"RELATED", 1 << 2},
	{"ESTABLISHED", 1 << 1},
	{"UNTRACKED", 1 << 8},
	{"SNAT", 1 << 6},
	{"DNAT", 1 << 7},
}

// String is part of match.
func (c conntrack) String() string {
	var names []string
	for _, s := range states {
		if c.states&s.bit != 0 {
			names = append(names, s.name)
		}
	}
	if c.alias {
		return "-m state " + not(c.negated) + "--state " + strings.Join(names, ",")
	}
	return "-m conntrack " + not(c.negated) + "--ctstate " + strings.Join(names, ",")
}

func (w *words) conntrack() match {
	option, negated := w.option("--ctstate")
	if option == "" {
		w.fail("match \"conntrack\" has no --ctstate")
	}
	c := conntrack{negated: negated}
	for name := range strings.SplitSeq(w.next(), ",") {
		b, ok := stateBit(name)
		if !ok {
			w.fail("nothing is known of connection state %q", name)
		}
		c.states |= b
	}
	return c
}

func stateBit(name string) (uint16, bool) {
	for _, s := range states {
		if s.name == name {
			return s.bit, true
		}
	}
	return 0, false
}

func (c conntrack) encode(e *encoder) { e.xtMatch(c.xt()) }

func (c conntrack) xt() xt {
	info := record{}.fill(conntrackMatch).
		u16(conntrackByState | bit[uint16](c.alias, conntrackAlias)).
		u16(bit[uint16](c.negated, conntrackByState)).
		u16(c.states).fill(conntrackLength)
	return xt{"conntrack", 3, info.align()}
}

func decodeConntrack(info []byte) (match, bool) {
	if len(info) != len(conntrack{}.xt().info) {
		return nil, false
	}
	c := conntrack{
		states:  binary.NativeEndian.Uint16(info[conntrackState:]),
		negated: binary.NativeEndian.Uint16(info[conntrackMatch+2:]) != 0,
		alias:   binary.NativeEndian.Uint16(info[conntrackMatch:])&conntrackAlias != 0,
	}
	known := uint16(0)
	for _, s := range states {
		known |= s.bit
	}
	return c, c.states != 0 && c.states&^known == 0 && bytes.Equal(c.xt().info, info)
}
