package repair

import (
	"net/http"
	"testing"

	core "k8s.io/api/core/v1"
)

// TestPrecondition_PodChanges holds the request back while the pod is replaced or changed.
func TestPrecondition_PodChanges(t *testing.T) {
	none := core.ContainerState{}
	for _, m := range modes()[:2] { // delete, evict
		end := "/pods/p"
		method := http.MethodDelete
		if m.name == "evict" {
			end, method = "/pods/p/eviction", http.MethodPost
		}
		for _, test := range []struct {
			name string
			// change returns the pod that exists afterwards.
			change  func(l *fixture, pod *core.Pod) *core.Pod
			deleted bool
		}{
			{"another pod of the name, in good health", func(l *fixture, pod *core.Pod) *core.Pod {
				l.delete(pod.Name)
				return l.pod("p", status(ended(0), none))
			}, false},
			{"another pod of the name, that has yet to start", func(l *fixture, pod *core.Pod) *core.Pod {
				l.delete(pod.Name)
				return l.pod("p")
			}, false},
			{"the same pod, recovered", func(l *fixture, pod *core.Pod) *core.Pod {
				status(ended(0), ended(126))(pod)
				return l.report(pod, pod.Status)
			}, false},
			{"the same pod, still broken", func(l *fixture, pod *core.Pod) *core.Pod {
				l.annotate(pod.Name, "once")
				return pod
			}, true},
		} {
			t.Run(m.name+"/"+test.name, func(t *testing.T) {
				l := newFixture(t)
				pod := l.pod("p", broken())
				through := l.tap(m.grant(l))
				through.hold(method, end)
				d := l.daemon(through.kubeconfig, m.args...)
				through.waitHeld()
				now := test.change(l, pod)
				through.release()
				l.Until("the conflict", func() bool { return l.count(m.verb, m.resource, "p", http.StatusConflict) == 1 })
				if test.deleted {
					l.Until("the pod to go", func() bool { return l.gone("p") })
				}
				l.pod("last", broken())
				l.Until("the last pod to go", func() bool { return l.gone("last") })
				d.stop()
				there := l.get(l.app, "p")
				switch {
				case !test.deleted && (there == nil || there.UID != now.UID || there.DeletionTimestamp != nil):
					t.Errorf("the other pod is deleted or terminating: %v", there)
				case !test.deleted && (len(l.events(l.app, "p")) != 0 || l.count(m.verb, m.resource, "p", 0) != 1):
					t.Errorf("events %q, %d requests", l.events(l.app, "p"), l.count(m.verb, m.resource, "p", 0))
				case test.deleted && len(l.events(l.app, "p")) != 1:
					t.Errorf("events %q", l.events(l.app, "p"))
				}
				l.noForbiddenRequests()
			})
		}
	}
}

// TestPrecondition_PodIsRecreated: the patch of a label has only the UID as precondition.
func TestPrecondition_PodIsRecreated(t *testing.T) {
	l := newFixture(t)
	l.pod("p", broken())
	through := l.tap(l.grant(mayWatch, mayReport, mayLabel))
	through.hold(http.MethodPatch, "/pods/p/status")
	d := l.daemon(through.kubeconfig, "--label-pods")
	through.waitHeld()
	l.delete("p")
	l.pod("p", status(ended(0), core.ContainerState{}))
	through.release()
	// The API server rejects another UID as invalid (422).
	l.Until("the refusal", func() bool { return l.count("patch", "pods/status", "p", http.StatusUnprocessableEntity) == 1 })
	// A changed pod with the same UID is labelled.
	l.pod("q")
	through.hold(http.MethodPatch, "/pods/q/status")
	l.breaks("q")
	through.waitHeld()
	l.annotate("q", "once")
	through.release()
	l.Until("the label", func() bool { return l.labelled("q") == "true" })
	d.stop()
	if mark := l.labelled("p"); mark != "" || len(l.events(l.app, "p")) != 0 {
		t.Errorf("label %q, events %q", mark, l.events(l.app, "p"))
	}
	l.noForbiddenRequests()
}
