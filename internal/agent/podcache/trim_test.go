package podcache

import (
	"fmt"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestTrimChangesNoDecision of race repair, whatever the container statuses, and keeps only what a decision reads. The tests
// of core/sidecar show the same for the plugin's decisions.
func TestTrimChangesNoDecision(t *testing.T) {
	ended := func(code int, message string) repair.State {
		return repair.State{Terminated: true, ExitCode: code, Reason: "Error", Message: message}
	}
	states := []repair.State{
		{}, {Message: "superfluous"}, {Running: true}, ended(0, "superfluous"), ended(126, ""), ended(126, " X\n"), ended(1, "X"), ended(126, "superfluous X"),
	}
	reasons := map[repair.Reason]bool{}
	for _, message := range []string{"", " X "} {
		for i := range len(states) * len(states) * len(states) {
			now, last, proxy := states[i%len(states)], states[i/len(states)%len(states)], states[i/len(states)/len(states)]
			pod := func() repair.Pod {
				return repair.Pod{
					Facts: sidecar.Facts{
						Namespace: "shop", Name: "web", Labels: map[string]string{"a": "superfluous", "mark": "1"}, Annotations: map[string]string{
							sidecar.StatusKey: "superfluous", "mark": "2",
						},
						Containers: []sidecar.Container{{Name: sidecar.ValidationContainer, Init: true}, {Name: "istio-proxy"}, {Name: "superfluous"}},
					},
					Addressed:  true,
					Init:       []repair.Container{{Name: sidecar.ValidationContainer, State: now, Last: last}},
					Containers: []repair.Container{{Name: "app", State: proxy}},
				}
			}
			whole, trimmed := pod(), pod()
			kept := kube.Pod{
				Facts: trimmed.Facts, Init: trimmed.Init, Containers: trimmed.Containers,
				Ephemeral: []repair.Container{{Name: "debugger", ID: "d", State: ended(1, "superfluous"), Last: ended(1, "superfluous")}},
			}
			Trim([]string{"mark", ""}, message)(&kept)
			trimmed.Facts = kept.Facts
			predicate := repair.Predicate{Annotation: sidecar.StatusKey, Container: sidecar.ValidationContainer, Message: message}
			want, got := repair.Classify(whole, predicate, sidecar.Policy{}), repair.Classify(trimmed, predicate, sidecar.Policy{})
			reasons[want.Reason] = true
			if want.Failed.Message = got.Failed.Message; fmt.Sprintf("%+v", want) != fmt.Sprintf("%+v", got) {
				t.Fatalf("with statuses %+v the decision was\n%+v\nand is\n%+v", whole.Init, want, got)
			}
			if text := fmt.Sprintf("%+v", kept); strings.Contains(text, "superfluous") || kept.Facts.Labels["mark"] != "1" || kept.Facts.Annotations["mark"] != "2" {
				t.Fatalf("with message %q, kept: %s", message, text)
			}
		}
	}
	check.Equal(t, len(reasons), 3, "reasons of", reasons)
}
