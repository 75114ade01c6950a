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
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
)

// shared is the cluster of all tests.
var shared struct {
	*cluster.Cluster
	artifacts.Artifacts
}

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(run(m))
}

func run(m *testing.M) (status int) {
	found, err := artifacts.Find()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	c, err := cluster.Start(context.Background(), cluster.Options{Kube: found.Kube, Tier: cluster.ControlPlane, Log: os.Stderr})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() {
		if status != 0 {
			err = c.CollectLogs(filepath.Join(found.Logs, "taint"))
		}
		if stopped := c.Stop(); err != nil || stopped != nil {
			fmt.Fprintln(os.Stderr, err, stopped)
			status = 1
		}
	}()
	shared.Cluster, shared.Artifacts = c, found
	return m.Run()
}
