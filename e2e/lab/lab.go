// Package lab is what tests on a real node have in common: the node, the agent from its chart, pods as injection makes them,
// and their traffic.
//
// It promises:
//
//   - Node is a node of the test's own. When the test fails, the logs of all servers and containers, the objects, the network's
//     configuration, what the agent has written, and the rules of each network namespace are in a directory of its name.
//   - Step says what is done, and when, in the log of the test.
//   - A mesh pod's proxy passes on what it is given and says so in the answer: what came by it is distinguished from what did
//     not, in both directions. See command box.
//   - Until waits long, as machines are slow at times, and fails with what it waited for. Nothing waits without end.
//
// It never skips. Start reading at Node; look.go asks about pods, pod.go makes them, install.go is the agent.
package lab

import (
	"context"
	"os"
	"slices"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
)

// Namespaces and images of each lab.
const (
	Mesh     = "istio-system"
	App      = "app"
	BoxImage = "localhost/box:e2e"
	// Image is the name in the chart.
	Image = "localhost/istio-cni/install-cni:0.1.0"
)

// Lab is a test with a node.
type Lab struct {
	Test
	*node
}

// node is what parts of a test share.
type node struct {
	*cluster.Cluster
	artifacts.Artifacts
	client kubernetes.Interface
	began  time.Time
}

// Node starts a node, and ends it with the test. Kube, Tier and Pause are given, and of Images those of test pods and of the
// program; it does not wait for the node.
func Node(t *testing.T, o cluster.Options) *Lab {
	t.Helper()
	found, err := artifacts.Find()
	if err != nil {
		t.Fatal(err)
	}
	o.Kube, o.Tier, o.Pause = found.Kube, cluster.Node, BoxImage
	o.Images = append([]string{found.BoxImage, found.Image}, o.Images...)
	if o.Log == nil {
		o.Log = os.Stderr
	}
	began := time.Now()
	c, err := cluster.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	l := (&Lab{node: &node{Cluster: c, Artifacts: found, client: c.Client(), began: began}}).With(t)
	t.Cleanup(func() {
		if t.Failed() {
			l.collect()
		}
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	for _, namespace := range []string{Mesh, App} {
		l.Must(c.Namespace(t.Context(), namespace))
	}
	return l
}

// With is the lab for a sub of the test.
func (l *Lab) With(t *testing.T) *Lab {
	t.Helper()
	sub := &Lab{Test: Test{T: t}, node: l.node}
	sub.OnTimeout = sub.logState
	return sub
}

// Step says what is done now.
func (l *Lab) Step(format string, args ...any) {
	l.Helper()
	l.Logf("%6.1f s  "+format, append([]any{time.Since(l.began).Seconds()}, args...)...)
}

// NodeIs reports whether the node is ready.
func (l *Lab) NodeIs(status core.ConditionStatus) bool {
	l.Helper()
	found, err := l.client.CoreV1().Nodes().Get(l.Context(), cluster.NodeName, meta.GetOptions{})
	return err == nil && slices.ContainsFunc(found.Status.Conditions, func(c core.NodeCondition) bool {
		return c.Type == core.NodeReady && c.Status == status
	})
}

// UntilNodeReady waits for the node.
func (l *Lab) UntilNodeReady() {
	l.Helper()
	l.Until("the node", func() bool { return l.NodeIs(core.ConditionTrue) })
}

// background is for what goes on after the test's own context has ended, which it does before cleanups.
func background() (context.Context, context.CancelFunc) {
	const longest = time.Minute
	return context.WithTimeout(context.Background(), longest)
}
