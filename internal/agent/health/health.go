// Package health tracks the liveness of the node agent and the readiness of its node, part by part, with reasons.
//
// It promises that readiness names each part that is not ready and why, that a part with an overdue report is not ready,
// that a change of a part is logged once, at info, and that liveness fails only if the heartbeat of a part is missing: an
// agent that waits for a primary configuration or for a hanging disk is alive but not ready.
//
// It opens no port, calls no part (parts report), and starts no goroutine.
//
// Start reading at State. The two endpoints are in http.go.
package health

import (
	"cmp"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"
)

// missedBeats is the number of intervals without a heartbeat after which liveness fails.
const missedBeats = 3

// starting is the reason of a part that has not reported yet.
const starting = "starting"

// Options configure a State. The zero value reports no change.
type Options struct {
	// Log gets one record at info for each change of a part, and one when readiness changes.
	Log *slog.Logger
	// Now is the clock; nil means the system's clock.
	Now func() time.Time
	// OnChange is called with each change of readiness, in order: true when all parts have become ready. It must not call
	// the State.
	OnChange func(ready bool)
}

// State has the last report of each part of an agent. Its methods are safe for concurrent use.
type State struct {
	options Options

	mu    sync.Mutex
	parts []Part
	ready bool
	beats map[PartName]beat
	due   map[PartName]due
}

// PartName identifies a part. It is a closed set: probes and operators read it.
type PartName string

// Part is the last report of a part of the agent. Since is the time of its last change of Ready or Reason. Reason is empty for
// a ready part. Checked is the time of its last report, zero before the first.
type Part struct {
	Name    PartName  `json:"name"`
	Ready   bool      `json:"ready"`
	Reason  string    `json:"reason,omitempty"`
	Since   time.Time `json:"since"`
	Checked time.Time `json:"checked,omitzero"`
}

// Snapshot is the state at one moment. It is ready when all its parts are ready.
type Snapshot struct {
	Ready bool   `json:"ready"`
	Parts []Part `json:"parts"`
}

// due is the deadline of a part's next report, and the part's reason after the deadline.
type due struct {
	at     time.Time
	reason string
}

// beat is the last heartbeat of a loop.
type beat struct {
	Name  PartName  `json:"name"`
	Last  time.Time `json:"last"`
	Every string    `json:"every"`

	deadline time.Time // of the next one
}

// NewState returns a state with the given parts, not ready yet, in the order of the output. A state without parts is ready.
func NewState(o Options, parts ...PartName) *State {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now //nolint:forbidigo // the only clock of the package; callers that need another one pass it
	}
	s := &State{options: o, parts: []Part{}, beats: make(map[PartName]beat), due: make(map[PartName]due)}
	for _, name := range parts {
		s.parts = append(s.parts, Part{Name: name, Reason: starting, Since: o.Now()})
	}
	s.update()
	return s
}

// Ready reports that a part works. A part that NewState did not get is added.
func (s *State) Ready(part PartName) {
	s.report(Part{Name: part, Ready: true})
}

// NotReady reports that a part does not work. The reason is text for people, such as "waiting for a CNI configuration in
// /host/etc/cni/net.d". An empty reason becomes "unknown".
func (s *State) NotReady(part PartName, reason string) {
	s.report(Part{Name: part, Reason: cmp.Or(reason, "unknown")})
}

// Expect sets the deadline of a part's next report. After the deadline the part is not ready for this reason, until it
// reports. A part that is not ready keeps its own reason.
func (s *State) Expect(part PartName, within time.Duration, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.due[part] = due{at: s.options.Now().Add(within), reason: reason}
}

func (s *State) report(now Part) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.due, now.Name)
	now.Checked = s.options.Now()
	s.set(now)
}

// set needs the lock.
func (s *State) set(now Part) {
	at := slices.IndexFunc(s.parts, func(p Part) bool { return p.Name == now.Name })
	if at < 0 {
		at = len(s.parts)
		s.parts = append(s.parts, Part{})
	}
	before := s.parts[at]
	now.Since = before.Since
	if before.Ready == now.Ready && before.Reason == now.Reason {
		s.parts[at] = now
		return
	}
	now.Since = s.options.Now()
	s.parts[at] = now
	log := s.options.Log.With("part", now.Name)
	if now.Ready {
		log.Info("part is ready")
	} else {
		log.Info("part is not ready", "reason", now.Reason)
	}
	s.update()
}

// update logs and reports a change of readiness. It needs the lock.
func (s *State) update() {
	ready := !slices.ContainsFunc(s.parts, func(p Part) bool { return !p.Ready })
	if ready == s.ready {
		return
	}
	s.ready = ready
	if ready {
		s.options.Log.Info("agent is ready")
	} else {
		s.options.Log.Info("agent is not ready")
	}
	if s.options.OnChange != nil {
		s.options.OnChange(ready)
	}
}

// Snapshot returns the state of all parts.
func (s *State) Snapshot() Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.parts {
		if d, expected := s.due[p.Name]; expected && p.Ready && s.options.Now().After(d.at) {
			s.set(Part{Name: p.Name, Reason: d.reason, Checked: p.Checked})
		}
	}
	return Snapshot{Ready: s.ready, Parts: slices.Clone(s.parts)}
}

// Beat is the heartbeat of a loop, which must beat again within every. The first beat starts the supervision; Rest ends it.
// A loop beats before each call that could hang.
func (s *State) Beat(part PartName, every time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.options.Now()
	s.beats[part] = beat{Name: part, Last: now, Every: every.String(), deadline: now.Add(missedBeats * every)}
}

// Rest ends the supervision of a loop that has ended on purpose, or waits without a deadline.
func (s *State) Rest(part PartName) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.beats, part)
}

// missing returns the overdue heartbeats, ordered by name.
func (s *State) missing() []beat {
	s.mu.Lock()
	defer s.mu.Unlock()
	beats := slices.SortedFunc(maps.Values(s.beats), func(a, b beat) int { return cmp.Compare(a.Name, b.Name) })
	return slices.DeleteFunc(beats, func(b beat) bool { return !s.options.Now().After(b.deadline) })
}
