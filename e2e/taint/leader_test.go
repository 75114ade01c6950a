package taint

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	coordination "k8s.io/api/coordination/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/rights"
)

const (
	leaseName = "istio-node-untaint"
	// leaseTime is the duration of leases in these tests.
	leaseTime = 4 * time.Second
)

// election returns the flags for leader election, with durations in proportion to the defaults, but short.
func (l *fixture) election() []string {
	return []string{
		"--namespace=" + l.mesh, "--lease-namespace=" + l.mesh,
		"--lease-duration=" + leaseTime.String(), "--renew-deadline=3s", "--retry-period=1s",
	}
}

// replica starts a controller with a ServiceAccount of its own, so that the audit log tells replicas apart.
func (l *fixture) replica(account string, args ...string) *controller {
	l.Helper()
	return l.begin(l.grant(permissions{Taint: rights.Taint{Lease: leaseName}, account: account}), append(l.election(), args...)...)
}

func (l *fixture) lease() coordination.LeaseSpec {
	l.Helper()
	lease, err := l.client.CoordinationV1().Leases(l.mesh).Get(l.Context(), leaseName, meta.GetOptions{})
	l.Must(err)
	return lease.Spec
}

// leads reports whether the replica is the leader, from its log. A failed renewal does not end the leadership.
func (c *controller) leads() (leads bool) {
	for _, line := range c.log() {
		if line.Msg == "election" && (line.State == "leading" || line.State == "the lease is lost") {
			leads = line.State == "leading"
		}
	}
	return leads
}

func (c *controller) waitsForLease() bool {
	return slices.ContainsFunc(c.log(), func(d decision) bool { return d.State == "waiting for the lease" })
}

// leaseWrites returns the successful writes of the Lease by the replica, in order, with the written specs.
func (c *controller) leaseWrites() (requests []cluster.Request, specs []coordination.LeaseSpec) {
	c.fixture.Helper()
	for _, r := range c.requests() {
		if r.Resource != "leases" || r.Status >= 300 || r.Verb != "update" && r.Verb != "create" {
			continue
		}
		var lease coordination.Lease
		c.fixture.Must(json.Unmarshal(r.Body, &lease))
		requests, specs = append(requests, r), append(specs, lease.Spec)
	}
	return requests, specs
}

// leaderRequests returns the requests that only a leader sends: all but those for leases and events.
func (c *controller) leaderRequests() []cluster.Request {
	c.fixture.Helper()
	return slices.DeleteFunc(c.requests(), func(r cluster.Request) bool { return r.Resource == "leases" || r.Resource == "events" })
}

// pair starts a leader, which removes the taint of one node, and a standby replica.
func pair(l *fixture) (leader, standby *controller) {
	l.Helper()
	l.node("first", nodeState{taints: []string{untaint}})
	l.pod("first", podState{ready: true})
	leader = l.replica("taint-a")
	l.Until("the first node", func() bool { return leader.leads() && len(l.taints("first")) == 0 })
	standby = l.replica("taint-b")
	l.Until("the other to wait", standby.waitsForLease)
	return leader, standby
}

// addNodeExpectTaintRemoved creates a node with the taint and a ready agent, and waits for the removal.
func (l *fixture) addNodeExpectTaintRemoved(name string) {
	l.Helper()
	l.node(name, nodeState{taints: []string{untaint}})
	l.pod(name, podState{ready: true})
	l.Until("node "+name, func() bool { return len(l.taints(name)) == 0 })
}

func TestTheLeaderIsKilled(t *testing.T) {
	l := newFixture(t)
	leader, standby := pair(l)
	// The standby replica sends no other requests during several renewals.
	l.Until("renewals", func() bool { requests, _ := leader.leaseWrites(); return len(requests) > 4 })
	if work := standby.leaderRequests(); len(work) != 0 {
		t.Errorf("the standby replica sent %s %s", work[0].Verb, work[0].URI)
	}
	if standby.patches("") != 0 || leader.patches("") != 1 {
		t.Errorf("patches: %d of the leader, %d of the other", leader.patches(""), standby.patches(""))
	}
	before := l.lease()
	leader.Signal(os.Kill)
	l.Until("the other to lead", standby.leads)
	l.addNodeExpectTaintRemoved("second")
	after := l.lease()
	if *after.HolderIdentity == *before.HolderIdentity || *after.LeaseTransitions != *before.LeaseTransitions+1 {
		t.Errorf("the lease: %s, %d transitions; before: %s, %d",
			*after.HolderIdentity, *after.LeaseTransitions, *before.HolderIdentity, *before.LeaseTransitions)
	}
	last, _ := leader.leaseWrites()
	first, _ := standby.leaseWrites()
	if waited := first[0].Received.Sub(last[len(last)-1].Received); waited < leaseTime {
		t.Errorf("the lease was acquired %s after its renewal, before its %s had passed", waited, leaseTime)
	}
	if standby.patches("first") != 0 || standby.patches("second") != 1 {
		t.Errorf("patches of the new leader: %d of a node without the taint, %d of the new one",
			standby.patches("first"), standby.patches("second"))
	}
	standby.checkRequests()
	standby.stop()
}

// TestLeaderReleasesTheLeaseOnSIGTERM, T-2: the leader exits, and the standby acquires the Lease without waiting for
// its expiry.
func TestLeaderReleasesTheLeaseOnSIGTERM(t *testing.T) {
	l := newFixture(t)
	leader, standby := pair(l)
	leader.stop()
	requests, specs := leader.leaseWrites()
	if last := specs[len(specs)-1]; last.HolderIdentity != nil && *last.HolderIdentity != "" || *last.LeaseDurationSeconds != 1 {
		t.Errorf("the leader's last write of the lease: %+v", last)
	}
	for _, r := range leader.leaderRequests() {
		if r.Received.After(requests[len(requests)-1].Received) {
			t.Errorf("after the release of the lease it sent %s %s", r.Verb, r.URI)
		}
	}
	l.Until("the other to lead", standby.leads)
	l.addNodeExpectTaintRemoved("second")
	standby.stop()
	if holder := l.lease().HolderIdentity; holder != nil && *holder != "" {
		t.Errorf("the lease is still held by %s", *holder)
	}
}

// TestStoppedLeaderMakesNoChangesAfterItsLeaseExpires: a leader that was stopped for longer than the lease duration
// notices the expiry before it sends a write.
func TestStoppedLeaderMakesNoChangesAfterItsLeaseExpires(t *testing.T) {
	l := newFixture(t)
	leader, standby := pair(l)
	leader.Signal(stopSignal)
	l.Until("the other to lead", standby.leads)
	l.addNodeExpectTaintRemoved("second")
	took, _ := standby.leaseWrites()
	leader.Signal(continueSignal)
	l.Until("the old leader to lose the leadership", func() bool { return !leader.leads() })
	l.addNodeExpectTaintRemoved("third")
	for _, r := range leader.requests() {
		if r.Received.After(took[0].Received) && r.Status < 300 && r.Verb != "list" && r.Verb != "watch" && r.Verb != "get" {
			t.Errorf("request of the old leader after the new one acquired the lease: %s %s %s", r.Received, r.Verb, r.URI)
		}
	}
	if n := standby.patches(""); n != 2 {
		t.Errorf("%d patches of the new leader, want 2", n)
	}
	leader.stop()
	standby.stop()
}

// takeLease writes another holder into the Lease.
func (l *fixture) takeLease() {
	l.Helper()
	leases := l.client.CoordinationV1().Leases(l.mesh)
	l.Until("another to take the lease", func() bool {
		lease, err := leases.Get(l.Context(), leaseName, meta.GetOptions{})
		l.Must(err)
		other, now := "other", meta.NowMicro()
		lease.Spec.HolderIdentity, lease.Spec.RenewTime = &other, &now
		_, err = leases.Update(l.Context(), lease, meta.UpdateOptions{})
		return err == nil
	})
}

// TestLeaseTakenByAnotherHolder: the running leader stops, and waits for the lease duration before it acquires the
// Lease again.
func TestLeaseTakenByAnotherHolder(t *testing.T) {
	l := newFixture(t)
	l.node("first", nodeState{taints: []string{untaint}})
	l.pod("first", podState{})
	c := l.replica("taint-a")
	l.Until("it to lead", func() bool { return c.leads() && c.decided("first") != "" })
	l.takeLease()
	taken := l.lease().RenewTime.Time
	l.Until("it to lose the leadership", func() bool { return !c.leads() })
	l.reportPod("first", podState{ready: true})
	l.Until("it to lead again", func() bool { return c.leads() && len(l.taints("first")) == 0 })
	for _, r := range c.requests() {
		if after := r.Received.Sub(taken); after > 0 && after < leaseTime && r.Verb != "get" && r.Status < 300 && r.Resource != "events" &&
			r.Verb != "list" && r.Verb != "watch" {
			t.Errorf("%s after the lease was taken away: %s %s", after, r.Verb, r.URI)
		}
	}
	c.checkRequests()
	c.stop()
}

// elector is client-go's leader election on the same Lease, as another controller would run it.
type elector struct {
	leading chan struct{}
	end     func()
	seen    chan string
}

func (l *fixture) elect(identity string) elector {
	l.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(l.Context()))
	e := elector{leading: make(chan struct{}), seen: make(chan string, 100)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		leaderelection.RunOrDie(ctx, leaderelection.LeaderElectionConfig{
			Lock: &resourcelock.LeaseLock{
				LeaseMeta: meta.ObjectMeta{Namespace: l.mesh, Name: leaseName}, Client: l.client.CoordinationV1(),
				LockConfig: resourcelock.ResourceLockConfig{Identity: identity},
			},
			LeaseDuration: leaseTime, RenewDeadline: 3 * time.Second, RetryPeriod: time.Second, ReleaseOnCancel: true,
			Callbacks: leaderelection.LeaderCallbacks{
				OnStartedLeading: func(context.Context) { close(e.leading) },
				OnStoppedLeading: func() {},
				OnNewLeader:      func(holder string) { e.seen <- holder },
			},
		})
	}()
	e.end = func() { cancel(); <-done }
	l.Cleanup(e.end)
	return e
}

func (e elector) leads() bool {
	select {
	case <-e.leading:
		return true
	default:
		return false
	}
}

func TestClientGoLeaderElectionOnTheSameLease(t *testing.T) {
	l := newFixture(t)
	l.node("first", nodeState{taints: []string{untaint}})
	l.pod("first", podState{ready: true})
	other := l.elect("client-go")
	l.Until("client-go to lead", other.leads)
	c := l.replica("taint-a")
	l.Until("ours to wait", func() bool {
		return slices.ContainsFunc(c.log(), func(d decision) bool { return d.State == "waiting for the lease" && d.Holder == "client-go" })
	})
	renewed := l.lease().RenewTime.Time
	l.Until("client-go to renew", func() bool { return l.lease().RenewTime.After(renewed.Add(2 * time.Second)) })
	if len(c.leaderRequests()) != 0 || len(l.taints("first")) != 1 {
		t.Error("the replica sent requests while client-go had the lease")
	}
	// client-go releases the Lease.
	other.end()
	l.Until("ours to lead", func() bool { return c.leads() && len(l.taints("first")) == 0 })

	other = l.elect("client-go-2")
	l.Until("client-go to see ours", func() bool {
		select {
		case holder := <-other.seen:
			return holder == *l.lease().HolderIdentity && strings.Contains(holder, "_")
		default:
			return false
		}
	})
	held, _ := c.leaseWrites()
	l.Until("ours to renew", func() bool { now, _ := c.leaseWrites(); return len(now) > len(held)+5 })
	if other.leads() {
		t.Error("client-go acquired the lease while our replica held it")
	}
	c.Signal(os.Kill)
	l.Until("client-go to lead", other.leads)
	mine, _ := c.leaseWrites()
	if acquired := l.lease().AcquireTime.Time; acquired.Sub(mine[len(mine)-1].Received) < leaseTime-time.Millisecond {
		t.Errorf("client-go acquired the lease %s after its renewal", acquired.Sub(mine[len(mine)-1].Received))
	}
	other.end()

	// client-go acquires the Lease that our replica releases.
	c = l.replica("taint-a")
	l.Until("ours to lead", c.leads)
	other = l.elect("client-go-3")
	c.stop()
	l.Until("client-go to lead", other.leads)
}

// TestHealthAndMetricsOfTwoReplicas: both replicas are ready, and only the leader has changes.
func TestHealthAndMetricsOfTwoReplicas(t *testing.T) {
	l := newFixture(t)
	l.node("first", nodeState{taints: []string{untaint}})
	l.pod("first", podState{ready: true})
	var replicas []*controller
	var ports []int
	for i, account := range []string{"taint-a", "taint-b"} {
		health, metrics := freePort(t), freePort(t)
		ports = append(ports, metrics)
		replicas = append(replicas, l.replica(account, fmt.Sprintf("--health-port=%d", health), fmt.Sprintf("--monitoring-port=%d", metrics)))
		for _, path := range []string{"/healthz", "/readyz"} {
			l.Until(fmt.Sprintf("replica %d at %s", i, path), func() bool { status, _ := get(t, health, path); return status == 200 })
		}
		if i == 0 {
			l.Until("the first node", func() bool { return len(l.taints("first")) == 0 })
		}
	}
	l.Until("the other to wait", replicas[1].waitsForLease)
	for i, want := range [][]string{
		{
			"istio_cni_taint_leader 1", `istio_cni_taint_nodes{reason="AgentReady"} 1`,
			`istio_cni_taint_changes_total{change="remove",result="success"} 1`,
		},
		{"istio_cni_taint_leader 0", `istio_cni_taint_changes_total{change="remove",result="success"} 0`},
	} {
		_, text := get(t, ports[i], "/metrics")
		for _, line := range want {
			if !slices.Contains(strings.Split(text, "\n"), line) {
				t.Errorf("replica %d: no %q in\n%s", i, line, text)
			}
		}
	}
	for _, r := range replicas {
		r.stop()
	}
}
