package ruleset

import (
	"slices"
	"strings"
)

// Rule is one rule without the name of its chain. Its text is the output of iptables-save or, for native tables, of nft.
// Rules are equal if their texts are.
type Rule struct {
	// Matches and Target are the parts of the rule, in the order of its dialect.
	Matches []Match
	Target  Target
	// Why explains the rule to people. Handle is the kernel's number, within its table, of an nf_tables rule that was read. String does not
	// print these two, and Equal does not compare them.
	Why    string
	Handle uint64

	text string
}

// String returns the text.
func (r Rule) String() string { return r.text }

// Equal reports whether both texts are equal.
func (r Rule) Equal(o Rule) bool { return r.text == o.text }

// IPTables returns a rule of iptables' dialect. Matches may come in any order: IPTables sorts them, with ports ahead of other
// extensions, and adds the protocol that a match on ports needs.
func IPTables(why string, target Target, matches ...Match) Rule {
	return iptables(why, target, matches, func(m Match) int {
		if _, ports := protocolOf(m); ports {
			return rankProtocol + 1
		}
		return matchRank(m)
	})
}

// InOrder is IPTables without sorting extensions: the kernel evaluates them in the given order.
func InOrder(why string, target Target, matches ...Match) Rule {
	return iptables(why, target, matches, matchRank)
}

func iptables(why string, target Target, matches []Match, rank func(Match) int) Rule {
	all := make([]Match, 0, len(matches)+1)
	all = append(all, matches...)
	named := slices.ContainsFunc(all, func(m Match) bool { return matchRank(m) == rankProtocol })
	for _, m := range matches {
		if number, of := protocolOf(m); of && !named {
			all = append(all, Protocol{Number: number})
			break
		}
	}
	slices.SortStableFunc(all, func(a, b Match) int { return rank(a) - rank(b) })
	var b strings.Builder
	for i, m := range all {
		text := m.iptables()
		if number, of := protocolOf(m); of && i > 0 { // one iptables match can have several options
			if before, same := protocolOf(all[i-1]); same && before == number {
				text = strings.TrimPrefix(text, "-m "+protocolName(number)+" ")
			}
		}
		add(&b, text)
	}
	if target != nil {
		add(&b, target.iptables())
	}
	return Rule{Matches: all, Target: target, Why: why, text: b.String()}
}

// NFT returns a rule of the native dialect. Matches are evaluated in the given order; a counter behind them counts packets.
func NFT(why string, target Target, matches ...Match) Rule {
	if _, counts := target.(TProxy); !counts {
		matches = append(slices.Clip(matches), Counter{})
	}
	return Uncounted(why, target, matches...)
}

// Uncounted is NFT without the counter.
func Uncounted(why string, target Target, matches ...Match) Rule {
	r := Listed(matches, target, append(slices.Clip(matches), Match(target)))
	r.Why = why
	return r
}

// Listed returns an nf_tables rule that was read, with nft's text of its parts in their order.
func Listed(matches []Match, target Target, parts []Match) Rule {
	var b strings.Builder
	for _, p := range parts {
		add(&b, p.nft())
	}
	return Rule{Matches: matches, Target: target, text: b.String()}
}

func add(b *strings.Builder, part string) {
	if b.Len() > 0 && part != "" {
		b.WriteByte(' ')
	}
	b.WriteString(part)
}

// rankProtocol is the position of a Protocol among the matches in iptables-save's output.
const rankProtocol = 4

// matchRank returns the position of a match there: built-in matches come before extensions, which are equal.
func matchRank(m Match) int {
	switch m := m.(type) {
	case Network:
		return int(bit(!m.Source))
	case Interface:
		return 2 + int(bit(m.Out))
	case Protocol:
		return rankProtocol
	}
	return rankProtocol + 2
}

func bit(b bool) uint8 {
	if b {
		return 1
	}
	return 0
}

// protocolOf returns the protocol whose header a match reads.
func protocolOf(m Match) (uint8, bool) {
	switch m := m.(type) {
	case Port:
		return m.Protocol, true
	case TCPFlags:
		return TCP, true
	case AnyPort:
		return m.Protocol, m.Protocol != 0
	}
	return 0, false
}

// appendTo returns the rule as an append to its chain. A rule without matches and target is legal and has no trailing space.
func (r Rule) appendTo(chain string) string {
	if r.text == "" {
		return "-A " + chain
	}
	return "-A " + chain + " " + r.text
}
