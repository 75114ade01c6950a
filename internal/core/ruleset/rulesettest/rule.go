package rulesettest

import (
	"errors"
	"fmt"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// onward is how a packet goes on after a rule.
type onward uint8

// The next rule; back to the calling chain; out of the table with the verdict that was set.
const (
	nextRule onward = iota
	goBack
	leaveTable
)

// protocols are the numbers of those that rules tell apart.
var protocols = map[Proto]uint8{TCP: ruleset.TCP, UDP: ruleset.UDP} //nolint:gochecknoglobals // a constant table

// check refuses a rule that is not understood, or that the kernel does not take where it stands.
func check(t ruleset.Table, here place, r ruleset.Rule) error {
	incoming := slices.Contains([]string{"INPUT", "PREROUTING"}, here.chain)
	outgoing := slices.Contains([]string{"OUTPUT", "POSTROUTING"}, here.chain)
	protocol := false
	for _, m := range r.Matches {
		switch m := m.(type) {
		case ruleset.Interface:
			if m.Out && incoming || !m.Out && outgoing {
				return fmt.Errorf("iptables refuses %v in chain %s", m, here.chain)
			}
		case ruleset.Owner:
			if incoming {
				return fmt.Errorf("iptables refuses an owner in chain %s", here.chain)
			}
		case ruleset.Protocol:
			protocol = !m.Not
		case ruleset.Port:
			protocol = true
		}
	}
	if r.Why == "" && t.Name != here.table {
		return errors.New("it has no reason")
	}
	return checkTarget(t, r.Target, protocol)
}

func checkTarget(t ruleset.Table, target ruleset.Target, protocol bool) error {
	jump, jumps := target.(ruleset.Jump)
	_, there := t.Chain(jump.Chain)
	table, known := tableOf(target)
	switch {
	case jumps && (!there || ruleset.Builtin(t.Name, jump.Chain) || jump.Goto):
		return fmt.Errorf("target %q is no chain of the table", jump.Chain)
	case !known:
		return fmt.Errorf("target %v is not known here", target)
	case table != "" && table != at(t, "").table:
		return fmt.Errorf("iptables takes its target in table %s only", table)
	}
	switch target.(type) {
	case ruleset.RedirectTo, ruleset.TProxy:
		if !protocol {
			return fmt.Errorf("iptables takes its target with a protocol only")
		}
	}
	return nil
}

// tableOf gives the only table that takes a target, "" for any.
func tableOf(t ruleset.Target) (table string, known bool) {
	switch t.(type) {
	case ruleset.Verdict, ruleset.Jump:
		return "", true
	case ruleset.RedirectTo:
		return "nat", true
	case ruleset.TProxy, ruleset.SetMark, ruleset.SaveMark, ruleset.RestoreMark:
		return "mangle", true
	case ruleset.Zone:
		return "raw", true
	case ruleset.Reject:
		return "filter", true
	}
	return "", false
}

// holds reports whether the packet meets a match.
func (w *walk) holds(m ruleset.Match) bool {
	p := w.packet
	switch m := m.(type) {
	case ruleset.Interface:
		return (pick(m.Out, p.Out, p.In) == m.Name) != m.Not
	case ruleset.Network:
		address := pick(m.Source, p.Src, p.Dst)
		return m.Prefix.Addr().Is4() == address.Is4() && m.Prefix.Masked().Contains(address) != m.Not
	case ruleset.Protocol:
		return (protocols[p.Proto] == m.Number) != m.Not
	case ruleset.Port:
		return protocols[p.Proto] == m.Protocol && (pick(m.Source, p.Sport, p.Dport) == m.Number) != m.Not
	case ruleset.Ports:
		return protocols[p.Proto] == m.Protocol && slices.Contains(m.List[:], p.Dport) != m.Not
	case ruleset.Reset:
		return p.Proto == TCP && p.RST
	case ruleset.Owner:
		return w.owned(m)
	case ruleset.Mark:
		return (pick(m.Connection, p.Connmark, p.Mark) == m.Value) != m.Not
	case ruleset.States:
		return m&states[p.state()] != 0
	case ruleset.OfFamily:
		return p.Dst.Is4() == (ruleset.Family(m) == ruleset.IPv4)
	}
	w.fail("match %v is not known here", m)
	return false
}

func pick[T any](condition bool, yes, no T) T {
	if condition {
		return yes
	}
	return no
}

// owned reports whether the socket is of the owner. Without a socket the negation holds (net/netfilter/xt_owner.c), but not
// for nft, whose match ends the rule then.
func (w *walk) owned(m ruleset.Owner) bool {
	if w.packet.Hook == Incoming {
		w.fail("a rule asks an incoming packet for its sender; the kernel takes that match on the way out only")
	}
	if w.packet.NoSocket {
		return m.Not && w.rules.family != ruleset.Inet
	}
	return (pick(m.Group, w.packet.GID, w.packet.UID) == m.ID) != m.Not
}

// states are conntrack's.
var states = map[State]ruleset.States{ //nolint:gochecknoglobals // a constant table
	New: ruleset.StateNew, Established: ruleset.StateEstablished, Related: ruleset.StateRelated, Invalid: ruleset.StateInvalid,
}

func (p Packet) state() State {
	if p.State == "" {
		return New
	}
	return p.State
}

// target does what a target does.
func (w *walk) target(t ruleset.Target) onward {
	switch t := t.(type) {
	case ruleset.Verdict:
		if t == ruleset.Return {
			return goBack
		}
		w.act = map[ruleset.Verdict]Action{ruleset.Accept: Accept, ruleset.Drop: Drop}[t]
	case ruleset.RedirectTo:
		w.act, w.verdict.Port = Redirect, uint16(t)
	case ruleset.TProxy:
		if w.packet.Hook != Incoming {
			w.fail("target TPROXY was reached by an outgoing packet; the kernel takes it in PREROUTING only")
		}
		w.act, w.verdict.Port, w.packet.Mark = TPROXY, t.Port, t.Mark
	case ruleset.Reject:
		w.act, w.verdict.With = Reject, string(t)
	case ruleset.SetMark:
		w.packet.Mark = uint32(t)
		return nextRule
	case ruleset.SaveMark:
		w.packet.Connmark = w.packet.Mark
		return nextRule
	case ruleset.RestoreMark:
		w.packet.Mark = w.packet.Connmark
		return nextRule
	case ruleset.Zone:
		// What comes in by lo has its conntrack entry from the way out (net/netfilter/xt_CT.c, xt_ct_target).
		if w.packet.In != "lo" && w.verdict.Zone == 0 {
			w.verdict.Zone = uint16(t)
		}
		return nextRule
	}
	return leaveTable
}
