package lab

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/program"
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

// Test extends testing.T with waits and programs.
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

// Until polls a condition. It also works in cleanups.
func (t Test) Until(what string, holds func() bool) {
	t.Helper()
	// t.Context is cancelled before cleanups run.
	err := cluster.Until(context.WithoutCancel(t.Context()), what, func() (bool, error) { return holds(), nil })
	if err == nil {
		return
	}
	if t.OnTimeout != nil {
		t.OnTimeout()
	}
	t.Fatal(err)
}

// Start starts a program, which is killed when the test ends. A test that fails logs its output.
func (t Test) Start(env []string, path string, args ...string) *program.Program {
	t.Helper()
	p, err := program.Start(env, path, args...)
	t.Must(err)
	t.Cleanup(func() {
		p.Signal(os.Kill)
		<-p.Ended()
		if t.Failed() {
			t.Logf("the output of %q:\n%s", strings.Join(args, " "), strings.Join(p.Lines(), "\n"))
		}
	})
	return p
}

// End waits until a program has exited, and returns its exit status.
func (t Test) End(p *program.Program) int {
	t.Helper()
	t.Until("the end of the program", func() bool {
		select {
		case <-p.Ended():
			return true
		default:
			return false
		}
	})
	return p.Status()
}

// Stop sends SIGTERM, as the kubelet does, and checks that the exit status is 0.
func (t Test) Stop(p *program.Program) {
	t.Helper()
	p.Signal(unix.SIGTERM)
	if status := t.End(p); status != 0 {
		t.Errorf("exit status %d", status)
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
