package taint

import (
	"context"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/eventrecorder"
	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// fixture is an API server and a controller.
type fixture struct {
	*testing.T
	server  *kubetest.Server
	clock   *clocktesting.FakeClock
	log     agenttest.Buffer
	options Options
}

func untaint() readiness.Policy {
	return readiness.Policy{
		Taint: readiness.Taint{Key: readiness.UntaintKey, Value: "true", Effect: readiness.NoSchedule}, AnyEffect: true,
		Settle: 2 * time.Minute, GracePeriod: 2 * time.Minute,
		Requirements: []readiness.Requirement{{Name: "agent", Namespaces: []string{"istio-system"}, Selector: readiness.AgentSelector}},
	}
}

func adding() readiness.Policy {
	p := untaint()
	p.AddTaint = true
	return p
}

func legacy() readiness.Policy {
	p := adding()
	p.Taint = readiness.Taint{Key: readiness.LegacyKey, Effect: readiness.NoSchedule}
	p.AnyEffect, p.RequireNodeReady, p.GracePeriod, p.Requirements = false, true, 0, nil
	return p
}

func newFixture(t *testing.T, policy readiness.Policy) *fixture {
	t.Helper()
	l := &fixture{T: t, server: kubetest.NewServer(t), clock: agenttest.NewClock()}
	api, err := kube.NewClient(kube.Config{
		Kubeconfig: l.server.Kubeconfig(t), Timeout: time.Minute, IdleTimeout: time.Hour,
		Backoff: &wait.Backoff{Duration: time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 3, Cap: 4 * time.Millisecond},
	})
	check.OK(l, err)
	l.Cleanup(api.Close)
	log := slog.New(slog.NewTextHandler(&l.log, nil))
	counts := metrics.NewTaint("test")
	recorder := eventrecorder.New(api, eventrecorder.Options{Log: log, Count: counts.EventReported, Clock: l.clock})
	l.Cleanup(recorder.Shutdown)
	l.options = Options{
		API: api, Events: recorder, Clock: l.clock, Log: log, Policy: policy, Metrics: counts,
		Health: health.NewState(health.Options{Now: l.clock.Now}, Parts()...), Host: "node-0",
	}
	return l
}

// run starts the controller; it ends with the test.
func (l *fixture) run() {
	l.Helper()
	agenttest.Go(l.T, func(ctx context.Context) { Run(ctx, l.options) })
}

func (l *fixture) ready() bool { return l.options.Health.Snapshot().Ready }

type object = map[string]any

// nodeSpec has the fields of a node that a test sets.
type nodeSpec struct {
	taints    []object
	heartbeat time.Time
	unready   bool
}

func ourTaint() object {
	return object{"key": readiness.UntaintKey, "value": "true", "effect": "NoSchedule"}
}

func otherTaint() object {
	return object{"key": "other", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z", "new": "field"}
}

func (l *fixture) node(name string, spec nodeSpec) {
	l.Helper()
	if spec.heartbeat.IsZero() {
		spec.heartbeat = l.clock.Now()
	}
	ready := "True"
	if spec.unready {
		ready = "False"
	}
	whole := object{
		"kind": "Node", "apiVersion": "v1",
		"metadata": object{"name": name, "creationTimestamp": agenttest.Start().Add(-48 * time.Hour).Format(time.RFC3339)},
		"spec":     object{},
		"status": object{
			"nodeInfo": object{"bootID": "boot-1"},
			"conditions": []object{
				{"type": "MemoryPressure", "status": "False"},
				{
					"type": "Ready", "status": ready, "lastTransitionTime": yesterday().Format(time.RFC3339),
					"lastHeartbeatTime": spec.heartbeat.Format(time.RFC3339),
				},
			},
		},
	}
	if spec.taints != nil {
		whole["spec"] = object{"taints": spec.taints}
	}
	l.set(whole)
}

func (l *fixture) set(whole object) {
	l.Helper()
	data, err := json.Marshal(whole)
	check.OK(l, err)
	l.server.Set(data)
}

// pod creates or updates an agent pod of a node.
func (l *fixture) pod(node, name, ready string, since time.Time) {
	l.Helper()
	l.labelledPod(node, name, ready, since, object{"k8s-app": "istio-cni-node"})
}

func (l *fixture) labelledPod(node, name, ready string, since time.Time, labels object) {
	l.Helper()
	l.set(object{
		"kind": "Pod", "apiVersion": "v1",
		"metadata": object{"namespace": "istio-system", "name": name, "labels": labels},
		"spec":     object{"nodeName": node},
		"status": object{"conditions": []object{
			{"type": "Ready", "status": ready, "lastTransitionTime": since.Format(time.RFC3339)},
		}},
	})
}

// fetch returns an object of the server.
func (l *fixture) fetch(path string) object {
	l.Helper()
	var whole object
	if data := l.server.Object(path); data != nil {
		check.OK(l, json.Unmarshal(data, &whole))
	}
	return whole
}

// taints returns the taints of the node "n".
func (l *fixture) taints() []any {
	l.Helper()
	spec, _ := l.fetch("/api/v1/nodes/n")["spec"].(object)
	taints, _ := spec["taints"].([]any)
	return taints
}

func (l *fixture) untainted() bool { l.Helper(); return len(l.taints()) == 0 }
func (l *fixture) tainted() bool   { l.Helper(); return len(l.taints()) > 0 }

// patches counts the requests so far that change nodes.
func (l *fixture) patches() int {
	return strings.Count(strings.Join(l.server.Requests(), "\n"), "PATCH /api/v1/nodes/")
}

// decided counts the decisions for a reason.
func (l *fixture) decided(reason readiness.Reason) int {
	return l.metric(`istio_cni_taint_decisions_total{reason="` + string(reason) + `"}`)
}

func (l *fixture) metric(name string) int {
	l.Helper()
	return agenttest.Metric(l.T, l.options.Metrics.Text(), name)
}

// stepUntil steps the clock until a condition holds.
func (l *fixture) stepUntil(otherwise string, holds func() bool) {
	l.Helper()
	agenttest.Eventually(l.T, otherwise, func() bool {
		if holds() {
			return true
		}
		l.clock.Step(time.Second)
		return false
	})
}

// after calls do and waits until it has led to one more decision for a reason.
func (l *fixture) after(reason readiness.Reason, do func()) {
	l.Helper()
	before := l.decided(reason)
	do()
	agenttest.Eventually(l.T, "no decision for "+string(reason), func() bool { return l.decided(reason) > before })
}
