package walk

import "slices"

// Way is where the packets of one kind go by the live rules, such as the app's outbound TCP connections.
type Way struct {
	Family  string `json:"family"`
	Packets string `json:"packets"`
	// Ends has more than one end if a rule takes some of the packets.
	Ends []End `json:"ends"`
}

// End is an end of packets.
type End struct {
	// Verdict is the text of a Verdict, or "fails" where a rule breaks the connections behind their redirection.
	Verdict string `json:"verdict"`
	// Port is the new destination port of redirected packets.
	Port uint16 `json:"port,omitempty"`
	// Wanted reports whether the wanted rules have this end, too.
	Wanted bool `json:"wanted"`
}

// Ways returns the ways of the packets that Deviations compares, by family and kind. It is nil where Deviations is.
func (n Namespace) Ways() (all []Way) {
	for _, k := range n.comparisons() {
		unread := len(n.Unread[k.family]) > 0
		for _, c := range k.list {
			i := slices.IndexFunc(all, func(w Way) bool { return w.Family == k.family.String() && w.Packets == c.name })
			if i < 0 {
				i, all = len(all), append(all, Way{Family: k.family.String(), Packets: c.name})
			}
			all[i].add(k.ends(c, unread))
		}
	}
	return all
}

// add adds the ends that the way does not have yet.
func (w *Way) add(ends []End) {
	for _, e := range ends {
		if !slices.Contains(w.Ends, e) {
			w.Ends = append(w.Ends, e)
		}
	}
}

// ends returns the ends of a canary. unread is set if it passes rules that cannot be read.
func (k comparison) ends(c canary, unread bool) (all []End) {
	c.Packet = c.completed(k.live.Loopback)
	want, got := k.wanted.walk(c.asWanted(k.live.Loopback)), k.live.either(c.Packet)
	if unread || got.limit != "" {
		return []End{{Verdict: CannotTell.String()}}
	}
	arrives := slices.ContainsFunc(got.ended, want.is)
	for _, r := range got.ended {
		if e := (End{r.verdict.String(), r.to.Port(), want.is(r)}); e.Wanted || !k.accepts(c, r, arrives) {
			all = append(all, e)
		}
	}
	if arrives && k.live.broken(c.Packet, got) != nil {
		all = append(all, End{Verdict: "fails"})
	}
	return all
}
