// Package taint is the taint controller: it takes a taint from the nodes where the plugin's agent is ready, and puts it
// on those where it is not.
//
// It promises that nothing is decided before all that a decision needs is known, that one replica of several works at a
// time, that a node is changed by a patch which tests what was decided on, so that other writers lose nothing, that a node
// that is as it should be costs no request, and that what failed is tried again, more and more seldom, for as long as it
// is wanted. Bad requirements in a ConfigMap leave the last good ones in force.
//
// It never decides by itself (core/readiness does), updates a whole node, or changes another taint. Of the API it knows internal/kube only.
//
// Start reading at Run; leader.go is the election, leadership.go a leader's caches, work.go the work on one node.
package taint

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/agent/eventrecorder"
	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/kube"
)

// The parts of the controller's health.
const (
	PartElection     = "election"
	PartRequirements = "requirements"
	PartCaches       = "caches"
	// PartWrites is there only once a change of a node was refused.
	PartWrites = "writes"
)

// Parts are those that have to be ready from the start.
func Parts() []string { return []string{PartElection, PartRequirements, PartCaches} }

// Component is the source of the controller's events.
const Component = "istio-cni-taint"

// ConfigMap names the object that has the requirements, in the legacy format.
type ConfigMap struct{ Namespace, Name string }

// Options are what a controller works with. API, Log, Health and Metrics are required.
type Options struct {
	API *kube.Client
	// Clock is the system's by default.
	Clock   clock.WithTicker
	Log     *slog.Logger
	Health  *health.State
	Metrics *metrics.Taint

	// Events records events about nodes and the ConfigMap; there are none where it is nil.
	Events *eventrecorder.Recorder

	// Policy configures decisions; a ConfigMap with a name replaces its requirements.
	Policy    readiness.Policy
	ConfigMap ConfigMap
	// Lease is the lock of the election, nil for a controller that is alone.
	Lease *Lease
	// Condition is the type of the node condition to publish, empty for none.
	Condition string
	// Host is the node where this runs, for events.
	Host string
	// Retry is the pause after a change that failed, doubled up to MaxRetry; 100 ms and 1 min by default.
	Retry, MaxRetry time.Duration
	// Workers is how many nodes are worked on at the same time, 4 by default.
	Workers int
	// Timeout bounds Once, 1 min by default.
	Timeout time.Duration
}

func (o Options) withDefaults() Options {
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.Retry <= 0 {
		o.Retry = 100 * time.Millisecond
	}
	if o.MaxRetry <= 0 {
		o.MaxRetry = time.Minute
	}
	if o.Workers <= 0 {
		o.Workers = 4
	}
	if o.Timeout <= 0 {
		o.Timeout = time.Minute
	}
	return o
}

// Run works until ctx ends: it waits for the lease, works for as long as it has it, and gives it back. It fails only for
// options that nothing can be done with.
func Run(ctx context.Context, o Options) error {
	o = o.withDefaults()
	if err := o.check(); err != nil {
		return err
	}
	lead := func(ctx context.Context) {
		o.Metrics.SetLeader(true)
		defer o.Metrics.SetLeader(false)
		newLeadership(o).run(ctx)
	}
	if o.Lease == nil {
		o.Health.Ready(PartElection)
		lead(ctx)
		return nil
	}
	o.standby()
	elect(ctx, o, lead)
	return nil
}

func (o Options) check() error {
	if o.API == nil || o.Log == nil || o.Health == nil || o.Metrics == nil {
		return errors.New("the taint controller needs an API, a log, health and metrics")
	}
	if o.Policy.Taint.Key == "" || o.Policy.Taint.Effect == "" {
		return errors.New("the taint controller needs a taint with key and effect")
	}
	return nil
}

// sleep is a pause that ends with ctx.
func (o Options) sleep(ctx context.Context, d time.Duration) {
	timer := o.Clock.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C():
	}
}

// standby reports that a replica that waits for the lease lacks nothing.
func (o Options) standby() {
	o.Health.Ready(PartRequirements)
	o.Health.Ready(PartCaches)
}
