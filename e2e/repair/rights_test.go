package repair

import (
	"maps"
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
)

// TestAMissingRightIsNamed runs each mode without the one rule that it adds to those of all modes: the event and the
// log name the rule, and the action is done when the rule is added.
func TestAMissingRightIsNamed(t *testing.T) {
	for _, m := range modes()[:3] {
		t.Run(m.name, func(t *testing.T) {
			l := newFixture(t)
			l.pod("p", broken())
			d := l.daemon(l.grant(mayWatch, mayReport), m.args...)
			l.Until("the refusal in an event", func() bool {
				return l.event(l.app, "p", m.reason, "403", "lacks the permission", m.verb+` resource "`+m.resource+`"`)
			})
			l.Until("the refusal in the log", func() bool {
				return d.logged("the work on a pod failed, and is retried", m.verb+` resource "`+m.resource+`"`)
			})
			if m.done(l, "p") {
				t.Error("it was done without the RBAC rule")
			}
			m.grant(l)
			l.Until("it to be done", func() bool { return m.done(l, "p") })
			d.stop()
		})
		t.Run(m.name+"/once", func(t *testing.T) {
			l := newFixture(t)
			l.pod("p", broken())
			r := l.start(l.grant(mayWatch, mayReport), m.args...)
			if status := r.end(); status != 1 {
				t.Errorf("exit status %d", status)
			}
			if !r.logged("ending", "pod "+l.app+"/p", "403", m.verb+` resource "`+m.resource+`"`) {
				t.Error("the last log line lacks the reason")
			}
		})
	}
}

// TestWithoutTheRightToWatch: no pod is repaired, and the log has the reason, until the rule is added.
func TestWithoutTheRightToWatch(t *testing.T) {
	l := newFixture(t)
	l.pod("p", broken())
	d := l.daemon(l.grant(mayDelete, mayReport), "--delete-pods")
	l.Until("the refusal in the log", func() bool {
		return d.logged("the watch of the pods fails: no pod is repaired", "403", `watch resource "pods"`)
	})
	l.grant(mayWatch, mayDelete, mayReport)
	l.Until("the watch to work", func() bool { return d.logged("the watch of the pods works again") })
	l.Until("the pod to go", func() bool { return l.gone("p") })
	d.stop()
}

// TestWithoutTheRightToReport: pods are repaired without events.
func TestWithoutTheRightToReport(t *testing.T) {
	l := newFixture(t)
	l.pod("p", broken())
	d := l.daemon(l.grant(mayWatch, mayDelete), "--delete-pods")
	l.Until("the pod to go", func() bool { return l.gone("p") })
	l.Until("the refusal in the log", func() bool {
		return slices.ContainsFunc(d.Lines(), func(text string) bool {
			return strings.Contains(text, "403") && strings.Contains(text, `create resource \"events\"`)
		})
	})
	d.stop()
}

// TestModesUseAllGrantedRights: the modes together use all rules and send no other request. A patch of an event would
// need a repeated event of the same pod.
func TestModesUseAllGrantedRights(t *testing.T) {
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
			what := r.Resource
			if r.Subresource != "" {
				what += "/" + r.Subresource
			}
			used[r.Verb+" "+what] = true
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
