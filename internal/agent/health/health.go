// Package health is whether the node agent is alive and whether its node is ready, part by part and with reasons.
//
// It promises that readiness names each part that is not ready and why, that a part that is due to report and does not is
// not ready, that a change of a part is logged once, at info, and that liveness fails when the heartbeat of a part is
// missing, and only then: an agent that waits for a primary configuration, or for a disk that hangs, is alive and not ready.
//
// It never opens a port, never asks a part anything (parts report), and starts no goroutine.
//
// Start reading at State. The two endpoints are in http.go.
package health

import (
	"cmp"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// missedBeats is how many intervals a part may be silent before liveness fails.
const missedBeats = 3

// starting is the reason of a part that has not reported yet.
const starting = "starting"

// Options configure a State. The zero value reports no change.
type Options struct {
	// Log has one record at info for each change of a part, and one when all of them become ready or cease to be.
	Log *slog.Logger
	// Now is the clock; nil means the system's.
	Now func() time.Time
	// OnChange is called when all parts have become ready and when that has ended, in the order of the changes. It must
	// not call the State.
	OnChange func(ready bool)
}

// State is what the parts of an agent have reported. Its methods may be called from several goroutines.
type State struct {
	options Options

	mu    sync.Mutex
	parts []Part
	ready bool
	beats map[string]beat
	due   map[string]due
}

// Part is a part of the agent as it last reported. Since is when it became as it is: ready, or not ready for this
// reason. Reason is empty when it is ready. Checked is when it last reported, zero if it has not yet.
type Part struct {
	Name    string    `json:"name"`
	Ready   bool      `json:"ready"`
	Reason  string    `json:"reason,omitempty"`
	Since   time.Time `json:"since"`
	Checked time.Time `json:"checked,omitzero"`
}

// Snapshot is the state at one moment. It is ready when all its parts are.
type Snapshot struct {
	Ready bool   `json:"ready"`
	Parts []Part `json:"parts"`
}

// due is when a part has to report again, and its reason for not being ready if it has not.
type due struct {
	at     time.Time
	reason string
}

type beat struct {
	last  time.Time
	every time.Duration
}

// NewState returns a state of parts that are not ready yet, in the order in which they will be shown. Without parts it is
// ready.
func NewState(o Options, parts ...string) *State {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now //nolint:forbidigo // the only clock of the package; callers that need another one pass it
	}
	s := &State{options: o, parts: []Part{}, beats: make(map[string]beat), due: make(map[string]due)}
	for _, name := range parts {
		s.parts = append(s.parts, Part{Name: name, Reason: starting, Since: o.Now()})
	}
	s.update()
	return s
}

// Ready reports that a part does its work. A part that NewState did not have is added.
func (s *State) Ready(part string) {
	s.report(Part{Name: part, Ready: true})
}

// NotReady reports that a part does not do its work, and why: a sentence for a person, such as "waiting for a CNI
// configuration in /host/etc/cni/net.d". An empty reason becomes "unknown".
func (s *State) NotReady(part, reason string) {
	s.report(Part{Name: part, Reason: cmp.Or(reason, "unknown")})
}

// Expect announces that a part will report within this time: from then on it counts as not ready for this reason, until it
// does. A part that is not ready already stays so for its own reason.
func (s *State) Expect(part string, within time.Duration, reason string) {
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
	now.Since = s.parts[at].Since
	changed := s.parts[at].Ready != now.Ready || s.parts[at].Reason != now.Reason
	if changed {
		now.Since = s.options.Now()
		log := s.options.Log.With("part", now.Name)
		if now.Ready {
			log.Info("part is ready")
		} else {
			log.Info("part is not ready", "reason", now.Reason)
		}
	}
	s.parts[at] = now
	if changed {
		s.update()
	}
}

// update reports whether all parts are ready, if that has changed. It needs the lock.
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

// Beat is the heartbeat of a loop, which comes again within the given time. The first one makes it expected; Rest ends
// that. A loop beats once before it does anything that could hang.
func (s *State) Beat(part string, every time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.beats[part] = beat{last: s.options.Now(), every: every}
}

// Rest reports that a loop has ended on purpose or waits for something that may take any time.
func (s *State) Rest(part string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.beats, part)
}

// missing is a heartbeat that has not come in time.
type missing struct {
	Name  string    `json:"name"`
	Last  time.Time `json:"last"`
	Every string    `json:"every"`
}

// missing returns the parts that have not beaten for three of their intervals, by name.
func (s *State) missing() []missing {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []missing
	for name, b := range s.beats {
		if s.options.Now().Sub(b.last) > missedBeats*b.every {
			found = append(found, missing{Name: name, Last: b.last, Every: b.every.String()})
		}
	}
	slices.SortFunc(found, func(a, b missing) int { return cmp.Compare(a.Name, b.Name) })
	return found
}
