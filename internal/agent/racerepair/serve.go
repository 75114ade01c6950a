package racerepair

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/inspect"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// checkTimeout bounds the inspection of all pods for one request.
const checkTimeout = time.Minute

// Handler returns the status of all pods as JSON, the most serious state first.
func (c *Controller) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if now, _ := strconv.ParseBool(r.URL.Query().Get(agentapi.CheckParam)); now {
			c.checkAll(r.Context())
		}
		all := c.Pods()
		audit.Sort(all)
		respond(w, all)
	})
}

// PodHandler returns one pod in detail as JSON, with the way of a packet if the query has one.
func (c *Controller) PodHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		k := types.NamespacedName{Namespace: r.PathValue("namespace"), Name: r.PathValue("name")}
		query := r.URL.Query()
		var question *inspect.Question
		if query.Has("to") || query.Has("from") {
			q, err := inspect.Parse(query.Get)
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			question = &q
		}
		e, err := c.Explain(r.Context(), k, question)
		if errors.Is(err, ErrNoPod) {
			http.Error(w, err.Error(), http.StatusNotFound)
			return
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		respond(w, e)
	})
}

// respond writes JSON that has no control characters.
func respond(w http.ResponseWriter, value any) {
	text, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(printable.Lines(text), '\n')) // the client may have closed the connection
}

// explainTimeout bounds the reading of a namespace for one request.
const explainTimeout = 10 * time.Second

// Explain inspects a pod and describes it in detail.
func (c *Controller) Explain(ctx context.Context, k types.NamespacedName, question *inspect.Question) (e inspect.Explanation, err error) {
	ctx, cancel := context.WithTimeout(ctx, explainTimeout)
	defer cancel()
	if e.Status, err = c.Check(ctx, k); err != nil {
		return e, err
	}
	c.mu.Lock()
	known := c.pods[k]
	if known == nil {
		c.mu.Unlock()
		return e, ErrNoPod
	}
	j := &job{controller: c.controller, pod: known.pod, log: c.Log}
	c.mu.Unlock()
	if j.conf, err = c.Plugin(); err != nil {
		return e, err
	}
	j.decision = sidecar.Decide(j.pod.Facts, j.conf.Policy())
	_, e.Injected = j.pod.Facts.Annotations[sidecar.StatusKey]
	e.Decision = inspect.Decision{
		Captured: j.decision.Outcome == sidecar.Capture, Reason: string(j.decision.Reason), Sentence: j.decision.Reason.Sentence(),
		Detail: j.decision.Detail, Remedy: j.decision.Reason.Remedy(),
	}
	if e.Decision.Captured {
		j.describe(ctx, question, &e)
	}
	return e, nil
}

// describe reads the namespace of a captured pod.
func (j *job) describe(ctx context.Context, question *inspect.Question, e *inspect.Explanation) {
	err := j.inNamespace(ctx, func(space redirection.Namespace) (err error) {
		if e.Detail, err = inspect.Read(ctx, space, &j.decision.Spec); err != nil || question == nil {
			return err
		}
		answer, err := inspect.Walk(ctx, space, &j.decision.Spec, *question)
		e.Answer = &answer
		return err
	})
	if err != nil {
		e.InspectionError = cause(ctx, err) + remedy(err)
	}
}
