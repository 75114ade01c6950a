package auditor

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// A list of the node's processes is used for scanInterval, or longer if the listing was slow: a pod can have very many. For a user's
// request it is used for scanForced.
const (
	scanInterval = time.Minute
	scanForced   = 5 * time.Second
)

// processes is the last list of the processes of the node's pods.
type processes struct {
	mu              sync.Mutex
	byPod           map[string][]sandbox.Process // by pod UID
	listed, scanned time.Time                    // the start of a complete listing; the end of the last one
	took            time.Duration
}

// podProcesses lists the processes of all pods by pod UID. listed is the start of the listing, zero if the list may be incomplete.
func (a *Auditor) podProcesses(ctx context.Context, forced bool) (byPod map[string][]sandbox.Process, listed time.Time) {
	s := &a.processes
	s.mu.Lock() // not a.mu: the pod watch must not wait for procfs
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
