package podrepair

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/kube"
)

// Bounds of the mail.
const (
	// maxMail is more than a node has pods. What is beyond is only logged.
	maxMail = 1024
	// mailBurst events are sent at once and one in each mailInterval after that: fewer than package kube lets pass in a
	// minute, so that none is dropped there when many pods are repaired together.
	mailBurst    = 20
	mailInterval = 2 * time.Second
	// farewell bounds what is sent after the end.
	farewell = 2 * time.Second
)

// mail is what is to be told to the API server by somebody who has the time for it: pods that can be helped must not wait until an
// API server that hangs has taken note of those before them.
type mail struct {
	letters chan kube.Event
	closing sync.Once
}

func newMail() *mail { return &mail{letters: make(chan kube.Event, maxMail)} }

// drop reports whether there was room.
func (m *mail) drop(event kube.Event) bool {
	select {
	case m.letters <- event:
		return true
	default:
		return false
	}
}

// close says that there will be no more.
func (m *mail) close() { m.closing.Do(func() { close(m.letters) }) }

// post sends what comes in until the mail is closed, and what is left then if that goes fast.
func (c *controller) post(ctx context.Context) {
	postal, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(farewell, end) })()
	left, filled := mailBurst, c.Clock.Now()
	for event := range c.mail.letters {
		for gained := int(c.Clock.Now().Sub(filled) / mailInterval); gained > 0; gained = 0 {
			left, filled = min(mailBurst, left+gained), filled.Add(time.Duration(gained)*mailInterval)
		}
		if left == 0 {
			c.sleep(ctx, mailInterval)
			left, filled = 1, c.Clock.Now()
		}
		left--
		c.record(postal, event)
	}
}

// record writes an event and counts what became of it.
func (c *controller) record(ctx context.Context, event kube.Event) {
	sent, err := c.API.RecordEvent(ctx, event)
	switch {
	case err != nil:
		c.Metrics.EventReported(metrics.EventFailed)
		c.Log.WarnContext(ctx, "an event was not recorded", slog.String("pod", event.Object.Namespace+"/"+event.Object.Name),
			slog.String("reason", event.Reason), slog.String("message", event.Message), slog.String("error", err.Error()))
	case sent:
		c.Metrics.EventReported(metrics.EventSent)
	default:
		c.Metrics.EventReported(metrics.EventSuppressed)
	}
}
