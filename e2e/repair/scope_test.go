package repair

import (
	"maps"
	"net/url"
	"slices"
	"testing"
)

// TestScope: the selectors are in the requests, so the API server filters and never sends other pods.
func TestScope(t *testing.T) {
	for _, test := range []struct {
		name string
		args []string
		// fields and labels are the expected selectors in the requests.
		fields, labels string
		// want has the names of the pods that are received. All pods are broken.
		want []string
	}{
		{"all nodes, W-9", nil, "", "", []string{"a-shop", "a-web", "b-shop", "unscheduled"}},
		{
			"a node and selectors",
			[]string{"--node-name=" + node, "--label-selectors=app=shop,tier notin (x)", "--field-selectors=status.phase=Pending"},
			"status.phase=Pending,spec.nodeName=" + node, "app=shop,tier notin (x)",
			[]string{"a-shop"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := newFixture(t)
			shop, web := labels(map[string]string{"app": "shop"}), labels(map[string]string{"app": "web"})
			l.pod("a-shop", broken(), shop)
			l.pod("a-web", broken(), web)
			l.pod("b-shop", broken(), shop, on("node-b"))
			l.pod("unscheduled", broken(), web, on(""))
			through := l.tap(l.grant(mayWatch, mayReport, mayDelete))
			d := l.daemon(through.kubeconfig, append(test.args, "--delete-pods")...)
			l.Until("the pods to go", func() bool {
				return !slices.ContainsFunc(test.want, func(name string) bool { return !l.gone(name) })
			})
			// The watch sends a pod that is created later, and no change of an unselected pod.
			l.annotate("b-shop", "once")
			l.pod("late", broken(), shop)
			l.Until("the late one to go", func() bool { return l.gone("late") })
			d.stop()
			got := slices.Sorted(maps.Keys(through.received().pods))
			if want := slices.Sorted(slices.Values(append(slices.Clone(test.want), "late"))); !slices.Equal(got, slices.Compact(want)) {
				t.Errorf("sent %q, want %q", got, want)
			}
			l.selected(test.fields, test.labels)
			l.noForbiddenRequests()
		})
	}
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
