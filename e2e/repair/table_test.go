package repair

import (
	"net/http"
	"slices"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// row is a pod, and whether it is broken.
type row struct {
	name   string
	is     []change
	broken bool
}

// table has the pods about which the reference decides, then those that it misses, then those that must be left
// alone.
func table(l *fixture) []row {
	none := core.ContainerState{}
	looping, failed := waiting("CrashLoopBackOff"), ended(126, "")
	return []row{
		{"succeeded", []change{status(ended(0, ""), none)}, false},
		{"recovered", []change{status(ended(0, ""), failed)}, false},
		{"looping", []change{status(looping, failed)}, true},
		{"failed-twice", []change{status(failed, failed)}, true},
		{"other-code", []change{status(looping, ended(121, ""))}, false},
		{"not-injected", []change{broken(), without(statusKey)}, false},
		{"empty-status", []change{func(p *core.Pod) { p.Status = core.PodStatus{} }}, false},

		{"failed-once", []change{status(failed, none)}, true},
		{"waits", nil, false},
		{"other-container", []change{broken(), func(p *core.Pod) { p.Status.InitContainerStatuses[0].Name = "mine" }}, false},
		{"second-of-two", []change{broken(), func(p *core.Pod) {
			first := core.ContainerStatus{Name: "mine", Image: "none", State: ended(0, "")}
			p.Status.InitContainerStatuses = slices.Insert(p.Status.InitContainerStatuses, 0, first)
		}}, true},
		{"never-restarted", []change{status(failed, none), phase(core.PodFailed), never}, true},
		{"no-proxy", []change{broken(), func(p *core.Pod) { p.Spec.Containers = p.Spec.Containers[1:] }}, true},
		{"bad-settings", []change{broken(), annotated("traffic.sidecar.istio.io/excludeInboundPorts", "many")}, true},

		{"excluded", []change{broken(), in(l.other)}, false},
		{"host-network", []change{broken(), func(p *core.Pod) { p.Spec.HostNetwork = true }}, false},
		{"gateway", []change{broken(), func(p *core.Pod) { p.Spec.Containers[0].Args = []string{"proxy", "router"} }}, false},
		{"with-init", []change{broken(), func(p *core.Pod) {
			p.Spec.InitContainers = append(p.Spec.InitContainers, core.Container{Name: "istio-init", Image: "none"})
		}}, false},
		{"opted-out", []change{broken(), labels(map[string]string{"sidecar.istio.io/inject": "false"})}, false},
		{"mode-none", []change{broken(), annotated("sidecar.istio.io/interceptionMode", "NONE")}, false},
		{"without-envoy", []change{broken(), func(p *core.Pod) {
			p.Spec.Containers[0].Env = []core.EnvVar{{Name: "DISABLE_ENVOY", Value: "true"}}
		}}, false},
	}
}

func never(p *core.Pod) { p.Spec.RestartPolicy = core.RestartPolicyNever }

// mode is an action on broken pods, with its flags and RBAC rules.
type mode struct {
	name   string
	args   []string
	rights []right
	reason string
	// done reports whether the action was done to a pod.
	done func(l *fixture, pod string) bool
	// verb and resource are those of the request of the action.
	verb, resource string
}

func modes() []mode {
	return []mode{
		{"delete", []string{"--delete-pods"}, []right{mayDelete}, "DeleteBrokenPod", (*fixture).gone, "delete", "pods"},
		{"evict", []string{"--delete-pods", "--evict"}, []right{mayEvict}, "DeleteBrokenPod", (*fixture).gone, "create", "pods/eviction"},
		{
			"label",
			[]string{"--label-pods"},
			[]right{mayLabel},
			"LabelBrokenPod",
			func(l *fixture, pod string) bool { l.Helper(); return l.labelled(pod) == "true" }, "patch", "pods/status",
		},
		{
			"report", nil, nil, "BrokenPod",
			func(l *fixture, pod string) bool { l.Helper(); return l.event(l.app, pod, "BrokenPod") }, "", "",
		},
	}
}

func (m mode) grant(l *fixture) string {
	l.Helper()
	return l.grant(append(m.rights, mayWatch, mayReport)...)
}

// TestTheDecisionTable checks each row in each mode, as a single run and as a daemon. Half of the pods are created
// after the daemon's start.
func TestTheDecisionTable(t *testing.T) {
	for _, m := range modes() {
		t.Run("once/"+m.name, func(t *testing.T) {
			l := newFixture(t)
			rows := table(l)
			for _, r := range rows {
				l.pod(r.name, r.is...)
			}
			if status := l.once(m.grant(l), append(m.args, "--exclude-namespaces="+l.other)...); status != 0 {
				t.Errorf("exit status %d", status)
			}
			m.check(l, rows)
		})
		t.Run("daemon/"+m.name, func(t *testing.T) {
			l := newFixture(t)
			rows := table(l)
			for _, r := range rows[:len(rows)/2] {
				l.pod(r.name, r.is...)
			}
			d := l.daemon(m.grant(l), append(m.args, "--exclude-namespaces="+l.other)...)
			l.Until("the first pods", func() bool { return m.done(l, "looping") })
			for _, r := range rows[len(rows)/2:] {
				l.pod(r.name, r.is...)
			}
			rows = append(rows, row{"last", []change{broken()}, true})
			l.pod("last", broken())
			// The program may end before it has sent all events.
			l.Until("all events", func() bool {
				return !slices.ContainsFunc(rows, func(r row) bool { return r.broken && !l.event(l.app, r.name, m.reason) })
			})
			d.stop()
			m.check(l, rows)
		})
	}
}

// check expects one action and one event for each broken pod, and no request and no event for the others.
func (m mode) check(l *fixture, rows []row) {
	l.Helper()
	for _, r := range rows {
		namespace := l.app
		if r.name == "excluded" {
			namespace = l.other
		}
		if r.broken != m.done(l, r.name) && namespace == l.app {
			l.Errorf("%s: acted upon: %t, want %t", r.name, !r.broken, r.broken)
		}
		events, requests := l.events(namespace, r.name), 0
		if m.verb != "" {
			requests = l.count(m.verb, m.resource, r.name, 0)
		}
		switch {
		case !r.broken && (len(events) > 0 || requests > 0 || l.get(namespace, r.name) == nil):
			l.Errorf("%s is not broken, and has %d requests and the events %q", r.name, requests, events)
		case r.broken && (len(events) != 1 || !l.event(namespace, r.name, m.reason, "126")):
			l.Errorf("%s: events %q", r.name, events)
		case r.broken && m.verb != "" && m.accepted(l, r.name) != 1:
			l.Errorf("%s: %d requests, of which %d were accepted", r.name, requests, m.accepted(l, r.name))
		}
	}
	l.noForbiddenRequests()
}

// accepted counts the successful requests. An eviction updates the pod before it deletes it, so the program may
// request it twice; the second request then fails with 404 or 409.
func (m mode) accepted(l *fixture, pod string) (count int) {
	l.Helper()
	for _, r := range l.requests() {
		what := r.Resource
		if r.Subresource != "" {
			what += "/" + r.Subresource
		}
		if r.Name != pod || r.Verb != m.verb || what != m.resource {
			continue
		}
		switch {
		case r.Status < 300:
			count++
		case m.name != "evict" || r.Status != http.StatusNotFound && r.Status != http.StatusConflict:
			l.Errorf("%s: %s %s: %d", pod, r.Verb, r.URI, r.Status)
		}
	}
	return count
}

// TestPredicate checks the settings of the broken-pod condition.
func TestPredicate(t *testing.T) {
	for _, test := range []struct {
		name   string
		args   []string
		is     []change
		broken bool
	}{
		{"another code", []string{"--init-container-exit-code=55"}, []change{broken()}, false},
		{
			"a message, with spaces around it",
			[]string{"--init-container-exit-code=0", "--init-container-termination-message=X"},
			[]change{status(waiting("CrashLoopBackOff"), ended(1, " X "))},
			true,
		},
		{
			"another message",
			[]string{"--init-container-exit-code=0", "--init-container-termination-message=X"},
			[]change{status(waiting("CrashLoopBackOff"), ended(1, "XY"))},
			false,
		},
		{"any code", []string{"--init-container-exit-code=0"}, []change{status(waiting("CrashLoopBackOff"), ended(121, ""))}, true},
		{
			"any container",
			[]string{"--init-container-name="},
			[]change{broken(), func(p *core.Pod) { p.Status.InitContainerStatuses[0].Name = "mine" }},
			true,
		},
		{"any annotation, on a pod that the plugin leaves alone", []string{"--sidecar-annotation="}, []change{
			broken(), without(statusKey), labels(map[string]string{"sidecar.istio.io/inject": "false"}),
		}, false},
		{"any annotation", []string{"--sidecar-annotation="}, []change{broken(), without(statusKey)}, true},
		{"another annotation", []string{"--sidecar-annotation=example.com/mesh"}, []change{broken()}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := newFixture(t)
			l.pod("p", test.is...)
			l.pod("other", status(ended(0, ""), core.ContainerState{}))
			if status := l.once(l.grant(mayWatch, mayReport, mayDelete), append(test.args, "--delete-pods")...); status != 0 {
				t.Errorf("exit status %d", status)
			}
			if gone := l.gone("p"); gone != test.broken {
				t.Errorf("deleted: %t", gone)
			}
			if l.gone("other") {
				t.Error("the other pod is gone")
			}
			l.noForbiddenRequests()
		})
	}
}

// TestTerminatingPodIsLeftAlone: the pod was deleted by another client, and its kubelet has not ended it yet.
func TestTerminatingPodIsLeftAlone(t *testing.T) {
	l := newFixture(t)
	l.pod("ending", broken(), func(p *core.Pod) {
		grace := int64(300)
		p.Spec.TerminationGracePeriodSeconds = &grace
	})
	l.Must(l.client.CoreV1().Pods(l.app).Delete(t.Context(), "ending", meta.DeleteOptions{}))
	l.pod("p", broken())
	if status := l.once(l.grant(mayWatch, mayReport, mayDelete), "--delete-pods"); status != 0 {
		t.Errorf("exit status %d", status)
	}
	if !l.gone("p") || l.count("delete", "pods", "ending", 0) != 0 || len(l.events(l.app, "ending")) != 0 {
		t.Errorf("events %q, requests %v", l.events(l.app, "ending"), l.requests())
	}
}
