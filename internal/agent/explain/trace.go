package explain

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/follow"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

const (
	// maxTraces bounds the concurrent packet traces.
	maxTraces = 4
	// recordTimeout is the time allowed for a client to read a record.
	recordTimeout = 10 * time.Second
	// presenceInterval is the time between two checks that a traced pod is still present.
	presenceInterval = time.Second
)

// Errors of a trace.
var (
	errReplaced = errors.New("another trace of the pod began")
	errTraces   = fmt.Errorf("the agent already traces %d pods", maxTraces)
	errOutside  = errors.New("the plugin leaves the pod alone")
	errGone     = errors.New("the pod ended")
	errSandbox  = errors.New("the pod's packets do not pass the rules of its network namespace")
	errUnseen   = errors.New("the agent does not see the network namespaces of the node's pods")
)

// TraceHandler streams a pod's packets, one follow.Record per line, until the trace ends or the client disconnects.
func (x *Explainer) TraceHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		filter, duration, err := follow.Parse(r.URL.Query().Get)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		k := types.NamespacedName{Namespace: r.PathValue("namespace"), Name: r.PathValue("name")}
		out := &stream{w: w, control: http.NewResponseController(w)}
		o := follow.Options{Subject: "pod " + k.String(), Filter: filter, For: duration, Now: x.Env.Clock.Now}
		if err = x.trace(r.Context(), k, o, out); err == nil {
			return
		}
		status := http.StatusServiceUnavailable
		switch {
		case out.begun:
			_ = out.send(follow.Record{Error: err.Error()}) // the client may be gone
			return
		case errors.Is(err, auditor.ErrNoPod):
			status = http.StatusNotFound
		case errors.Is(err, errOutside), errors.Is(err, errSandbox):
			status = http.StatusConflict
		case errors.Is(err, errTraces):
			status = http.StatusTooManyRequests
		}
		http.Error(w, err.Error(), status)
	})
}

// stream writes each record immediately.
type stream struct {
	w       http.ResponseWriter
	control *http.ResponseController
	begun   bool
}

func (s *stream) event(e document.TraceEvent) error { return s.send(follow.Record{TraceEvent: e}) }

func (s *stream) send(r follow.Record) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if !s.begun {
		s.begun = true
		s.w.Header().Set("Content-Type", "application/x-ndjson")
		// The server's request timeout is shorter than a trace.
		if err := s.control.SetReadDeadline(time.Time{}); err != nil {
			return err
		}
	}
	if err := s.control.SetWriteDeadline(deadline(recordTimeout)); err != nil {
		return err
	}
	if _, err := s.w.Write(append(printable.Lines(text), '\n')); err != nil {
		return err
	}
	return s.control.Flush()
}

// deadline returns the time after d by the system's clock, because the kernel knows no fake clock.
func deadline(d time.Duration) time.Time { return time.Now().Add(d) } //nolint:forbidigo // as above

// trace follows the packets of a pod. Each pod has one trace at a time: a new one ends the previous one, because kubectl exec
// leaves an interrupted user's command running.
func (x *Explainer) trace(ctx context.Context, k types.NamespacedName, o follow.Options, out *stream) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	t := &tracing{end: cancel, ended: make(chan struct{})}
	if err := x.beginTrace(ctx, k, t); err != nil {
		return err
	}
	defer x.endTrace(k, t)
	pod, end := x.Look(k)
	if pod == nil {
		return auditor.ErrNoPod
	}
	defer end()
	want := pod.Decision.Wanted()
	switch {
	case pod.Err != nil:
		return pod.Err
	case want == nil:
		return fmt.Errorf("%w: %s", errOutside, pod.Decision.Reason.Sentence())
	case pod.Decision.Sandbox != "":
		return fmt.Errorf("%w: %s", errSandbox, pod.Decision.Sandbox.Sentence())
	case !pod.Reachable():
		return errUnseen
	}
	go x.watchPresence(ctx, pod.Pod, cancel)
	return pod.InNamespace(ctx, func(space redirection.Namespace) (err error) {
		if space, _, err = space.AuditAny(ctx, want); err != nil {
			return err
		}
		return follow.Run(ctx, space, want, o, out.event)
	})
}

// tracing is a running trace.
type tracing struct {
	end   context.CancelCauseFunc
	ended chan struct{}
}

// beginTrace reserves the trace of a pod, after it has ended the pod's previous trace.
func (x *Explainer) beginTrace(ctx context.Context, k types.NamespacedName, t *tracing) error {
	for {
		other, err := x.reserveTrace(k, t)
		if other == nil {
			return err
		}
		other.end(errReplaced)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-other.ended:
		}
	}
}

// reserveTrace reserves the trace of a pod, or returns the running one.
func (x *Explainer) reserveTrace(k types.NamespacedName, t *tracing) (other *tracing, err error) {
	if !x.Present(k, "") {
		return nil, auditor.ErrNoPod
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case x.traced[k] != nil:
		return x.traced[k], nil
	case len(x.traced) >= maxTraces:
		return nil, errTraces
	}
	x.traced[k] = t
	return nil, nil
}

func (x *Explainer) endTrace(k types.NamespacedName, t *tracing) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.traced, k)
	close(t.ended)
}

// watchPresence ends a trace when its pod ends, so that no namespace outlives its pod.
func (x *Explainer) watchPresence(ctx context.Context, p kube.Pod, end context.CancelCauseFunc) {
	ticker := time.NewTicker(presenceInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if !x.Present(p.Key(), p.Facts.UID) {
			end(errGone)
			return
		}
	}
}
