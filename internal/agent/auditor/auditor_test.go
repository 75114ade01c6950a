package auditor

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/node/sandbox/sandboxtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// fixture is an Auditor with no pods.
type fixture struct {
	*testing.T
	*Auditor

	clock *clocktesting.FakeClock
}

func newFixture(t *testing.T) fixture {
	t.Helper()
	clock := agenttest.NewClock()
	env := &podwork.Env{
		Clock: clock, Log: slog.New(slog.DiscardHandler), Node: "node-1", Plugin: func() (cniconf.NetConf, error) { return cniconf.NetConf{}, nil },
	}
	a := New(Options{Env: env, Settings: Settings{Interval: time.Minute}, Metrics: metrics.NewRepair("test")})
	return fixture{t, a, clock}
}

// work is a turn of a pod whose network namespace is at a path, with listeners of user nobody.
func (f fixture) work(p kube.Pod, m *Memory, path string) *work {
	f.Env.Find = func(context.Context, sandbox.Pod) (*sandbox.Namespace, error) {
		return &sandbox.Namespace{Namespace: netnstest.Open(f.T, path), Source: sandbox.FromCache, Inhabited: true}, nil
	}
	t, end := f.known(p).Look(p.Key())
	f.Cleanup(end)
	return &work{Auditor: f.Auditor, Turn: t, memory: m}
}

// known makes pods known to the Auditor.
func (f fixture) known(all ...kube.Pod) *podwork.Controller[Memory] {
	nothing := func(*Memory) {}
	pods := podwork.New(podwork.Options[Memory]{
		Env: *f.Env, OtherSandbox: nothing, Ended: nothing, Follow: func(_ context.Context, l kube.Listener[kube.Pod]) {
			for _, p := range all {
				l.OnUpdate(p)
			}
		},
	})
	over, cancel := context.WithCancel(f.Context())
	cancel()
	pods.Run(over) // it reads the pods
	f.Pods = pods
	return pods
}

// TestStatuses_PodThatWaits: omitting it would make it look captured.
func TestStatuses_PodThatWaits(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.known(kube.Pod{}).Each(func(_ kube.Pod, m *Memory) { m.due = time.Now() })
	if all := f.Statuses(); len(all) != 1 || all[0].State != audit.NotInspected || !all[0].Faulty() || all[0].Why() != "it waits for its first inspection" {
		t.Errorf("got %+v", all)
	}
}

// TestStatuses_ManyPods: the list of 5,000 pods is bounded in memory, and so are the series of the metric.
func TestStatuses_ManyPods(t *testing.T) { //nolint:paralleltest // it measures the memory of the process
	f := newFixture(t)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	const n = 5000
	var all []kube.Pod
	for i := range n {
		all = append(all, kube.Pod{Facts: sidecar.Facts{Namespace: "shop", Name: fmt.Sprintf("web-%d", i), UID: fmt.Sprint(i)}})
	}
	f.known(all...).Each(func(p kube.Pod, m *Memory) {
		w := &work{Auditor: f.Auditor, Turn: &podwork.Turn{Env: f.Env, Pod: p}, memory: m}
		w.setStatus([]audit.Problem{{State: audit.Drifted, Detail: strings.Repeat("x", 1024)}})
	})
	f.Metrics.ReadAudit(f.Statuses, time.Now)
	runtime.GC()
	runtime.ReadMemStats(&after)
	if each := int64(after.HeapAlloc-before.HeapAlloc) / n; each > 16<<10 {
		t.Errorf("%d bytes for each pod", each)
	}
	check.Equal(t, len(f.Statuses()), n, "pods in the list")
	check.Equal(t, strings.Count(string(f.Metrics.Text()), "istio_cni_audit_offender{"), 100, "series of offenders")
}

// TestBudget_OnePercent: after a burst, the schedule takes one percent of the time.
func TestBudget_OnePercent(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for i := range 10 {
		check.Equal(t, f.pauseAfter(burst/10), 0, "the pause after inspection", i)
	}
	for _, test := range []struct{ took, want time.Duration }{
		{2 * time.Millisecond, 200 * time.Millisecond}, {48 * time.Millisecond, 4800 * time.Millisecond}, {time.Hour, 10 * time.Second},
	} {
		pause := f.pauseAfter(test.took)
		check.Equal(t, pause.Round(time.Millisecond), test.want, "the pause after", test.took)
		f.clock.Step(pause)
	}
	f.clock.Step(duty * burst)
	check.Equal(t, f.pauseAfter(slow), 0, "the pause after a calm time")
}

// TestCharge_ManyRequests: the delay of the schedule does not depend on the number of requests.
func TestCharge_ManyRequests(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for range 100 {
		f.Charge(Port, slow)
	}
	if pause := f.pauseAfter(0); pause.Round(time.Millisecond) > duty*slow {
		t.Errorf("the schedule pauses for %s", pause)
	}
}

// TestObserve_EqualVersion: a request gets freshly read rules, even if their version has not changed since the last inspection.
func TestObserve_EqualVersion(t *testing.T) {
	t.Parallel()
	path := sandboxtest.New(t).Sandbox("10.88.0.2/24")
	space := redirection.Namespace{NetNS: netnstest.Open(t, path), Log: slog.New(slog.DiscardHandler)}
	version, err := space.Version()
	check.OK(t, err)
	for forced, want := range map[bool]int{false: 0, true: 1} {
		f := newFixture(t)
		w := f.work(meshPod(), &Memory{version: version}, path)
		w.forced = forced
		if problems, err := w.observe(t.Context()); err != nil || len(w.memory.rules.problems) != want {
			t.Errorf("forced %v: got %v, %v", forced, problems, err)
		}
	}
}

// meshPod is a pod of the mesh.
func meshPod() kube.Pod {
	return kube.Pod{
		Facts: sidecar.Facts{
			Namespace: "shop", Name: "web", UID: "u", Annotations: map[string]string{sidecar.StatusKey: ""},
			Containers: []sidecar.Container{{Name: sidecar.ValidationContainer, Init: true}, {Name: "istio-proxy", Args: []string{"proxy", "sidecar"}}},
		},
		NodeName: "node-1", Addresses: []netip.Addr{netip.MustParseAddr("10.88.0.2")}, Phase: "Running",
	}
}

// TestAudit_ChangeOfASlowPod: a tenant can fill a namespace with rules, and change an annotation at any rate.
func TestAudit_ChangeOfASlowPod(t *testing.T) {
	t.Parallel()
	for name, took := range map[string]time.Duration{"quick": 0, "slow": 10 * time.Second} {
		f := newFixture(t)
		m := &Memory{took: took, status: audit.Status{State: audit.Captured, Checked: f.clock.Now()}}
		f.work(meshPod(), m, netnstest.New(t)).audit(t.Context())
		if want := f.clock.Now().Add(duty * took); !m.due.Equal(want) {
			t.Errorf("%s: due in %s, want %s", name, m.due.Sub(f.clock.Now()), want.Sub(f.clock.Now()))
		}
	}
}

// TestProcesses_SlowList: a slow list of processes is used for longer, and its time does not make an inspection slow.
func TestProcesses_SlowList(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	lists := 0
	f.Processes = func(context.Context) (map[string][]sandbox.Process, error) {
		lists++
		f.clock.Step(10 * time.Second)
		return map[string][]sandbox.Process{}, nil
	}
	path := netnstest.New(t)
	verify := func(after time.Duration) {
		f.clock.Step(after)
		m := &Memory{}
		f.work(meshPod(), m, path).verify(t.Context())
		check.Equal(t, m.took, 0, "the inspection took")
	}
	verify(0)
	verify(2 * scanInterval)
	check.Equal(t, lists, 1, "lists of processes within", 2*scanInterval)
	verify(1000 * time.Second)
	check.Equal(t, lists, 2, "lists of processes")
}
