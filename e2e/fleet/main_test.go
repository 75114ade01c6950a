// Package fleet tests the audit of running pods and "kubectl istio-cni" on a real node: each state of a pod is made to happen in the
// pod's namespace, and is seen in the command, as an event and as a metric; then the audit repairs what it may repair.
//
// The plugin is run by the real kubectl, as its users do, against one cluster that all subtests share.
//
// Start reading at TestTheAudit.
package fleet

import (
	"os"
	"testing"

	"github.com/meshcni/istio-cni/e2e/cluster"
)

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(m.Run())
}
