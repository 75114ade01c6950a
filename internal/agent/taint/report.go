package taint

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/kube"
)

// reporter makes events beside the work, which never waits for it.
type reporter struct {
	options Options
	events  chan kube.Event
}

// maxEvents is how many events may wait. The API is asked for no more than that in four minutes anyway.
const maxEvents = 256

// lastWords bounds the events that are sent at the end.
const lastWords = 3 * time.Second

func newReporter(o Options) *reporter {
	return &reporter{options: o, events: make(chan kube.Event, maxEvents)}
}

// run starts sending; the function that it gives waits until the events so far are sent, for a while.
func (r *reporter) run(ctx context.Context) (end func()) {
	sending, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var work sync.WaitGroup
	work.Go(func() {
		for event := range r.events {
			r.send(sending, event)
		}
	})
	return func() {
		close(r.events)
		over := r.options.Clock.NewTimer(lastWords)
		defer over.Stop()
		done := make(chan struct{})
		go func() {
			defer close(done)
			work.Wait()
		}()
		select {
		case <-over.C():
		case <-done:
		}
		cancel()
		<-done
	}
}

func (r *reporter) send(ctx context.Context, event kube.Event) {
	sent, err := r.options.API.RecordEvent(ctx, event)
	switch {
	case err != nil:
		r.options.Metrics.EventReported(metrics.EventFailed)
		r.options.Log.DebugContext(ctx, "an event was not recorded", slog.String("reason", event.Reason),
			slog.String("error", err.Error()))
	case sent:
		r.options.Metrics.EventReported(metrics.EventSent)
	default:
		r.options.Metrics.EventReported(metrics.EventSuppressed)
	}
}

// Reasons of events.
const (
	eventTainted      = "MeshCNINotReady"
	eventUntainted    = "MeshCNIReady"
	eventRequirements = "InvalidTaintRequirements"
)

func (r *reporter) about(object kube.ObjectRef, kind kube.EventType, reason, message string) {
	event := kube.Event{
		Object: object, Reason: reason, Message: message, Type: kind, Component: Component, Host: r.options.Host,
	}
	select {
	case r.events <- event:
	default:
		r.options.Metrics.EventReported(metrics.EventSuppressed)
	}
}

func (r *reporter) configMap(at ConfigMap, message string) {
	r.about(kube.ObjectRef{Kind: "ConfigMap", APIVersion: "v1", Namespace: at.Namespace, Name: at.Name}, kube.EventWarning,
		eventRequirements, message)
}
