package auditor

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// A list of the node's processes is used for scanInterval, and for longer if it took long: a pod can have very many. Where a request
// waits for the result it is used for scanForced.
const (
	scanInterval = time.Minute
	scanForced   = 5 * time.Second
)

// processes are those of the node's pods.
type processes struct {
	mu              sync.Mutex
	byPod           map[string][]sandbox.Process // by pod UID
	listed, scanned time.Time                    // the begin of a complete list, and the end
	took            time.Duration
}

// podProcesses lists the processes of all pods by pod UID. listed is the begin of the search, zero if the list may be incomplete.
func (a *Auditor) podProcesses(ctx context.Context, forced bool) (byPod map[string][]sandbox.Process, listed time.Time) {
	s := &a.processes
	s.mu.Lock() // not a.mu: the watch of the pods must not wait for the procfs
	defer s.mu.Unlock()
	began, age := a.Env.Clock.Now(), max(scanInterval, duty*s.took)
	if forced {
		age = scanForced
	}
	if a.Processes == nil || s.byPod != nil && began.Sub(s.scanned) < age {
		return s.byPod, s.listed
	}
	all, err := a.Processes(ctx)
	if err != nil {
		a.Env.Log.WarnContext(ctx, "the processes of the node cannot be listed", slog.String("error", err.Error()))
	}
	s.byPod, s.listed, s.scanned = all, began, a.Env.Clock.Now()
	if s.took = s.scanned.Sub(began); err != nil {
		s.listed = time.Time{}
	}
	return s.byPod, s.listed
}
