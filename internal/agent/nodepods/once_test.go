package nodepods

import (
	"errors"
	"fmt"
	"testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// once repairs all pods once, while the clock runs. It checks for an error with the texts, or for no error without texts.
func (l *fixture) once(texts ...string) {
	l.Helper()
	agenttest.Run(l.T, l.clock)
	err := Once(l.Context(), l.options)
	if texts == nil {
		check.OK(l, err)
		return
	}
	check.Fails(l, err, texts...)
}

func TestOnceRepairsEachPod(t *testing.T) {
	t.Parallel()
	l := newFixture(t, inPlace)
	p, missing, job := crashing("web").at("10.88.0.2/24"), podSpec{name: "missing", uid: "m"}.at("10.88.0.3/24"), broken("job")
	job.restart = "Never"
	paths := []string{l.place(p), l.place(missing)}
	l.set(job)
	l.once()
	l.waitForEvent(p, "Normal", podwork.ReasonRepaired)
	l.waitForEvent(missing, "Normal", podwork.ReasonRepaired)
	l.waitForEvent(job, "Warning", podwork.ReasonBroken)
	l.redirected(paths...)
	rules := rulesOf(t, paths[0])
	check.OK(t, Once(t.Context(), l.options), "the second time")
	l.waitForCount(metrics.RepairPod, metrics.RepairSuccess, 2)
	l.waitForCount(metrics.RepairPod, metrics.RepairSkip, 1)
	check.Equal(t, rulesOf(t, paths[0]), rules, "the rules")
	l.end()
	l.oneEvent(p)
}

// TestOnceTriesFiveTimes, like the reference, and names the pods that could not be repaired. With a bad configuration of the
// plugin it does not try.
func TestOnceTriesFiveTimes(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		switches       repair.Switches
		fault          kubetest.Fault
		times, written int
		problem        string // of the plugin's configuration
		texts          []string
	}{
		{deleting, kubetest.Forbidden, kubetest.Forever, 10, "", []string{"pod shop/a: ", "pod shop/b: ", "delete pods shop/a", "forbidden (403)"}},
		{labelled, kubetest.ServerError, kubetest.Forever, 10, "", []string{"pod shop/a: ", "patch pods/status shop/a", "server error (500)"}},
		{deleting, kubetest.Unavailable, 4, 6, "", nil},
		{deleting, "", 0, 0, "no", []string{"pod shop/a: the plugin's configuration cannot be used: no"}},
	} {
		l := newFixture(t, test.switches)
		l.server.FailOn("/pods/", test.fault, test.times)
		if test.problem != "" {
			l.conf.Store(&cniconf.NetConf{Problems: errors.New(test.problem)})
		}
		l.set(crashing("a"))
		l.set(crashing("b"))
		l.once(test.texts...)
		check.Equal(t, len(l.writes()), test.written, "requests for two pods")
	}
}

func TestOnceHasNoRateLimitAndNoSecondInspection(t *testing.T) {
	t.Parallel()
	l := newFixture(t, deleting)
	const all = 30 + 5
	for i := range all {
		l.set(crashing(fmt.Sprintf("web-%d", i)))
	}
	missing := podSpec{name: "missing", uid: "m"}.at("10.88.0.3/24") // not inspected a second time
	l.place(missing)
	if err := Once(t.Context(), l.options); err != nil { // the clock does not move
		t.Fatal(err)
	}
	l.waitForEvent(missing, "Warning", podwork.ReasonDeleted, "no rules")
	l.waitForCount(metrics.RepairDelete, metrics.RepairSuccess, all+1)
}

func TestOnceEndsWhenThereIsNoServer(t *testing.T) {
	t.Parallel()
	l := newFixture(t, inPlace)
	l.server.Fail(kubetest.Forbidden, kubetest.Forever)
	l.once("waiting for the pods", "not done after 2m0s", "watch pods at", "forbidden (403)")
}
