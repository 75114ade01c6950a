// Package taint tests "istio-cni taint" from outside: the built program, with the RBAC rules of its chart, against a real API
// server.
//
// Nodes and pods are objects without kubelets; the tests update their status as kubelets do. All tests share one API server
// and run sequentially; each deletes its nodes, of which there are no others. Tests wait for objects or log lines of the
// program; the absence of a request is checked in the API server's audit log.
//
// Start reading at trigger_test.go; lab_test.go has the fixture.
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
