package taint

import (
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/e2e/cluster"
)

// TestOutage_LeaseIsLost: a crash of the API server itself changes no taint, with hysteresis 0 too, and afterwards the leader
// reconciles all changes, also those that it missed (T-2).
func TestOutage_LeaseIsLost(t *testing.T) {
	l := newFixture(t)
	l.node("waiting", nodeState{ready: "True", taints: []string{untaint}})
	l.pod("waiting", podState{})
	for _, name := range []string{"a", "b", "c", "d"} {
		l.node(name, nodeState{ready: "True"})
		l.pod(name, podState{ready: true})
	}
	c := l.replica("--add", "--hysteresis=0")
	l.Until("decisions about all nodes", func() bool { return c.decided("waiting") != "" && c.decided("d") != "" })
	l.Must(shared.Kill(cluster.APIServer))
	l.Until("the lease to be lost", func() bool { return !c.leads() })
	l.Must(shared.Restart(t.Context(), cluster.APIServer))
	l.Until("the controller to lead again", c.leads)
	if n := l.patches(""); n != 0 {
		t.Errorf("%d patches without a change", n)
	}

	// The stopped controller misses changes before and after a crash, after which the API server has no watch history.
	c.Signal(syscall.SIGSTOP)
	l.deletePod("a", 0)
	l.deleteNode("b")
	l.Must(shared.Kill(cluster.APIServer))
	l.Must(shared.Restart(t.Context(), cluster.APIServer))
	l.deletePod("c", 0)
	l.deleteNode("c")
	l.node("c", nodeState{ready: "True", taints: []string{"a=b:NoSchedule"}})
	l.reportPod("waiting", podState{ready: true, since: time.Now()})
	c.Signal(syscall.SIGCONT)
	l.untilTaints("a", untaint)
	l.untilTaints("c", "a=b:NoSchedule", untaint)
	l.untilTaints("waiting")
	l.waitSynced()
	l.Stop(c.Program)
	if n := l.patches(""); n != 4 {
		t.Errorf("%d patches, want one of each node that changed", n)
	}
}
