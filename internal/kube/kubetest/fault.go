package kubetest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"path"
	"strconv"
)

// Fault is a way for the API server to fail one request or one connection.
type Fault string

// Faults of an answer.
const (
	BadRequest   Fault = "400"
	Unauthorized Fault = "401"
	Forbidden    Fault = "403"
	NotFound     Fault = "404"
	TooMany      Fault = "429, with the Retry-After of SetRetryAfter"
	ServerError  Fault = "500"
	Unavailable  Fault = "503"
	Redirect     Fault = "a redirect to another path"

	Hang         Fault = "no answer"
	HangMidBody  Fault = "half an answer and then nothing"
	Reset        Fault = "connection reset instead of an answer"
	ResetMidBody Fault = "connection reset in the middle of the answer"
	Truncated    Fault = "connection closed before Content-Length bytes"
	Garbage      Fault = "200 with something that is not JSON"
	EmptyBody    Fault = "200 with nothing"
	WrongKind    Fault = "200 with a Status"
	WrongUID     Fault = "the pod with another UID"
	WrongName    Fault = "a pod of another name"
	TooLarge     Fault = "a body of 9 MiB"
)

// Faults of a connection: the certificate that the server presents.
const (
	ExpiredCertificate   Fault = "a certificate that has expired"
	WrongHostCertificate Fault = "a certificate for another host"
	UnknownCA            Fault = "a certificate of another authority"
)

// OtherUID is the UID of the pod that [WrongUID] sends.
const OtherUID = "00000000-0000-4000-8000-0000000000ff"

func (f Fault) ofConnection() bool {
	return f == ExpiredCertificate || f == WrongHostCertificate || f == UnknownCA
}

// behaviours says how each fault of an answer is answered.
func (s *Server) behaviours() map[Fault]http.HandlerFunc {
	return map[Fault]http.HandlerFunc{
		BadRequest:   verdict(http.StatusBadRequest, "BadRequest", "the server does not like the request"),
		Unauthorized: verdict(http.StatusUnauthorized, "Unauthorized", "Unauthorized"),
		Forbidden: verdict(http.StatusForbidden, "Forbidden",
			`pods is forbidden: User "system:serviceaccount:istio-system:istio-cni" cannot get resource "pods"`),
		NotFound:    notFound,
		TooMany:     s.tooMany,
		ServerError: verdict(http.StatusInternalServerError, "InternalError", "etcdserver: leader changed"),
		Unavailable: verdict(http.StatusServiceUnavailable, "ServiceUnavailable", "apiserver is shutting down"),
		Redirect:    http.RedirectHandler("/elsewhere", http.StatusFound).ServeHTTP,
		Hang:        func(_ http.ResponseWriter, r *http.Request) { s.hang(r) },
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
		EmptyBody: body(nil),
		WrongKind: verdict(http.StatusOK, "", "all is well"),
		WrongUID:  func(w http.ResponseWriter, r *http.Request) { answer(w, s.rewrite(r, "uid", OtherUID)) },
		WrongName: func(w http.ResponseWriter, r *http.Request) { answer(w, s.rewrite(r, "name", "another")) },
		TooLarge: func(w http.ResponseWriter, _ *http.Request) {
			const length = 9 << 20
			w.Header().Set("Content-Length", strconv.Itoa(length))
			answer(w, bytes.Repeat([]byte(" "), length))
		},
	}
}

// verdict answers with an object of kind Status, as the API server does.
func verdict(code int, reason, message string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { status(w, code, reason, message) }
}

func body(data []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { answer(w, data) }
}

func notFound(w http.ResponseWriter, r *http.Request) {
	status(w, http.StatusNotFound, "NotFound", fmt.Sprintf("pods %q not found", path.Base(r.URL.Path)))
}

func (s *Server) tooMany(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	w.Header().Set("Retry-After", strconv.Itoa(s.retryAfter))
	s.mu.Unlock()
	status(w, http.StatusTooManyRequests, "TooManyRequests", "too many requests, please try again later")
}

func (s *Server) hang(r *http.Request) {
	select {
	case <-r.Context().Done():
	case <-s.done:
	}
}

// half sends half of the pod under the length of the whole.
func (s *Server) half(w http.ResponseWriter, r *http.Request) {
	pod := s.pod(r.URL.Path)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(pod)))
	answer(w, pod[:len(pod)/2])
	if err := http.NewResponseController(w).Flush(); err != nil {
		s.tb.Errorf("kubetest: sending half a pod: %v", err)
	}
}

// reset ends the connection with RST rather than FIN, and without the close_notify of TLS.
func (s *Server) reset(w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		s.tb.Errorf("kubetest: taking over the connection: %v", err)
		return
	}
	if outer, ok := conn.(interface{ NetConn() net.Conn }); ok {
		conn = outer.NetConn()
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		tcp.SetLinger(0) //nolint:errcheck,gosec // then it is a plain close
	}
	conn.Close() //nolint:errcheck,gosec // nothing is left to lose
}

// rewrite gives the pod with one field of its metadata changed.
func (s *Server) rewrite(r *http.Request, field, value string) []byte {
	var whole object
	if err := json.Unmarshal(s.pod(r.URL.Path), &whole); err != nil {
		s.tb.Errorf("kubetest: no pod to change the %s of: %v", field, err)
		return nil
	}
	if metadata, ok := whole["metadata"].(object); ok {
		metadata[field] = value
	}
	return encode(s.tb, whole)
}
