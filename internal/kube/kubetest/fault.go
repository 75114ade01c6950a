package kubetest

import (
	"fmt"
	"net"
	"net/http"
	"strconv"

	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Fault is a failure of one request or one connection.
type Fault string

// Faults of a response.
const (
	BadRequest   Fault = "400"
	Unauthorized Fault = "401"
	Forbidden    Fault = "403"
	NotFound     Fault = "404"
	Conflict     Fault = "409"
	TooMany      Fault = "429, with the Retry-After of SetRetryAfter"
	Budget       Fault = "429 because of a PodDisruptionBudget, with the Retry-After of SetRetryAfter"
	ServerError  Fault = "500"
	Unavailable  Fault = "503"
	Gone         Fault = "410"
	Redirect     Fault = "a redirect to another path"

	// Error statuses from a server other than the API server.
	UnauthorizedPage Fault = "401 with a page of HTML"
	ForbiddenPage    Fault = "403 with a page of HTML"
	NotFoundPage     Fault = "404 with a page of HTML"
	// UnknownPath is the response of an API server that does not serve such a resource.
	UnknownPath Fault = "404 about the path instead of the object"

	Hang         Fault = "no answer"
	HangMidBody  Fault = "half a response and then nothing"
	Reset        Fault = "connection reset instead of a response"
	ResetMidBody Fault = "connection reset in the middle of the response"
	Truncated    Fault = "connection closed before Content-Length bytes"
	Garbage      Fault = "200 with something that is not JSON"
	WrongKind    Fault = "200 with a Status"
	WrongUID     Fault = "the pod with another UID"
	WrongName    Fault = "a pod of another name"
)

// UnknownCA is the only fault of a connection.
const UnknownCA Fault = "a certificate of another authority"

func (f Fault) ofConnection() bool { return f == UnknownCA }

// behaviours returns the handler of each fault of a response.
func (s *Server) behaviours() map[Fault]http.HandlerFunc {
	return map[Fault]http.HandlerFunc{
		BadRequest:   verdict(http.StatusBadRequest, "BadRequest", "the server does not like the request"),
		Unauthorized: verdict(http.StatusUnauthorized, "Unauthorized", "Unauthorized"),
		Forbidden: verdict(http.StatusForbidden, "Forbidden",
			`pods is forbidden: User "system:serviceaccount:istio-system:istio-cni" cannot get resource "pods"`),
		NotFound:         func(w http.ResponseWriter, r *http.Request) { refuse(w, parsePath(r.URL.Path).notFound()) },
		Conflict:         verdict(http.StatusConflict, "Conflict", "the object has been modified; please apply your changes to the latest version and try again"),
		Gone:             verdict(http.StatusGone, "Expired", "too old resource version: 1 (2)"),
		UnauthorizedPage: page(http.StatusUnauthorized),
		ForbiddenPage:    page(http.StatusForbidden),
		NotFoundPage:     page(http.StatusNotFound),
		UnknownPath:      verdict(http.StatusNotFound, "NotFound", "the server could not find the requested resource"),
		TooMany:          s.tooMany("too many requests, please try again later"),
		Budget: s.tooMany("Cannot evict pod as it would violate the pod's disruption budget.", metav1.StatusCause{
			Type: policyv1.DisruptionBudgetCause, Message: "The disruption budget web needs 2 healthy pods and has 2 currently",
		}),
		ServerError: verdict(http.StatusInternalServerError, "InternalError", "etcdserver: leader changed"),
		Unavailable: verdict(http.StatusServiceUnavailable, "ServiceUnavailable", "apiserver is shutting down"),
		Redirect:    http.RedirectHandler("/elsewhere", http.StatusFound).ServeHTTP,
		Hang: func(_ http.ResponseWriter, r *http.Request) {
			s.hang(r)
			// A client that is about to cancel may still read, and would accept an empty response.
			panic(http.ErrAbortHandler)
		},
		HangMidBody: func(w http.ResponseWriter, r *http.Request) {
			s.half(w, r)
			s.hang(r)
		},
		Reset: func(w http.ResponseWriter, _ *http.Request) { s.reset(w) },
		ResetMidBody: func(w http.ResponseWriter, r *http.Request) {
			s.half(w, r)
			s.reset(w)
		},
		Truncated: func(w http.ResponseWriter, r *http.Request) {
			s.half(w, r)
			panic(http.ErrAbortHandler) // closes the connection without the rest
		},
		Garbage:   body([]byte("<html>this is not the server you are looking for</html>")),
		WrongKind: body(marshal(statusOf(metav1.Status{Status: metav1.StatusSuccess, Code: http.StatusOK}))),
		WrongUID:  func(w http.ResponseWriter, r *http.Request) { answer(w, s.rewrite(r, "uid", "another")) },
		WrongName: func(w http.ResponseWriter, r *http.Request) { answer(w, s.rewrite(r, "name", "another")) },
	}
}

// verdict returns a handler that responds with a Status, as the API server does.
func verdict(code int32, reason metav1.StatusReason, message string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { refuse(w, failure(code, reason, message)) }
}

func body(data []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { answer(w, data) }
}

func page(code int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		w.WriteHeader(code)
		fmt.Fprintf(w, "<html><h1>%d %s</h1></html>", code, http.StatusText(code)) //nolint:errcheck // the client may be gone
	}
}

// tooMany responds 429. The API server sends no Retry-After for a budget unless it is about to recompute the budget's status.
func (s *Server) tooMany(message string, causes ...metav1.StatusCause) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		refused := apierrors.NewTooManyRequests(message, valueOf(s, func() int { return s.retryAfter }))
		refused.ErrStatus.Details.Causes = causes
		refuse(w, refused)
	}
}

func (s *Server) hang(r *http.Request) {
	select {
	case <-r.Context().Done():
	case <-s.done:
	}
}

// half sends half of the object or list with the Content-Length of the whole.
func (s *Server) half(w http.ResponseWriter, r *http.Request) {
	pod := s.Object(r.URL.Path)
	if within, err := selectionOf(r); pod == nil && err == nil {
		pod = s.list(r, within)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(pod)))
	answer(w, pod[:len(pod)/2])
	// After its deadline a client closes the connection.
	if err := http.NewResponseController(w).Flush(); err != nil && r.Context().Err() == nil {
		s.tb.Errorf("kubetest: sending half a response: %v", err)
	}
}

// reset ends an HTTP/1.1 connection with RST rather than FIN, and without TLS's close_notify. In HTTP/2 it resets the
// stream.
func (s *Server) reset(w http.ResponseWriter) {
	if _, http1 := w.(http.Hijacker); !http1 {
		panic(http.ErrAbortHandler)
	}
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		s.tb.Errorf("kubetest: taking over the connection: %v", err)
		return
	}
	if outer, ok := conn.(interface{ NetConn() net.Conn }); ok {
		conn = outer.NetConn()
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		tcp.SetLinger(0) //nolint:errcheck,gosec // after an error Close sends FIN
	}
	conn.Close() //nolint:errcheck,gosec // nothing is left to lose
}

// rewrite returns the pod with one field of its metadata changed.
func (s *Server) rewrite(r *http.Request, field, value string) []byte {
	whole := decode(s.Object(r.URL.Path))
	if err := unstructured.SetNestedField(whole.Object, value, "metadata", field); err != nil {
		s.tb.Errorf("kubetest: no pod to change the %s of: %v", field, err)
	}
	return marshal(whole.Object)
}
