// Package node tests the taint of a real node: containerd, kubelet and the scheduler, with images of the built program. Another test
// kills the process that runs such nodes.
//
// Start reading at TestTaint.
package node

import (
	"fmt"
	"os"
	"testing"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
)

func TestMain(m *testing.M) {
	cluster.Main()
	if dir := os.Getenv(hold); dir != "" {
		found, err := artifacts.Find()
		if err == nil {
			err = holdNodes(dir, found)
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}
