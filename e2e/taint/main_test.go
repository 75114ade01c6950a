// Package taint tests "istio-cni taint" as its users know it: the built program, with the rights of its chart, against a
// real API server.
//
// Nodes and pods are objects without kubelets, made and changed by the tests as kubelets do. All tests share one API
// server, one after the other; each removes its nodes, of which there are no others. What a test has to wait for it sees in
// the API or in the program's log; that nothing was done it sees in the API server's audit log.
//
// Start reading at trigger_test.go; lab_test.go is what all tests have.
package taint

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
	os.Exit(lab.ControlPlane(m, "taint", &shared))
}
