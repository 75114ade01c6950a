// Package repair tests "istio-cni repair" as its users know it: the built program, with the rights of its mode, against a
// real API server.
//
// Pods are objects without kubelets, made and changed by the tests as kubelets do: repair in place, which takes a node, is
// tested in e2e/mesh. All tests share one API server, one after the other; each removes its pods, as the program looks at
// those of all namespaces. What a test waits for it sees in the API or in the program's log; that nothing was done it sees
// in the audit log, after what came later was done.
//
// Start reading at table_test.go; lab_test.go is what all tests have, tap_test.go the place between program and server
// where a test can hold a request back and sees what was sent.
package repair

import (
	"os"
	"testing"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// shared is the cluster of all tests.
var shared lab.Cluster

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(lab.ControlPlane(m, "repair", &shared))
}
