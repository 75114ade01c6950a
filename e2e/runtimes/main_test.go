// Package runtimes tests the agent and the plugin on a real node with containerd 2, which hack/containerd.sh builds. The other
// packages use Debian's containerd 1.6.
//
// It promises to show what that runtime does besides what containerd 1.6 does: it loads drop-in files, it calls STATUS for a list of
// version 1.1.0, and it starts pods in user namespaces. A recorder keeps each call of the plugin with its configuration.
//
// Start reading at TestContainerd2; recorder_test.go has the recorder.
package runtimes

import (
	"os"
	"testing"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// scenario is the fixture of one test.
type scenario struct{ *lab.Lab }

func newScenario(t *testing.T, networks map[string]string) *scenario {
	t.Helper()
	runtime, err := artifacts.FindContainerd()
	if err != nil {
		t.Fatal(err)
	}
	s := &scenario{Lab: lab.Node(t, cluster.Options{Runtime: runtime, Networks: networks})}
	s.record()
	return s
}

// subtest runs a part of the scenario as a subtest.
func (s *scenario) subtest(name string, run func(*scenario)) {
	s.Helper()
	s.Run(name, func(t *testing.T) { t.Helper(); run(&scenario{Lab: s.With(t)}) })
}

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(m.Run())
}
