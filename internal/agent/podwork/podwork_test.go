package podwork

import (
	"context"
	"log/slog"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
)

// TestRun_IncompleteList: a pod gets no turn before the list of pods is complete, because another pod may have its address.
func TestRun_IncompleteList(t *testing.T) {
	t.Parallel()
	for complete, want := range map[bool]bool{false: false, true: true} {
		ctx, cancel := context.WithCancel(t.Context())
		worked := false
		c := New(Options[int]{
			Env:       Env{Log: slog.New(slog.DiscardHandler), Plugin: func() (cniconf.NetConf, error) { return cniconf.NetConf{}, nil }},
			Reconcile: func(context.Context, *Turn, *int) error { worked = true; cancel(); return nil },
			Changed:   func(_, _ *int) {}, OtherSandbox: func(*int) {}, Ended: func(*int) {},
		})
		context.AfterFunc(ctx, c.queue.ShutDown) // as in Run
		c.update(kube.Pod{Facts: sidecar.Facts{Namespace: "shop", Name: "web", UID: "u"}})
		if complete {
			close(c.synced)
		} else {
			cancel()
		}
		c.runWorker(ctx)
		if cancel(); worked != want {
			t.Errorf("complete %v: worked on the pod: %v", complete, worked)
		}
	}
}
