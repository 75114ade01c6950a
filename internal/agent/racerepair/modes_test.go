package racerepair

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

var (
	nothing  = repair.Switches{}
	inPlace  = repair.Switches{InPlace: true}
	deleting = repair.Switches{Delete: true}
	labelled = repair.Switches{Label: true}
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

// TestModes is each action; the precedence is core/repair's.
func TestModes(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		switches repair.Switches
		want     repair.Mode
	}{
		{nothing, repair.Report},
		{labelled, repair.Label},
		{deleting, repair.Delete},
		{repair.Switches{InPlace: true, Delete: true, Label: true}, repair.InPlace},
	} {
		t.Run(fmt.Sprint(test.switches.Modes()), func(t *testing.T) {
			t.Parallel()
			l := newFixture(t, test.switches)
			p, path := l.crashing()
			l.run()
			l.waitForAction(p, test.want)
			if got := captured(t, path); got != (test.want == repair.InPlace) {
				t.Errorf("captured %v in mode %s", got, test.want)
			}
			want := map[repair.Mode][]string{
				repair.Delete: {"DELETE " + p.path()}, repair.Label: {"PATCH " + p.path() + "/status"},
			}[test.want]
			if got := l.writes(); !slices.Equal(got, want) {
				t.Errorf("requests %q, want %q", got, want)
			}
		})
	}
}

// waitForAction waits for the event and the count of an action.
func (l *fixture) waitForAction(p podSpec, mode repair.Mode) {
	l.Helper()
	switch mode {
	case repair.InPlace:
		l.waitForEvent(p, "Normal", ReasonRepaired, "redirected now", "exit code 126", "within its back-off")
		l.waitForCount(metrics.RepairPod, metrics.RepairSuccess, 1)
		l.waitForStates(1, 0, 0, 0)
	case repair.Delete:
		l.waitForEvent(p, "Warning", ReasonDeleted, "exit code 126", "it is deleted")
		l.waitForCount(metrics.RepairDelete, metrics.RepairSuccess, 1)
		if _, leaving := l.fetch(p); !leaving {
			l.Error("the pod has no deletion timestamp")
		}
		l.waitForStates(0, 0, 0, 0)
	case repair.Label:
		l.waitForEvent(p, "Warning", ReasonLabelled, "exit code 126", "cni.istio.io/uninitialized=true")
		l.waitForCount(metrics.RepairLabel, metrics.RepairSuccess, 1)
		if labels, leaving := l.fetch(p); labels["cni.istio.io/uninitialized"] != "true" || leaving {
			l.Errorf("labels %v, leaving %v", labels, leaving)
		}
		l.waitForStates(0, 1, 0, 0)
	case repair.Report:
		l.waitForEvent(p, "Warning", ReasonBroken, "exit code 126", "switch on")
		l.waitForStates(0, 1, 0, 0)
	}
}

func TestTheLabelIsNotWrittenTwice(t *testing.T) {
	t.Parallel()
	l := newFixture(t, labelled)
	p := crashing("web")
	p.labels = object{"cni.istio.io/uninitialized": "whatever"}
	l.set(p)
	l.run()
	l.waitForCount(metrics.RepairLabel, metrics.RepairSkip, 1)
	p.last = ended(126, agenttest.Start())
	l.set(p) // it failed again
	l.waitForWorker()
	l.waitForCount(metrics.RepairLabel, metrics.RepairSkip, 1)
	if got := l.writes(); len(got) > 0 {
		t.Errorf("requests %q", got)
	}
	l.noEvents(p)
}

func TestTheLabelCanBeAnother(t *testing.T) {
	t.Parallel()
	l := newFixture(t, labelled, func(o *Options) { o.Settings.LabelKey, o.Settings.LabelValue = "example.org/broken", "yes" })
	p := crashing("web")
	l.set(p)
	l.run()
	l.waitForEvent(p, "Warning", ReasonLabelled, "example.org/broken=yes")
	if labels, _ := l.fetch(p); labels["example.org/broken"] != "yes" {
		t.Errorf("labels %v", labels)
	}
}

// TestW9WithoutANodeNameAllNodesAreMeant has pods of two nodes and one of none, of which the reference saw only the last.
func TestW9WithoutANodeNameAllNodesAreMeant(t *testing.T) {
	t.Parallel()
	l := newFixture(t, repair.Switches{InPlace: true, Label: true}, func(o *Options) { o.Settings.Node = "" })
	here, there := crashing("here"), crashing("there").at("10.88.0.2")
	there.node = "node-2"
	l.set(here)
	l.set(there)
	l.run()
	for _, p := range []podSpec{here, there} {
		l.waitForEvent(p, "Warning", ReasonLabelled, "on its own node alone")
	}
	if n := l.requests("fieldSelector"); n > 0 {
		t.Errorf("%d requests with a field selector", n)
	}
	if l.searches.Load() > 0 {
		t.Error("a namespace was looked for, on whatever node")
	}
}

// TestW10AJobIsNotRedirectedWhenItIsOver has no container that would start again.
func TestW10AJobIsNotRedirectedWhenItIsOver(t *testing.T) {
	t.Parallel()
	l := newFixture(t, inPlace)
	p := broken("job").at("10.88.0.2/24")
	p.restart = "Never"
	path := l.place(p)
	l.run()
	l.waitForEvent(p, "Warning", ReasonBroken, "not started again", "cannot be redirected in place any more: delete it")
	if captured(t, path) {
		t.Error("rules were written")
	}
}

// TestPodsThatAreLeftAlone: they failed as the others, and are neither redirected nor reported. The e2e suite has the other modes.
func TestPodsThatAreLeftAlone(t *testing.T) {
	t.Parallel()
	l := newFixture(t, inPlace)
	l.conf.Store(&cniconf.NetConf{ExcludeNamespaces: []string{"kube-system"}})
	var pods []podSpec
	var paths []string
	for i, change := range []func(*podSpec){
		func(p *podSpec) { p.ns = "kube-system" },
		func(p *podSpec) { p.host = true },
		func(p *podSpec) { p.gateway = true },
		func(p *podSpec) { p.plain = true; p.annotations = object{"other": "x"} },
		func(p *podSpec) { p.labels = object{"sidecar.istio.io/inject": "false"} },
		func(p *podSpec) { p.annotations = object{sidecar.ModeKey: "NONE"} },
		func(p *podSpec) { p.deleting = true },
		func(p *podSpec) { p.now = ended(0, agenttest.Start()) },
	} {
		p := crashing(fmt.Sprintf("web-%d", i)).at(fmt.Sprintf("10.88.0.%d/24", 2+i))
		change(&p)
		path := l.place(p)
		pods, paths = append(pods, p), append(paths, path)
	}
	l.run()
	l.waitForWorker()
	for i, p := range pods {
		l.noEvents(p)
		if got := rulesOf(t, paths[i]); got != "" {
			t.Errorf("rules were written:\n%s", got)
		}
	}
	if got := l.writes(); len(got) > 0 {
		t.Errorf("pods were changed: %q", got)
	}
}

func TestEveryRowTakesItsDefaultAndShowsIt(t *testing.T) {
	t.Parallel()
	s := defaults(t)
	for _, row := range Rows(&s) {
		if got := row.Value.String(); got != row.Default || row.Use == "" {
			t.Errorf("%s shows %q, its default is %q", row.Name, got, row.Default)
		}
	}
	if s.Switches != nothing || s.Evict || s.Predicate.ExitCode != 126 || s.Predicate.Container != "istio-validation" ||
		s.Predicate.Annotation != "sidecar.istio.io/status" || s.LabelKey != "cni.istio.io/uninitialized" || s.LabelValue != "true" {
		t.Errorf("defaults %+v", s)
	}
	for name, bad := range map[string]string{
		"repair-pods": "maybe", "delete-pods": "2", "evict": "x", "broken-pod-label-key": "a/b/c", "broken-pod-label-value": "-", "node-name": "A",
		"init-container-exit-code": "256", "init-container-name": "a b", "label-selectors": "a in", "field-selectors": "spec.nodeName",
	} {
		at := slices.IndexFunc(Rows(&s), func(r settings.Setting) bool { return r.Name == name })
		if err := Rows(&s)[at].Value.Set(bad); err == nil {
			t.Errorf("%s takes %q", name, bad)
		}
	}
}
