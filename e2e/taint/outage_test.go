package taint

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/rights"
)

const (
	stopSignal     = syscall.SIGSTOP
	continueSignal = syscall.SIGCONT
)

// fleet creates nodes without the taint and with a ready agent, and nodes with the taint whose agents are not ready.
func (l *fixture) fleet(good, waiting int) {
	l.Helper()
	for i := range good {
		name := fmt.Sprintf("good-%02d", i)
		l.node(name, nodeState{ready: "True"})
		l.pod(name, podState{ready: true})
	}
	for i := range waiting {
		name := fmt.Sprintf("waiting-%02d", i)
		l.node(name, nodeState{ready: "True", taints: []string{untaint}})
		l.pod(name, podState{})
	}
}

func (l *fixture) crash() {
	l.Helper()
	l.Must(shared.Kill(cluster.APIServer))
}

func (l *fixture) recover() {
	l.Helper()
	l.Must(shared.Restart(l.Context(), cluster.APIServer))
}

// TestTheAPIServerCrashes: the crash itself changes no taint, with hysteresis 0 too, and afterwards all pending
// changes are made.
func TestTheAPIServerCrashes(t *testing.T) {
	l := newFixture(t)
	const good, waiting = 20, 5
	l.fleet(good, waiting)
	c := l.replica("taint-a", "--add", "--hysteresis=0")
	l.Until("decisions about all nodes", func() bool { return c.decided("waiting-04") != "" && c.decided("good-19") != "" })
	for round := range 2 {
		logged := len(c.log())
		l.crash()
		l.Until("the controller to notice", func() bool {
			return slices.ContainsFunc(c.log()[logged:], func(d decision) bool { return d.Msg == "watch fails" })
		})
		l.Until("the lease to be lost", func() bool { return !c.leads() })
		l.recover()
		l.Until("the controller to lead again", c.leads)
		if n := c.patches(""); n != 2*round {
			t.Errorf("%d patches, want %d", n, 2*round)
		}
		l.reportPod(fmt.Sprintf("waiting-%02d", round), podState{ready: true, since: time.Now()})
		l.deletePod(l.mesh, fmt.Sprintf("good-%02d", round))
		l.Until("the work after the crash", func() bool {
			return len(l.taints(fmt.Sprintf("waiting-%02d", round))) == 0 &&
				slices.Equal(l.taints(fmt.Sprintf("good-%02d", round)), []string{untaint})
		})
	}
	c.waitSynced()
	c.stop()
	if n := c.patches(""); n != 5 {
		t.Errorf("%d patches, want 5: one for each node where something happened", n)
	}
}

// TestChangesMissedWhileStoppedAreReconciled, T-2: the controller is stopped while agents are deleted, nodes are
// replaced and the API server restarts, which then has no watch history.
func TestChangesMissedWhileStoppedAreReconciled(t *testing.T) {
	l := newFixture(t)
	l.fleet(6, 2)
	c := l.begin(l.grant(permissions{}), "--namespace="+l.mesh, "--leader-elect=false", "--add", "--hysteresis=0")
	l.Until("decisions about all nodes", func() bool { return c.decided("waiting-01") != "" && c.decided("good-05") != "" })
	c.Signal(stopSignal)
	l.deletePod(l.mesh, "good-03")
	l.Must(l.client.CoreV1().Nodes().Delete(l.Context(), "good-04", meta.DeleteOptions{}))
	// A write to another resource: otherwise the last known revision could still be the current one, from which a watch
	// resumes.
	l.configMap(map[string]string{})
	l.crash()
	l.recover()
	l.deletePod(l.mesh, "good-00")
	l.reportPod("waiting-00", podState{ready: true, since: time.Now()})
	l.Must(l.client.CoreV1().Nodes().Delete(l.Context(), "good-01", meta.DeleteOptions{}))
	l.Must(l.client.CoreV1().Nodes().Delete(l.Context(), "good-02", meta.DeleteOptions{}))
	l.deletePod(l.mesh, "good-02")
	l.node("good-02", nodeState{ready: "True", taints: []string{"a=b:NoSchedule"}})
	c.Signal(continueSignal)
	l.Until("the missed changes to be reconciled", func() bool {
		return slices.Equal(l.taints("good-00"), []string{untaint}) && slices.Equal(l.taints("good-03"), []string{untaint}) &&
			len(l.taints("waiting-00")) == 0 &&
			slices.Equal(l.taints("good-02"), []string{"a=b:NoSchedule", untaint})
	})
	c.waitSynced()
	c.stop()
	if n := c.patches(""); n != 5 {
		t.Errorf("%d patches, want 5", n)
	}
	// 410 Gone: the restarted API server does not have the revisions at which the watches stopped.
	lists := map[string]int{}
	for _, r := range c.requests() {
		if strings.Contains(r.URI, "sendInitialEvents=true") {
			lists[r.Resource]++
		}
	}
	if lists["nodes"] < 2 || lists["pods"] < 2 {
		t.Errorf("lists %v, want two of each: the watches were not restarted", lists)
	}
	c.checkWatchCache()
}

// TestAStartWithoutAnAPIServer: the controller waits for the API server, is not ready meanwhile, and then works.
func TestAStartWithoutAnAPIServer(t *testing.T) {
	l := newFixture(t)
	l.fleet(2, 1)
	kubeconfig := l.grant(permissions{Taint: rights.Taint{Lease: leaseName, ConfigMap: configMapName}})
	l.crash()
	health := freePort(t)
	c := l.begin(kubeconfig, append(l.election(), fmt.Sprintf("--health-port=%d", health))...)
	l.Until("the controller to notice", func() bool { return c.logged("election fails") })
	if status, _ := get(t, health, "/readyz"); status != 503 {
		t.Errorf("/readyz: %d", status)
	}
	if status, _ := get(t, health, "/healthz"); status != 200 {
		t.Errorf("/healthz: %d", status)
	}
	l.recover()
	l.reportPod("waiting-00", podState{ready: true})
	l.Until("the work", func() bool { return len(l.taints("waiting-00")) == 0 })
	l.Until("to be ready", func() bool { status, _ := get(t, health, "/readyz"); return status == 200 })
	c.stop()
	if n := c.patches(""); n != 1 {
		t.Errorf("%d patches, want 1", n)
	}
}

// TestEachFailedRenewalIsLogged: the lease outlasts an outage in which it cannot be renewed, and the log has each
// outage with its error, and its end.
func TestEachFailedRenewalIsLogged(t *testing.T) {
	l := newFixture(t)
	l.fleet(1, 0)
	c := l.begin(l.grant(permissions{Taint: rights.Taint{Lease: leaseName}}), "--namespace="+l.mesh, "--lease-namespace="+l.mesh,
		"--lease-duration=120s", "--renew-deadline=110s", "--retry-period=1s")
	l.Until("the controller to lead", func() bool { return c.leads() && c.decided("good-00") != "" })
	for round := 1; round <= 2; round++ {
		logged := len(c.log())
		since := func(holds func(decision) bool) func() bool {
			return func() bool { return slices.ContainsFunc(c.log()[logged:], holds) }
		}
		l.crash()
		l.Until("the renewal to fail", since(func(d decision) bool { return d.Msg == "part is not ready" && d.Part == "election" }))
		l.recover()
		l.Until("the renewal to work", since(func(d decision) bool { return d.Msg == "part is ready" && d.Part == "election" }))
		if !since(func(d decision) bool {
			return d.Msg == "election fails" && d.Error != ""
		})() {
			t.Errorf("outage %d: the log has no reason", round)
		}
		last := ""
		for _, line := range c.log() {
			if line.Msg == "election" {
				last = line.State
			}
		}
		if last != "leading" {
			t.Errorf("outage %d is over, and the last logged election state is %q", round, last)
		}
	}
	c.stop()
}

// TestTheAPIServerHangs: the API server is paused, which is worse than a crash, as connections stay open without
// responses. The leader gives up before its lease expires although its requests are pending, and works again
// afterwards.
func TestTheAPIServerHangs(t *testing.T) {
	l := newFixture(t)
	l.fleet(3, 2)
	c := l.replica("taint-a", "--add", "--hysteresis=0")
	l.Until("decisions about all nodes", func() bool { return c.decided("waiting-01") != "" && c.decided("good-02") != "" })
	l.Must(shared.Pause(cluster.APIServer))
	resumed := false
	t.Cleanup(func() {
		if !resumed {
			_ = shared.Resume(cluster.APIServer)
		}
	})
	l.Until("the lease to be lost", func() bool { return !c.leads() })
	l.Must(shared.Resume(cluster.APIServer))
	resumed = true
	l.Until("the controller to lead again", c.leads)
	l.reportPod("waiting-00", podState{ready: true, since: time.Now()})
	l.deletePod(l.mesh, "good-00")
	l.Until("the work", func() bool {
		return len(l.taints("waiting-00")) == 0 && slices.Equal(l.taints("good-00"), []string{untaint})
	})
	c.waitSynced()
	c.stop()
	if n := c.patches(""); n != 3 {
		t.Errorf("%d patches, want 3", n)
	}
}

// TestTheTokenIsReplaced: the ServiceAccount is deleted, so its token becomes invalid, and a new token is written to
// the kubeconfig.
func TestTheTokenIsReplaced(t *testing.T) {
	l := newFixture(t)
	l.fleet(1, 1)
	granted := permissions{Taint: rights.Taint{Lease: leaseName}}
	c := l.begin(l.grant(granted), l.election()...)
	l.Until("decisions about all nodes", func() bool { return c.decided("waiting-00") != "" })
	l.Must(l.client.CoreV1().ServiceAccounts(l.mesh).Delete(t.Context(), account, meta.DeleteOptions{}))
	l.Until("the controller to be unauthorized", func() bool {
		return slices.ContainsFunc(c.log(), func(d decision) bool {
			return d.Msg == "election fails" && strings.Contains(d.Error, "401")
		})
	})
	l.Until("the lease to be lost", func() bool { return !c.leads() })
	l.grant(granted)
	l.Until("the controller to lead again", c.leads)
	l.reportPod("waiting-00", podState{ready: true, since: time.Now()})
	l.Until("the work", func() bool { return len(l.taints("waiting-00")) == 0 })
	for _, line := range c.Lines() {
		if strings.Contains(line, "eyJhbGciOi") {
			t.Errorf("the token is in the log: %s", line)
		}
	}
	c.stop()
}
