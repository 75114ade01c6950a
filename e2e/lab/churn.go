package lab

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
)

// Churn makes and deletes pods, of the mesh and others, until it is ended. The names of the others end in -plain.
//
// Of each pod of the mesh it holds that its validation has never failed (it ran redirected from the beginning), and that its
// traffic goes by its proxy both ways; of each other pod that its traffic does not. Of each pod it holds that it was ready,
// and gone when it was deleted, in time, and that its containers were started once. What the API server does not
// answer for the moment is asked again.
type Churn struct {
	l      *Lab
	number int64
	// restarts are allowed: who makes the pods is killed while it does.
	restarts bool
	ended    chan struct{}
	workers  sync.WaitGroup

	mu       sync.Mutex
	problems []string
	pods     map[string]int // by kind
	slowest  time.Duration
}

// Churn starts it with so many workers, each of which has one pod at a time.
func (l *Lab) Churn(workers int) *Churn { l.Helper(); return l.churn(workers, false) }

// ChurnWithRestarts is Churn where a pod's containers may be started again: a kubelet or runtime that is killed in the middle of
// a start does that.
func (l *Lab) ChurnWithRestarts(workers int) *Churn { l.Helper(); return l.churn(workers, true) }

func (l *Lab) churn(workers int, restarts bool) *Churn {
	l.Helper()
	c := &Churn{l: l, restarts: restarts, number: execs.Add(1), ended: make(chan struct{}), pods: map[string]int{}}
	for w := range workers {
		c.workers.Go(func() {
			for n := w % 2; ; n++ {
				select {
				case <-c.ended:
					return
				default:
					c.runPod(fmt.Sprintf("churn-%d-%d-%d", c.number, w, n), n%2 == 0)
				}
			}
		})
	}
	l.Cleanup(c.stop)
	return c
}

func (c *Churn) stop() {
	select {
	case <-c.ended:
	default:
		close(c.ended)
	}
	c.workers.Wait()
}

// End ends it once so many pods of each kind have come and gone, and tells the test what was wrong.
func (c *Churn) End(atLeast int) {
	c.l.Helper()
	c.l.Until(fmt.Sprintf("%d pods of each kind to come and go", atLeast), func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return min(c.pods["mesh"], c.pods["plain"]) >= atLeast || len(c.problems) > 0
	})
	c.stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, problem := range c.problems {
		c.l.Error(problem)
	}
	c.l.Step("%d pods of the mesh and %d others have come and gone; the slowest was ready after %s", c.pods["mesh"], c.pods["plain"],
		c.slowest.Round(100*time.Millisecond))
}

// round is the life of one pod.
func (c *Churn) runPod(name string, inMesh bool) {
	template, kind := Injected(), "mesh"
	if !inMesh {
		template, kind = Plain(), "plain"
		name += "-plain"
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*Timeout)
	defer cancel()
	err := c.live(ctx, name, template, inMesh)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pods[kind]++
	if err != nil {
		c.problems = append(c.problems, fmt.Sprintf("%s (%s): %v", name, kind, err))
	}
}

func (c *Churn) live(ctx context.Context, name string, template core.PodTemplateSpec, inMesh bool) error {
	began := time.Now()
	pods := c.l.client.CoreV1().Pods(App)
	template.Name = name
	err := cluster.Until(ctx, "making it", func() (bool, error) {
		_, err := pods.Create(ctx, &core.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}, meta.CreateOptions{})
		return err == nil || apierrors.IsAlreadyExists(err), nil
	})
	if err != nil {
		return err
	}
	var pod *core.Pod
	err = cluster.Until(ctx, "it to be ready", func() (bool, error) {
		found, asking := pods.Get(ctx, name, meta.GetOptions{})
		if asking != nil {
			return false, nil //nolint:nilerr // asked again
		}
		pod = found
		if ValidationFailed(found) {
			return false, errors.New("it ran without redirection: its validation failed")
		}
		if n := Restarts(found); n > 0 && !c.restarts {
			return false, fmt.Errorf("its containers were started %d times more", n)
		}
		return Ready(found), nil
	})
	if err == nil {
		c.mu.Lock()
		c.slowest = max(c.slowest, time.Since(began))
		c.mu.Unlock()
		err = c.flows(ctx, pod, inMesh)
	}
	if deleted := c.delete(ctx, name); err == nil {
		err = deleted
	}
	return err
}

func (c *Churn) delete(ctx context.Context, name string) error {
	pods := c.l.client.CoreV1().Pods(App)
	return cluster.Until(ctx, "it to be gone", func() (bool, error) {
		if err := pods.Delete(ctx, name, meta.DeleteOptions{}); err != nil {
			return apierrors.IsNotFound(err), nil
		}
		_, err := pods.Get(ctx, name, meta.GetOptions{})
		return apierrors.IsNotFound(err), nil
	})
}

// flows is Flow, without asking the API server, and without ending the test.
func (c *Churn) flows(ctx context.Context, pod *core.Pod, inMesh bool) error {
	text, id := "", ""
	for _, s := range pod.Status.ContainerStatuses {
		if s.Name == app {
			id = strings.TrimPrefix(s.ContainerID, "containerd://")
		}
	}
	by := func(text, way string) bool { return strings.Contains(text, "via "+way+" "+pod.Name) }
	// The proxy, or the application, listens a moment after it was started. The runtime may be away for a moment, too.
	return cluster.Until(ctx, "its traffic", func() (bool, error) {
		output, err := c.l.Command(ctx, c.l.Box, "get", "http://"+pod.Status.PodIP+":"+AppPort).CombinedOutput()
		text = string(output)
		if err != nil {
			return false, nil //nolint:nilerr // asked again
		}
		if by(text, "inbound") != inMesh {
			return false, fmt.Errorf("in the mesh: %t, and what comes in was answered: %s", inMesh, text)
		}
		output, err = c.l.Command(ctx, "ctr", "--address", runtimeSocket, "--namespace", "k8s.io", "task", "exec", "--exec-id",
			fmt.Sprintf("e2e-%d", execs.Add(1)), id, "/box", "get", unassigned4).CombinedOutput()
		text = string(output)
		answered := strings.Contains(text, "502") || strings.Contains(text, "no route to host") || err == nil && text != ""
		if answered && by(text, "outbound") != inMesh {
			return false, fmt.Errorf("in the mesh: %t, and what goes out was answered: %s", inMesh, text)
		}
		return answered, nil
	})
}
