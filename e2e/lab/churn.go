package lab

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
)

// Churn creates and deletes pods, with and without sidecar, on all nodes, until End. Names of pods without sidecar end in
// -plain.
//
// It checks that the validation of each injected pod never fails (the pod is redirected from its start) and that its
// traffic passes its proxy in both directions; that the traffic of other pods does not; and that each pod becomes
// ready and is deleted in time, without container restarts. It retries requests that the API server does not answer.
type Churn struct {
	l      *Lab
	number int64
	// restarts allows container restarts: the test kills containerd or the kubelet.
	restarts bool
	ended    chan struct{}
	workers  sync.WaitGroup

	mu       sync.Mutex
	problems []string
	pods     map[string]int // by kind and node
	slowest  time.Duration
}

// Churn starts churn with a number of workers, each of which has one pod at a time. Two have each node in turn.
func (l *Lab) Churn(workers int) *Churn { l.Helper(); return l.churn(workers, false) }

// ChurnWithRestarts is Churn with container restarts allowed: a kubelet or runtime that is killed while it starts a
// container starts it again.
func (l *Lab) ChurnWithRestarts(workers int) *Churn { l.Helper(); return l.churn(workers, true) }

func (l *Lab) churn(workers int, restarts bool) *Churn {
	l.Helper()
	c := &Churn{l: l, restarts: restarts, number: execs.Add(1), ended: make(chan struct{}), pods: map[string]int{}}
	nodes := l.Machines()
	for _, m := range nodes {
		c.pods[meshOn+m.Node()], c.pods[plainOn+m.Node()] = 0, 0
	}
	for w := range workers {
		node := nodes[w/2%len(nodes)].Node()
		c.workers.Go(func() {
			for n := w % 2; ; n++ {
				select {
				case <-c.ended:
					return
				default:
					c.runPod(fmt.Sprintf("churn-%d-%d-%d", c.number, w, n), node, n%2 == 0)
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

// End waits until this many pods of each kind are done on each node, stops the workers, and reports the problems as test
// errors.
func (c *Churn) End(atLeast int) {
	c.l.Helper()
	c.l.Until(fmt.Sprintf("%d pods of each kind to be deleted", atLeast), func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return slices.Min(slices.Collect(maps.Values(c.pods))) >= atLeast || len(c.problems) > 0
	})
	c.stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, problem := range c.problems {
		c.l.Error(problem)
	}
	c.l.Step("pods were created and deleted: %v; the slowest was ready after %s", c.pods, c.slowest.Round(100*time.Millisecond))
}

// Prefixes of the kinds of pods.
const meshOn, plainOn = "injected on ", "plain on "

// runPod creates one pod, checks it and deletes it.
func (c *Churn) runPod(name, node string, inMesh bool) {
	template, kind := Injected(On(node)), meshOn+node
	if !inMesh {
		template, kind = Plain(On(node)), plainOn+node
		name += "-plain"
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*cluster.Timeout)
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
			return false, fmt.Errorf("%d container restarts", n)
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

// flows checks traffic like Flow, from pod's status alone and with an error in place of a test failure.
func (c *Churn) flows(ctx context.Context, pod *core.Pod, inMesh bool) error {
	text, id := "", ""
	for _, s := range pod.Status.ContainerStatuses {
		if s.Name == app {
			id = strings.TrimPrefix(s.ContainerID, "containerd://")
		}
	}
	by := func(text, way string) bool { return strings.Contains(text, "via "+way+" "+pod.Name) }
	// The proxy and the application listen a moment after their containers start, and the runtime may be restarting.
	return cluster.Until(ctx, "its traffic", func() (bool, error) {
		output, err := c.l.Command(ctx, c.l.Box, "get", "http://"+pod.Status.PodIP+":"+AppPort).CombinedOutput()
		text = string(output)
		if err != nil {
			return false, nil //nolint:nilerr // asked again
		}
		if by(text, "inbound") != inMesh {
			return false, fmt.Errorf("in the mesh: %t, response to an inbound request: %s", inMesh, text)
		}
		output, err = c.l.On(pod.Spec.NodeName).Command(ctx, "ctr", "--address", runtimeSocket, "--namespace", "k8s.io", "task", "exec", "--exec-id",
			fmt.Sprintf("e2e-%d", execs.Add(1)), id, "/box", "get", unassigned4).CombinedOutput()
		text = string(output)
		answered := strings.Contains(text, "502") || strings.Contains(text, "no route to host") || err == nil && text != ""
		if answered && by(text, "outbound") != inMesh {
			return false, fmt.Errorf("in the mesh: %t, response to an outbound request: %s", inMesh, text)
		}
		return answered, nil
	})
}
