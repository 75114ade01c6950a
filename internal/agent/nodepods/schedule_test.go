package nodepods

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/podcache"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/agent/racerepair"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/test/check"
)

var web = types.NamespacedName{Namespace: "shop", Name: "web"}

// step steps the clock until the pod is inspected again.
func (l *auditFixture) step(by time.Duration) {
	l.Helper()
	before := l.checked()
	agenttest.Eventually(l.T, "no timer runs", func() bool { return l.clock.HasWaiters() })
	l.clock.Step(by)
	agenttest.Eventually(l.T, "the pod is not inspected again", func() bool { return l.checked().After(before) })
}

// checked returns the time of the pod's last inspection.
func (l *auditFixture) checked() (at time.Time) {
	for _, s := range l.controller.Pods() {
		if s.Pod == "web" {
			at = s.Checked
		}
	}
	return at
}

// wantEvents checks the reasons of all events on a pod, after the end of the controller.
func (l *fixture) wantEvents(p podSpec, want ...kube.EventReason) {
	l.Helper()
	l.end()
	var got []kube.EventReason
	for _, e := range l.events(p) {
		for range e.Count {
			got = append(got, kube.EventReason(e.Reason))
		}
	}
	check.Equal(l, fmt.Sprint(got), fmt.Sprint(want), "events", l.events(p))
}

// TestOneFaultIsOneEvent, although race repair and the audit inspect the same pods.
func TestOneFaultIsOneEvent(t *testing.T) {
	t.Parallel()
	unproven := podSpec{name: "web", uid: "u", phase: "Running"}.at("10.88.0.2/24")
	for name, test := range map[string]struct {
		switches repair.Switches
		mode     auditor.Settings
		want     []kube.EventReason
	}{
		"reports":            {nothing, auditor.Settings{}, []kube.EventReason{podwork.ReasonBroken}},
		"repairs in place":   {inPlace, auditor.Settings{}, []kube.EventReason{podwork.ReasonRepaired}},
		"both repair":        {inPlace, auditor.Settings{Repair: true}, []kube.EventReason{podwork.ReasonRepaired}},
		"the audit restores": {nothing, auditor.Settings{Repair: true}, []kube.EventReason{podwork.ReasonRepaired}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test.mode.Interval = time.Minute
			l := newFixture(t, test.switches, func(o *Options) { o.Audit = test.mode })
			path := l.place(unproven)
			c := l.start()
			for range 4 {
				c.statusOf(t, web)
				l.clock.Step(3 * time.Second)
			}
			if repaired := test.switches.InPlace || test.mode.Repair; captured(t, path) != repaired {
				t.Errorf("captured: %v", !repaired)
			}
			l.wantEvents(unproven, test.want...)
		})
	}
}

// TestSelectors_OtherPods: race repair leaves alone the pods that its selectors do not select; the audit only reports them.
func TestSelectors_OtherPods(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*racerepair.Settings){
		"labels": func(s *racerepair.Settings) { s.LabelSelectors = "mine" },
		"fields": func(s *racerepair.Settings) { s.FieldSelectors = "spec.schedulerName=mine" },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newFixture(t, inPlace, func(o *Options) {
				change(o.Repair)
				o.Audit = auditor.Settings{Interval: time.Minute, Repair: true}
				o.Follow = func(ctx context.Context, l kube.Listener[kube.Pod]) { // all pods, like the agent
					o.API.WatchPods(ctx, kube.PodScope{Node: node1, Transform: podcache.Trim(o.Repair.Keeps(), "")}, l)
				}
			})
			p := podSpec{name: "web", uid: "u", phase: "Running"}.at("10.88.0.2/24")
			mine := podSpec{name: "mine", uid: "m", phase: "Running", labels: object{"mine": "yes"}, scheduler: "mine"}.at("10.88.0.3/24")
			path, own := l.place(p), l.place(mine)
			c := l.start()
			agenttest.Eventually(t, "the selected pod is not repaired", func() bool { return captured(t, own) })
			agenttest.Eventually(t, "the pod is not known", func() bool {
				s, err := c.Check(t.Context(), web)
				return err == nil && s.State == audit.Bypassed
			})
			l.waitForStates(1, 1, 0, 0)
			if captured(t, path) {
				t.Error("the other pod is repaired")
			}
			l.wantEvents(p, podwork.ReasonBroken)
		})
	}
}

// TestAPodEndsWhileItIsInspected: whatever the search finds then, there is no state and no event.
func TestAPodEndsWhileItIsInspected(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(l *auditFixture){
		"it is deleted": func(l *auditFixture) { l.server.Delete(l.pod.path()) },
		"it has ended":  func(l *auditFixture) { l.pod.phase = "Succeeded"; l.publish(nil) },
		"it terminates": func(l *auditFixture) { l.pod.deleting = true; l.publish(nil) },
		"another UID":   func(l *auditFixture) { l.pod.uid, l.pod.ips = "u2", nil; l.publish(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var l *auditFixture
			var ends atomic.Bool
			l = newAuditFixture(t, auditor.Settings{Repair: true}, cniconf.NetConf{}, func(o *Options) {
				find := o.Find
				o.Find = func(ctx context.Context, pod sandbox.Pod) (*sandbox.Namespace, error) {
					if !ends.Load() {
						return find(ctx, pod)
					}
					end(l)
					agenttest.Eventually(t, "the pod is still known", func() bool {
						ended := true
						l.controller.pods.Get(web, func(p kube.Pod, _ *memory) { ended = !podwork.Inspectable(p) })
						return ended
					})
					return nil, &sandbox.Error{Err: sandbox.ErrNotFound}
				}
			})
			first := l.pod
			l.want(audit.Captured, "")
			ends.Store(true)
			_, _ = l.controller.Check(t.Context(), web) // either answer is right
			if all := l.controller.Pods(); len(all) > 0 {
				t.Errorf("got %+v", all)
			}
			l.waitForStates(0, 0, 0, 0)
			l.wantEvents(first)
		})
	}
}

// TestALostNamespaceIsConfirmed: the sandbox of an ending pod is gone before the pod object shows the end.
func TestALostNamespaceIsConfirmed(t *testing.T) {
	t.Parallel()
	var lost atomic.Bool
	var l *auditFixture
	l = newAuditFixture(t, auditor.Settings{}, cniconf.NetConf{}, func(o *Options) {
		find := o.Find
		o.Find = func(ctx context.Context, pod sandbox.Pod) (*sandbox.Namespace, error) {
			if lost.Load() {
				l.searches.Add(1)
				return nil, &sandbox.Error{Err: sandbox.ErrNotFound}
			}
			return find(ctx, pod)
		}
	})
	l.want(audit.Captured, "")
	lost.Store(true)
	inspect := func() {
		l.Helper()
		for before := l.searches.Load(); l.searches.Load() == before; { // the place is reused for some inspections
			_, err := l.controller.auditor.InspectNext(t.Context(), web, false)
			l.Do(err)
		}
	}
	inspect()
	if s := l.controller.Pods()[0]; s.State != audit.Captured {
		t.Errorf("after one failure: %+v", s)
	}
	l.clock.Step(10 * time.Second)
	inspect()
	if s := l.controller.Pods()[0]; s.State != audit.NotInspected || !strings.Contains(s.Why(), "its network namespace was not found") {
		t.Errorf("after two failures: %+v", s)
	}
	l.waitForStates(0, 0, 0, 1)
}

// TestARepairThatDoesNotLast: a program removes the rules after each repair.
func TestARepairThatDoesNotLast(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, auditor.Settings{Repair: true}, cniconf.NetConf{})
	l.want(audit.Captured, "")
	for range 64 { // intervals
		netnstest.Run(t, l.path, "nft", "flush", "ruleset")
		l.step(time.Minute)
	}
	const repairs = 7 // at 1, 2, 4, 8, 16, 32 and 64 minutes
	check.Equal(t, l.metric(`istio_cni_audit_repairs_total{result="success"}`), repairs, "repairs")
	l.end()
	events := 0
	for _, e := range l.events(l.pod) {
		events += int(e.Count)
	}
	if events > 2*repairs {
		t.Errorf("%d events: %v", events, l.events(l.pod))
	}
}

// TestAPodHasNoTimerOfItsOwn: neither changes of a pod nor requests create timers.
func TestAPodHasNoTimerOfItsOwn(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, auditor.Settings{}, cniconf.NetConf{})
	l.want(audit.Captured, "")
	before := l.clock.Waiters()
	for i := range 30 {
		l.pod.labels = object{"n": fmt.Sprint(i)}
		l.publish(nil)
		l.want(audit.Captured, "")
	}
	agenttest.Until(t, func() string { return fmt.Sprintf("%d timers, %d before", l.clock.Waiters(), before) }, func() bool {
		return l.clock.Waiters() <= before+2
	})
	l.end()
	check.Fails(t, check.Err(l.controller.Check(t.Context(), web)), "the node agent ends")
}

// TestRequestsShareInspections: many requests for a check inspect each pod once, few at a time, and leave a worker for race repair.
func TestRequestsShareInspections(t *testing.T) {
	t.Parallel()
	var running, most atomic.Int64
	release := make(chan struct{})
	l := newFixture(t, nothing, func(o *Options) {
		o.Audit, o.Repair, o.Workers = auditor.Settings{Interval: time.Hour}, nil, 0
		find := o.Find
		o.Find = func(ctx context.Context, pod sandbox.Pod) (*sandbox.Namespace, error) {
			most.Store(max(most.Load(), running.Add(1)))
			defer running.Add(-1)
			<-release
			return find(ctx, pod)
		}
	})
	feed := l.feed()
	const pods, maxChecks = 110, 2
	c := l.start()
	feed.crowd(pods)
	agenttest.Eventually(t, "the pods are not due", func() bool { return len(c.Pods()) == pods })
	var work sync.WaitGroup
	for range 20 {
		work.Go(func() {
			_, text := c.ask(t.Context(), auditor.Socket, checkAll)
			check.Equal(t, strings.Count(text, `"state": "not-inspected"`), 2*pods, "pods in the answer")
		})
	}
	l.clock.Step(time.Second) // later than every inspection so far
	agenttest.Eventually(t, "nothing is inspected", func() bool { return running.Load() > 0 })
	close(release)
	work.Wait()
	if most.Load() > maxChecks+1 || l.searches.Load() > 4*pods {
		t.Errorf("%d inspections at a time, %d searches", most.Load(), l.searches.Load())
	}
}

// TestTriggers: a relevant change is inspected at once, without a step of the clock; a started container within 15 s; any other change
// is not.
func TestTriggers(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, auditor.Settings{}, cniconf.NetConf{})
	l.want(audit.Captured, "")
	l.waitForWorker() // a step of the clock during a turn would make the pod a slow one
	state := func() audit.State { return l.controller.Pods()[0].State }
	times := map[time.Time]bool{l.checked(): true}
	for i := range 5 {
		l.clock.Step(time.Second)
		l.pod.labels = object{"n": fmt.Sprint(i)}
		l.publish(nil)
		l.waitForWorker()
		times[l.checked()] = true
	}
	if len(times) > 2 { // one was due at the start
		t.Errorf("%d inspections after changes of a label", len(times)-1)
	}
	flush := func() { netnstest.Run(t, l.path, "nft", "flush", "ruleset") }
	l.publish(running())
	l.waitForWorker()
	flush()
	l.restarts = "2"
	l.publish(running())
	agenttest.Eventually(t, "a container that starts again is no trigger", func() bool { return state() == audit.Bypassed })
	l.program(l.path)
	l.pod.annotations = object{"traffic.sidecar.istio.io/excludeOutboundPorts": "5432"}
	l.publish(running())
	agenttest.Eventually(t, "an annotation is no trigger", func() bool { return state() == audit.Drifted })
	l.pod.annotations = nil
	l.publish(running())
	agenttest.Eventually(t, "an annotation that goes is no trigger", func() bool { return state() == audit.Captured })
	flush()
	l.others = []object{{"name": "late", "containerID": "containerd://89", "state": running()}}
	l.publish(running())
	l.waitForWorker()
	check.Equal(t, state(), audit.Captured, "a container that starts is inspected at once")
	l.clock.Step(15 * time.Second)
	agenttest.Eventually(t, "a container that starts is no trigger", func() bool { return state() == audit.Bypassed })
	l.conf.Store(&cniconf.NetConf{ExcludeNamespaces: []string{"shop"}})
	agenttest.Eventually(t, "the plugin's configuration is no trigger", func() bool {
		l.clock.Step(10 * time.Second)
		return state() == audit.Outside
	})
}

// TestSettingsOfARunningPodApplyFromItsNextStart: the audit reports that they differ, and writes rules only if some are lost.
func TestSettingsOfARunningPodApplyFromItsNextStart(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, auditor.Settings{Repair: true}, cniconf.NetConf{})
	l.want(audit.Captured, "")
	before := netnstest.Run(t, l.path, "nft", "-s", "list", "ruleset")
	l.pod.annotations = object{"traffic.sidecar.istio.io/excludeOutboundPorts": "5432"}
	l.publish(nil)
	agenttest.Eventually(t, "the annotation is no trigger", func() bool { return l.check().State == audit.Drifted })
	for range 3 {
		l.waitForWorker() // a turn that is not over would time out by the step
		l.clock.Step(10 * time.Minute)
		l.want(audit.Drifted, "until it is restarted")
	}
	check.Equal(t, netnstest.Run(t, l.path, "nft", "-s", "list", "ruleset"), before, "the rules")
	netnstest.Run(t, l.path, "iptables-nft", "-t", "nat", "-F", "OUTPUT")
	l.want(audit.Captured, "")
	if rules := netnstest.Run(t, l.path, "iptables-save"); !strings.Contains(rules, "5432") {
		t.Errorf("the repair wrote other rules than the wanted ones:\n%s", rules)
	}
}

// TestTheAuditRepairsNoMoreThanRaceRepair: the audit writes rules only where race repair would.
func TestTheAuditRepairsNoMoreThanRaceRepair(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change func(l *auditFixture)
		want   audit.State
	}{
		"refused settings": {func(l *auditFixture) {
			l.pod.annotations = object{"traffic.sidecar.istio.io/excludeOutboundPorts": "x"}
		}, audit.NotInspected},
		"the host's network": {func(l *auditFixture) { l.pod.host = true }, audit.Outside},
		"an unusable configuration": {func(l *auditFixture) {
			l.conf.Store(&cniconf.NetConf{Problems: errors.New("exclude_namespaces: no list")})
		}, audit.NotInspected},
		"no configuration":   {func(l *auditFixture) { l.conf.Store(nil) }, audit.NotInspected},
		"a pod that ends":    {func(l *auditFixture) { l.pod.deleting = true }, ""},
		"without the mesh":   {func(l *auditFixture) { l.pod.plain = true }, audit.Outside},
		"an uncertain place": {func(l *auditFixture) { l.options.Find = nil }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newAuditFixture(t, auditor.Settings{Repair: true}, cniconf.NetConf{})
			l.want(audit.Captured, "")
			l.end()
			netnstest.Run(t, l.path, "nft", "flush", "ruleset")
			test.change(l)
			l.publish(nil)
			l.controller = l.start()
			s := l.check()
			check.Equal(t, s.State, test.want, s)
			l.untouched(l.path)
		})
	}
}
