package taint

import (
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

const leasePath = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/istio-taint-lock"

func (l *fixture) leaseSpec() object {
	l.Helper()
	spec, _ := l.fetch(leasePath)["spec"].(object)
	return spec
}

// candidate returns a replica that is not started, with the legacy controller's lease.
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

// TestLease_ForeignFields: a renewal keeps the fields of other writers. e2e/taint TestLease_SharedWithClientGo covers the other
// phases of a lease.
func TestLease_ForeignFields(t *testing.T) {
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
	check.Diff(t, "renewed", want, l.leaseSpec())
	metadata, _ := l.fetch(leasePath)["metadata"].(object)
	if metadata["annotations"] == nil {
		t.Error("the annotations are gone")
	}
}

// TestLease_NotRenewed: the leader stops before its lease expires, also if the requests get no response.
func TestLease_NotRenewed(t *testing.T) {
	for _, fault := range []kubetest.Fault{kubetest.ServerError, kubetest.Hang} {
		t.Run(string(fault), func(t *testing.T) { testNotRenewed(t, fault) })
	}
}

func testNotRenewed(t *testing.T, fault kubetest.Fault) {
	l := candidate(t)
	if fault == kubetest.Hang { // a request ends in real time
		l.options.Lease.Deadline, l.options.Lease.Retry = 2*time.Second, time.Second
	}
	l.node("n", nodeSpec{taints: []object{ourTaint()}})
	l.pod("n", "agent", "False", yesterday())
	l.run()
	agenttest.Eventually(t, "it never leads", l.leads)
	l.server.FailOn("PUT "+leasePath, fault, kubetest.Forever)
	l.server.FailOn("GET "+leasePath, fault, kubetest.Forever)
	l.stepUntil("it keeps leading", func() bool { return !l.leads() })
	check.Equal(t, l.ready(), false, "ready")
	// It changes no node any more.
	l.pod("n", "agent", "True", agenttest.Start())
	before := l.patches()
	l.server.Heal()
	l.stepUntil("it never leads again", l.leads)
	agenttest.Eventually(t, "the node stays tainted", l.untainted)
	check.Equal(t, before, 0, "patches without the lease")
	agenttest.Eventually(t, "it stays unready", l.ready)
}

// TestLease_StoppedProcess: a process that was stopped for longer than Deadline does not write the lease, which another
// replica holds by then.
func TestLease_StoppedProcess(t *testing.T) {
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
	l.takeLease()
	before := writes()
	l.clock.Step(20 * time.Second)
	l.stepUntil("it keeps leading", func() bool { return !l.leads() })
	check.Equal(t, writes(), before, "writes of the lease after the deadline")
}

func TestLease_Deleted(t *testing.T) {
	l := candidate(t)
	l.run()
	agenttest.Eventually(t, "it never leads", l.leads)
	l.server.Delete(leasePath)
	l.stepUntil("it is not created again", func() bool { return l.leaseSpec()["holderIdentity"] == "a" })
	check.Equal(t, l.leads(), true, "it leads")
}

// TestLease_WrongClockOfHolder: a lease expires when its duration has passed since it was read.
func TestLease_WrongClockOfHolder(t *testing.T) {
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
	check.Equal(t, l.leaseSpec()["leaseTransitions"], 8.0, "transitions")
}

// takeLease writes another holder into the lease.
func (l *fixture) takeLease() {
	l.Helper()
	l.server.Edit(leasePath, func(whole object) {
		spec, _ := whole["spec"].(object)
		spec["holderIdentity"] = "b"
	})
}

// TestLease_TakenByAnotherHolder: the leader stops at its next renewal, and leads again after the lease expires.
func TestLease_TakenByAnotherHolder(t *testing.T) {
	l := candidate(t)
	l.node("n", nodeSpec{taints: []object{ourTaint()}})
	l.run()
	agenttest.Eventually(t, "it never leads", func() bool { return l.leads() && l.decided(readiness.NoAgent) > 0 })
	taken := l.clock.Now() // the candidate sees it at this step or a later one, and counts from there
	l.takeLease()
	l.stepUntil("it keeps leading", func() bool { return !l.leads() })
	l.pod("n", "agent", "True", yesterday())
	l.stepUntil("it never leads again", l.leads)
	if waited := l.clock.Now().Sub(taken); waited < l.options.Lease.Duration || l.patches() > 1 {
		t.Errorf("it leads again after %s, %d patches", waited, l.patches())
	}
	agenttest.Eventually(t, "the node stays tainted", l.untainted)
}

// TestLease_EachOutageIsLogged: the lease outlasts both outages, and the log has the start and the end of each.
func TestLease_EachOutageIsLogged(t *testing.T) {
	l := candidate(t)
	l.run()
	agenttest.Eventually(t, "it never leads", l.leads)
	for outage := 1; outage <= 2; outage++ {
		l.server.FailOn("PUT "+leasePath, kubetest.ServerError, 1)
		l.stepUntil("no outage", func() bool { return strings.Count(l.log.String(), `msg="election fails"`) == outage })
		l.stepUntil("no end of the outage", func() bool { return strings.Count(l.log.String(), "state=leading") == outage+1 })
	}
	check.Equal(t, strings.Count(l.log.String(), "leader changed"), 2, "errors in", l.log.String())
}
