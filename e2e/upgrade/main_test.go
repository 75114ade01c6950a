// Package upgrade takes a node over from the reference, Istio's own istio-cni, and gives it back: its chart and its programs
// as they are, Helm as it is, a real node, and pods whose traffic is looked at before, between and after.
//
// It is one scenario: the reference is installed, upgraded to this program, rolled back, upgraded again and uninstalled, while
// pods come and go.
//
// Start reading at TestFromTheReferenceAndBack; lab_test.go has what it is told with.
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

// newScenario has a node that knows the image of the reference as well.
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
