package taint

import (
	"fmt"
	"maps"
	"runtime"
	"testing"
	"time"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/lab"
	"github.com/meshcni/istio-cni/e2e/rights"
)

// tainted counts the nodes with the taint.
func (l *fixture) tainted() (count int) {
	l.Helper()
	nodes, err := l.client.CoreV1().Nodes().List(l.Context(), meta.ListOptions{ResourceVersion: "0"})
	l.Must(err)
	for _, node := range nodes.Items {
		for _, t := range node.Spec.Taints {
			if show(t) == untaint {
				count++
			}
		}
	}
	return count
}

// TestManyNodesAndPods counts the requests for 500 nodes and 5,000 pods; the times are only logged.
func TestManyNodesAndPods(t *testing.T) {
	l := newFixture(t)
	const nodes, pods = 500, 5000
	began := time.Now()
	lab.InParallel(nodes+pods, func(i int) {
		node := fmt.Sprintf("many-%03d", i%nodes)
		switch {
		case i < nodes:
			l.node(node, nodeState{ready: "True", taints: []string{untaint}})
		case i < 2*nodes:
			l.pod(node, podState{ready: true})
		default:
			l.pod(node, podState{name: fmt.Sprintf("app-%d", i), namespace: l.namespaceOf(i), noStatus: true, labels: map[string]string{"app": "shop"}})
		}
	})
	t.Logf("%d cores: %d nodes and %d pods made in %s", runtime.NumCPU(), nodes, pods, time.Since(began).Round(time.Second))
	kubeconfig := l.grant(permissions{Taint: rights.Taint{Lease: leaseName}})
	args := []string{"--namespace=" + l.mesh, "--lease-namespace=" + l.mesh}

	began = time.Now()
	c := l.begin(kubeconfig, args...)
	l.Until("all nodes", func() bool { return l.tainted() == 0 })
	t.Logf("from the start of the program until the last of %d nodes: %s", nodes, time.Since(began).Round(10*time.Millisecond))
	c.stop()
	want := map[string]int{"watch nodes": 1, "watch pods": 1, "patch nodes": nodes} // watches stream the initial list
	if got := c.nodeAndPodRequests(); !maps.Equal(got, want) {
		t.Errorf("requests %v, want %v", got, want)
	}
	for i := range nodes {
		if n := c.patches(fmt.Sprintf("many-%03d", i)); n != 1 {
			t.Errorf("node %d: %d patches", i, n)
		}
	}
	t.Logf("requests: %v and %v", c.nodeAndPodRequests(), c.otherRequests())
	if n := c.otherRequests()["create events"]; n > 60+30 {
		t.Errorf("%d events in less than a minute", n)
	}
	c.checkRequests()

	// For the next leader no node needs a change. Heartbeats of kubelets and changes of other pods cause no requests.
	c = l.begin(l.grant(permissions{Taint: rights.Taint{Lease: leaseName}, account: "next"}), args...)
	l.Until("the caches to be synced", func() bool { return c.logged("nodes and pods are known") })
	lab.InParallel(nodes, func(i int) {
		l.report(fmt.Sprintf("many-%03d", i), nodeState{ready: "True", heartbeat: time.Now().Add(time.Minute)})
		app := 2*nodes + i
		l.reportPod("", podState{name: fmt.Sprintf("app-%d", app), namespace: l.namespaceOf(app), labels: map[string]string{"app": "shop"}})
	})
	c.waitSynced()
	c.stop()
	want["patch nodes"] = 1 // the node of waitSynced
	if got := c.nodeAndPodRequests(); !maps.Equal(got, want) {
		t.Errorf("requests of the next leader %v, want %v", got, want)
	}
}

// namespaceOf puts every other pod into the namespace of the agents.
func (l *fixture) namespaceOf(i int) string {
	if i%2 == 0 {
		return l.mesh
	}
	return l.other
}

// nodeAndPodRequests counts the requests for nodes and pods by verb and resource, otherRequests all others.
func (c *controller) nodeAndPodRequests() map[string]int {
	c.fixture.Helper()
	all := map[string]int{}
	for _, r := range c.requests() {
		if r.Resource == "nodes" || r.Resource == "pods" {
			all[r.Verb+" "+r.Resource]++
		}
	}
	return all
}

func (c *controller) otherRequests() map[string]int {
	c.fixture.Helper()
	all := map[string]int{}
	for _, r := range c.requests() {
		if r.Resource != "nodes" && r.Resource != "pods" {
			all[r.Verb+" "+r.Resource]++
		}
	}
	return all
}
