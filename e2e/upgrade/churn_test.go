package upgrade

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/lab"
)

// mesh returns an injected pod.
func mesh(name string) *core.Pod {
	template := lab.Injected()
	template.Name = name
	return &core.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}
}

// churn creates an injected pod per beat and deletes one of the victims, until stop. At most underWay pods are
// Pending at a time, besides those whose validation failed.
type churn struct {
	*scenario
	prefix        string
	victims, gone []string
	end           context.CancelFunc
	ended         chan struct{}

	mu   sync.Mutex
	made []string
	errs []error
	// missing is the total time in which the CNI configuration had no istio-cni plugin; restored is the last time it had none.
	missing  time.Duration
	restored time.Time
}

const (
	beat     = 500 * time.Millisecond
	underWay = 3
)

// begin starts churn and returns when its first pod is ready, so that the upgrade happens during the churn.
func (s *scenario) begin(prefix string, victims ...string) *churn {
	s.Helper()
	ctx, end := context.WithCancel(s.Context())
	c := &churn{scenario: s, prefix: prefix, victims: victims, end: end, ended: make(chan struct{})}
	go c.run(ctx)
	go c.watch(ctx)
	s.Until("the first pod", func() bool { return c.count() > 0 && s.IsReady(prefix+"-0") })
	return c
}

func (c *churn) run(ctx context.Context) {
	defer close(c.ended)
	tick := time.NewTicker(beat)
	defer tick.Stop()
	for n := 0; ; {
		name := fmt.Sprintf("%s-%d", c.prefix, n)
		made, err := c.next(ctx, name)
		if ctx.Err() != nil && !made {
			return
		}
		c.mu.Lock()
		if made {
			c.made = append(c.made, name)
			n++
		}
		c.errs = append(c.errs, err)
		c.mu.Unlock()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// next creates a pod and deletes a victim, unless too many pods are Pending.
func (c *churn) next(ctx context.Context, name string) (made bool, err error) {
	api := c.Client().CoreV1().Pods(lab.App)
	all, err := api.List(ctx, meta.ListOptions{})
	if err != nil {
		return false, err
	}
	busy := 0
	for _, p := range all.Items {
		if s := p.Status.InitContainerStatuses; p.Status.Phase == core.PodPending && (len(s) == 0 || s[0].RestartCount == 0) {
			busy++
		}
	}
	if busy >= underWay {
		return false, nil
	}
	if len(c.victims) > 0 && c.count() > 0 {
		c.gone, c.victims = append(c.gone, c.victims[0]), c.victims[1:]
		if err = api.Delete(ctx, c.gone[len(c.gone)-1], meta.DeleteOptions{}); err != nil {
			return false, err
		}
	}
	_, err = api.Create(ctx, mesh(name), meta.CreateOptions{})
	return err == nil, err
}

// watch polls the CNI configuration and creates one more pod as soon as it has no istio-cni plugin.
func (c *churn) watch(ctx context.Context) {
	const often = 10 * time.Millisecond
	path := filepath.Clean(c.NodeFile("/etc/cni/net.d/10-e2e.conflist"))
	tick := time.NewTicker(often)
	defer tick.Stop()
	for last, begun := time.Now(), false; ctx.Err() == nil; last = time.Now() {
		<-tick.C
		text, err := os.ReadFile(path)
		if err == nil && bytes.Contains(text, []byte(`"istio-cni"`)) {
			continue
		}
		c.mu.Lock()
		c.missing, c.restored = c.missing+time.Since(last), time.Now()
		if !begun {
			begun = true
			_, err = c.Client().CoreV1().Pods(lab.App).Create(ctx, mesh(c.prefix+"-gap"), meta.CreateOptions{})
			c.made = append(c.made, c.prefix+"-gap")
		}
		c.errs = append(c.errs, err)
		c.mu.Unlock()
	}
}

func (c *churn) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.made)
}

// stop waits for some more pods, ends the churn, checks each of its pods and deletes them. It returns the creation
// times of the pods whose validation passed at once (captured) and of those whose validation failed first (held).
func (c *churn) stop() (captured, held map[string]time.Time) {
	c.Helper()
	const after = 3
	enough := c.count() + after
	c.Until("pods after the change", func() bool { return c.count() >= enough })
	c.end()
	<-c.ended
	c.mu.Lock() // watch may still be running
	defer c.mu.Unlock()
	c.Must(errors.Join(c.errs...))
	captured, held = map[string]time.Time{}, map[string]time.Time{}
	for _, name := range c.made {
		c.Until(name, func() bool { return c.IsReady(name) })
		c.Flows(name)
		in := captured
		if c.restarts(name) > 0 {
			in = held
		}
		in[name] = c.Get(lab.App, name).CreationTimestamp.Time
	}
	c.Step("%d pods were created meanwhile, %d of them started without redirection: %q; all are ready and redirected now",
		len(c.made), len(held), slices.Sorted(maps.Keys(held)))
	c.Step("the stanza was missing for %s; %q were deleted meanwhile", c.missing.Round(time.Millisecond), c.gone)
	for _, name := range c.gone {
		c.Until("the end of "+name, func() bool { return c.Get(lab.App, name) == nil })
	}
	c.RemoveReleased(c.made...)
	return captured, held
}
