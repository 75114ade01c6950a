package kube

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Class is the kind of a failed look-up. It is a closed set; its text is what the message says.
type Class string

// What a look-up can end with. The comment says how often that is tried.
const (
	NotFound           Class = "pod not found"                       // within the budget
	WrongPod           Class = "answer is about another pod"         // within the budget: the server may lag behind
	TooManyRequests    Class = "too many requests"                   // within the budget, not before Retry-After
	ServerError        Class = "server error"                        // within the budget
	Timeout            Class = "no answer in time"                   // within the budget
	Refused            Class = "connection refused"                  // within the budget
	Reset              Class = "connection lost"                     // within the budget
	Unreachable        Class = "server unreachable"                  // within the budget
	DNS                Class = "server name not resolved"            // within the budget
	Truncated          Class = "answer cut short"                    // within the budget
	Undecodable        Class = "answer not understood"               // within the budget
	Transport          Class = "transport error"                     // within the budget
	Unauthorized       Class = "unauthorized"                        // twice
	Forbidden          Class = "forbidden"                           // twice
	UnknownCA          Class = "certificate of an unknown authority" // twice
	CertificateExpired Class = "certificate not valid at this time"  // twice
	WrongHost          Class = "certificate for another host"        // twice
	TLS                Class = "TLS failure"                         // twice
	Rejected           Class = "request rejected"                    // once
	TooLarge           Class = "answer too large"                    // once
	InvalidKey         Class = "not a pod's name"                    // never sent
	NoCredentials      Class = "credentials not readable"            // never sent
	Canceled           Class = "canceled"                            // the caller's wish
)

// attempts is how often a class is tried: these bounds are for failures that another try seldom mends. Zero means as
// often as the budget allows.
func (c Class) attempts() int {
	switch c {
	case Rejected, TooLarge, InvalidKey, NoCredentials, Canceled:
		return 1
	case Unauthorized, Forbidden, UnknownCA, CertificateExpired, WrongHost, TLS:
		return 2
	case NotFound, WrongPod, TooManyRequests, ServerError, Timeout, Refused, Reset, Unreachable, DNS, Truncated,
		Undecodable, Transport:
		return 0
	}
	return 1
}

// Error is a request that failed, or a look-up with all its attempts. Its text is one line for a person, without any
// credential: what was asked of whom, how it ended and, of a look-up, how often and how long it was tried and the remedy.
type Error struct {
	// Class is NotFound, Unauthorized or Forbidden only where the API server itself said so, about this very object:
	// the same status from another server at its address is Undecodable or Rejected.
	Class  Class
	Verb   string // as in RBAC: get, list, watch, create, update, patch, delete
	Object string // resource, namespace and name; of a look-up namespace and name
	Server string // URL of the API server
	Proxy  string // URL of the proxy in between, empty when there is none
	Status int    // HTTP status of the last answer, 0 when there was none
	// Message is what the server said, bounded and printable.
	Message string
	// RetryAfter is the time for which the server wants to be left alone.
	RetryAfter time.Duration

	// File is the kubeconfig of a look-up, empty for other requests; the three below are of look-ups only as well.
	File     string
	Attempts int
	Elapsed  time.Duration
	// Exhausted says that the budget ended the look-up while the failure could still have passed.
	Exhausted bool
	// Err is the last cause: of a refusal an [apierrors.StatusError], else of net, crypto/x509, a decoder, or a context.
	Err error
}

// ClassOf is the class of an error of this package, empty for any other.
func ClassOf(err error) Class {
	if failed, ok := errors.AsType[*Error](err); ok {
		return failed.Class
	}
	return ""
}

// IsConflict tells whether a change was refused because the object was not any more what it was made for: 409 for a
// resourceVersion, 422 for the test of a JSON patch. A patch that the API server finds invalid is 422 as well.
func IsConflict(err error) bool {
	failed, ok := errors.AsType[*Error](err)
	return ok && (failed.Status == http.StatusConflict || failed.Status == http.StatusUnprocessableEntity)
}

// ErrDisruptionBudget is the cause of an [Error] of [Client.EvictPod] that a PodDisruptionBudget is the reason of. Its
// class is TooManyRequests, as that of an API server that sheds load.
var ErrDisruptionBudget = errors.New("a PodDisruptionBudget does not allow it")

// Unwrap gives the last cause.
func (e *Error) Unwrap() error { return e.Err }

// Transient tells whether the failure may pass by itself: another try is worth its while, later.
func (e *Error) Transient() bool { return e.Class.attempts() == 0 && e.Class != NotFound }

// Error is [Error.Summary] and, of a look-up, [Error.Remedy] in one line.
func (e *Error) Error() string {
	if e.File == "" {
		return e.Summary()
	}
	return e.Summary() + ". Remedy: " + e.Remedy()
}

// Summary is the message without the remedy.
func (e *Error) Summary() string {
	var text strings.Builder
	fmt.Fprintf(&text, "asking API server %s", e.Server)
	if e.Proxy != "" {
		fmt.Fprintf(&text, " through proxy %s", e.Proxy)
	}
	if e.File != "" {
		fmt.Fprintf(&text, " for pod %s: %s", e.Object, e.Class)
	} else {
		fmt.Fprintf(&text, " to %s %s: %s", e.Verb, e.Object, e.kind())
	}
	if e.Status != 0 {
		fmt.Fprintf(&text, " (%d)", e.Status)
	}
	if e.Attempts > 0 {
		fmt.Fprintf(&text, " after %d attempt%s in %.1fs", e.Attempts, plural(e.Attempts), e.Elapsed.Seconds())
	}
	if e.Exhausted {
		text.WriteString(", time budget used up")
	}
	switch {
	case e.Message != "":
		text.WriteString(": " + e.Message)
	case e.Err != nil:
		text.WriteString(": " + clean(e.Err.Error()))
	}
	return strings.TrimRight(text.String(), ". ")
}

// kind is the class without the pod that look-ups are about.
func (e *Error) kind() string {
	switch e.Class { //nolint:exhaustive // the others are about no pod
	case NotFound:
		return "not found"
	case InvalidKey:
		return "not an object's name"
	}
	return string(e.Class)
}

// Remedy says what to look at. It never repeats the cause.
func (e *Error) Remedy() string {
	switch e.Class {
	case NotFound:
		return "the runtime tries again; if it stays so, the pod is already deleted or " + e.File +
			" points at another cluster"
	case WrongPod:
		return "the pod was deleted and created anew under its name: the runtime tries again with the new one"
	case Unauthorized:
		return "the token in " + e.File + " was refused; " + agentRewrites
	case Forbidden:
		return "the identity in " + e.File + " may not read this pod: allow it \"get\" on \"pods\" by a ClusterRole " +
			"and a ClusterRoleBinding"
	case TooManyRequests:
		return "the API server sheds load: see who floods it (its metrics apiserver_flowcontrol_*)"
	case ServerError, Truncated, Undecodable, TooLarge:
		return "look into the logs of the API server and of the load balancer or proxy before it"
	case Timeout, Reset:
		return "check that this node reaches the API server (firewall, network policy, load balancer) and that the " +
			"API server is not overloaded"
	case Refused, Unreachable:
		return "check that the API server runs, that this node's routes and service rules (kube-proxy) lead to it, and " +
			"that the address in " + e.File + " is current"
	case DNS:
		return "check this node's resolver, or give the server in " + e.File + " by address"
	case UnknownCA:
		return "the authority in " + e.File + " did not sign the API server's certificate: was it rotated? " + agentRewrites
	case CertificateExpired:
		return "renew the API server's certificate, and check this node's clock"
	case WrongHost:
		return "use an address that the API server's certificate names, or set tls-server-name in " + e.File
	case TLS, Transport:
		return "check the server, certificates and proxy in " + e.File
	case Rejected:
		return "check that the server in " + e.File + " is a Kubernetes API server"
	case InvalidKey:
		return "the container runtime passed a pod name or namespace that Kubernetes does not allow (CNI_ARGS)"
	case Canceled:
		return "none needed: the caller gave up"
	case NoCredentials:
		return agentRewrites
	}
	return agentRewrites
}

// agentRewrites is the remedy for whatever is wrong with the file itself.
const agentRewrites = "the node agent (istio-cni-node) rewrites the file: check that its pod runs on this node"

// ConfigError is a kubeconfig that cannot be used.
type ConfigError struct {
	File string
	Err  error
}

// Error names the file, the cause and the remedy in one line.
func (e *ConfigError) Error() string {
	return fmt.Sprintf("reading kubeconfig %q: %s. Remedy: %s", e.File, clean(e.Err.Error()), e.Remedy())
}

// Remedy says what to look at. It never repeats the cause.
func (e *ConfigError) Remedy() string { return agentRewrites }

// Unwrap gives the cause: a missing file is fs.ErrNotExist.
func (e *ConfigError) Unwrap() error { return e.Err }

// failure is one request that gave nothing, before it is known what it was about.
type failure struct {
	class   Class
	status  int
	message string
	// verdict is nil when the answer was none of the API server's.
	verdict    *metav1.Status
	retryAfter time.Duration
	err        error
}

func (f *failure) Error() string { return string(f.class) }
func (f *failure) Unwrap() error { return f.err }

// asFailure is what a request of client-go ended with. What did not come from [endpoint] was made by client-go itself.
func asFailure(err error) *failure {
	if failed, ok := errors.AsType[*failure](err); ok {
		return failed
	}
	return &failure{class: classify(err, starting), err: withoutURL(err)}
}

// refusal reads an answer that is not good. The API server says no with a Status, in JSON or protobuf; load balancers and
// other servers that answer in its place do not.
func refusal(response *http.Response, secrets *strings.Replacer) *failure {
	const longest = 64 << 10
	// What cannot be read any more is not missed: the status says enough. Reading to the end keeps the connection.
	body, _ := io.ReadAll(io.LimitReader(response.Body, longest))
	failed := failure{class: classOf(response.StatusCode), status: response.StatusCode, message: string(body)}
	decoded, _, err := codecs().UniversalDeserializer().Decode(body, nil, nil)
	if verdict, ok := decoded.(*metav1.Status); ok && err == nil {
		failed.verdict = verdict
		if verdict.Message != "" {
			failed.message = verdict.Message
		}
	}
	if failed.message = clean(secrets.Replace(failed.message)); failed.message == "" {
		failed.message = clean(secrets.Replace(response.Status))
	}
	// The API server sends seconds, never a date.
	if seconds, err := strconv.ParseUint(response.Header.Get("Retry-After"), 10, 31); err == nil {
		failed.retryAfter = time.Duration(seconds) * time.Second
	}
	failed.err = failed.statusError(secrets)
	return &failed
}

// statusError is the answer as client-go and its users know it, without credentials and without texts beside the message.
func (f *failure) statusError(secrets *strings.Replacer) *apierrors.StatusError {
	safe := func(text string) string { return clean(secrets.Replace(text)) }
	status := apierrors.NewGenericServerResponse(f.status, "", schema.GroupResource{}, "", "", int(f.retryAfter.Seconds()), false)
	if f.verdict != nil {
		status.ErrStatus.Reason = metav1.StatusReason(safe(string(f.verdict.Reason)))
		if details := f.verdict.Details; details != nil {
			status.ErrStatus.Details = &metav1.StatusDetails{
				Name: safe(details.Name), Group: safe(details.Group), Kind: safe(details.Kind), RetryAfterSeconds: details.RetryAfterSeconds,
			}
			for _, cause := range details.Causes {
				status.ErrStatus.Details.Causes = append(status.ErrStatus.Details.Causes, metav1.StatusCause{Type: metav1.CauseType(safe(string(cause.Type)))})
			}
		}
	}
	status.ErrStatus.Message = f.message
	return status
}

func classOf(status int) Class {
	switch {
	case status == http.StatusUnauthorized:
		return Unauthorized
	case status == http.StatusForbidden:
		return Forbidden
	case status == http.StatusNotFound:
		return NotFound
	case status == http.StatusTooManyRequests:
		return TooManyRequests
	case status >= http.StatusInternalServerError:
		return ServerError
	}
	return Rejected
}

// classify finds the class of an attempt that ended without an answer. The order matters: a certificate is refused
// inside a handshake, and a reset may happen in one.
func classify(err error, at stage) Class {
	if class, found := classifyTLS(err); found {
		return class
	}
	var dns *net.DNSError
	var network net.Error
	switch {
	case errors.As(err, &dns):
		return DNS
	case errors.Is(err, context.Canceled):
		return Canceled
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &network) && network.Timeout():
		if at == resolving {
			return DNS
		}
		return Timeout
	case errors.Is(err, syscall.ECONNREFUSED):
		return Refused
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.Is(err, io.EOF):
		return Reset
	case errors.Is(err, io.ErrUnexpectedEOF):
		return Truncated
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETDOWN),
		errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EADDRNOTAVAIL):
		return Unreachable
	case at == handshaking:
		return TLS
	}
	return Transport
}

// classifyTLS recognises what the handshake itself reports.
func classifyTLS(err error) (Class, bool) {
	var (
		invalid   x509.CertificateInvalidError
		authority x509.UnknownAuthorityError
		hostname  x509.HostnameError
		refused   *tls.CertificateVerificationError
		alert     tls.AlertError
		record    tls.RecordHeaderError
	)
	switch {
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return CertificateExpired, true
	case errors.As(err, &authority):
		return UnknownCA, true
	case errors.As(err, &hostname):
		return WrongHost, true
	case errors.As(err, &refused), errors.As(err, &alert), errors.As(err, &record), errors.Is(err, http.ErrSchemeMismatch):
		return TLS, true
	}
	return "", false
}

// withoutURL drops the layer of an error that repeats the URL: a message has it already, and a password may stand in it.
func withoutURL(err error) error {
	if outer, ok := errors.AsType[*url.Error](err); ok {
		return outer.Err
	}
	return err
}

// maxForeignText bounds text that a server wrote.
const maxForeignText = 256

// clean makes foreign text fit for one line of a log: printable, no runs of space, bounded.
func clean(text string) string {
	return printable.Text(strings.Join(strings.Fields(text), " "), maxForeignText)
}

func plural(n int) string {
	if n == 1 {
		return ""
	}
	return "s"
}
