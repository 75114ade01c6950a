package follow

import (
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/inspect"
	"github.com/meshcni/istio-cni/internal/node/iptables"
)

// place is the position of a rule in its chain.
type place struct {
	family       ruleset.Family
	table, chain string
	number       int
}

// maxCounts bounds the rules that one reading shows.
const maxCounts = 100

// count stores the counters of legacy tables. With compare it shows the rules whose packets increased since the last reading.
func (f *follower) count(all []iptables.Count, compare bool) error {
	before := f.counts
	f.counts = map[place]iptables.Count{}
	reason, shown := f.rules.Reasons(), 0
	for _, c := range all {
		at := place{c.Family, c.Rule.Table, c.Rule.Chain, c.Rule.Number}
		f.counts[at] = c
		last := before[at]
		if last.Rule.Rule != c.Rule.Rule || c.Packets < last.Packets { // another rule, or counters that were reset
			last.Packets = 0
		}
		c.Packets -= last.Packets
		if !compare || c.Packets == 0 || shown == maxCounts {
			continue
		}
		shown++
		if hook, base := ruleset.HookOf(c.Rule.Table, c.Rule.Chain); base {
			c.Rule.Hook = hook.Name
		}
		c.Rule.Why = reason(c.Rule.Table, c.Rule.Chain, c.Rule.Rule)
		if err := f.emit(document.TraceEvent{Count: &document.TraceCount{
			Hop: hopOf(c.Rule), Family: c.Family.String(), Packets: c.Packets, Wanted: f.judgeRule(c.Rule),
		}}); err != nil {
			return err
		}
	}
	return nil
}

// judgeRule judges the packets of a rule that ends their way through the table that redirects. Every other rule decides nothing.
func (f *follower) judgeRule(h walk.Hop) document.Wanted {
	result := walk.Result{Decided: &h}
	switch target := h.Target.(type) {
	case ruleset.RedirectTo, ruleset.TProxy:
		if h.Why == "" {
			return ""
		}
		return document.AsWanted
	case ruleset.Reject:
		result.Verdict = walk.Dropped
	case ruleset.Verdict:
		if result.Verdict = walk.Passed; target == ruleset.Drop {
			result.Verdict = walk.Dropped
		} else if h.Table != "nat" {
			return ""
		}
	default:
		return ""
	}
	return inspect.Judge(f.rules.Explained(result, walk.Packet{}, ""))
}
