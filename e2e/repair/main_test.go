// Package repair tests "istio-cni repair" from outside: the built program, with the RBAC rules of its mode, against a real API
// server.
//
// Pods are objects without kubelets; the tests update their status as kubelets do. Repair in place needs a node and is tested
// in e2e/mesh. All tests share one API server and run sequentially; each deletes its pods, because the program reads the pods of all
// namespaces. Tests wait for objects or log lines of the program; the absence of a request is checked in the audit log, after
// a later change was processed.
//
// Start reading at table_test.go; lab_test.go has the fixture, tap_test.go a reverse proxy between program and API server that
// delays requests and records responses.
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
