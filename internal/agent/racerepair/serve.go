package racerepair

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/inspect"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// checkTimeout bounds the inspection of all pods for one request.
const checkTimeout = time.Minute

// Handler returns the status of all pods as JSON, the most serious state first. A browser gets an inspection for the port's own
// page alone.
func (c *Controller) Handler(by Way) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if now, _ := strconv.ParseBool(r.URL.Query().Get(agentapi.CheckParam)); now {
			if site := r.Header.Get("Sec-Fetch-Site"); site != "" && site != "same-origin" {
				http.Error(w, "an inspection is not for a link: ask without check", http.StatusForbidden)
				return
			}
			c.checkAll(r.Context(), by)
		}
		all := c.Pods()
		audit.Sort(all)
		respond(w, all)
	})
}

// PodHandler returns one pod in detail as JSON, with the way of a packet if the query has one.
func (c *Controller) PodHandler(by Way) http.Handler {
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
		e, err := c.Explain(r.Context(), by, k, question)
		switch {
		case errors.Is(err, ErrNoPod):
			http.Error(w, c.elsewhere(r.Context(), by, k), http.StatusNotFound)
		case errors.Is(err, errAsked):
			http.Error(w, err.Error(), http.StatusTooManyRequests)
		case err != nil:
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		default:
			respond(w, e)
		}
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

// Explain inspects a pod and describes it in detail, if that is in the budget.
func (c *Controller) Explain(ctx context.Context, by Way, k types.NamespacedName, question *inspect.Question) (e inspect.Explanation, err error) {
	if !c.knows(k) {
		return e, ErrNoPod
	}
	ctx, cancel := context.WithTimeout(ctx, explainTimeout)
	defer cancel()
	done, err := c.turn(ctx, by)
	if err != nil {
		return e, err
	}
	defer done()
	if e.Status, err = c.inspected(ctx, by, k); err != nil {
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
	j.inject(&e)
	e.Decision = inspect.Decision{
		Captured: j.decision.Outcome == sidecar.Capture, Reason: string(j.decision.Reason), Sentence: j.decision.Reason.Sentence(),
		Detail: j.decision.Detail, Remedy: j.decision.Reason.Remedy(),
	}
	if j.decision.Err != nil {
		e.Decision.Detail = printable.Text(j.decision.Err.Error(), maxDetail)
	}
	if c.Reported != nil {
		if report, found := c.Reported(j.pod.Is); found {
			e.Added = &report
		}
	}
	if e.InspectionError = j.withoutNamespace(); e.InspectionError == "" {
		began := c.Clock.Now()
		j.describe(ctx, question, &e)
		c.charge(by, c.Clock.Since(began))
	}
	j.complete(&e)
	return e, nil
}

// complete gives a pod a state that the audit does not inspect.
func (j *job) complete(e *inspect.Explanation) {
	switch {
	case e.State != "":
		return
	case j.decision.Outcome == sidecar.Pass:
		e.State, e.Sentence, e.Remedy = audit.Outside, "is not redirected by the plugin: "+e.Decision.Sentence, e.Decision.Remedy
	default:
		e.State = audit.NotInspected
		e.Sentence, e.Remedy = e.State.Sentence(), j.remedy(e.State)
		e.Problems = []audit.Problem{{State: e.State, Detail: e.InspectionError}}
	}
}

// maxDetail bounds the text of an error about a pod's settings in bytes.
const maxDetail = 1 << 10

// inject describes the injection.
func (j *job) inject(e *inspect.Explanation) {
	var status string
	status, e.Injected = j.pod.Facts.Annotations[sidecar.StatusKey]
	e.Injection.Revision = sidecar.Revision(status)
	for _, c := range j.pod.Facts.Containers {
		switch {
		case c.Name == sidecar.ProxyContainer && c.Init:
			e.Injection.Proxy = "native sidecar"
		case c.Name == sidecar.ProxyContainer:
			e.Injection.Proxy = "container"
		case sidecar.OfTheMesh(c.Name, c.Init):
			e.Injection.Setup = c.Name
		}
	}
}

// withoutNamespace is why the pod has no network namespace to be read, "" if it has one.
func (j *job) withoutNamespace() string {
	switch {
	case j.pod.Facts.HostNetwork:
		return "the pod uses the node's network namespace, which is never inspected"
	case podOf(j.pod).Ended:
		return "the pod has ended"
	case j.pod.Deleting:
		return "the pod is being deleted"
	case len(j.pod.Addresses) == 0:
		return "the pod has no address yet"
	case !j.reachable():
		return "the agent does not see the processes of the node (mount the node's /proc at /host/proc)"
	}
	return ""
}

// describe reads the namespace. That of a pod that the plugin does not redirect is judged by its live rules alone.
func (j *job) describe(ctx context.Context, question *inspect.Question, e *inspect.Explanation) {
	var spec *redirect.Spec
	if e.Decision.Captured {
		spec = &j.decision.Spec
	}
	err := j.inNamespace(ctx, func(space redirection.Namespace) (err error) {
		if spec != nil {
			if space, _, err = space.AuditAny(ctx, *spec); err == nil {
				e.Detail, err = inspect.Read(ctx, space, spec)
			}
		} else {
			var alone inspect.Explanation
			alone, err = inspect.Alone(ctx, space)
			e.Detail, e.ByRules = alone.Detail, alone.State
		}
		if err != nil || question == nil {
			return err
		}
		answer, err := inspect.Walk(ctx, space, spec, *question)
		if err == nil {
			e.Answer = &answer
		}
		return err
	})
	if err != nil {
		e.InspectionError = cause(ctx, err) + remedy(err)
	}
}

func (c *controller) knows(k types.NamespacedName) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pods[k] != nil
}

// elsewhere says where a pod is that this node does not have. For root it queries the API server.
func (c *Controller) elsewhere(ctx context.Context, by Way, k types.NamespacedName) string {
	text := fmt.Sprintf("%v: %s", ErrNoPod, k)
	if c.API == nil || by == Port {
		return text
	}
	pod, err := c.API.Pod(ctx, kube.PodRef{Namespace: k.Namespace, Name: k.Name})
	switch {
	case kube.ClassOf(err) == kube.NotFound:
		return text + "; the cluster has none either"
	case err != nil:
		return text + "; its node is not known: " + err.Error()
	case pod.NodeName == "":
		return text + "; it is not scheduled to a node yet"
	case pod.NodeName == c.Settings.Node:
		return text + "; it is on this node, and the agent has not seen it yet: try again"
	}
	return fmt.Sprintf("%s; it is on node %s, this one is %s", text, pod.NodeName, c.Settings.Node)
}
