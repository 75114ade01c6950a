package racerepair

import (
	"context"
	"maps"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// TestAChangeOfASlowPodWaits: a tenant can fill a namespace with rules, and change an annotation as often as he wants.
func TestAChangeOfASlowPodWaits(t *testing.T) {
	t.Parallel()
	for name, took := range map[string]time.Duration{"quick": 0, "slow": 10 * time.Second} {
		l := newAuditFixture(t, AuditSettings{}, cniconf.NetConf{})
		l.want(audit.Captured, "")
		l.end()
		e := l.controller.pods[web]
		e.audited.took = took
		j := &job{controller: l.controller.controller, pod: e.pod, memory: e.memory}
		j.pod.Facts.Annotations = maps.Clone(j.pod.Facts.Annotations)
		j.pod.Facts.Annotations["traffic.sidecar.istio.io/excludeOutboundPorts"] = "5432"
		j.conf, _ = j.Plugin()
		j.decision = sidecar.Decide(j.pod.Facts, j.conf.Policy())
		j.audit(t.Context())
		if got, want := j.memory.audited.due, l.clock.Now().Add(duty*took); !got.Equal(want) {
			t.Errorf("%s: due in %s, want %s", name, got.Sub(l.clock.Now()), want.Sub(l.clock.Now()))
		}
	}
}

// TestManyProcessesDelayNoPod: the list of processes is as old as its cost demands, and no inspection of a pod counts as slow for it.
func TestManyProcessesDelayNoPod(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, AuditSettings{}, cniconf.NetConf{})
	l.want(audit.Captured, "")
	l.end()
	lists := 0
	c := New(l.options)
	c.Processes = func(context.Context) (map[string][]sandbox.Process, error) {
		lists++
		l.clock.Step(10 * time.Second)
		return map[string][]sandbox.Process{}, nil
	}
	e := l.controller.pods[web]
	c.pods[web] = e
	verify := func(after time.Duration) {
		l.clock.Step(after)
		j := &job{controller: c.controller, pod: e.pod, log: c.Log}
		j.conf, _ = c.Plugin()
		j.decision = sidecar.Decide(j.pod.Facts, j.conf.Policy())
		j.verify(t.Context())
		if took := j.memory.audited.took; took != 0 {
			t.Errorf("the inspection took %s", took)
		}
	}
	verify(0)
	verify(2 * scanInterval)
	if lists != 1 {
		t.Errorf("%d lists of processes within %s", lists, 2*scanInterval)
	}
	verify(1000 * time.Second)
	if lists != 2 {
		t.Errorf("%d lists of processes", lists)
	}
}
