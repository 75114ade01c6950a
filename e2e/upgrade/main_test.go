// Package upgrade replaces the reference, Istio's own istio-cni, on a real node and rolls back: with the reference's chart and
// programs, Helm itself, and pods whose traffic is checked before, during and after each step.
//
// It is one scenario: the reference is installed, upgraded to this program, rolled back, upgraded again and uninstalled, while
// pods are created and deleted.
//
// Start reading at TestFromTheReferenceAndBack; lab_test.go has the helpers.
package upgrade

import (
	"os"
	"testing"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

const (
	// oursHub and oursTag are the defaults of the chart.
	oursHub, oursTag = "localhost/istio-cni", "0.1.0"
	referenceHub     = "localhost/reference"
	referenceTag     = "e2e"
	referenceImage   = referenceHub + "/install-cni:" + referenceTag
)

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(m.Run())
}

// newScenario starts a node that has the image of the reference too.
func newScenario(t *testing.T) *scenario {
	t.Helper()
	reference, err := artifacts.FindReference()
	if err != nil {
		t.Fatal(err)
	}
	s := &scenario{Lab: lab.Node(t, cluster.Options{Images: []string{reference.Image}}), reference: reference, made: map[string]string{}}
	s.UntilNodeReady()
	s.network = s.networkNow()
	return s
}
