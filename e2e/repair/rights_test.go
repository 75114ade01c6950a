package repair

import (
	"maps"
	"slices"
	"testing"

	core "k8s.io/api/core/v1"
)

// TestRights_UsedAndEnough: the modes together use all rules and send no other request. A patch of an event would
// need a repeated event of the same pod.
func TestRights_UsedAndEnough(t *testing.T) {
	used := map[string]bool{}
	for _, m := range modes() {
		l := newFixture(t)
		l.pod("p", broken(), phase(core.PodRunning), labels(map[string]string{"app": "shop"}))
		if m.name == "evict" {
			l.budget(0)
		}
		d := l.daemon(m.grant(l), m.args...)
		l.Until("an event", func() bool { return l.event(l.app, "p", m.reason) })
		if m.name == "evict" {
			l.budget(1)
		}
		l.Until("it to be done", func() bool { return m.done(l, "p") })
		d.stop()
		for _, r := range l.requests() {
			used[r.Verb+" "+resourceOf(r)] = true
		}
		l.noForbiddenRequests()
	}
	// Not used here: list pods (for API servers without streaming lists) and patch events (five minutes after the first
	// event).
	want := []string{"create events", "create pods/eviction", "delete pods", "patch pods/status", "watch pods"}
	if got := slices.Sorted(maps.Keys(used)); !slices.Equal(got, want) {
		t.Errorf("asked for %q, want %q", got, want)
	}
}
