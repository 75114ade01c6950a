package racerepair

import (
	"encoding/json"
	"testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/repair"
)

var (
	nothing  = repair.Switches{}
	inPlace  = repair.Switches{InPlace: true}
	deleting = repair.Switches{Delete: true}
	labelled = repair.Switches{Label: true}
)

// counted is the type under which the actions of a mode are counted, and reasons that of their events.
var (
	counted = map[repair.Switches]metrics.RepairType{
		inPlace: metrics.RepairPod, deleting: metrics.RepairDelete, labelled: metrics.RepairLabel,
	}
	reasons = map[repair.Switches]EventReason{inPlace: ReasonRepaired, deleting: ReasonDeleted, labelled: ReasonLabelled}
)

// fetch gives a pod as the server has it.
func (l *fixture) fetch(p podSpec) (labels map[string]string, leaving bool) {
	l.Helper()
	var whole struct {
		Metadata struct {
			Labels            map[string]string
			DeletionTimestamp string
		}
	}
	data := l.server.Object(p.path())
	if data == nil {
		l.Fatalf("pod %s is no more", p.name)
	}
	l.Do(json.Unmarshal(data, &whole))
	return whole.Metadata.Labels, whole.Metadata.DeletionTimestamp != ""
}

// waitForAction waits for the event and the count of an action.
func (l *fixture) waitForAction(p podSpec, mode repair.Mode) {
	l.Helper()
	switch mode {
	case repair.InPlace:
		l.waitForEvent(p, "Normal", ReasonRepaired, "redirected now", "exit code 126", "within its back-off")
		l.waitForCount(metrics.RepairPod, metrics.RepairSuccess, 1)
		l.waitForStates(1, 0, 0, 0)
	case repair.Label:
		l.waitForEvent(p, "Warning", ReasonLabelled, "exit code 126", "cni.istio.io/uninitialized=true")
		l.waitForCount(metrics.RepairLabel, metrics.RepairSuccess, 1)
		if labels, leaving := l.fetch(p); labels["cni.istio.io/uninitialized"] != "true" || leaving {
			l.Errorf("labels %v, leaving %v", labels, leaving)
		}
		l.waitForStates(0, 1, 0, 0)
	case repair.Delete:
		l.Fatal("deletion is for e2e/repair")
	case repair.Report:
		l.waitForEvent(p, "Warning", ReasonBroken, "exit code 126", "switch on")
		l.waitForStates(0, 1, 0, 0)
	}
}

// TestAnExistingLabelIsSkippedOnce: whatever its value is, and also when the validation fails again.
func TestAnExistingLabelIsSkippedOnce(t *testing.T) {
	t.Parallel()
	l := newFixture(t, labelled)
	p := crashing("web")
	p.labels = object{"cni.istio.io/uninitialized": "whatever"}
	l.set(p)
	l.run()
	l.waitForCount(metrics.RepairLabel, metrics.RepairSkip, 1)
	p.last = ended(126, agenttest.Start())
	l.set(p)
	l.waitForWorker()
	l.waitForCount(metrics.RepairLabel, metrics.RepairSkip, 1)
	l.noEvents(p)
}
