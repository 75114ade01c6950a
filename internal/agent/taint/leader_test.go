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

func (l *fixture) leaseSpec() object {
	l.Helper()
	spec, _ := l.fetch(leasePath)["spec"].(object)
	return spec
}

// candidate is a replica that is not started, with the lease of the legacy controller.
func candidate(t *testing.T) *fixture {
	t.Helper()
	l := newFixture(t, untaint())
	l.options.Lease = &Lease{
		Namespace: "kube-system", Name: "istio-taint-lock", Identity: "a",
		Duration: 60 * time.Second, Deadline: 15 * time.Second, Retry: 5 * time.Second,
	}
	return l
}

func (l *fixture) leads() bool { return l.metric("istio_cni_taint_leader") == 1 }

// TestRenewalKeepsForeignFields: e2e/taint TestClientGoLeaderElectionOnTheSameLease and TestLeaderReleasesTheLeaseOnSIGTERM show
// the lease of each other moment.
func TestRenewalKeepsForeignFields(t *testing.T) {
	l := candidate(t)
	l.run()
	agenttest.Eventually(t, "it never leads", l.leads)
	l.server.Edit(leasePath, func(whole object) {
		metadata, _ := whole["metadata"].(object)
		metadata["annotations"] = object{"who": "me"}
		spec, _ := whole["spec"].(object)
		spec["strategy"] = "OldestEmulationVersion"
	})
	want := object{
		"holderIdentity": "a", "leaseDurationSeconds": 60.0, "acquireTime": "2026-01-01T12:00:00.000000Z",
		"renewTime": "2026-01-01T12:00:05.000000Z", "leaseTransitions": 0.0, "strategy": "OldestEmulationVersion",
	}
	agenttest.Eventually(t, "no timer runs for the renewal", func() bool { return l.clock.Waiters() > 1 })
	l.clock.Step(5 * time.Second)
	agenttest.Eventually(t, "it is not renewed", func() bool { return l.leaseSpec()["renewTime"] == want["renewTime"] })
	if diff := cmp.Diff(want, l.leaseSpec()); diff != "" {
		t.Errorf("renewed (-want +got):\n%s", diff)
	}
	metadata, _ := l.fetch(leasePath)["metadata"].(object)
	if metadata["annotations"] == nil {
		t.Error("the annotations are gone")
	}
}

func TestLeaderEndsBeforeALeaseThatItCannotRenew(t *testing.T) {
	l := candidate(t)
	l.node("n", nodeSpec{taints: []object{ourTaint()}})
	l.pod("n", "agent", "False", yesterday())
	l.run()
	agenttest.Eventually(t, "it never leads", l.leads)
	l.server.FailOn("PUT "+leasePath, kubetest.ServerError, kubetest.Forever)
	l.server.FailOn("GET "+leasePath, kubetest.ServerError, kubetest.Forever)
	l.stepUntil("it goes on", func() bool { return !l.leads() })
	if l.ready() {
		t.Error("it is ready")
	}
	// It changes no node any more.
	l.pod("n", "agent", "True", agenttest.Start())
	before := l.patches()
	l.server.Heal()
	l.stepUntil("it never leads again", l.leads)
	agenttest.Eventually(t, "the node stays tainted", l.untainted)
	if before != 0 {
		t.Errorf("%d patches without the lease", before)
	}
	agenttest.Eventually(t, "it stays unready", l.ready)
}

// TestAStoppedLeaderDoesNotRenew: a process that was stopped for longer than Deadline sends no write of the lease, which another
// replica has by then.
func TestAStoppedLeaderDoesNotRenew(t *testing.T) {
	l := candidate(t)
	writes := func() (n int) {
		for _, request := range l.server.Requests() {
			if strings.HasPrefix(request, "PUT "+leasePath) {
				n++
			}
		}
		return n
	}
	l.run()
	agenttest.Eventually(t, "it never leads", l.leads)
	l.server.Edit(leasePath, func(whole object) {
		spec, _ := whole["spec"].(object)
		spec["holderIdentity"] = "b"
	})
	before := writes()
	l.clock.Step(20 * time.Second)
	l.stepUntil("it goes on", func() bool { return !l.leads() })
	if after := writes(); after != before {
		t.Errorf("%d writes of the lease after the deadline", after-before)
	}
}

func TestDeletedLeaseIsCreatedAgain(t *testing.T) {
	l := candidate(t)
	l.run()
	agenttest.Eventually(t, "it never leads", l.leads)
	l.server.Delete(leasePath)
	l.stepUntil("it is not created again", func() bool { return l.leaseSpec()["holderIdentity"] == "a" })
	if !l.leads() {
		t.Error("it lost the lease")
	}
}

// TestClockOfADeadLeaderDoesNotMatter: a lease expires when its duration has passed since it was read.
func TestClockOfADeadLeaderDoesNotMatter(t *testing.T) {
	l := candidate(t)
	l.set(object{
		"kind": "Lease", "apiVersion": "coordination.k8s.io/v1",
		"metadata": object{"namespace": "kube-system", "name": "istio-taint-lock"},
		"spec": object{
			"holderIdentity": "dead", "leaseDurationSeconds": 60, "leaseTransitions": 7,
			"acquireTime": "2031-01-01T12:00:00.000000Z", "renewTime": "2031-01-01T12:00:00.000000Z",
		},
	})
	l.run()
	agenttest.Eventually(t, "it never reads the lease", l.ready)
	l.stepUntil("it never leads", l.leads)
	if waited := l.clock.Now().Sub(agenttest.Start()); waited < 60*time.Second {
		t.Errorf("a waited for %s only", waited)
	}
	if got := l.leaseSpec()["leaseTransitions"]; got != 8.0 {
		t.Errorf("%v transitions", got)
	}
}
