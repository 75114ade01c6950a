package repair

import (
	"net/http"
	"testing"

	"github.com/meshcni/istio-cni/e2e/cluster"
)

// TestOutage_Crash: the API server is killed during a deletion. After its restart that pod and one that broke
// meanwhile are deleted, each once.
func TestOutage_Crash(t *testing.T) {
	l := newFixture(t)
	l.pod("first", broken())
	l.pod("p")
	through := l.tap(l.grant(mayWatch, mayReport, mayDelete))
	d := l.daemon(through.kubeconfig, "--delete-pods")
	l.Until("the first to go", func() bool { return l.gone("first") })
	through.hold(http.MethodDelete, "/pods/p")
	l.pod("fine")
	l.breaks("p")
	through.waitHeld()
	l.Must(shared.Kill(cluster.APIServer))
	through.release()
	l.Until("the outage in the log", func() bool { return d.logged("the watch of the pods fails: no pod is repaired") })
	l.Until("the failure in the log", func() bool { return d.logged("the work on a pod failed, and is retried") })
	l.Must(shared.Restart(t.Context(), cluster.APIServer))
	l.pod("q", broken())
	l.Until("the watch to work", func() bool { return d.logged("the watch of the pods works again") })
	for _, name := range []string{"p", "q"} {
		l.Until(name+" to go", func() bool { return l.gone(name) })
		l.Until("its event", func() bool { return l.event(l.app, name, "DeleteBrokenPod", "it is deleted") })
		if n := l.count("delete", "pods", name, http.StatusOK); n != 1 {
			t.Errorf("%s: deleted %d times", name, n)
		}
	}
	if l.gone("fine") || len(l.events(l.app, "fine")) != 0 {
		t.Error("a pod that is not broken was changed")
	}
	d.stop()
	// A restarted API server denies requests until it has read the roles, so noForbiddenRequests does not apply here.
}
