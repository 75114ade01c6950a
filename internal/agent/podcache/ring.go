package podcache

import (
	"sync"

	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// remembered is the capacity of the ring, in reports.
const remembered = 512

// Ring has the last reports of plugins, numbered from 1.
type Ring struct {
	mu  sync.Mutex
	all []agentapi.Report // the report of number n is at n modulo remembered
	// last is the number of the latest report.
	last uint64
}

// Add stores a trimmed report, in place of the oldest if the ring is full.
func (r *Ring) Add(one agentapi.Report) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all == nil {
		r.all = make([]agentapi.Report, remembered)
	}
	r.last++
	one.Number = r.last
	r.all[r.last%remembered] = one
}

// Page lists the reports whose number is below before, at most limit, the latest first.
func (r *Ring) Page(before uint64, limit int) []agentapi.Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := []agentapi.Report{}
	for n := min(before, r.last+1); n > 1 && n+remembered-1 > r.last && len(list) < limit; n-- {
		list = append(list, r.all[(n-1)%remembered])
	}
	return list
}
