package racerepair

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
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

// checked is the time of the pod's last inspection.
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
	if fmt.Sprint(got) != fmt.Sprint(want) {
		l.Errorf("events %v, want %v: %v", got, want, l.events(p))
	}
}

// TestOneFaultIsOneEvent: race repair and the audit look at the same pods.
func TestOneFaultIsOneEvent(t *testing.T) {
	t.Parallel()
	unproven := podSpec{name: "web", uid: "u", phase: "Running"}.at("10.88.0.2/24")
	for name, test := range map[string]struct {
		switches repair.Switches
		mode     AuditSettings
		want     []kube.EventReason
	}{
		"reports":            {nothing, AuditSettings{}, []kube.EventReason{ReasonBroken}},
		"repairs in place":   {inPlace, AuditSettings{}, []kube.EventReason{ReasonRepaired}},
		"both repair":        {inPlace, AuditSettings{Repair: true}, []kube.EventReason{ReasonRepaired}},
		"the audit restores": {nothing, AuditSettings{Repair: true}, []kube.EventReason{ReasonRepaired}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test.mode.Interval = time.Minute
			l := newFixture(t, test.switches, func(o *Options) { o.Audit = test.mode })
			path := l.place(unproven)
			c := New(l.options)
			l.stops = append(l.stops, agenttest.Go(t, c.Run))
			agenttest.Eventually(t, "the pod is not known", func() bool { _, err := c.Check(t.Context(), web); return err == nil })
			for range 3 {
				l.clock.Step(confirmAfter)
				_, err := c.Check(t.Context(), web)
				l.Do(err)
			}
			if repaired := test.switches.InPlace || test.mode.Repair; captured(t, path) != repaired {
				t.Errorf("captured: %v", !repaired)
			}
			l.wantEvents(unproven, test.want...)
		})
	}
}

// TestTwoControllers: another controller repairs selected pods, and this one audits all of them.
func TestTwoControllers(t *testing.T) {
	t.Parallel()
	l := newFixture(t, nothing)
	p := podSpec{name: "web", uid: "u", phase: "Running"}.at("10.88.0.2/24")
	l.place(p)
	repairs, audits := l.options, l.options
	repairs.AuditedNode = node1
	other := New(repairs)
	audits.Audit, audits.AuditOnly, audits.Reports = AuditSettings{Interval: time.Minute}, true, other.Reports
	c := New(audits)
	l.stops = append(l.stops, agenttest.Go(t, other.Run))
	agenttest.Eventually(t, "it is not reported", func() bool {
		l.clock.Step(confirmAfter)
		return len(l.events(p)) > 0
	})
	agenttest.Eventually(t, "the other one does not report it", func() bool { return other.Reports(kubePod(p)) })
	l.stops = append(l.stops, agenttest.Go(t, c.Run))
	agenttest.Eventually(t, "the pod is not known", func() bool {
		s, err := c.Check(t.Context(), web)
		return err == nil && s.State == audit.Bypassed
	})
	l.waitForStates(0, 1, 0, 0)
	l.wantEvents(p, ReasonBroken)
}

func kubePod(p podSpec) kube.Pod { return p.nodePod() }

// TestTheGaugeSaysWhatIs: the validation has found the redirection, which is gone by now; a change of the pod does not bring it back.
func TestTheGaugeSaysWhatIs(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, AuditSettings{}, cniconf.NetConf{})
	l.want(audit.Captured, "")
	l.waitForStates(1, 0, 0, 0)
	netnstest.Run(t, l.path, "nft", "flush", "ruleset")
	l.want(audit.Bypassed, "")
	l.pod.labels = object{"app": "web"}
	l.publish(nil)
	l.waitForWorker()
	l.waitForStates(0, 1, 0, 0)
	l.pod.phase = "Succeeded"
	l.publish(nil)
	agenttest.Eventually(t, "an ended pod has a state", func() bool { return len(l.controller.Pods()) == 0 })
	l.waitForWorker()
	if s, err := l.controller.Check(t.Context(), web); err != nil || s.State != "" {
		t.Errorf("got %+v, %v", s, err)
	}
	l.wantEvents(l.pod, ReasonBroken)
}

// TestAPodEndsWhileItIsInspected: whatever the search finds then, it is no state and no event.
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
			l = newAuditFixture(t, AuditSettings{Repair: true}, cniconf.NetConf{}, func(o *Options) {
				find := o.Find
				o.Find = func(ctx context.Context, pod sandbox.Pod) (*sandbox.Namespace, error) {
					if !ends.Load() {
						return find(ctx, pod)
					}
					end(l)
					agenttest.Eventually(t, "the pod is still known", func() bool {
						l.controller.mu.Lock()
						defer l.controller.mu.Unlock()
						e := l.controller.pods[web]
						return e == nil || !inspectable(e.pod)
					})
					return nil, &sandbox.Error{Err: sandbox.ErrNotFound}
				}
			})
			first := l.pod
			l.want(audit.Captured, "")
			ends.Store(true)
			_, _ = l.controller.Check(t.Context(), web) // its answer is about the moment before or after
			if all := l.controller.Pods(); len(all) > 0 {
				t.Errorf("got %+v", all)
			}
			l.waitForStates(0, 0, 0, 0)
			l.wantEvents(first)
		})
	}
}

// TestALostNamespaceIsConfirmed: the sandbox of a pod that ends is gone before its object shows that.
func TestALostNamespaceIsConfirmed(t *testing.T) {
	t.Parallel()
	var lost atomic.Bool
	l := newAuditFixture(t, AuditSettings{}, cniconf.NetConf{}, func(o *Options) {
		find := o.Find
		o.Find = func(ctx context.Context, pod sandbox.Pod) (*sandbox.Namespace, error) {
			if lost.Load() {
				return nil, &sandbox.Error{Err: sandbox.ErrNotFound}
			}
			return find(ctx, pod)
		}
	})
	l.want(audit.Captured, "")
	lost.Store(true)
	l.end() // inspections by hand
	ctx := t.Context()
	inspect := func() {
		l.Helper()
		l.controller.mu.Lock()
		e := l.controller.pods[web]
		e.waiting, e.audited.place = append(e.waiting, make(chan struct{})), place{}
		l.controller.mu.Unlock()
		l.Do(l.controller.reconcile(ctx, web))
	}
	inspect()
	if s := l.controller.Pods()[0]; s.State != audit.Captured {
		t.Errorf("after one failure: %+v", s)
	}
	l.clock.Step(confirmation)
	inspect()
	if s := l.controller.Pods()[0]; s.State != audit.NotInspected || !strings.Contains(s.Why(), "no network namespace of it is found") {
		t.Errorf("after two failures: %+v", s)
	}
	l.waitForStates(0, 0, 0, 1)
}

// TestARepairThatDoesNotLast: a program removes the rules after each repair.
func TestARepairThatDoesNotLast(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, AuditSettings{Repair: true}, cniconf.NetConf{})
	l.want(audit.Captured, "")
	for range 64 { // intervals
		netnstest.Run(t, l.path, "nft", "flush", "ruleset")
		l.step(time.Minute)
	}
	const repairs = 7 // at 1, 2, 4, 8, 16, 32 and 64 minutes
	if got := l.metric(`istio_cni_audit_repairs_total{result="success"}`); got != repairs {
		t.Errorf("%d repairs", got)
	}
	l.end()
	events := 0
	for _, e := range l.events(l.pod) {
		events += int(e.Count)
	}
	if events > 2*repairs {
		t.Errorf("%d events: %v", events, l.events(l.pod))
	}
}

// TestAPodHasNoTimerOfItsOwn: neither changes of a pod nor requests add timers.
func TestAPodHasNoTimerOfItsOwn(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, AuditSettings{}, cniconf.NetConf{})
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
	if _, err := l.controller.Check(t.Context(), web); !errors.Is(err, errEnded) {
		t.Errorf("after the end: %v", err)
	}
}

// crowd makes n pods of the mesh known, none with a namespace.
func (l *fixture) crowd(c *Controller, n int) {
	for i := range n {
		p := podSpec{name: fmt.Sprintf("web-%d", i), uid: fmt.Sprint(i), now: ended(0, agenttest.Start()), phase: "Running"}
		c.update(p.at(fmt.Sprintf("10.9.%d.%d/16", i/250, i%250)).nodePod())
	}
	c.syncOnce.Do(func() { close(c.synced) })
}

// TestRequestsShareInspections: many requests for a check inspect each pod once, few at a time, and leave a worker to race repair.
func TestRequestsShareInspections(t *testing.T) {
	t.Parallel()
	var running, most atomic.Int64
	release := make(chan struct{})
	l := newFixture(t, nothing, func(o *Options) {
		o.Audit, o.AuditOnly, o.Workers = AuditSettings{Interval: time.Hour}, true, 0
		o.Follow = func(ctx context.Context, _ kube.Listener[kube.Pod]) { <-ctx.Done() }
		find := o.Find
		o.Find = func(ctx context.Context, pod sandbox.Pod) (*sandbox.Namespace, error) {
			most.Store(max(most.Load(), running.Add(1)))
			defer running.Add(-1)
			<-release
			return find(ctx, pod)
		}
	})
	c := New(l.options)
	const pods = 110
	l.crowd(c, pods)
	l.stops = append(l.stops, agenttest.Go(t, c.Run))
	agenttest.Eventually(t, "the pods are not due", func() bool {
		for _, k := range c.keys() {
			if !c.checkedBefore(k, agenttest.Start().Add(time.Hour)) {
				return false
			}
		}
		return true
	})
	var work sync.WaitGroup
	for range 20 {
		work.Go(func() {
			w := httptest.NewRecorder()
			c.Handler(Socket).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/v1/audit?"+agentapi.CheckParam+"=true", nil))
			if got := strings.Count(w.Body.String(), `"state": "not-inspected"`); got != 2*pods {
				t.Errorf("%d pods in the answer", got)
			}
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

// TestManyPods: the list of 5,000 pods is bounded in memory.
func TestManyPods(t *testing.T) { //nolint:paralleltest // it measures the memory of the process
	l := newFixture(t, nothing, func(o *Options) { o.Audit = AuditSettings{Interval: time.Hour} })
	c := New(l.options)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	const pods = 5000
	l.crowd(c, pods)
	for _, e := range c.pods {
		j := &job{controller: c.controller, pod: e.pod}
		j.setStatus([]audit.Problem{{State: audit.Drifted, Detail: strings.Repeat("x", 1024)}})
		e.audited = j.memory.audited
	}
	l.options.Metrics.ReadAudit(c.Pods, time.Now)
	runtime.GC()
	runtime.ReadMemStats(&after)
	if each := int64(after.HeapAlloc-before.HeapAlloc) / pods; each > 16<<10 {
		t.Errorf("%d bytes for each pod", each)
	}
	w := httptest.NewRecorder()
	c.Handler(Socket).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/v1/audit", nil))
	if got := strings.Count(w.Body.String(), `"drifted"`); got != 2*pods && got != pods {
		t.Errorf("%d pods in the list", got)
	}
	if got := strings.Count(string(l.options.Metrics.Text()), "istio_cni_audit_offender{"); got != 100 {
		t.Errorf("%d series of offenders", got)
	}
}

// TestTriggers: a change that matters is inspected at once, without a step of the clock; any other is not.
func TestTriggers(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, AuditSettings{}, cniconf.NetConf{})
	l.want(audit.Captured, "")
	checked := func() int { // the number of inspections since the last search
		l.controller.mu.Lock()
		defer l.controller.mu.Unlock()
		return l.controller.pods[web].audited.place.uses
	}
	state := func() audit.State { return l.controller.Pods()[0].State }
	before := checked()
	for i := range 5 {
		l.pod.labels = object{"n": fmt.Sprint(i)}
		l.publish(nil)
		l.waitForWorker()
	}
	if after := checked(); after > before+1 { // the one that was due at the start
		t.Errorf("%d inspections after changes of a label", after-before)
	}
	netnstest.Run(t, l.path, "nft", "flush", "ruleset")
	l.publish(running())
	agenttest.Eventually(t, "a container that starts is no trigger", func() bool { return state() == audit.Bypassed })
	l.program(l.path)
	l.pod.annotations = object{"traffic.sidecar.istio.io/excludeOutboundPorts": "5432"}
	l.publish(running())
	agenttest.Eventually(t, "an annotation is no trigger", func() bool { return state() == audit.Drifted })
	l.pod.annotations = nil
	l.publish(running())
	agenttest.Eventually(t, "an annotation that goes is no trigger", func() bool { return state() == audit.Captured })
	l.conf.Store(&cniconf.NetConf{ExcludeNamespaces: []string{"shop"}})
	agenttest.Eventually(t, "the plugin's configuration is no trigger", func() bool {
		l.clock.Step(policyInterval)
		return state() == audit.Outside
	})
}

// TestSettingsOfARunningPodApplyFromItsNextStart: the audit reports that they differ, and writes rules only if some are lost.
func TestSettingsOfARunningPodApplyFromItsNextStart(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, AuditSettings{Repair: true}, cniconf.NetConf{})
	l.want(audit.Captured, "")
	before := netnstest.Run(t, l.path, "nft", "-s", "list", "ruleset")
	l.pod.annotations = object{"traffic.sidecar.istio.io/excludeOutboundPorts": "5432"}
	l.publish(nil)
	agenttest.Eventually(t, "the annotation is no trigger", func() bool { return l.check().State == audit.Drifted })
	for range 3 {
		l.clock.Step(10 * time.Minute)
		l.want(audit.Drifted, "until it is restarted")
	}
	if after := netnstest.Run(t, l.path, "nft", "-s", "list", "ruleset"); after != before {
		t.Errorf("the rules were\n%s\nand are\n%s", before, after)
	}
	netnstest.Run(t, l.path, "iptables-nft", "-t", "nat", "-F", "OUTPUT")
	l.want(audit.Captured, "")
	if rules := netnstest.Run(t, l.path, "iptables-save"); !strings.Contains(rules, "5432") {
		t.Errorf("the repair wrote other rules than the wanted ones:\n%s", rules)
	}
}

// TestAPodThatWaitsIsListed: left out, it would pass for one that is captured.
func TestAPodThatWaitsIsListed(t *testing.T) {
	t.Parallel()
	c := New(newAuditFixture(t, AuditSettings{}, cniconf.NetConf{}).options)
	if c.Synced() {
		t.Error("a controller that has not begun knows the pods")
	}
	e := &entry{}
	e.audited.due = time.Now()
	c.pods[web] = e
	if all := c.Pods(); len(all) != 1 || all[0].State != audit.NotInspected || !all[0].Faulty() || all[0].Why() != "it waits for its first inspection" {
		t.Errorf("got %+v", all)
	}
}

// TestTheAuditRepairsNoMoreThanRaceRepair: it writes no rule where race repair would not.
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
			l := newAuditFixture(t, AuditSettings{Repair: true}, cniconf.NetConf{})
			l.want(audit.Captured, "")
			l.end()
			netnstest.Run(t, l.path, "nft", "flush", "ruleset")
			test.change(l)
			l.publish(nil)
			l.controller = New(l.options)
			l.stops = append(l.stops, agenttest.Go(t, l.controller.Run))
			var s audit.Status
			agenttest.Eventually(t, "the pod is not known", func() (known bool) {
				var err error
				s, err = l.controller.Check(t.Context(), web)
				return err == nil
			})
			if s.State != test.want {
				t.Errorf("got %+v, want %q", s, test.want)
			}
			l.untouched(l.path)
		})
	}
}

// TestTheAuditTakesOnePercent after a burst.
func TestTheAuditTakesOnePercent(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, AuditSettings{}, cniconf.NetConf{})
	c := New(l.options)
	for i := range 10 {
		if pause := c.pauseAfter(burst / 10); pause != 0 {
			t.Errorf("inspection %d: a pause of %s", i, pause)
		}
	}
	for _, test := range []struct{ took, want time.Duration }{
		{2 * time.Millisecond, 200 * time.Millisecond}, {48 * time.Millisecond, 4800 * time.Millisecond}, {time.Hour, 10 * time.Second},
	} {
		pause := c.pauseAfter(test.took)
		if pause.Round(time.Millisecond) != test.want {
			t.Errorf("a pause of %s after %s, want %s", pause, test.took, test.want)
		}
		l.clock.Step(pause)
	}
	l.clock.Step(duty * burst)
	if pause := c.pauseAfter(slow); pause != 0 {
		t.Errorf("a pause of %s after a calm time", pause)
	}
}
