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

// Shared runs the tests of a package on one cluster, which start creates. When a test fails, the servers' logs are
// kept in a directory called name. It returns the exit code of the test binary.
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

// Cluster is a cluster shared by the tests of a package, with the artifacts under test.
type Cluster struct {
	*cluster.Cluster
	artifacts.Artifacts
}

// ControlPlane is Shared with a cluster of tier ControlPlane, which it stores in to.
func ControlPlane(m *testing.M, name string, to *Cluster) int {
	return Shared(m, name, func(ctx context.Context, found artifacts.Artifacts) (c *cluster.Cluster, err error) {
		c, err = cluster.Start(ctx, cluster.Options{Kube: found.Kube, Tier: cluster.ControlPlane, Log: os.Stderr})
		*to = Cluster{Cluster: c, Artifacts: found}
		return c, err
	})
}

// Test extends testing.T with waits.
type Test struct {
	*testing.T
	// OnTimeout, if set, logs the state when Until times out.
	OnTimeout func()
}

// Must ends the test if err is not nil.
func (t Test) Must(err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Timeout bounds Until: the kubelet retries a failed init container after up to 80 seconds.
const Timeout = 3 * time.Minute

// Until polls a condition.
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
			t.Fatalf("timed out waiting for %s", what)
		}
	}
}

// InParallel calls do with 0 to n-1, up to 16 at a time.
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
