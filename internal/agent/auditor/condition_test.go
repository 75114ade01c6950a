package auditor

import (
	"cmp"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestCondition_States: the reason is the state in CamelCase, and the text is bounded and printable.
func TestCondition_States(t *testing.T) {
	t.Parallel()
	check.Equal(t, len(states), len(audit.States())+1, "states with a row, Outside among them,")
	statuses := map[audit.State]string{audit.Captured: "True", audit.NotInspected: "Unknown", audit.Sandboxed: "Unknown", audit.Outside: "Unknown"}
	for state := range states {
		problems := []audit.Problem{{State: state, Detail: "bad\x1b" + strings.Repeat("x", 2*maxConditionMessage)}}
		c := condition(audit.Status{State: state, Sentence: state.Sentence(), Problems: problems})
		check.Equal(t, c.Status, cmp.Or(statuses[state], "False"), state)
		if !strings.EqualFold(c.Reason, strings.ReplaceAll(string(state), "-", "")) || len(c.Message) > maxConditionMessage || strings.Contains(c.Message, "\x1b") {
			t.Errorf("%s: got %+v", state, c)
		}
	}
}
