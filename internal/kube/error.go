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
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"
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

// Error is a look-up that failed for good. Its text is one line for a person: what was asked of whom, how it ended,
// how often and how long it was tried, the last cause, and the remedy.
type Error struct {
	Class    Class
	Key      PodKey
	Server   string // URL of the API server
	Proxy    string // URL of the proxy in between, empty when there is none
	File     string // the kubeconfig
	Status   int    // HTTP status of the last answer, 0 when there was none
	Message  string // what the server said, bounded and printable
	Attempts int
	Elapsed  time.Duration
	// Exhausted says that the budget ended the look-up while the failure could still have passed.
	Exhausted bool
	// Err is the last cause; nil when the server's answer is the cause.
	Err error
}

// IsNotFound tells whether the API server, as far as it answered, knows no such pod.
func IsNotFound(err error) bool {
	failed, ok := errors.AsType[*Error](err)
	return ok && failed.Class == NotFound
}

// Unwrap gives the last cause, for instance context.Canceled or an x509 error.
func (e *Error) Unwrap() error { return e.Err }

// Error is [Error.Summary] and [Error.Remedy] in one line.
func (e *Error) Error() string { return e.Summary() + ". Remedy: " + e.Remedy() }

// Summary is the message without the remedy.
func (e *Error) Summary() string {
	var text strings.Builder
	fmt.Fprintf(&text, "asking API server %s", e.Server)
	if e.Proxy != "" {
		fmt.Fprintf(&text, " through proxy %s", e.Proxy)
	}
	fmt.Fprintf(&text, " for pod %s: %s", e.Key, e.Class)
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

// failure is one attempt that gave nothing.
type failure struct {
	class      Class
	status     int
	message    string
	verdict    wireStatus // empty when the answer was none of the API server's
	retryAfter time.Duration
	err        error
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
	printable := strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, text)
	printable = strings.Join(strings.Fields(printable), " ")
	if len(printable) <= maxForeignText {
		return printable
	}
	cut := maxForeignText
	for !utf8.RuneStart(printable[cut]) {
		cut--
	}
	return printable[:cut] + "…"
}

func plural(n int) string {
	if n == 1 {
		return ""
	}
	return "s"
}
