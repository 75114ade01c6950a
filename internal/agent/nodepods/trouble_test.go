package nodepods

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/agent/racerepair"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestRefusals: each is reported, counted and retried.
func TestRefusals(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		fault kubetest.Fault
		text  string
	}{
		{kubetest.Forbidden, "lacks a permission"},
		{kubetest.ServerError, "leader changed"},
		{kubetest.Unavailable, "shutting down"},
		{kubetest.TooMany, "too many requests"},
		{kubetest.Unauthorized, "unauthorized"},
		{kubetest.Reset, "connection lost"},
		{kubetest.Hang, "the work on the pod takes more than 1m0s"},
		{kubetest.ForbiddenPage, "response not understood"},
	} {
		for name, settings := range map[string]racerepair.Settings{
			"delete": {Switches: deleting}, "evict": {Switches: deleting, Evict: true}, "label": {Switches: labelled},
		} {
			t.Run(string(test.fault)+"/"+name, func(t *testing.T) {
				t.Parallel()
				switches := settings.Switches
				l := newFixture(t, switches, func(o *Options) { o.Repair.Evict = settings.Evict })
				l.server.SetRetryAfter(30)
				p := crashing("web")
				l.set(p)
				l.server.FailOn("/pods/web", test.fault, 1)
				l.run()
				if test.fault == kubetest.Hang { // the turn times out
					agenttest.Eventually(t, "nothing is done", func() bool { return len(l.writes()) == 1 })
					l.clock.Step(time.Minute)
				}
				l.waitForEvent(p, "Warning", reasons[switches], "cannot be", test.text)
				l.waitForCount(counted[switches], metrics.RepairFail, 1)
				l.waitForCount(counted[switches], metrics.RepairSuccess, 0)
				l.waitForStates(0, 1, 0, 0)
				failed := l.clock.Now()
				l.stepUntilSuccess(counted[switches])
				if waited := l.clock.Since(failed); test.fault == kubetest.TooMany && waited < 30*time.Second {
					t.Errorf("retried after %s", waited)
				}
				l.waitForCount(counted[switches], metrics.RepairFail, 1)
			})
		}
	}
}

// TestFailingWatchMakesUnready: e2e/repair tests a crash of the API server.
func TestFailingWatchMakesUnready(t *testing.T) {
	t.Parallel()
	state := health.NewState(health.Options{}, Part)
	l := newFixture(t, inPlace, func(o *Options) { o.Health = state })
	becomes := func(ready bool, troubles int) {
		t.Helper()
		agenttest.Eventually(t, "readiness or the count of failures does not change", func() bool {
			return state.Snapshot().Ready == ready && l.metric("istio_cni_repair_watch_troubles_total") == troubles
		})
	}
	l.server.Fail(kubetest.Forbidden, kubetest.Forever)
	l.run()
	becomes(false, 1)
	l.server.Heal()
	becomes(true, 1)
	l.server.FailOn("/pods", kubetest.Unavailable, kubetest.Forever)
	l.server.BreakWatches()
	becomes(false, 2)
	p, _ := l.crashing()
	l.server.Heal()
	becomes(true, 2)
	l.waitForRepair(p)
}

// TestNothingIsDoneOnABadConfiguration of the plugin: the excluded namespaces may be among the unreadable keys.
func TestNothingIsDoneOnABadConfiguration(t *testing.T) {
	t.Parallel()
	for _, switches := range []repair.Switches{inPlace, deleting, labelled, nothing} {
		t.Run(string(switches.Modes()[0]), func(t *testing.T) {
			t.Parallel()
			l := newFixture(t, switches)
			conf, err := cniconf.Parse([]byte(`{"cniVersion":"1.0.0","name":"istio-cni","type":"istio-cni","exclude_namespaces":"shop"}`))
			l.Do(err)
			l.conf.Store(&conf)
			p := crashing("web").at("10.88.0.2/24")
			unproven := podSpec{name: "unproven", uid: "u"}.at("10.88.0.3/24")
			path := l.place(p)
			l.set(unproven)
			l.run()
			l.waitForEvent(p, "Warning", podwork.ReasonBroken, "configuration cannot be used", "exclude_namespaces", "Correct the configuration")
			l.waitForStates(0, 1, 0, 1)
			for range 10 {
				l.clock.Step(time.Minute)
				l.waitForWorker()
			}
			l.noWrites()
			l.untouched(path)
			l.oneEvent(p)
			check.Equal(t, strings.Count(l.log.String(), "no pod is repaired until"), 1, "records")
			if switches != nothing {
				l.waitForCount(counted[switches], metrics.RepairFail, 1)
			}
			l.waitForEvent(unproven, "Warning", podwork.ReasonUnverified, "configuration cannot be used")

			l.conf.Store(&cniconf.NetConf{})
			agenttest.Eventually(t, "the new configuration is not used", func() bool {
				l.clock.Step(10 * time.Second)
				return slices.ContainsFunc(l.events(p), func(e corev1.Event) bool { return !strings.Contains(e.Message, "configuration") }) || switches == nothing
			})
		})
	}
}

// TestAPodThatCannotBeRepairedGetsOneEvent, and no flood of events, for a long time.
func TestAPodThatCannotBeRepairedGetsOneEvent(t *testing.T) {
	t.Parallel()
	// The clock steps by minutes, perhaps during a turn.
	l := newFixture(t, inPlace, func(o *Options) { o.PodTimeout = 24 * time.Hour })
	p := crashing("web").at("10.88.0.2/24")
	l.set(p)
	l.run()
	l.waitForEvent(p, "Warning", podwork.ReasonRepaired, "its network namespace was not found", "delete the pod")
	for i := range 60 {
		l.clock.Step(time.Minute)
		if i%10 == 0 {
			l.Start(l.Host) // the node changes, and so do the numbers in the log
		}
		l.waitForWorker()
	}
	if fails := l.repaired(metrics.RepairPod, metrics.RepairFail); fails < 20 || fails > 70 {
		t.Errorf("%d tries in an hour", fails)
	}
	// Equal events are one, whose count is patched from time to time.
	if got := l.events(p); len(got) != 1 || got[0].Count < 10 {
		t.Errorf("%d events: %v", len(got), got)
	}
	if n := l.requests("/namespaces/shop/events"); n > 13 {
		t.Errorf("%d requests about the pod's events in an hour", n)
	}
	path := l.Sandbox(p.ips...)
	l.Mount(path, "late")
	l.Process("77", path)
	l.clock.Step(3 * time.Minute)
	l.waitForEvent(p, "Normal", podwork.ReasonRepaired)
}

// TestPodIsDeletedDuringTheRequest: the deleted pod is neither counted in the gauge nor repaired again.
func TestPodIsDeletedDuringTheRequest(t *testing.T) {
	t.Parallel()
	for _, switches := range []repair.Switches{deleting, labelled} {
		l := newFixture(t, switches)
		p := crashing("web")
		l.set(p)
		l.server.FailOn("/pods/web", kubetest.Hang, 1)
		l.run()
		agenttest.Eventually(t, "nothing is done", func() bool { return len(l.writes()) == 1 })
		l.server.Delete(p.path())
		l.clock.Step(time.Minute)
		l.waitForCount(counted[switches], metrics.RepairFail, 1)
		l.waitForWorker()
		l.clock.Step(time.Hour)
		l.waitForWorker()
		l.waitForStates(0, 0, 0, 0)
		if got := l.writes(); len(got) != 1 {
			t.Errorf("requests %q", got)
		}
	}
}

// TestPodThatWasDeletedBeforeIsNoFailure: the watch has not delivered the deletion yet.
func TestPodThatWasDeletedBeforeIsNoFailure(t *testing.T) {
	t.Parallel()
	for _, switches := range []repair.Switches{deleting, labelled} {
		l := newFixture(t, switches)
		l.server.FailOn("/pods/web", kubetest.NotFound, 1)
		p := crashing("web")
		l.set(p)
		l.run()
		l.waitForCount(counted[switches], metrics.RepairSkip, 1)
		l.waitForCount(counted[switches], metrics.RepairFail, 0)
		l.wantEvents(p)
	}
}

// TestAnExistingLabelIsSkippedOnce, whatever its value, and also when the validation fails again.
func TestAnExistingLabelIsSkippedOnce(t *testing.T) {
	t.Parallel()
	l := newFixture(t, labelled)
	p := crashing("web")
	p.labels = object{"cni.istio.io/uninitialized": "whatever"}
	l.set(p)
	l.run()
	l.waitForCount(metrics.RepairLabel, metrics.RepairSkip, 1)
	p.last = ended(126, agenttest.Start())
	l.set(p)
	l.waitForWorker()
	l.waitForCount(metrics.RepairLabel, metrics.RepairSkip, 1)
	l.wantEvents(p)
}

// TestARefusedSecondMode: a chart may not grant the rights to delete or label beside repair in place. That is logged once, and
// no deletion is requested again.
func TestARefusedSecondMode(t *testing.T) {
	t.Parallel()
	for name, switches := range map[string]repair.Switches{
		"delete": {InPlace: true, Delete: true}, "label": {InPlace: true, Label: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newFixture(t, switches)
			l.server.FailOn("/pods/job", kubetest.Forbidden, kubetest.Forever)
			for _, pod := range []string{"job-1", "job-2"} {
				p := broken(pod)
				p.restart = "Never"
				l.set(p)
			}
			l.run()
			for _, pod := range []string{"job-1", "job-2"} {
				l.waitForEvent(broken(pod), "Warning", podwork.ReasonBroken, "exit code 126", "delete it, so that its owner creates another one")
			}
			l.waitForStates(0, 2, 0, 0)
			for range 5 {
				l.clock.Step(podwork.RetryMax)
				l.waitForWorker()
			}
			const text = "level=INFO msg=\"broken pods that cannot be redirected in place are only reported"
			if writes := l.writes(); len(writes) > 2 { // two concurrent workers
				t.Errorf("requests: %q", writes)
			}
			if log := l.log.String(); strings.Count(log, text) != 1 {
				t.Errorf("log:\n%s", log)
			}
		})
	}
}
