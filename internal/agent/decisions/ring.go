// Package decisions keeps the last decisions about the node's pods: the plugins' reports, and the pods that plugins left alone
// without a report.
//
// It promises that neither kind displaces the other; that they are known to the next agent, also if this one is killed; and that no
// report of a plugin is dropped for what its texts quote: plugins cut them, and the ring does so again.
//
// Start reading at Ring. serve.go answers the socket's requests, outside.go has the pods without a report, keep.go the file.
package decisions

import (
	"slices"
	"sync"

	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// remembered is the capacity of each part of the ring, in reports.
const remembered = 512

// Ring has the last reports of plugins and, separately, the last pods that the plugin left alone without a report: neither part
// displaces the other. All entries are numbered from 1.
type Ring struct {
	mu sync.Mutex
	// plugin and watch are in the order of their numbers.
	plugin, watch []agentapi.Report
	// last is the number of the latest report.
	last uint64
	// unusable is set if the previous agent's file must be replaced.
	unusable bool
}

// Add stores a trimmed report of a plugin, and drops the oldest if the ring is full. It replaces the watch's entry for the
// same pod.
func (r *Ring) Add(one agentapi.Report) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.add(one)
}

// add needs the lock.
func (r *Ring) add(one agentapi.Report) {
	if one.Source == agentapi.SourceWatch {
		r.watch = r.push(r.watch, one)
		return
	}
	if decided(one) {
		r.watch = slices.DeleteFunc(r.watch, func(w agentapi.Report) bool { return w.UID == one.UID })
	}
	r.plugin = r.push(r.plugin, one)
}

// addOutside stores an entry of the watch, unless a report has the plugin's decision about the pod, or the ring has an entry
// with the same reason. is reports whether a runtime's UID is the pod's.
func (r *Ring) addOutside(one agentapi.Report, is func(uid string) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	reported := slices.ContainsFunc(r.plugin, func(p agentapi.Report) bool { return decided(p) && is(p.UID) })
	known := slices.ContainsFunc(r.watch, func(w agentapi.Report) bool { return w.UID == one.UID && w.Reason == one.Reason })
	if !reported && !known {
		r.watch = r.push(r.watch, one)
	}
}

// decided reports whether a report has a decision about a pod. A failed call has none: the runtime repeats it.
func decided(r agentapi.Report) bool { return r.Error == "" && r.UID != "" }

// push needs the lock.
func (r *Ring) push(to []agentapi.Report, one agentapi.Report) []agentapi.Report {
	r.last++
	one.Number = r.last
	if len(to) == remembered {
		to[0] = agentapi.Report{} // frees its texts now instead of when append reallocates
		to = to[1:]
	}
	return append(to, one)
}

// All returns all reports, the latest first.
func (r *Ring) All() []agentapi.Report {
	all, _ := r.since(0)
	slices.Reverse(all)
	return all
}

// Of returns the latest decision about a pod, preferably the plugin's own. is reports whether a runtime's UID is the pod's.
func (r *Ring) Of(is func(uid string) bool) (agentapi.Report, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, part := range [][]agentapi.Report{r.plugin, r.watch} {
		for _, one := range slices.Backward(part) {
			if is(one.UID) && (one.Command == "ADD" || one.Source == agentapi.SourceWatch) {
				return one, true
			}
		}
	}
	return agentapi.Report{}, false
}
