package auditor

import (
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestCondition_States(t *testing.T) {
	t.Parallel()
	check.Equal(t, len(states), len(audit.States())+1, "states with a row, Outside among them,")
	for state, want := range map[audit.State]string{
		audit.Captured: "True Captured", audit.Bypassed: "False Bypassed", audit.ForeignRule: "False ForeignRule", audit.Drifted: "False Drifted",
		audit.ForeignListener: "False ForeignListener", audit.NoListener: "False NoListener", audit.Pending: "False Pending", audit.UIDCollision: "False UIDCollision", audit.IPv6Open: "False IPv6Open",
		audit.NotInspected: "Unknown NotInspected", audit.Sandboxed: "Unknown Sandboxed", audit.Outside: "Unknown Outside",
	} {
		status := audit.Status{State: state, Sentence: state.Sentence()}
		if state != audit.Captured {
			status.Problems = []audit.Problem{{State: state, Detail: "bad\x1b" + strings.Repeat("x", 2*maxConditionMessage)}}
		}
		c := condition(status)
		if got := c.Status + " " + c.Reason; got != want || len(c.Message) > maxConditionMessage || strings.Contains(c.Message, "\x1b") {
			t.Errorf("%s: got %+v, want %s", state, c, want)
		}
	}
}
