package kube

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Class is the kind of a failure. It is a closed set; its text is part of the message.
type Class string

// The classes. Each comment is the number of attempts of a look-up.
const (
	NotFound        Class = "not found"                     // within the budget
	WrongPod        Class = "response is about another pod" // within the budget: the server can lag behind
	TooManyRequests Class = "too many requests"             // within the budget, not before Retry-After
	ServerError     Class = "server error"                  // within the budget
	Timeout         Class = "no response in time"           // within the budget
	Unreachable     Class = "server unreachable"            // within the budget
	DNS             Class = "server name not resolved"      // within the budget
	ConnectionLost  Class = "connection lost"               // within the budget
	Undecodable     Class = "response not understood"       // within the budget
	Unauthorized    Class = "unauthorized"                  // twice
	Forbidden       Class = "forbidden"                     // twice
	TLS             Class = "TLS failure"                   // twice
	Rejected        Class = "request rejected"              // once
	TooLarge        Class = "response too large"            // once
	InvalidKey      Class = "not an object's name"          // never sent
	NoCredentials   Class = "credentials not readable"      // never sent
	InvalidConfig   Class = "kubeconfig not usable"         // never sent
	Canceled        Class = "canceled"                      // by the caller
)

// Error is a failed request, or a failed look-up with all its attempts. Its text is one line without credentials: request, server,
// result and, for a look-up, the number of attempts, the time and the remedy.
type Error struct {
	// Class is NotFound, Unauthorized or Forbidden only for a response of the API server itself about this object. The same status
	// from another server at its address is Undecodable or Rejected.
	Class  Class
	Verb   string // as in RBAC: get, list, watch, create, update, patch, delete
	Object string // resource, namespace and name
	Server string // URL of the API server
	Status int    // HTTP status of the last response, 0 without a response
	// Message is the server's message, bounded and printable.
	Message string
	// RetryAfter is the server's Retry-After.
	RetryAfter time.Duration

	// File is the kubeconfig of a look-up, empty for other requests; the three fields below are also set for look-ups only.
	File     string
	Attempts int
	Elapsed  time.Duration
	// Exhausted reports that the budget ended a look-up that another attempt could have completed.
	Exhausted bool
	// Err is the last cause: an [apierrors.StatusError] for a refusal, else an error of net, crypto/x509, a decoder, or a context.
	Err error
}

// errorOf returns an error of this package, zero for any other error.
func errorOf(err error) Error {
	if failed, ok := errors.AsType[*Error](err); ok {
		return *failed
	}
	return Error{}
}

// ClassOf returns the class of an error of this package, empty for any other error.
func ClassOf(err error) Class { return errorOf(err).Class }

// RetryAfter returns the server's Retry-After, at most five minutes, or 0 without a Retry-After.
func RetryAfter(err error) time.Duration { return min(errorOf(err).RetryAfter, maxRetryAfter) }

// IsConflict reports whether the API server refused a change because the object has changed: 409 for a resourceVersion, 422 for
// the test of a JSON patch. The status of an invalid patch is 422 as well.
func IsConflict(err error) bool {
	status := errorOf(err).Status
	return status == http.StatusConflict || status == http.StatusUnprocessableEntity
}

// ErrDisruptionBudget is the cause of an [Error] of [Client.EvictPod] if a PodDisruptionBudget forbids the eviction. Its class
// is TooManyRequests, the class of an overloaded API server.
var ErrDisruptionBudget = errors.New("a PodDisruptionBudget does not allow it")

// Unwrap returns the last cause.
func (e *Error) Unwrap() error { return e.Err }

// Transient reports whether a retry can succeed.
func (e *Error) Transient() bool {
	attempts, _ := e.policy()
	return attempts == 0 && e.Class != NotFound
}

// Error returns one line: request, server and result, and for a look-up the remedy.
func (e *Error) Error() string {
	_, remedy := e.policy()
	if e.Class == InvalidConfig {
		return fmt.Sprintf("reading kubeconfig %q: %s. Remedy: %s", e.File, clean(e.Err.Error()), remedy)
	}
	var text strings.Builder
	fmt.Fprintf(&text, "%s %s at API server %s: %s", e.Verb, e.Object, e.Server, e.Class)
	if e.Status != 0 {
		fmt.Fprintf(&text, " (%d)", e.Status)
	}
	if e.Attempts > 0 {
		noun := "attempts"
		if e.Attempts == 1 {
			noun = "attempt"
		}
		fmt.Fprintf(&text, " after %d %s in %.1fs", e.Attempts, noun, e.Elapsed.Seconds())
	}
	if e.Exhausted {
		text.WriteString(", time budget used up")
	}
	if cause := cmp.Or(e.Message, clean(fmt.Sprint(e.Err))); e.Err != nil || e.Message != "" {
		text.WriteString(": " + strings.TrimRight(cause, ". "))
	}
	if e.File != "" {
		text.WriteString(". Remedy: " + remedy)
	}
	return text.String()
}

// policy returns the number of attempts of a class, zero for any number within the budget, and a remedy. The remedy never repeats
// the cause.
func (e *Error) policy() (attempts int, remedy string) {
	switch e.Class { //nolint:exhaustive // the others are about the file
	case NotFound:
		return 0, "the runtime tries again; if it stays so, the pod is already deleted or " + e.File + " points at another cluster"
	case WrongPod:
		return 0, "the pod was deleted and created anew under its name: the runtime tries again with the new one"
	case Unauthorized:
		return 2, "the token in " + e.File + " was refused; " + agentRewrites
	case Forbidden:
		resource, _, _ := strings.Cut(e.Object, " ")
		return 2, fmt.Sprintf("the identity in %s may not read this: allow it \"get\" on %q by a ClusterRole and a ClusterRoleBinding", e.File, resource)
	case TooManyRequests:
		return 0, "the API server sheds load: find the clients with most requests (its metrics apiserver_flowcontrol_*)"
	case ServerError, Undecodable:
		return 0, serverLogs
	case TooLarge:
		return 1, serverLogs
	case Timeout, ConnectionLost:
		return 0, "check that this node reaches the API server (firewall, network policy, load balancer, proxy) and that the " +
			"API server is not overloaded"
	case Unreachable:
		return 0, "check that the API server runs, that this node's routes and service rules (kube-proxy) lead to it, and " +
			"that the address in " + e.File + " is current"
	case DNS:
		return 0, "check this node's resolver, or give the server in " + e.File + " by address"
	case TLS:
		return 2, "check the authority and the address in " + e.File + " (" + agentRewrites + "), the API server's certificate and " +
			"this node's clock"
	case Rejected:
		return 1, "check that the server in " + e.File + " is a Kubernetes API server"
	case InvalidKey:
		return 1, "the container runtime passed a pod name or namespace that Kubernetes does not allow (CNI_ARGS)"
	case Canceled:
		return 1, "none needed: the caller canceled the request"
	}
	return 1, agentRewrites
}

// Remedies for more than one class.
const (
	serverLogs    = "look into the logs of the API server and of the load balancer or proxy before it"
	agentRewrites = "the node agent (istio-cni-node) rewrites the file: check that its pod runs on this node"
)

// invalid returns the error of a call that was not sent.
func (c *Client) invalid(what *call, err error) *Error {
	return (&exchange{client: c, call: what}).fail(InvalidKey, err)
}

// fail returns the error of a request. It redacts credentials in texts of servers and libraries.
func (x *exchange) fail(class Class, err error) *Error {
	failed := &Error{Class: class, Verb: x.call.verb, Object: x.call.String(), Server: x.client.Server(), Err: err}
	if class == Undecodable {
		failed.Status = http.StatusOK
	}
	if text := err.Error(); x.redact(text) != text {
		failed.Err = errors.New(x.redact(text))
	}
	return failed
}

// failure converts client-go's error of a request.
func (x *exchange) failure(ctx context.Context, err error) *Error {
	x.client.mu.Lock()
	x.client.stale = true
	x.client.mu.Unlock()
	if answer, ok := errors.AsType[*apierrors.StatusError](err); ok && x.broken == nil {
		return x.refused(answer.ErrStatus)
	}
	err = cmp.Or(context.Cause(ctx), x.broken, err) // net/http can report a closed connection instead of the cause
	if tooLarge, ok := errors.AsType[errTooLarge](err); ok {
		return x.fail(TooLarge, tooLarge)
	}
	if outer, ok := errors.AsType[*url.Error](err); ok {
		err = outer.Err // without the URL, which is in the message and can contain a password
	}
	at, _ := x.stage.Load().(stage)
	return x.fail(classify(err, at), fmt.Errorf("%s: %w", at, err))
}

// refused returns the error of a response with an error status. The API server sends a Status. A load balancer, a proxy or
// another server at the address can also respond 401, 403 or 404, but without a Status or with a Status about another object.
func (x *exchange) refused(answer metav1.Status) *Error {
	status := metav1.Status{
		Code: answer.Code, Reason: metav1.StatusReason(x.redact(string(answer.Reason))), Message: clean(x.redact(answer.Message)),
		Details: &metav1.StatusDetails{},
	}
	foreign := false
	if details := answer.Details; details != nil {
		status.Details.RetryAfterSeconds = details.RetryAfterSeconds
		for _, cause := range details.Causes {
			status.Details.Causes = append(status.Details.Causes, metav1.StatusCause{Type: metav1.CauseType(x.redact(string(cause.Type)))})
			if foreign = cause.Type == metav1.CauseTypeUnexpectedServerResponse; foreign && cause.Message != "unknown" {
				status.Message = clean(x.redact(cause.Message))
			}
		}
	}
	failed := x.fail(classOf(status.Code), &apierrors.StatusError{ErrStatus: status})
	failed.Status, failed.Message = int(status.Code), status.Message
	failed.RetryAfter = time.Duration(status.Details.RetryAfterSeconds) * time.Second
	switch failed.Class { //nolint:exhaustive // the other classes need no check
	case Unauthorized, Forbidden, NotFound:
		if foreign {
			failed.Class = Undecodable
		} else if failed.Class == NotFound && !x.call.named(answer) {
			failed.Class = Rejected
		}
	case TooManyRequests:
		// A PodDisruptionBudget forbids the eviction (k8s.io/api/policy/v1.DisruptionBudgetCause).
		if apierrors.HasStatusCause(failed.Err, policyv1.DisruptionBudgetCause) {
			failed.Err = fmt.Errorf("%w: %w", ErrDisruptionBudget, failed.Err)
		}
	}
	return failed
}

// named reports whether a Status says that no object has the call's name.
func (c *call) named(verdict metav1.Status) bool {
	about := verdict.Details
	return verdict.Reason == metav1.StatusReasonNotFound && about != nil && c.name != "" && about.Kind == c.resource.plural &&
		about.Group == c.resource.group && about.Name == c.name
}

func (x *exchange) redact(text string) string {
	for _, secret := range x.secrets {
		text = strings.ReplaceAll(text, secret, "[redacted]")
	}
	return text
}

func classOf(status int32) Class {
	if status >= http.StatusInternalServerError {
		return ServerError
	}
	return cmp.Or(map[int32]Class{
		http.StatusUnauthorized: Unauthorized, http.StatusForbidden: Forbidden, http.StatusNotFound: NotFound,
		http.StatusTooManyRequests: TooManyRequests,
	}[status], Rejected)
}

// classify returns the class of a request without a response. The order matters: a reset can happen in a handshake.
func classify(err error, at stage) Class {
	network, _ := errors.AsType[net.Error](err)
	switch {
	case is[*tls.CertificateVerificationError](err), is[tls.AlertError](err), is[tls.RecordHeaderError](err),
		errors.Is(err, http.ErrSchemeMismatch):
		return TLS
	case is[*net.DNSError](err), errors.Is(err, context.DeadlineExceeded) && at == resolving:
		return DNS
	case errors.Is(err, context.Canceled):
		return Canceled
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, errSilent), network != nil && network.Timeout():
		return Timeout
	case utilnet.IsConnectionRefused(err), errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EHOSTUNREACH),
		errors.Is(err, syscall.ENETDOWN), errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM),
		errors.Is(err, syscall.EADDRNOTAVAIL):
		return Unreachable
	case utilnet.IsConnectionReset(err), utilnet.IsProbableEOF(err), at == reading:
		return ConnectionLost
	case at == handshaking:
		return TLS
	case at == authenticating:
		return NoCredentials
	}
	return ConnectionLost
}

func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

// maxForeignText bounds a server's text in bytes.
const maxForeignText = 256

// clean formats a server's text for one line of a log: printable, without runs of space, bounded.
func clean(text string) string {
	return printable.Text(strings.Join(strings.Fields(text), " "), maxForeignText)
}
