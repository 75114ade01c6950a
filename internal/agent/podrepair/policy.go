package podrepair

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
)

// errPolicy is the cause of whatever cannot be done before the plugin is told something else. It is no use to try it again.
var errPolicy = errors.New("the plugin's configuration cannot be used")

// watchPolicy judges all pods anew when the plugin is told something else than before.
func (c *controller) watchPolicy(ctx context.Context, said string) {
	for {
		c.sleep(ctx, c.PolicyEvery)
		if ctx.Err() != nil {
			return
		}
		now := c.policy()
		if now == said {
			continue
		}
		said = now
		keys := c.keys()
		c.Log.InfoContext(ctx, "the plugin is told something else: all pods are judged anew", slog.Int("pods", len(keys)))
		c.logProblems(ctx)
		for _, k := range keys {
			c.queue.Add(k)
		}
	}
}

// logProblems says, once for all pods, that nothing can be done.
func (c *controller) logProblems(ctx context.Context) {
	conf, err := c.Plugin()
	if err = errors.Join(err, conf.Problems); err != nil {
		c.Log.ErrorContext(ctx, "no pod is looked after before the plugin's configuration can be used", slog.String("error", err.Error()))
	}
}

// policy is all that the plugin is told and that decides here, as a text to compare.
func (c *controller) policy() string {
	conf, err := c.Plugin()
	return fmt.Sprintf("%+v %q %q %v %v", conf.Policy(), conf.ForceIptables, conf.Backend, conf.Problems, err)
}
