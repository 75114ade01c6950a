// Package lab is the shared fixture of tests on a real node: the node, the agent from its chart, injected pods, and their
// traffic.
//
// It promises:
//
//   - Node starts a node for one test. When the test fails, the logs of all servers and containers, the objects, the CNI
//     configuration, the files of the agent, and the rules of each network namespace are kept in a directory of its name.
//   - Step logs each step of a test with the time since its start.
//   - The proxy of an injected pod forwards HTTP and adds a Via header to the response, which shows for both directions whether
//     a connection passed it. See command box.
//   - Until polls with a long timeout, because machines may be slow, and fails with the name of the condition.
//
// It never skips. Start reading at Node; query.go queries pods, pod.go creates them, install.go installs the agent.
package lab

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/client-go/kubernetes"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
)

// Namespaces and images of each Lab.
const (
	Mesh     = "istio-system"
	App      = "app"
	BoxImage = "localhost/box:e2e"
	// Image is the agent's image, as in the chart's defaults.
	Image = "localhost/istio-cni/install-cni:0.1.0"
)

// Lab is the fixture of a test that has a node.
type Lab struct {
	Test
	*node
}

// node is shared by the subtests of a test.
type node struct {
	*cluster.Cluster
	artifacts.Artifacts
	client kubernetes.Interface
	began  time.Time
	// bin is a directory with kubectl and our plugin for it.
	bin string
}

// Node starts a node, which ends with the test. It sets Kube, Tier and Pause, and prepends the images of test pods
// and of the program to Images. It does not wait until the node is ready.
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
	l := (&Lab{node: &node{Cluster: c, Artifacts: found, client: c.Client(), began: began, bin: t.TempDir()}}).With(t)
	t.Cleanup(func() {
		if t.Failed() {
			l.collect()
		}
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	l.Must(os.Symlink(found.Kube, filepath.Join(l.bin, "kubectl")))
	l.Must(os.Symlink(found.Kubectl, filepath.Join(l.bin, "kubectl-istio_cni")))
	for _, namespace := range []string{Mesh, App} {
		l.Must(c.Namespace(t.Context(), namespace))
	}
	return l
}

// With returns the Lab of a subtest.
func (l *Lab) With(t *testing.T) *Lab {
	t.Helper()
	sub := &Lab{Test: Test{T: t}, node: l.node}
	sub.OnTimeout = sub.logState
	return sub
}

// Stage runs a subtest from whose result the next one starts: the test ends if it fails.
func (l *Lab) Stage(name string, run func(*testing.T)) {
	l.Helper()
	began := time.Now()
	if !l.Run(name, run) {
		l.FailNow()
	}
	l.Step("%s took %s", name, time.Since(began).Round(time.Second))
}

// Step logs a step of the test.
func (l *Lab) Step(format string, args ...any) {
	l.Helper()
	l.Logf("%6.1f s  "+format, append([]any{time.Since(l.began).Seconds()}, args...)...)
}

// NodeIs reports whether the first node's condition Ready has this status.
func (l *Lab) NodeIs(status core.ConditionStatus) bool {
	l.Helper()
	return l.NodeNamedIs(cluster.NodeName, status)
}

// NodeNamedIs is NodeIs of any node.
func (l *Lab) NodeNamedIs(name string, status core.ConditionStatus) bool {
	l.Helper()
	found, err := l.client.CoreV1().Nodes().Get(l.Context(), name, meta.GetOptions{})
	return err == nil && slices.ContainsFunc(found.Status.Conditions, func(c core.NodeCondition) bool {
		return c.Type == core.NodeReady && c.Status == status
	})
}

// NativeSidecars reports whether the cluster has native sidecars: from Kubernetes 1.29 on by default.
func (l *Lab) NativeSidecars() bool {
	l.Helper()
	found, err := l.client.Discovery().ServerVersion()
	l.Must(err)
	v, err := version.ParseGeneric(found.GitVersion)
	l.Must(err)
	return v.AtLeast(version.MajorMinor(1, 29))
}

// UntilNodeReady waits until the first node is ready.
func (l *Lab) UntilNodeReady() {
	l.Helper()
	l.Until("the node", func() bool { return l.NodeIs(core.ConditionTrue) })
}

// background returns a context for cleanups, which run after t.Context is cancelled.
func background() (context.Context, context.CancelFunc) {
	const longest = time.Minute
	return context.WithTimeout(context.Background(), longest)
}
