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

// mesh is a pod of the mesh.
func mesh(name string) *core.Pod {
	template := lab.Injected()
	template.Name = name
	return &core.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}
}

// churn makes a mesh pod each beat, and deletes one of those that it is given, until it is told to end. It has no more pods
// under way than two cores can do, beside those that are held back by their validation.
type churn struct {
	*scenario
	prefix        string
	victims, gone []string
	end           context.CancelFunc
	ended         chan struct{}

	mu   sync.Mutex
	made []string
	errs []error
	// away is how long the network had no stanza of ours or the reference's, back when it had one again.
	away time.Duration
	back time.Time
}

const (
	beat     = 500 * time.Millisecond
	underWay = 3
)

// begin returns when the first pod is ready: the upgrade is to meet the churn, not the other way round.
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

// next makes a pod and deletes another, if there are not too many under way.
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

// watch looks at the network's configuration all the time. A pod more is made as soon as it has no stanza.
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
		c.away, c.back = c.away+time.Since(last), time.Now()
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

// stop ends it some pods later, looks at each pod that it made, and removes them. It gives the pods that were captured from
// the beginning and those that were not, with the times at which they were made.
func (c *churn) stop() (captured, held map[string]time.Time) {
	c.Helper()
	const after = 3
	enough := c.count() + after
	c.Until("pods after the change", func() bool { return c.count() >= enough })
	c.end()
	<-c.ended
	c.mu.Lock() // the watch may have a last look
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
	c.Step("%d pods were made under way, %d of them began without redirection: %q; all are ready and redirected now",
		len(c.made), len(held), slices.Sorted(maps.Keys(held)))
	c.Step("the stanza was away for %s; %q were deleted under way", c.away.Round(time.Millisecond), c.gone)
	for _, name := range c.gone {
		c.Until("the end of "+name, func() bool { return c.Get(lab.App, name) == nil })
	}
	c.remove(c.made...)
	return captured, held
}
