package taint

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
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

// replica starts a controller with leader election, with durations in proportion to the defaults, but short.
func (l *fixture) replica(args ...string) *controller {
	l.Helper()
	return l.begin(l.grant(rights.Taint{Lease: leaseName}), append([]string{
		"--namespace=" + l.mesh, "--lease-namespace=" + l.mesh,
		"--lease-duration=" + leaseTime.String(), "--renew-deadline=3s", "--retry-period=1s",
	}, args...)...)
}

func (l *fixture) lease() coordination.LeaseSpec {
	l.Helper()
	lease, err := l.client.CoordinationV1().Leases(l.mesh).Get(l.Context(), leaseName, meta.GetOptions{})
	l.Must(err)
	return lease.Spec
}

// leaseWrites returns the successful writes of the Lease by the replica, in order.
func (l *fixture) leaseWrites() []cluster.Request {
	l.Helper()
	return slices.DeleteFunc(l.requests(), func(r cluster.Request) bool {
		return r.Resource != "leases" || r.Status >= 300 || r.Verb != "update" && r.Verb != "create"
	})
}

// leaderRequests returns the requests that only a leader sends: all but those for leases and events.
func (l *fixture) leaderRequests() []cluster.Request {
	l.Helper()
	return slices.DeleteFunc(l.requests(), func(r cluster.Request) bool { return r.Resource == "leases" || r.Resource == "events" })
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

// TestLease_SharedWithClientGo: our leader election and client-go's respect each other's lease, take over one that is not
// renewed any more, and release their own.
func TestLease_SharedWithClientGo(t *testing.T) {
	l := newFixture(t)
	l.node("first", nodeState{taints: []string{untaint}})
	l.pod("first", podState{ready: true})
	other := l.elect("client-go")
	l.Until("client-go to lead", other.leads)
	health, metrics := freePort(t), freePort(t)
	c := l.replica(fmt.Sprintf("--health-port=%d", health), fmt.Sprintf("--monitoring-port=%d", metrics))
	l.Until("ours to wait", func() bool {
		return c.logged(0, func(d decision) bool { return d.State == "waiting for the lease" && d.Holder == "client-go" })
	})
	l.Until("the standby to be ready", func() bool { status, _ := get(t, health, "/readyz"); return status == 200 })
	renewed := l.lease().RenewTime.Time
	l.Until("client-go to renew", func() bool { return l.lease().RenewTime.After(renewed.Add(2 * time.Second)) })
	if _, text := get(t, metrics, "/metrics"); len(l.leaderRequests()) != 0 || !strings.Contains(text, "\nistio_cni_taint_leader 0\n") {
		t.Errorf("the replica sent requests while client-go had the lease, or its metrics are wrong:\n%s", text)
	}
	// client-go releases the Lease.
	transitions := *l.lease().LeaseTransitions
	other.end()
	l.untilTaints("first")
	_, text := get(t, metrics, "/metrics")
	if lease := l.lease(); !strings.Contains(text, "\nistio_cni_taint_leader 1\n") || *lease.LeaseTransitions == transitions {
		t.Errorf("lease %+v, metrics\n%s", lease, text)
	}

	other = l.elect("client-go-2")
	l.Until("client-go to see ours", func() bool {
		select {
		case holder := <-other.seen:
			return holder == *l.lease().HolderIdentity && strings.Contains(holder, "_")
		default:
			return false
		}
	})
	held := len(l.leaseWrites())
	l.Until("ours to renew", func() bool { return len(l.leaseWrites()) > held+5 })
	if other.leads() {
		t.Error("client-go acquired the lease while our replica held it")
	}
	c.Signal(os.Kill)
	l.Until("client-go to lead", other.leads)
	mine := l.leaseWrites()
	if waited := l.lease().AcquireTime.Sub(mine[len(mine)-1].Received); waited < leaseTime-time.Millisecond {
		t.Errorf("client-go acquired the lease %s after its renewal", waited)
	}
	other.end()
	l.release()
}

// release checks that client-go acquires the Lease that our replica releases on SIGTERM (T-2), after which it sends no request.
func (l *fixture) release() {
	l.Helper()
	c := l.replica()
	l.Until("ours to lead", c.leads)
	other := l.elect("client-go-3")
	l.Stop(c.Program)
	mine := l.leaseWrites()
	last := mine[len(mine)-1]
	var lease coordination.Lease
	l.Must(json.Unmarshal(last.Body, &lease))
	if holder := lease.Spec.HolderIdentity; holder != nil && *holder != "" || *lease.Spec.LeaseDurationSeconds != 1 {
		l.Errorf("the last write of the lease: %+v", lease.Spec)
	}
	for _, r := range l.leaderRequests() {
		if r.Received.After(last.Received) {
			l.Errorf("after the release of the lease it sent %s %s", r.Verb, r.URI)
		}
	}
	l.Until("client-go to lead", other.leads)
}

// freePort returns a TCP port that is free at the moment.
func freePort(t *testing.T) int {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close() //nolint:errcheck // nothing came in
	return listener.Addr().(*net.TCPAddr).Port
}

// get sends a GET to the controller and returns status and body; status 0 is no response.
func get(t *testing.T, port int, path string) (status int, text string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d%s", port, path), http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err.Error()
	}
	defer response.Body.Close() //nolint:errcheck // only read from
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, err.Error()
	}
	return response.StatusCode, string(body)
}
