package podinfo

import (
	"sync"

	"github.com/meshcni/istio-cni/internal/node/agentcall"
)

// remembered is how many reports are kept.
const remembered = 512

// Ring has the last reports of plugins.
type Ring struct {
	mu   sync.Mutex
	all  []agentcall.Report
	next int
}

// Add keeps a report, in place of the oldest when there are enough.
func (r *Ring) Add(one agentcall.Report) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.all) < remembered {
		r.all = append(r.all, one)
		return
	}
	r.all[r.next] = one
	r.next = (r.next + 1) % remembered
}

// Latest lists the reports, the latest first.
func (r *Ring) Latest() []agentcall.Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := make([]agentcall.Report, 0, len(r.all))
	for i := range r.all {
		list = append(list, r.all[(r.next-1-i+2*len(r.all))%len(r.all)])
	}
	return list
}
