// Package explain answers questions about the node's pods over HTTP: the states of all pods, the details of one with the path of a
// packet, and a trace of real packets.
//
// It promises that an answer is about one pod with one UID; that requests are bounded in time, number and size; and that requests on
// the port never cause one to the API server.
//
// Start reading at Explain; trace.go has the traces.
package explain

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/inspect"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// Options are the dependencies of an Explainer. All but API are required.
type Options struct {
	API     *kube.Client
	Auditor *auditor.Auditor
	Env     *podwork.Env
	// Look returns a turn for a request, see podwork.Controller.
	Look func(k types.NamespacedName) (t *podwork.Turn, end func())
	// Present reports whether a pod with the UID is present and has not ended. An empty UID matches any pod.
	Present func(k types.NamespacedName, uid string) bool
}

// Explainer answers questions about pods over HTTP.
type Explainer struct {
	Options

	mu sync.Mutex
	// traced are the packet traces of pods.
	traced map[types.NamespacedName]*tracing
}

// New returns an Explainer.
func New(o Options) *Explainer {
	return &Explainer{Options: o, traced: map[types.NamespacedName]*tracing{}}
}

// look is a turn of a pod for a request.
type look struct{ *podwork.Turn }

// Handler returns the status of all pods, or of those with a label selector, as JSON, the most serious state first. A browser can request
// an inspection only from the port's own page.
func (x *Explainer) Handler(by auditor.Way) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		query := r.URL.Query()
		selects, err := selector.Labels(query.Get(agentapi.SelectorParam))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		var left []types.NamespacedName
		if now, _ := strconv.ParseBool(query.Get(agentapi.CheckParam)); now {
			if site := r.Header.Get("Sec-Fetch-Site"); site != "" && site != "same-origin" {
				http.Error(w, "a link must not cause an inspection: omit the check parameter", http.StatusForbidden)
				return
			}
			extend(w, auditor.CheckTimeout+recordTimeout)
			left = x.Auditor.CheckAll(r.Context(), by)
		}
		respond(w, x.statuses(selects, left))
	})
}

// statuses returns the sorted status of the pods whose labels match; left are the pods that a check left out.
func (x *Explainer) statuses(selects func(map[string]string) bool, left []types.NamespacedName) []audit.Status {
	old := map[types.NamespacedName]bool{}
	for _, k := range left {
		old[k] = true
	}
	all := []audit.Status{}
	for _, s := range x.Auditor.Statuses() {
		k, matches := types.NamespacedName{Namespace: s.Namespace, Name: s.Pod}, false
		x.Auditor.Pods.Get(k, func(p kube.Pod, _ *auditor.Memory) { matches = selects(p.Facts.Labels) })
		if s.LeftOut = old[k]; matches {
			all = append(all, s)
		}
	}
	audit.Sort(all)
	return all
}

// extend gives a request more time than the server does: the end of the time to read would end its context, and that of the time to write
// its answer.
func extend(w http.ResponseWriter, d time.Duration) {
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Time{}) // an answer that comes too late is an error of the client
	_ = control.SetWriteDeadline(deadline(d))
}

// PodHandler returns one pod in detail as JSON, with the path of the packet in the query, if any.
func (x *Explainer) PodHandler(by auditor.Way) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		extend(w, explainTimeout+recordTimeout)
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
		e, err := x.Explain(r.Context(), by, k, question)
		switch {
		case errors.Is(err, auditor.ErrNoPod):
			http.Error(w, x.elsewhere(r.Context(), by, k), http.StatusNotFound)
		case errors.Is(err, auditor.ErrAsked):
			http.Error(w, err.Error(), http.StatusTooManyRequests)
		case err != nil:
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		default:
			respond(w, e)
		}
	})
}

// respond writes a value as JSON without control characters.
func respond(w http.ResponseWriter, value any) {
	text, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(printable.Lines(text), '\n')) // the client may have closed the connection
}

// explainTimeout bounds one request, with its inspection.
const explainTimeout = 10 * time.Second

// Pictured is an Explanation with what the page draws: on the port, and if the namespace was read.
type Pictured struct {
	document.Explanation

	Picture *inspect.Picture `json:"picture,omitempty"`
}

// Explain inspects a pod and describes it in detail. It returns auditor.ErrAsked if the budget is used up.
func (x *Explainer) Explain(ctx context.Context, by auditor.Way, k types.NamespacedName, question *inspect.Question) (e Pictured, err error) {
	ctx, cancel := context.WithTimeout(ctx, explainTimeout)
	defer cancel()
	if known := x.Present(k, ""); !known {
		return e, auditor.ErrNoPod
	}
	done, err := x.Auditor.Admit(ctx, by)
	if err != nil {
		return e, err
	}
	defer done()
	if e.Status, err = x.Auditor.Inspect(ctx, by, k); err != nil {
		return e, err
	}
	t, end := x.Look(k)
	if t == nil {
		return e, auditor.ErrNoPod
	}
	defer end()
	if t.Err != nil {
		return e, t.Err
	}
	l := look{t}
	e.Time = x.Env.Clock.Now()
	l.inject(&e.Explanation)
	e.Decision = document.CurrentDecision{
		Captured: l.Decision.Wanted() != nil, Reason: string(l.Decision.Reason), Sentence: l.Decision.Reason.Sentence(),
		Detail: l.Decision.Detail, Remedy: l.Decision.Reason.Remedy(),
	}
	e.Modes = modes(l.Decision, l.Pod.Facts, l.Conf)
	if l.Decision.Err != nil {
		e.Decision.Detail = printable.Text(l.Decision.Err.Error(), maxDetail)
	}
	if x.Env.Reported != nil {
		if report, found := x.Env.Reported(l.Pod.Is); found {
			added := report.Decision()
			e.Added = &added
		}
	}
	if e.InspectionError = l.withoutNamespace(); e.InspectionError == "" {
		began := x.Env.Clock.Now()
		l.describe(ctx, question, by == auditor.Port, &e)
		x.Auditor.Charge(by, x.Env.Clock.Since(began))
	}
	x.complete(&e.Explanation, t)
	return e, nil
}

// complete sets the state of a pod that the audit does not inspect.
func (x *Explainer) complete(e *document.Explanation, t *podwork.Turn) {
	switch {
	case e.State != "":
		return
	case t.Decision.Outcome == sidecar.Pass:
		e.State, e.Sentence, e.Remedy = audit.Outside, "is not redirected by the plugin: "+e.Decision.Sentence, e.Decision.Remedy
	default:
		e.State = audit.NotInspected
		e.Sentence, e.Remedy = e.State.Sentence(), x.Auditor.Remedy(e.State)
		e.Problems = []audit.Problem{{State: e.State, Detail: e.InspectionError}}
	}
}

// maxDetail bounds the text of an error about a pod's settings in bytes.
const maxDetail = 1 << 10

// inject describes the injection.
func (l look) inject(e *document.Explanation) {
	var status string
	status, e.Injected = l.Pod.Facts.Annotations[sidecar.StatusKey]
	e.Injection.Revision = sidecar.Revision(status)
	for _, c := range l.Pod.Facts.Containers {
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

// withoutNamespace returns why no network namespace of the pod can be read, or "".
func (l look) withoutNamespace() string {
	switch {
	case l.Pod.Facts.HostNetwork:
		return "the pod uses the node's network namespace, which is never inspected"
	case podwork.PodOf(l.Pod).Ended:
		return "the pod has ended"
	case l.Pod.Deleting:
		return "the pod is being deleted"
	case len(l.Pod.Addresses) == 0:
		return "the pod has no address yet"
	case l.Decision.Sandbox != "":
		return "the rules that apply are inside the sandbox, where the node cannot see them"
	case !l.Reachable():
		return "the agent does not see the processes of the node (mount the node's /proc at /host/proc)"
	}
	return ""
}

// describe reads the namespace, and draws it if drawn is set. If the plugin does not redirect the pod, only its live rules are judged.
func (l look) describe(ctx context.Context, question *inspect.Question, drawn bool, e *Pictured) {
	want := l.Decision.Wanted()
	err := l.InNamespace(ctx, func(space redirection.Namespace) (err error) {
		if want != nil {
			if space, _, err = space.AuditAny(ctx, want); err == nil {
				e.Detail, err = inspect.Read(ctx, space, want)
			}
		} else {
			var alone document.Explanation
			alone, err = inspect.Alone(ctx, space)
			e.Detail, e.ByRules = alone.Detail, alone.State
		}
		if err == nil && drawn {
			e.Picture, err = inspect.Draw(ctx, space, want)
		}
		if err != nil || question == nil {
			return err
		}
		answer, err := inspect.Walk(ctx, space, want, *question)
		if err == nil {
			e.Answer = &answer
		}
		return err
	})
	if err != nil {
		e.InspectionError = podwork.Cause(ctx, err)
	}
}

// elsewhere returns a text about a pod that is not on this node. For requests on the socket it queries the API server.
func (x *Explainer) elsewhere(ctx context.Context, by auditor.Way, k types.NamespacedName) string {
	text := fmt.Sprintf("%v: %s", auditor.ErrNoPod, k)
	if x.API == nil || by == auditor.Port {
		return text
	}
	pod, err := x.API.Pod(ctx, kube.PodRef{Namespace: k.Namespace, Name: k.Name})
	switch {
	case kube.ClassOf(err) == kube.NotFound:
		return text + "; the cluster has none either"
	case err != nil:
		return text + "; its node is unknown: " + err.Error()
	case pod.NodeName == "":
		return text + "; it is not scheduled to a node yet"
	case pod.NodeName == x.Env.Node:
		return text + "; it is on this node, and the agent has not seen it yet: try again"
	}
	return fmt.Sprintf("%s; it is on node %s, this one is %s", text, pod.NodeName, x.Env.Node)
}
