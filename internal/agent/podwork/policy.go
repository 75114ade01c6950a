package podwork

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// ErrPolicy is the cause of failures that last until the plugin's configuration changes. They are not retried.
var ErrPolicy = errors.New("the plugin's configuration cannot be used")

// policyInterval is the interval between two comparisons of the plugin's configuration.
const policyInterval = 10 * time.Second

// watchPolicy enqueues all pods when the plugin's configuration has changed.
func (c *Controller[M]) watchPolicy(ctx context.Context, before string) {
	for ctx.Err() == nil {
		c.Sleep(ctx, policyInterval)
		now := c.policy(ctx, before)
		if now == before {
			continue
		}
		before = now
		keys := c.Keys()
		c.Log.InfoContext(ctx, "the plugin's configuration has changed: all pods are checked again", slog.Int("pods", len(keys)))
		for _, k := range keys {
			c.queue.Add(k)
		}
	}
}

// policy returns a text to compare, made of the parts of the plugin's configuration that affect decisions. It logs the
// problems of a changed configuration once for all pods.
func (c *Controller[M]) policy(ctx context.Context, before string) string {
	conf, err := c.Plugin()
	now := fmt.Sprintf("%+v %q %q %v %v", conf.Policy(), conf.ForceIptables, conf.Backend, conf.Problems, err)
	if err = errors.Join(err, conf.Problems); err != nil && now != before {
		c.Log.ErrorContext(ctx, "no pod is repaired until the plugin's configuration can be used", slog.String("error", err.Error()))
	}
	return now
}
