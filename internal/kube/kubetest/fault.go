package kubetest

import (
	"bytes"
	"net"
	"net/http"
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

// fail answers a request with a fault.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, f Fault) {
	switch f {
	case BadRequest:
		status(w, http.StatusBadRequest, "BadRequest", "the server does not like the request")
	case Unauthorized:
		status(w, http.StatusUnauthorized, "Unauthorized", "Unauthorized")
	case Forbidden:
		status(w, http.StatusForbidden, "Forbidden",
			`pods is forbidden: User "system:serviceaccount:istio-system:istio-cni" cannot get resource "pods"`)
	case NotFound:
		notFound(w, r)
	case TooMany:
		s.mu.Lock()
		w.Header().Set("Retry-After", strconv.Itoa(s.retryAfter))
		s.mu.Unlock()
		status(w, http.StatusTooManyRequests, "TooManyRequests", "too many requests, please try again later")
	case ServerError:
		status(w, http.StatusInternalServerError, "InternalError", "etcdserver: leader changed")
	case Unavailable:
		status(w, http.StatusServiceUnavailable, "ServiceUnavailable", "apiserver is shutting down")
	case Redirect:
		http.Redirect(w, r, "/elsewhere", http.StatusFound)
	default:
		s.failBody(w, r, f)
	}
}

// failBody answers with a fault that is not a status code.
func (s *Server) failBody(w http.ResponseWriter, r *http.Request, f Fault) {
	pod := s.pod(r.URL.Path)
	switch f {
	case Hang:
		s.hang(r)
	case HangMidBody:
		half(w, pod)
		s.hang(r)
	case Reset:
		s.reset(w)
	case ResetMidBody:
		half(w, pod)
		s.reset(w)
	case Truncated:
		half(w, pod)
		panic(http.ErrAbortHandler) // closes the connection without the rest
	case Garbage:
		answer(w, []byte("<html>this is not the server you are looking for</html>"))
	case EmptyBody:
		answer(w, nil)
	case WrongKind:
		status(w, http.StatusOK, "", "all is well")
	case WrongUID:
		answer(w, s.rewrite(pod, "uid", OtherUID))
	case WrongName:
		answer(w, s.rewrite(pod, "name", "another"))
	case TooLarge:
		answer(w, bytes.Repeat([]byte(" "), 9<<20))
	default:
		s.t.Errorf("kubetest: %q is no fault of an answer", f)
	}
}

func (s *Server) hang(r *http.Request) {
	select {
	case <-r.Context().Done():
	case <-s.done:
	}
}

func half(w http.ResponseWriter, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.Write(body[:len(body)/2]) //nolint:errcheck // the client may be gone
	w.(http.Flusher).Flush()    //nolint:errcheck,forcetypeassert // every server of net/http has it
}

// reset ends the connection with RST rather than FIN, and without the close_notify of TLS.
func (s *Server) reset(w http.ResponseWriter) {
	conn, _, err := w.(http.Hijacker).Hijack() //nolint:errcheck,forcetypeassert // HTTP/1.1 has it
	if err != nil {
		s.t.Errorf("kubetest: taking over the connection: %v", err)
		return
	}
	if outer, ok := conn.(interface{ NetConn() net.Conn }); ok {
		conn = outer.NetConn()
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		tcp.SetLinger(0) //nolint:errcheck // then it is a plain close
	}
	conn.Close() //nolint:errcheck // nothing is left to lose
}
