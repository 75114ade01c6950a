package racerepair

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
)

// once runs one look at all pods, on a clock that does not stand still.
func (l *fixture) once() error {
	l.Helper()
	agenttest.Run(l.T, l.clock)
	return Once(l.Context(), l.options)
}

// failsOnce is one look that ends with an error of some texts.
func (l *fixture) failsOnce(says ...string) {
	l.Helper()
	err := l.once()
	if err == nil {
		l.Fatal("no error")
	}
	for _, want := range says {
		if !strings.Contains(err.Error(), want) {
			l.Errorf("no %q in %v", want, err)
		}
	}
}

func TestOnceRepairsEachPod(t *testing.T) {
	t.Parallel()
	l := newFixture(t, inPlace)
	p, missing, job := crashing("web").at("10.88.0.2/24"), podSpec{name: "missing", uid: "m"}.at("10.88.0.3/24"), broken("job")
	job.restart = "Never"
	paths := []string{l.place(p), l.place(missing)}
	l.set(job)
	if err := l.once(); err != nil {
		t.Fatal(err)
	}
	l.waitForEvent(p, "Normal", ReasonRepaired)
	l.waitForEvent(missing, "Normal", ReasonRepaired)
	l.waitForEvent(job, "Warning", ReasonBroken)
	l.redirected(paths...)
	if err := Once(t.Context(), l.options); err != nil {
		t.Errorf("the second time: %v", err)
	}
	l.waitForCount(metrics.RepairPod, metrics.RepairSuccess, 2)
}

// TestOnceNamesPodsThatCouldNotBeRepaired and has tried five times, as the reference does.
func TestOnceNamesPodsThatCouldNotBeRepaired(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		switches repair.Switches
		fault    kubetest.Fault
		says     []string
		tries    int
	}{
		{deleting, kubetest.Forbidden, []string{"pod shop/a: ", "pod shop/b: ", "delete pods shop/a", "forbidden (403)"}, 5},
		{labelled, kubetest.ServerError, []string{"pod shop/a: ", "patch pods/status shop/a", "server error (500)"}, 5},
	} {
		l := newFixture(t, test.switches)
		l.server.FailOn("/pods/", test.fault, kubetest.Forever)
		l.set(crashing("a"))
		l.set(crashing("b"))
		l.failsOnce(test.says...)
		if got := len(l.writes()); got != 2*test.tries {
			t.Errorf("%d requests for two pods", got)
		}
	}
}

func TestOnceHasNoRateLimitAndNoSecondInspection(t *testing.T) {
	t.Parallel()
	l := newFixture(t, deleting)
	const all = deletionBurst + 5
	for i := range all {
		l.set(crashing(fmt.Sprintf("web-%d", i)))
	}
	missing := podSpec{name: "missing", uid: "m"}.at("10.88.0.3/24") // which is not inspected a second time
	l.place(missing)
	if err := Once(t.Context(), l.options); err != nil { // on a clock that stands still
		t.Fatal(err)
	}
	l.waitForEvent(missing, "Warning", ReasonDeleted, "no rules")
	l.waitForCount(metrics.RepairDelete, metrics.RepairSuccess, all+1)
}

func TestOnceRetries(t *testing.T) {
	t.Parallel()
	l := newFixture(t, deleting)
	l.server.FailOn("/pods/", kubetest.Unavailable, 3)
	p := crashing("a")
	l.set(p)
	if err := l.once(); err != nil {
		t.Error(err)
	}
	if _, leaving := l.fetch(p); !leaving {
		t.Error("it is not deleted")
	}
}

func TestOnceEndsWhenThereIsNoServer(t *testing.T) {
	t.Parallel()
	l := newFixture(t, inPlace)
	l.server.Fail(kubetest.Forbidden, kubetest.Forever)
	l.failsOnce("waiting for the pods", "not done after 2m0s", "to watch pods", "forbidden (403)")
}

func TestOnceDoesNothingOnABadConfiguration(t *testing.T) {
	t.Parallel()
	l := newFixture(t, deleting)
	conf := *l.conf.Load()
	conf.Problems = errors.New("half of it is missing")
	l.conf.Store(&conf)
	p := crashing("a")
	l.set(p)
	l.failsOnce("pod shop/a: the plugin's configuration cannot be used: half of it is missing")
	l.noWrites()
}
