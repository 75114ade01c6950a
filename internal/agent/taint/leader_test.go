package taint

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
)

const leasePath = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/istio-taint-lock"

func (l *lab) leaseSpec() object {
	l.Helper()
	spec, _ := l.fetch(leasePath)["spec"].(object)
	return spec
}

func (l *lab) holder() string {
	holder, _ := l.leaseSpec()["holderIdentity"].(string)
	return holder
}

// candidate is a replica that is not started, with the lease of the legacy controller.
func candidate(t *testing.T) (*lab, Options) {
	t.Helper()
	l := newLab(t, untaint())
	l.options.Lease = &Lease{
		Namespace: "kube-system", Name: "istio-taint-lock", Identity: "a",
		Duration: 60 * time.Second, Deadline: 15 * time.Second, Retry: 5 * time.Second,
	}
	return l, l.options
}

func leads(o Options) bool {
	return strings.Contains(string(o.Metrics.Text()), "istio_cni_taint_leader 1\n")
}

func TestTheLeaseIsWrittenAsOthersDo(t *testing.T) {
	l, a := candidate(t)
	stop := l.start(a)
	until(t, "it never leads", func() bool { return leads(a) })
	want := object{
		"holderIdentity": "a", "leaseDurationSeconds": 60.0, "acquireTime": "2026-01-01T12:00:00.000000Z",
		"renewTime": "2026-01-01T12:00:00.000000Z", "leaseTransitions": 0.0,
	}
	if diff := cmp.Diff(want, l.leaseSpec()); diff != "" {
		t.Errorf("taken (-want +got):\n%s", diff)
	}
	// What others put into it stays.
	l.server.Edit(leasePath, func(whole object) {
		metadata, _ := whole["metadata"].(object)
		metadata["annotations"] = object{"who": "me"}
		spec, _ := whole["spec"].(object)
		spec["strategy"] = "OldestEmulationVersion"
	})
	want["renewTime"], want["strategy"] = "2026-01-01T12:00:05.000000Z", "OldestEmulationVersion"
	l.turnUntil("it is not renewed", 5*time.Second, func() bool { return l.leaseSpec()["renewTime"] == want["renewTime"] })
	if diff := cmp.Diff(want, l.leaseSpec()); diff != "" {
		t.Errorf("renewed (-want +got):\n%s", diff)
	}
	stop()
	want["holderIdentity"], want["leaseDurationSeconds"] = "", 1.0
	want["acquireTime"] = want["renewTime"]
	if diff := cmp.Diff(want, l.leaseSpec()); diff != "" {
		t.Errorf("given back (-want +got):\n%s", diff)
	}
	metadata, _ := l.fetch(leasePath)["metadata"].(object)
	if metadata["annotations"] == nil {
		t.Error("the annotations are gone")
	}
}

// turnUntil turns the clock once and then waits; a renewal waits for the clock alone, beside the queue.
func (l *lab) turnUntil(otherwise string, d time.Duration, holds func() bool) {
	l.Helper()
	until(l.T, "nobody waits for the clock", func() bool { return l.clock.Waiters() > 1 })
	l.clock.Step(d)
	until(l.T, otherwise, holds)
}

func TestALeaderThatCannotRenewEndsBeforeTheLeaseDoes(t *testing.T) {
	l, a := candidate(t)
	l.node("n", nodeSpec{taints: []object{ourTaint()}})
	l.pod("n", "agent", "False", yesterday())
	l.start(a)
	until(t, "a never leads", func() bool { return leads(a) })
	l.server.FailOn("PUT "+leasePath, kubetest.ServerError, kubetest.Forever)
	l.server.FailOn("GET "+leasePath, kubetest.ServerError, kubetest.Forever)
	until(t, "a goes on", func() bool {
		l.clock.Step(time.Second)
		return !leads(a)
	})
	if a.Health.Snapshot().Ready {
		t.Error("nobody is told")
	}
	// It does nothing any more.
	l.pod("n", "agent", "True", agenttest.Start())
	before := l.patches()
	l.server.Heal()
	until(t, "a never leads again", func() bool { l.clock.Step(time.Second); return leads(a) })
	l.wantTaints("n")
	if before != 0 {
		t.Errorf("%d patches without the lease", before)
	}
	until(t, "a stays unready", func() bool { return a.Health.Snapshot().Ready })
}

func TestALeaseThatWasDeletedIsMadeAgain(t *testing.T) {
	l, a := candidate(t)
	l.start(a)
	until(t, "a never leads", func() bool { return leads(a) })
	l.server.Delete(leasePath)
	until(t, "it is not made again", func() bool { l.clock.Step(time.Second); return l.holder() == "a" })
	if !leads(a) {
		t.Error("a lost it")
	}
}

// TestTheClockOfADeadLeaderDoesNotMatter: a lease ends as long after it was read as its duration says.
func TestTheClockOfADeadLeaderDoesNotMatter(t *testing.T) {
	l, a := candidate(t)
	l.set(object{
		"kind": "Lease", "apiVersion": "coordination.k8s.io/v1",
		"metadata": object{"namespace": "kube-system", "name": "istio-taint-lock"},
		"spec": object{
			"holderIdentity": "dead", "leaseDurationSeconds": 60, "leaseTransitions": 7,
			"acquireTime": "2031-01-01T12:00:00.000000Z", "renewTime": "2031-01-01T12:00:00.000000Z",
		},
	})
	l.start(a)
	until(t, "a never looks", func() bool { return a.Health.Snapshot().Ready })
	until(t, "a never leads", func() bool {
		if leads(a) {
			return true
		}
		l.clock.Step(time.Second)
		return false
	})
	if waited := l.clock.Now().Sub(agenttest.Start()); waited < 60*time.Second {
		t.Errorf("a waited for %s only", waited)
	}
	if got := l.leaseSpec()["leaseTransitions"]; got != 8.0 {
		t.Errorf("%v transitions", got)
	}
}
