package taint

import (
	"fmt"
	"maps"
	"runtime"
	"strings"
	"testing"
	"time"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/lab"
	"github.com/meshcni/istio-cni/e2e/rights"
)

// anyTainted reports whether a node has the taint.
func (l *fixture) anyTainted() bool {
	l.Helper()
	nodes, err := l.client.CoreV1().Nodes().List(l.Context(), meta.ListOptions{ResourceVersion: "0"})
	l.Must(err)
	for _, node := range nodes.Items {
		for _, t := range node.Spec.Taints {
			if show(t) == untaint {
				return true
			}
		}
	}
	return false
}

// TestManyNodesAndPods counts the requests for 500 nodes and 5,000 pods; the times are only logged.
func TestManyNodesAndPods(t *testing.T) {
	l := newFixture(t)
	const nodes, pods = 500, 5000
	// app is a pod that is no agent. Every other one is in the namespace of the agents.
	app := func(i int) podState {
		return podState{
			name: fmt.Sprintf("app-%d", i), namespace: []string{l.mesh, l.other}[i%2], noStatus: true, labels: map[string]string{"app": "shop"},
		}
	}
	began := time.Now()
	lab.InParallel(nodes+pods, func(i int) {
		node := fmt.Sprintf("many-%03d", i%nodes)
		switch {
		case i < nodes:
			l.node(node, nodeState{ready: "True", taints: []string{untaint}})
		case i < 2*nodes:
			l.pod(node, podState{ready: true})
		default:
			l.pod(node, app(i))
		}
	})
	t.Logf("%d cores: %d nodes and %d pods made in %s", runtime.NumCPU(), nodes, pods, time.Since(began).Round(time.Second))
	kubeconfig := l.grant(rights.Taint{Lease: leaseName})
	args := []string{"--namespace=" + l.mesh, "--lease-namespace=" + l.mesh}

	began = time.Now()
	c := l.begin(kubeconfig, args...)
	l.Until("all nodes", func() bool { return !l.anyTainted() })
	t.Logf("from the start of the program until the last of %d nodes: %s", nodes, time.Since(began).Round(10*time.Millisecond))
	l.Stop(c.Program)
	want := map[string]int{"watch nodes": 1, "watch pods": 1, "patch nodes": nodes} // watches stream the initial list
	all := l.requestCounts()
	t.Logf("requests: %v", all)
	if n := all["create events"]; n > 60+30 {
		t.Errorf("%d events in less than a minute", n)
	}
	if got := ofNodesAndPods(all); !maps.Equal(got, want) || l.patches("") != nodes {
		t.Errorf("requests %v, want %v", got, want)
	}

	// For the next leader no node needs a change. Heartbeats of kubelets and changes of other pods cause no requests.
	c = l.begin(kubeconfig, args...)
	l.Until("the caches to be synced", func() bool {
		return c.logged(0, func(d decision) bool { return d.Msg == "nodes and pods are known" })
	})
	lab.InParallel(nodes, func(i int) {
		l.report(fmt.Sprintf("many-%03d", i), nodeState{ready: "True"})
		l.reportPod("", app(2*nodes+i))
	})
	l.waitSynced()
	l.Stop(c.Program)
	want = map[string]int{"watch nodes": 2, "watch pods": 2, "patch nodes": nodes + 1} // the node of waitSynced
	if got := ofNodesAndPods(l.requestCounts()); !maps.Equal(got, want) {
		t.Errorf("requests including the next leader's %v, want %v", got, want)
	}
	l.checkRequests()
}

// requestCounts counts the requests by verb and resource.
func (l *fixture) requestCounts() map[string]int {
	l.Helper()
	all := map[string]int{}
	for _, r := range l.requests() {
		all[r.Verb+" "+r.Resource]++
	}
	return all
}

func ofNodesAndPods(all map[string]int) map[string]int {
	some := maps.Clone(all)
	maps.DeleteFunc(some, func(what string, _ int) bool {
		return !strings.HasSuffix(what, " nodes") && !strings.HasSuffix(what, " pods")
	})
	return some
}
