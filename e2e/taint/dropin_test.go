package taint

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/program"
	"github.com/meshcni/istio-cni/e2e/rights"
)

// TestLegacyCommandEnvironmentAndLease runs the program under the name and with the environment variables, which have
// dashes, of the chart of Istio 1.8 to 1.17. It must use the same Lease as that controller.
func TestLegacyCommandEnvironmentAndLease(t *testing.T) {
	l := newFixture(t)
	l.configMap(l.requires("k8s-app=istio-cni-node"))
	kubeconfig := l.grant(permissions{Taint: rights.Taint{Lease: "istio-taint-lock", ConfigMap: configMapName}, leaseNamespace: meta.NamespaceSystem})
	l.node("a", nodeState{ready: "True", taints: []string{legacy}})
	l.pod("a", podState{ready: true})
	name := filepath.Join(t.TempDir(), "istio-cni-taint")
	l.Must(os.Symlink(shared.IstioCNI, name))
	p, err := program.Start([]string{
		"TAINT_RUN-AS-DAEMON=true", "TAINT_CONFIGMAP-NAME=" + configMapName, "TAINT_CONFIGMAP-NAMESPACE=" + l.mesh,
		"KUBECONFIG=" + kubeconfig, "LOG_AS_JSON=true", "TAINT_HEALTH_PORT=0", "TAINT_MONITORING_PORT=0",
	}, name)
	l.Must(err)
	t.Cleanup(func() {
		p.Signal(os.Kill)
		<-p.Ended()
		// Only this Lease is not in a namespace of the fixture.
		leases := l.client.CoordinationV1().Leases(meta.NamespaceSystem)
		if left := leases.Delete(context.Background(), "istio-taint-lock", meta.DeleteOptions{}); left != nil {
			t.Error(left)
		}
	})
	l.Until("the removal", func() bool { return len(l.taints("a")) == 0 })
	lease, err := l.client.CoordinationV1().Leases(meta.NamespaceSystem).Get(t.Context(), "istio-taint-lock", meta.GetOptions{})
	l.Must(err)
	if *lease.Spec.LeaseDurationSeconds != 60 || *lease.Spec.HolderIdentity == "" {
		t.Errorf("the lease: %+v", lease.Spec)
	}
	(&controller{Program: p, fixture: l, account: account}).stop()
}

// TestTwoControllersOfTheSameTaintKey: two controllers run without a common Lease, as ours and istiod's would. The
// taint is removed from each node, neither controller fails, and no other taint is lost.
func TestTwoControllersOfTheSameTaintKey(t *testing.T) {
	l := newFixture(t)
	const nodes = 30
	for i := range nodes {
		name := fmt.Sprintf("both-%02d", i)
		l.node(name, nodeState{ready: "True", taints: []string{"a=b:NoExecute", untaint}})
		l.pod(name, podState{ready: true})
	}
	args := []string{"--namespace=" + l.mesh, "--leader-elect=false"}
	one := l.begin(l.grant(permissions{account: "one"}), args...)
	two := l.begin(l.grant(permissions{account: "two"}), args...)
	free := func(i int) bool {
		return slices.Equal(l.taints(fmt.Sprintf("both-%02d", i)), []string{"a=b:NoExecute"})
	}
	l.Until("the taint to be removed from all nodes", func() bool {
		for i := range nodes {
			if !free(i) {
				return false
			}
		}
		return true
	})
	one.waitSynced()
	one.stop()
	two.stop()
	if n := one.patches("") + two.patches(""); n != nodes+1 {
		t.Errorf("%d patches that were done, want one for each of %d nodes", n, nodes+1)
	}
	conflicts := 0
	for _, c := range []*controller{one, two} {
		c.checkRequests()
		conflicts += len(slices.DeleteFunc(c.requests(), func(r cluster.Request) bool { return r.Status != 422 }))
	}
	t.Logf("%d patches of one, %d of the other, %d conflicts", one.patches(""), two.patches(""), conflicts)
}
