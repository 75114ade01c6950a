package auditor

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// The pause between two repairs of a pod is the interval at first, and doubles up to maxRepairPause. It is reset after the pod
// has been captured for calm.
const (
	maxRepairPause = 6 * time.Hour
	calm           = time.Hour
)

// restorable reports whether writing the wanted rules is enabled, due, and can help. It leaves pods that race repair acts on to
// race repair.
func (w *work) restorable(state audit.State) bool {
	m := w.memory
	elsewhere := state == audit.ForeignRule && !m.rules.repairable // in another program's table
	if !w.Settings.Repair || w.repair.Acts || w.Selects != nil && !w.Selects(w.Pod) {
		return false
	}
	return slices.Contains(aboutRules, state) && !elsewhere && !m.rules.earlier && !w.Clock.Now().Before(m.repairAfter)
}

// restore writes the wanted rules if necessary, and returns the problems that remain.
func (w *work) restore(ctx context.Context, found []audit.Problem) []audit.Problem {
	m, state := w.memory, audit.StateOf(found)
	if !w.restorable(state) || !w.Unchanged() {
		return found
	}
	m.repairAfter = w.Clock.Now().Add(min(w.Settings.Interval<<min(m.repairs, 16), maxRepairPause))
	m.repairs++
	var report redirection.Report
	err := w.InNamespace(ctx, func(space redirection.Namespace) (err error) {
		report, err = space.Apply(ctx, w.Decision.Wanted(), redirection.Reconcile)
		return err
	})
	left := found
	if err == nil {
		left, err = w.observe(ctx)
	}
	if errors.Is(context.Cause(ctx), context.Canceled) || !w.Unchanged() {
		return found
	}
	what := "the pod " + summary(found)
	if err != nil || slices.Contains(aboutRules, audit.StateOf(left)) {
		if err != nil {
			what, left = what+", and its rules cannot be restored: "+podwork.Cause(ctx, err), found
		} else {
			what += "; the wanted rules are written, and the pod still " + summary(left)
		}
		w.Metrics.AuditRepaired(metrics.RepairFail)
		w.Event(kube.EventWarning, podwork.ReasonRepaired, what+w.backoffText())
		m.reported = audit.StateOf(left)
		return left
	}
	w.Metrics.AuditRepaired(metrics.RepairSuccess)
	w.Log.InfoContext(ctx, "restored the pod's rules", slog.String("problem", what), slog.String("tools", toolsOf(report)))
	w.Event(kube.EventNormal, podwork.ReasonRepaired, what+"; its rules are restored. Connections that it opened meanwhile stay outside of "+
		"the mesh until they are closed")
	m.reported = audit.Captured
	return left
}
