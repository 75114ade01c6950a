// Package upgrade replaces the reference, Istio's own istio-cni, on a real node and rolls back: with the reference's chart and
// programs, Helm itself, and pods whose traffic is checked before, during and after each step.
//
// It is one scenario: the reference is installed, observed, upgraded to this program, rolled back, upgraded again and uninstalled, while
// pods are created and deleted.
//
// Start reading at TestFromTheReferenceAndBack; helm_test.go has the helpers, observer_test.go
// the observer.
package upgrade

import (
	"os"
	"testing"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(documented.Main(m))
}

// documented are the commands of docs/install.md.
var documented = lab.Commands("e2e/upgrade")

// newScenario starts a node that has the image of the reference too.
func newScenario(t *testing.T) *scenario {
	t.Helper()
	s := &scenario{Beside: lab.NodeBeside(t, cluster.Options{}), made: map[string]string{}}
	s.network = s.Network()
	return s
}
