package walk

import (
	"slices"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// broken returns the rule that breaks the connection of a packet that arrives: it drops the replies or the following packets, or puts
// the replies into another conntrack zone. It returns nil without such a rule, or if this is not known.
func (c *course) broken(p Packet, o outcome) *Hop {
	ends := o.Verdict == Passed || o.Verdict.redirects()
	hostile := len(o.Hops) > 2*maxShown // too many matching rules to walk three times
	if !ends || hostile || o.limit != "" || o.Packet.State == ruleset.StateUntracked || !p.Outgoing && o.Packet.Type != local {
		return nil
	}
	w, left := c.back(p, o)
	if h := w.dropped(left); h != nil {
		return h
	}
	if zoned := slices.IndexFunc(o.Hops, zones); zoned >= 0 && o.brokenByZone(p, left) {
		return &o.Hops[zoned]
	}
	if o.Verdict != Passed || o.Packet.Translated != 0 { // the kernel translates the following packets without a rule
		return nil
	}
	p.State = ruleset.StateEstablished
	w = c.walker(p.State)
	return w.dropped(w.pass(p))
}

// brokenByZone reports whether zones break the connection. Replies in another zone are not translated: nat treats them as a new incoming
// connection. The proxy finds the original destination of redirected TCP in zone 0 only (nf_conntrack_proto.c, getorigdst).
func (o outcome) brokenByZone(p Packet, left []reading) bool {
	switch {
	case o.Verdict == Passed && p.Protocol != ruleset.TCP:
		return false
	case o.Verdict == Redirected && p.Protocol == ruleset.TCP:
		return true
	}
	return !slices.ContainsFunc(left, func(r reading) bool { return r.zone == o.Zone })
}

// zones reports whether a foreign rule puts a packet into a zone.
func zones(h Hop) bool {
	_, is := h.Target.(ruleset.Zone)
	return is && h.Answer == Yes && !h.wanted
}

// back walks the first reply to a packet, and returns the readings that arrive.
func (c *course) back(p Packet, o outcome) (*walker, []reading) {
	w := c.walker(ruleset.StateEstablished)
	back := Packet{
		Protocol: p.Protocol, Src: o.Packet.Dst, Dst: p.Src, State: w.state, Translated: o.Packet.Translated, ConnMark: o.Packet.ConnMark,
		Free: o.Packet.Free.turned(), Type: local, reply: true,
	}
	looped := o.Packet.In == c.Loopback
	if p.Outgoing && !looped { // from another host
		back.In = o.Packet.Out
		return w, w.receive(begin(back))
	}
	if back.Outgoing, back.Out = true, o.Packet.In; !looped {
		back.Type = ""
	}
	all := w.hook("egress", w.hook("postrouting", w.hook("output", begin(c.by(back, o.Verdict).completed(c.Loopback)))))
	if !looped {
		return w, all
	}
	for i := range all { // now from the first destination of the connection
		all[i].looped, all[i].packet.In, all[i].packet.Out, all[i].packet.Src = true, c.Loopback, "", p.Dst
	}
	return w, w.receive(all)
}

// by adds the user that answers: the proxy's where the mesh decided, otherwise any other user.
func (c *course) by(p Packet, v Verdict) Packet {
	if v != Passed {
		p.Mark = c.Wanted.proxyMark()
	}
	if v == Passed || len(c.proxy) == 0 {
		p.Free |= FreeUser
		return p
	}
	for _, o := range c.proxy {
		if o.Group {
			p.GID = o.ID
		} else {
			p.UID = o.ID
		}
	}
	return p
}

// dropped returns the rule that certainly drops a packet, nil if the packet may arrive.
func (w *walker) dropped(left []reading) *Hop {
	ended := func(r reading) bool { return r.verdict == Dropped || r.verdict == Rejected }
	i := slices.IndexFunc(w.ended, func(r reading) bool { return r.because < 0 && r.decided >= 0 })
	if len(left) > 0 || w.limit != "" || i < 0 || slices.ContainsFunc(w.ended, func(r reading) bool { return !ended(r) }) {
		return nil
	}
	return &w.hops[w.ended[i].decided]
}

// turned returns the fields of a packet in the other direction.
func (f Fields) turned() Fields {
	back := f & FreeOwn
	for _, pair := range [][2]Fields{{FreeDestination, FreeSource}, {FreeDestinationPort, FreeSourcePort}} {
		if f&pair[0] != 0 {
			back |= pair[1]
		}
		if f&pair[1] != 0 {
			back |= pair[0]
		}
	}
	return back
}

func begin(p Packet) []reading {
	return []reading{{packet: p, because: -1, decided: -1, marked: -1, routed: p.Mark}}
}

func (c *course) walker(s ruleset.States) *walker {
	return &walker{course: c, state: s, passed: -1}
}
