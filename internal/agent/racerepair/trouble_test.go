package racerepair

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
)

// TestRefusals: each is reported, counted and retried.
func TestRefusals(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		fault kubetest.Fault
		says  string
	}{
		{kubetest.Forbidden, "lacks the permission"},
		{kubetest.ServerError, "leader changed"},
		{kubetest.Unavailable, "shutting down"},
		{kubetest.TooMany, "too many requests"},
		{kubetest.Unauthorized, "unauthorized"},
		{kubetest.Reset, "connection lost"},
		{kubetest.Hang, "the work on the pod takes more than 1m0s"},
		{kubetest.ForbiddenPage, "answer not understood"},
	} {
		for name, settings := range map[string]Settings{
			"delete": {Switches: deleting}, "evict": {Switches: deleting, Evict: true}, "label": {Switches: labelled},
		} {
			t.Run(string(test.fault)+"/"+name, func(t *testing.T) {
				t.Parallel()
				switches := settings.Switches
				l := newFixture(t, switches, func(o *Options) { o.Settings.Evict = settings.Evict })
				l.server.SetRetryAfter(30)
				p := crashing("web")
				l.set(p)
				l.server.FailOn("/pods/web", test.fault, 1)
				l.run()
				if test.fault == kubetest.Hang { // the time for the pod ends
					agenttest.Eventually(t, "nothing is done", func() bool { return len(l.writes()) == 1 })
					l.clock.Step(time.Minute)
				}
				l.waitForEvent(p, "Warning", reasons[switches], "cannot be", test.says)
				l.waitForCount(counted[switches], metrics.RepairFail, 1)
				l.waitForCount(counted[switches], metrics.RepairSuccess, 0)
				l.waitForStates(0, 1, 0, 0)
				failed := l.clock.Now()
				l.stepUntilSuccess(counted[switches])
				if waited := l.clock.Since(failed); (waited >= 30*time.Second) != (test.fault == kubetest.TooMany) {
					t.Errorf("retried after %s", waited)
				}
				l.waitForCount(counted[switches], metrics.RepairFail, 1)
			})
		}
	}
}

// TestAServerThatHangsDelaysNoRepair has an API server that takes no event and no change any more: pods are redirected in place
// all the same, at once.
func TestAServerThatHangsDelaysNoRepair(t *testing.T) {
	t.Parallel()
	l := newFixture(t, inPlace)
	l.server.FailOn("/events", kubetest.Hang, kubetest.Forever)
	var paths []string
	for i := range 3 {
		paths = append(paths, l.place(crashing(fmt.Sprint("web-", i)).at(fmt.Sprintf("10.88.0.%d/24", 2+i))))
	}
	l.run()
	l.waitForCount(metrics.RepairPod, metrics.RepairSuccess, 3)
	l.redirected(paths...)
	if n := l.requests("POST", "/events"); n > 1 {
		t.Errorf("%d events were sent although none was answered", n)
	}
}

// TestTheServerIsAwayAtTheStart and comes later; it goes again and comes back.
func TestTheServerIsAwayAtTheStart(t *testing.T) {
	t.Parallel()
	for _, fault := range []kubetest.Fault{kubetest.Reset, kubetest.Unavailable, kubetest.Forbidden, kubetest.Garbage, kubetest.UnknownCA} {
		t.Run(string(fault), func(t *testing.T) {
			t.Parallel()
			state := health.NewState(health.Options{Now: time.Now}, Part)
			l := newFixture(t, inPlace, func(o *Options) { o.Health = state })
			l.server.Fail(fault, kubetest.Forever)
			p, _ := l.crashing()
			l.run()
			agenttest.Eventually(t, "the failing watch is not counted", func() bool { return l.metric("istio_cni_repair_watch_troubles_total") == 1 })
			if state.Snapshot().Ready {
				t.Error("it is ready")
			}
			l.server.Heal()
			l.waitForAction(p, repair.InPlace)
			agenttest.Eventually(t, "it is not ready", func() bool { return state.Snapshot().Ready })

			// The server goes away: known pods are still repaired, and a change is seen afterwards.
			l.server.FailOn("/pods", kubetest.Unavailable, kubetest.Forever)
			l.server.BreakWatches()
			agenttest.Eventually(t, "it is still ready", func() bool { return !state.Snapshot().Ready })
			second := crashing("second").at("10.88.0.3/24")
			l.place(second)
			l.server.Delete(p.path())
			l.server.Heal()
			l.waitForEvent(second, "Normal", ReasonRepaired)
			l.waitForStates(1, 0, 0, 0)
		})
	}
}

// TestNothingIsDoneOnABadConfiguration of the plugin: the excluded namespaces may be among the keys that could not be read.
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
			l.waitForEvent(p, "Warning", ReasonBroken, "configuration cannot be used", "exclude_namespaces", "Correct the configuration")
			l.waitForStates(0, 1, 0, 1)
			for range 10 {
				l.clock.Step(time.Minute)
				l.waitForWorker()
			}
			l.noWrites()
			l.untouched(path)
			l.oneEvent(p)
			if got := strings.Count(l.log.String(), "no pod is repaired until"); got != 1 {
				t.Errorf("it is logged %d times", got)
			}
			if switches != nothing {
				l.waitForCount(counted[switches], metrics.RepairFail, 1)
			}
			l.waitForEvent(unproven, "Warning", ReasonUnverified, "configuration cannot be used")

			l.conf.Store(&cniconf.NetConf{})
			agenttest.Eventually(t, "the new configuration is not used", func() bool {
				l.clock.Step(10 * time.Second)
				return slices.ContainsFunc(l.events(p), func(e event) bool { return !strings.Contains(e.Message, "configuration") }) || switches == nothing
			})
		})
	}
}

func TestAConfigurationThatCannotBeReadIsRetried(t *testing.T) {
	t.Parallel()
	l := newFixture(t, labelled)
	var good atomic.Bool
	l.options.Plugin = func() (cniconf.NetConf, error) {
		if !good.Load() {
			return cniconf.NetConf{}, errors.New("it is no JSON")
		}
		return cniconf.NetConf{}, nil
	}
	p := crashing("web")
	l.set(p)
	l.run()
	agenttest.Eventually(t, "the error is not logged", func() bool { return strings.Contains(l.log.String(), "it is no JSON") })
	l.noWrites()
	good.Store(true)
	l.stepUntilSuccess(metrics.RepairLabel)
}

// TestAPodThatCannotBeRepairedGetsOneEvent for a long time without a flood.
func TestAPodThatCannotBeRepairedGetsOneEvent(t *testing.T) {
	t.Parallel()
	// The clock goes by minutes, perhaps in the middle of the work on the pod.
	l := newFixture(t, inPlace, func(o *Options) { o.PodTimeout = 24 * time.Hour })
	p := crashing("web").at("10.88.0.2/24")
	l.set(p)
	l.run()
	l.waitForEvent(p, "Warning", ReasonRepaired, "no network namespace of it is found", "delete the pod")
	for i := range 60 {
		l.clock.Step(time.Minute)
		if i%10 == 0 {
			l.Start(l.Host) // the node changes, and with it the numbers in the log
		}
		l.waitForWorker()
	}
	if fails := l.repaired(metrics.RepairPod, metrics.RepairFail); fails < 20 || fails > 70 {
		t.Errorf("%d tries in an hour", fails)
	}
	// Equal events are one, whose count the API server is given from time to time.
	if got := l.events(p); len(got) != 1 || got[0].Count < 10 {
		t.Errorf("%d events: %v", len(got), got)
	}
	if n := l.requests("/namespaces/shop/events"); n > 13 {
		t.Errorf("%d requests about the pod's events in an hour", n)
	}
	path := l.Sandbox(p.ips...)
	l.Mount(path, "late")
	l.clock.Step(3 * time.Minute)
	l.waitForEvent(p, "Normal", ReasonRepaired, "redirected now")
}

// TestAFlappingPodIsWorkedOnOnce sends a hundred news of pods for which there is nothing left to do.
func TestAFlappingPodIsWorkedOnOnce(t *testing.T) {
	t.Parallel()
	for _, switches := range []repair.Switches{inPlace, labelled, nothing} {
		t.Run(string(switches.Modes()[0]), func(t *testing.T) {
			t.Parallel()
			l := newFixture(t, switches)
			p := crashing("web").at("10.88.0.2/24")
			l.place(p)
			l.run()
			l.waitForAction(p, switches.Modes()[0])
			labels, _ := l.fetch(p)
			for i := range 100 {
				p.labels = object{"i": string(rune('a' + i%26))}
				for key, value := range labels {
					p.labels[key] = value
				}
				l.set(p)
			}
			l.waitForWorker()
			l.end()
			l.oneEvent(p)
			if got := l.writes(); len(got) > 1 {
				t.Errorf("requests %q", got)
			}
		})
	}
}

// TestAPodThatGoesWhileItIsWorkedOn leaves nothing behind, in the gauge least of all.
func TestAPodThatGoesWhileItIsWorkedOn(t *testing.T) {
	t.Parallel()
	for _, switches := range []repair.Switches{deleting, labelled} {
		t.Run(string(switches.Modes()[0]), func(t *testing.T) {
			t.Parallel()
			l := newFixture(t, switches)
			p := crashing("web")
			l.set(p)
			l.server.FailOn("/pods/web", kubetest.Hang, 1)
			l.run()
			agenttest.Eventually(t, "nothing is done", func() bool { return len(l.writes()) == 1 })
			l.server.Delete(p.path())
			l.clock.Step(time.Minute)
			agenttest.Eventually(t, "the answer is still awaited", func() bool {
				return l.repaired(counted[switches], metrics.RepairFail) == 1
			})
			l.waitForWorker()
			l.clock.Step(time.Hour)
			l.waitForWorker()
			l.waitForStates(0, 0, 0, 0)
			if got := l.writes(); len(got) != 1 {
				t.Errorf("requests %q", got)
			}
		})
	}
}

// TestAPodThatIsGoneAlreadyIsNoFailure : the pod ended before the watch has delivered that.
func TestAPodThatIsGoneAlreadyIsNoFailure(t *testing.T) {
	t.Parallel()
	for _, switches := range []repair.Switches{deleting, labelled} {
		l := newFixture(t, switches)
		l.server.FailOn("/pods/web", kubetest.NotFound, 1)
		p := crashing("web")
		l.set(p)
		l.run()
		l.waitForCount(counted[switches], metrics.RepairSkip, 1)
		l.waitForCount(counted[switches], metrics.RepairFail, 0)
		l.noEvents(p)
	}
}
