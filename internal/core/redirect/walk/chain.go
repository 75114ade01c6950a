package walk

import (
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// onward is how a packet goes on after a rule: with the next rule, in the calling chain, behind the base chain, or not.
type onward uint8

const (
	next onward = iota
	back
	leave
	end
)

// passage are the packets of a chain by how they go on.
type passage [end + 1][]reading

// chain passes a chain: its packets go back to the calling chain, or leave the base chain.
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

// rule passes the packets that are at one rule of a chain.
func (w *walker) rule(s *stage, c *ruleset.Chain, i int, p *passage) {
	text := c.Rules[i].String()
	r, why := w.read(place{s.table, c.Name, text}, c.Rules[i])
	why = redirect.Reason(why, p[next][0].packet.Protocol)
	h := Hop{Hook: s.hook.Name, Table: s.table, Chain: c.Name, Set: s.set, Number: i + 1, Rule: text, Why: why}
	hop, matching, rest := w.judge(r, h, p[next])
	p[next] = rest
	if len(matching) == 0 {
		return
	}
	if called := s.chains[r.target]; called != nil {
		w.calls = append(w.calls, hop)
		q := w.chain(s, called, matching)
		w.calls = w.calls[:len(w.calls)-1]
		returned := next
		if r.goes {
			returned = back
		}
		p[returned], p[leave] = append(p[returned], q[back]...), append(p[leave], q[leave]...)
	} else {
		for _, m := range matching {
			to := w.act(s, r, &m, hop)
			p[to] = append(p[to], m)
		}
	}
	p[next], p[back], p[leave], p[end] = w.merge(p[next]), w.merge(p[back]), w.merge(p[leave]), nil
}

// judge splits the packets by whether a rule matches; where it may, a packet goes both ways. It shows the hop of the packet
// that no such rule matches.
func (w *walker) judge(r rule, h Hop, all []reading) (hop int, matching, rest []reading) {
	hop = -1
	for _, one := range all {
		answer := r.judge(one.packet, w.family, h.Hook)
		if one.because < 0 {
			h.Answer = answer
			hop = w.show(h)
		}
		if answer != Yes {
			rest = append(rest, one)
		}
		if answer == Unknown && one.because < 0 {
			one.because = hop
		}
		if answer != No {
			matching = append(matching, one)
		}
	}
	return hop, matching, rest
}
