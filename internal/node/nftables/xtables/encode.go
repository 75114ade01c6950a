// Package xtables translates between rules of iptables and the expressions of nf_tables that iptables-nft writes for them.
//
// It promises that Encode returns the attributes that iptables-nft 1.8.9 sends for a rule; and that Read accepts a match or target that
// Encode can write only in the exact bytes of some version of iptables. It uses no socket, no file and no process.
//
// Start reading at Encode and Read; layout.go has the structs of the kernel's headers. Package decode reads whole rules.
package xtables

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Encode adds the attributes NFTA_RULE_EXPRESSIONS and NFTA_RULE_COMPAT of a rule that ruleset.IPTables made. It returns an error
// for a match or target that no rule of the mesh uses.
func Encode(b *nfnetlink.Buffer, f ruleset.Family, r ruleset.Rule) error {
	e := encoder{Buffer: b, family: f}
	b.Nested(unix.NFTA_RULE_EXPRESSIONS, func() { e.rule(r) })
	// Some matches and targets of x_tables require a protocol.
	flags := uint32(0)
	if e.protocol.Not {
		flags = unix.NFT_RULE_COMPAT_F_INV
	}
	b.Nested(unix.NFTA_RULE_COMPAT, func() {
		b.Uint32(unix.NFTA_RULE_COMPAT_PROTO, uint32(e.protocol.Number))
		b.Uint32(unix.NFTA_RULE_COMPAT_FLAGS, flags)
	})
	return e.err
}

type encoder struct {
	*nfnetlink.Buffer
	family   ruleset.Family
	protocol ruleset.Protocol
	err      error
}

// rule adds the expressions in the order of iptables-nft: interfaces, protocol, addresses, then extensions.
func (e *encoder) rule(r ruleset.Rule) {
	rank := func(m ruleset.Match) int {
		switch m.(type) {
		case ruleset.Interface:
			return 0
		case ruleset.Protocol:
			return 1
		case ruleset.Network:
			return 2
		}
		return 3
	}
	for _, m := range slices.SortedStableFunc(slices.Values(r.Matches), func(a, b ruleset.Match) int { return rank(a) - rank(b) }) {
		e.match(m)
	}
	e.Counter()
	if r.Target != nil {
		e.target(r.Target)
	}
}

// link compares a name with its zero byte, or a prefix of the name without one.
func (e *encoder) link(i ruleset.Interface) {
	name, open := strings.CutSuffix(i.Name, "+")
	value := []byte(name)
	if !open {
		value = append(value, 0)
	}
	key := uint32(unix.NFT_META_IIFNAME)
	if i.Out {
		key = unix.NFT_META_OIFNAME
	}
	e.Meta(key)
	e.Compare(i.Not, value)
}

func (e *encoder) network(n ruleset.Network) {
	switch {
	case n.Prefix.Bits() > 0:
		e.Network(n.Source, n.Not, n.Prefix)
	case n.Not:
		e.err = fmt.Errorf("cannot encode a match of all addresses")
	}
}

// match adds an iptables extension as comparisons if iptables-nft writes it so since version 1.8.8, else as a struct of x_tables.
func (e *encoder) match(m ruleset.Match) {
	switch m := m.(type) {
	case ruleset.Interface:
		e.link(m)
		return
	case ruleset.Protocol:
		e.protocol = m
		e.Meta(unix.NFT_META_L4PROTO)
		e.Compare(m.Not, []byte{m.Number})
		return
	case ruleset.Network:
		e.network(m)
		return
	case ruleset.OfFamily: // the family of the table implies it
		if ruleset.Family(m) == e.family {
			return
		}
	case ruleset.Port:
		e.port(m)
		return
	case ruleset.TCPFlags:
		if m == ruleset.Reset {
			e.Reset()
			return
		}
	case ruleset.Mark:
		if !m.Connection {
			e.Meta(unix.NFT_META_MARK)
			e.Masked(m.Not, m.Value, m.Mask)
			return
		}
	}
	e.extension("match", m)
}

// extension adds a match or target as a struct of x_tables: NFTA_TARGET_… have the numbers of NFTA_MATCH_….
func (e *encoder) extension(kind string, part ruleset.Match) {
	all := layouts(e.family, part)
	if len(all) == 0 {
		e.err = fmt.Errorf("cannot encode %s %v", kind, part)
		return
	}
	e.Expression(kind, func() {
		e.String(unix.NFTA_MATCH_NAME, all[0].name)
		e.Uint32(unix.NFTA_MATCH_REV, all[0].revision)
		e.Attribute(unix.NFTA_MATCH_INFO, all[0].info)
	})
}

func (e *encoder) port(p ruleset.Port) {
	if p.Range.First == p.Range.Last {
		e.Port(p.Source, p.Not, p.Range.First)
		return
	}
	e.LoadPort(p.Source)
	e.Between(p.Not, nfnetlink.PortValue(p.Range.First), nfnetlink.PortValue(p.Range.Last))
}

func (e *encoder) target(t ruleset.Target) {
	switch t := t.(type) {
	case ruleset.Verdict:
		e.Verdict(nfnetlink.Verdict{Code: codes[t]})
	case ruleset.Jump:
		if strings.ContainsRune(t.Chain, '\\') {
			e.err = fmt.Errorf("cannot encode target %v: the chain's name is escaped", t)
			return
		}
		v := nfnetlink.Verdict{Code: nfnetlink.Jump, Chain: t.Chain}
		if t.Goto {
			v.Code = nfnetlink.Goto
		}
		e.Verdict(v)
	default:
		e.extension("target", t)
	}
}

// codes are the kernel's codes for the verdicts.
var codes = map[ruleset.Verdict]int32{ //nolint:gochecknoglobals // a constant table
	ruleset.Drop: nfnetlink.Drop, ruleset.Accept: nfnetlink.Accept, ruleset.Return: nfnetlink.Return,
}
