package lab

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
)

// Shared runs the tests of a package on one cluster, which start starts and keeps for them. When a test fails the logs of its
// servers are kept in a directory of that name. It gives the exit code of the package.
func Shared(m *testing.M, name string, start func(context.Context, artifacts.Artifacts) (*cluster.Cluster, error)) (status int) {
	found, err := artifacts.Find()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	c, err := start(context.Background(), found)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() {
		if status != 0 {
			err = c.CollectLogs(filepath.Join(found.Logs, name))
		}
		if stopped := c.Stop(); err != nil || stopped != nil {
			fmt.Fprintln(os.Stderr, err, stopped)
			status = 1
		}
	}()
	return m.Run()
}

// Cluster is one that the tests of a package share, and what they run.
type Cluster struct {
	*cluster.Cluster
	artifacts.Artifacts
}

// ControlPlane is Shared with an API server and nothing else, which it leaves in to.
func ControlPlane(m *testing.M, name string, to *Cluster) int {
	return Shared(m, name, func(ctx context.Context, found artifacts.Artifacts) (c *cluster.Cluster, err error) {
		c, err = cluster.Start(ctx, cluster.Options{Kube: found.Kube, Tier: cluster.ControlPlane, Log: os.Stderr})
		*to = Cluster{Cluster: c, Artifacts: found}
		return c, err
	})
}

// Test is a test that waits.
type Test struct {
	*testing.T
	// OnTimeout, if given, says what there is to know when a wait was in vain.
	OnTimeout func()
}

// Must ends the test when there is an error.
func (t Test) Must(err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Timeout is for how long Until waits: a validation that failed is tried again by the kubelet after up to 80 seconds.
const Timeout = 3 * time.Minute

// Until waits for a condition.
func (t Test) Until(what string, holds func() bool) {
	t.Helper()
	deadline := time.NewTimer(Timeout)
	defer deadline.Stop()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline.C:
			if t.OnTimeout != nil {
				t.OnTimeout()
			}
			t.Fatalf("gave up waiting: %s", what)
		}
	}
}

// InParallel does something for 0 to n-1.
func InParallel(n int, do func(int)) {
	todo := make(chan int)
	var work sync.WaitGroup
	for range 16 {
		work.Go(func() {
			for i := range todo {
				do(i)
			}
		})
	}
	for i := range n {
		todo <- i
	}
	close(todo)
	work.Wait()
}
