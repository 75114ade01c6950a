package walk

import (
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// onward says where a packet continues after a rule: at the next rule, in the calling chain, behind the base chain, or nowhere.
type onward uint8

const (
	next onward = iota
	back
	leave
	end
)

// passage groups the packets of a chain by where they continue.
type passage [end + 1][]reading

// chain walks packets through a chain: they return to the calling chain, or leave the base chain.
func (w *walker) chain(s *stage, c *ruleset.Chain, all []reading) passage {
	if len(w.calls) > maxDepth {
		w.stop("chains lead to chains more than %d times", maxDepth)
	}
	p := passage{next: all}
	for i := range c.Rules {
		if w.steps += len(p[next]); w.steps > maxSteps {
			w.stop("the packet meets more than %d rules", maxSteps)
		}
		if len(p[next]) == 0 || w.limit != "" {
			break
		}
		w.rule(s, c, i, &p)
	}
	p[back] = w.merge(append(p[back], p[next]...))
	return p
}

// rule walks packets through one rule of a chain.
func (w *walker) rule(s *stage, c *ruleset.Chain, i int, p *passage) {
	r := c.Rules[i]
	want, wanted := w.wanted[place{s.Table, c.Name, r.String()}]
	h := s.hop(c, i+1, r.String())
	h.Target = r.Target
	h.Why, h.wanted = redirect.Reason(want.Why, p[next][0].packet.Protocol), wanted
	hop, matching, rest := w.judge(r.Matches, h, p[next])
	p[next] = rest
	w.apply(s, r.Target, matching, h, hop, p)
	p[next], p[back], p[leave], p[end] = w.merge(p[next]), w.merge(p[back]), w.merge(p[leave]), nil
}

// judge splits the packets by whether a rule matches; if it may match, a packet goes both ways. It shows the hop of the reading
// in which no such rule matches.
func (w *walker) judge(matches []ruleset.Match, h Hop, all []reading) (hop int, matching, rest []reading) {
	hop = -1
	for _, one := range all {
		answer := w.ask(one.packet, h).all(matches)
		if one.because < 0 {
			h.Answer = answer
			hop = w.show(h)
		}
		matching, rest = divide(one, answer, hop, matching, rest)
	}
	return hop, matching, rest
}

// divide adds a packet to the matching packets, to the rest, or to both.
func divide(one reading, answer Answer, hop int, matching, rest []reading) (m, r []reading) {
	if answer != Yes {
		rest = append(rest, one)
	}
	if answer == Unknown && one.because < 0 {
		one.because = hop
	}
	if answer != No {
		matching = append(matching, one)
	}
	return matching, rest
}

// ask returns the question of a rule. For a rule of the mesh no field is free.
func (w *walker) ask(p Packet, h Hop) question {
	q := question{Packet: p, course: w.course, hook: h.Hook}
	if !h.wanted {
		q.free = p.Free
	}
	return q
}

// apply applies the target of a rule to the packets that match.
func (w *walker) apply(s *stage, t ruleset.Target, matching []reading, h Hop, hop int, p *passage) {
	switch t := t.(type) {
	case ruleset.Jump:
		if called := s.chains[t.Chain]; called != nil && len(matching) > 0 {
			w.call(s, called, t.Goto, matching, hop, p)
			return
		}
	case ruleset.VerdictMap:
		w.verdictMap(s, t, matching, h, hop, p)
		return
	case ruleset.Then:
		var own passage
		own[next] = matching
		for _, one := range t {
			on := own[next]
			own[next] = nil
			w.apply(s, one, on, h, hop, &own)
		}
		for i := range own {
			p[i] = append(p[i], own[i]...)
		}
		return
	}
	for _, m := range matching {
		to := w.act(s, t, &m, hop)
		p[to] = append(p[to], m)
	}
}

// call walks the packets through another chain of the table.
func (w *walker) call(s *stage, called *ruleset.Chain, goes bool, matching []reading, hop int, p *passage) {
	w.calls = append(w.calls, hop)
	q := w.chain(s, called, matching)
	w.calls = w.calls[:len(w.calls)-1]
	returned := next
	if goes {
		returned = back
	}
	p[returned], p[leave] = append(p[returned], q[back]...), append(p[leave], q[leave]...)
}

// verdictMap applies the verdict of the first entry that matches.
func (w *walker) verdictMap(s *stage, m ruleset.VerdictMap, all []reading, h Hop, hop int, p *passage) {
	for _, entry := range m.List {
		var taken, rest []reading
		for _, one := range all {
			if w.steps++; w.steps > maxSteps {
				w.stop("the packet meets more than %d rules", maxSteps)
				return
			}
			taken, rest = divide(one, w.ask(one.packet, h).all(entry.Matches), hop, taken, rest)
		}
		w.apply(s, entry.Target, taken, h, hop, p)
		all = rest
	}
	p[next] = append(p[next], all...)
}
