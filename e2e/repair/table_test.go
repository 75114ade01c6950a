package repair

import (
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"testing"

	core "k8s.io/api/core/v1"
)

// row is a pod, and whether it is broken.
type row struct {
	name   string
	is     []change
	broken bool
}

// table has pods that API servers store differently. TestClassify_ReferencePredicate and TestClassify of internal/core/repair have all
// conditions.
func table(l *fixture) []row {
	none, failed := core.ContainerState{}, ended(126)
	return []row{
		{"looping", []change{broken()}, true},
		{"terminating", []change{broken(), grace(300)}, false},
		{"failed-once", []change{status(failed, none)}, true},
		{"second-of-two", []change{broken(), func(p *core.Pod) {
			first := core.ContainerStatus{Name: "mine", Image: "none", State: ended(0)}
			p.Status.InitContainerStatuses = slices.Insert(p.Status.InitContainerStatuses, 0, first)
		}}, true},
		{"never-restarted", []change{status(failed, none), phase(core.PodFailed), never}, true},
		{"recovered", []change{status(ended(0), failed)}, false},
		{"empty-status", []change{func(p *core.Pod) { p.Status = core.PodStatus{} }}, false},
		{"excluded", []change{broken(), in(l.other)}, false},
		{"host-network", []change{broken(), func(p *core.Pod) { p.Spec.HostNetwork = true }}, false},
	}
}

func never(p *core.Pod) { p.Spec.RestartPolicy = core.RestartPolicyNever }

// make creates the pod of a row.
func (l *fixture) make(r row) {
	l.Helper()
	l.pod(r.name, r.is...)
	if r.name == "terminating" { // its kubelet does not end it
		l.delete(r.name)
	}
}

// mode is an action on broken pods, with its flags and RBAC rules.
type mode struct {
	name   string
	args   []string
	rights []right
	reason string
	// done reports whether the action was done to a pod.
	done func(l *fixture, pod string) bool
	// verb and resource describe the action's request.
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

// TestDecisions_Once deletes pods in a single run.
func TestDecisions_Once(t *testing.T) {
	l, m := newFixture(t), modes()[0]
	rows := table(l)
	for _, r := range rows {
		l.make(r)
	}
	l.once(m.grant(l), append(m.args, "--exclude-namespaces="+l.other)...)
	m.check(l, rows)
	l.selected("", "") // W-9, all nodes
}

// TestDecisions_Daemon labels pods under the program's historic name, with environment variables that have dashes. Half of the
// pods are created after the daemon's start. The selectors are in the requests, so the API server filters.
func TestDecisions_Daemon(t *testing.T) {
	l, m := newFixture(t), modes()[2]
	rows := table(l)
	for _, r := range rows[:len(rows)/2] {
		l.make(r)
	}
	path := filepath.Join(t.TempDir(), "istio-cni-repair")
	l.Must(os.Symlink(shared.IstioCNI, path))
	d := l.run([]string{
		"REPAIR_NODE-NAME=" + node, "REPAIR_LABEL-PODS=true", "REPAIR_RUN-AS-DAEMON=true", "KUBECONFIG=" + m.grant(l),
	}, path, "--exclude-namespaces="+l.other, "--label-selectors=tier notin (x)", "--field-selectors=status.phase!=Unknown")
	l.Until("the first pods", func() bool { return m.done(l, "looping") })
	for _, r := range rows[len(rows)/2:] {
		l.make(r)
	}
	rows = append(rows, row{"elsewhere", []change{broken(), on("node-b")}, false},
		row{"unselected", []change{broken(), labels(map[string]string{"tier": "x"})}, false}, row{"last", []change{broken()}, true})
	for _, r := range rows[len(rows)-3:] {
		l.make(r)
	}
	// The program may end before it has sent all events.
	l.Until("all events", func() bool {
		return !slices.ContainsFunc(rows, func(r row) bool { return r.broken && !l.event(l.app, r.name, m.reason) })
	})
	d.stop()
	m.check(l, rows)
	l.selected("status.phase!=Unknown,spec.nodeName="+node, "tier notin (x)")
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
		events, requests := l.events(namespace, r.name), l.count(m.verb, m.resource, r.name, 0)
		switch {
		case !r.broken && (len(events) > 0 || requests > 0 || l.get(namespace, r.name) == nil):
			l.Errorf("%s is not broken, and has %d requests and the events %q", r.name, requests, events)
		case r.broken && (len(events) != 1 || !l.event(namespace, r.name, m.reason, "126")):
			l.Errorf("%s: events %q", r.name, events)
		case r.broken && (requests != 1 || l.count(m.verb, m.resource, r.name, http.StatusOK) != 1):
			l.Errorf("%s: %d requests, %v", r.name, requests, l.requests())
		}
	}
	l.noForbiddenRequests()
}

// selected checks that there was one list, possibly as the start of a watch, and that lists and watches have these
// selectors and all namespaces.
func (l *fixture) selected(fields, labels string) {
	l.Helper()
	lists := 0
	for _, r := range l.requests() {
		if r.Resource != "pods" || r.Verb != "list" && r.Verb != "watch" {
			continue
		}
		at, err := url.Parse(r.URI)
		l.Must(err)
		query := at.Query()
		if r.Verb == "list" || query.Get("sendInitialEvents") == "true" {
			lists++
		}
		if at.Path != "/api/v1/pods" || query.Get("fieldSelector") != fields || query.Get("labelSelector") != labels {
			l.Errorf("asked for %s", r.URI)
		}
	}
	if lists != 1 {
		l.Errorf("%d lists", lists)
	}
}
