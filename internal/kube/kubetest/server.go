// Package kubetest is an API server for tests: a real HTTPS server (HTTP/1.1 and 2) that stores objects, checks the token,
// serves lists and watches, accepts this program's writes, counts requests, and fails on demand as [Fault] lists.
//
// It promises the behaviour of the real API server except for faults (e2e/contract runs TestContract against a real server),
// that requests consume faults in order, and that no goroutine or connection outlives the test.
//
// It never listens on another address than the given one. Only tests import it.
//
// Start reading at [NewServer].
package kubetest

import (
	"crypto/tls"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/meshcni/istio-cni/internal/test/check"
)

// Forever is more requests than any test sends.
const Forever = 1 << 30

// Server is one API server.
type Server struct {
	tb          testing.TB
	http        *httptest.Server
	certificate tls.Certificate
	behave      map[Fault]http.HandlerFunc
	done        chan struct{}
	stop        func()

	mu          sync.Mutex
	token       string
	retryAfter  int
	objects     map[string][]byte // by path
	version     int               // of the last change
	oldest      int               // the first version that a watch may begin at
	noStreams   bool
	protobuf    bool
	history     []change
	watches     map[*watch]struct{}
	faults      []planned
	requests    []string
	connections int
	denied      []string
}

type planned struct {
	// request is a required part of "METHOD /path?query", or empty for any request.
	request string
	fault   Fault
	times   int
}

// NewServer starts a server on a free port of 127.0.0.1. It ends with the test.
func NewServer(tb testing.TB) *Server {
	tb.Helper()
	return NewServerAt(tb, "127.0.0.1:0")
}

// NewServerAt starts a server on an address such as "[::1]:0" or "10.1.2.3:6443".
func NewServerAt(tb testing.TB, address string) *Server {
	tb.Helper()
	var config net.ListenConfig
	listener, err := config.Listen(tb.Context(), "tcp", address)
	check.OK(tb, err, "listening on", address)
	s := &Server{
		tb:         tb,
		done:       make(chan struct{}),
		token:      "secret-token-of-the-node-agent",
		retryAfter: 1,
		objects:    map[string][]byte{},
		version:    1,
		watches:    map[*watch]struct{}{},
	}
	s.behave = s.behaviours()
	s.http = &httptest.Server{Listener: listener, EnableHTTP2: true, TLS: &tls.Config{MinVersion: tls.VersionTLS12}}
	s.http.Config = &http.Server{ //nolint:gosec // no header timeout because faults can hang
		Handler:  http.HandlerFunc(s.serve),
		ErrorLog: log.New(io.Discard, "", 0),
		ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateNew {
				s.locked(func() { s.connections++ })
			}
		},
	}
	s.http.TLS.GetConfigForClient = s.certificates()
	s.stop = sync.OnceFunc(func() {
		close(s.done)
		s.http.Close()
	})
	s.http.StartTLS()
	tb.Cleanup(s.Stop)
	return s
}

// locked calls do with the lock held.
func (s *Server) locked(do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	do()
}

// valueOf is locked for a function with a result.
func valueOf[T any](s *Server, get func() T) (value T) {
	s.locked(func() { value = get() })
	return value
}

// URL returns https://ADDRESS:PORT.
func (s *Server) URL() string { return "https://" + s.http.Listener.Addr().String() }

// Stop ends the server, so that later connections are refused. It may be called twice.
func (s *Server) Stop() { s.stop() }

// Token returns the bearer token that the server accepts.
func (s *Server) Token() string { return valueOf(s, func() string { return s.token }) }

// SetToken replaces the accepted token. Existing kubeconfigs keep their token.
func (s *Server) SetToken(token string) { s.locked(func() { s.token = token }) }

// Kubeconfig writes a kubeconfig as the node agent does, with the authority and the token inline, and returns its path.
func (s *Server) Kubeconfig(tb testing.TB) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "istio-cni-kubeconfig")
	s.WriteKubeconfig(tb, path)
	return path
}

// WriteKubeconfig writes [Server.Kubeconfig] to a path, replacing an existing file.
func (s *Server) WriteKubeconfig(tb testing.TB, path string) {
	tb.Helper()
	const cluster, user, name = "local", "istio-cni", "istio-cni-context"
	check.OK(tb, clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{cluster: {Server: s.URL(), CertificateAuthorityData: s.CA()}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{user: {Token: s.Token()}},
		Contexts:       map[string]*clientcmdapi.Context{name: {Cluster: cluster, AuthInfo: user}},
		CurrentContext: name,
	}, path))
}

// Address returns the server's host and port, in the form of KUBERNETES_SERVICE_HOST and _PORT.
func (s *Server) Address() (host, port string) {
	host, port, err := net.SplitHostPort(s.http.Listener.Addr().String())
	check.OK(s.tb, err)
	return host, port
}

// ServiceAccount writes the files that the kubelet projects into a pod, token and ca.crt, and returns their paths.
func (s *Server) ServiceAccount(tb testing.TB) (tokenFile, caFile string) {
	tb.Helper()
	dir := tb.TempDir()
	tokenFile, caFile = filepath.Join(dir, "token"), filepath.Join(dir, "ca.crt")
	Write(tb, tokenFile, s.Token())
	Write(tb, caFile, string(s.CA()))
	return tokenFile, caFile
}

// Write writes a file that only its owner can read.
func Write(tb testing.TB, path, text string) {
	tb.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil { //nolint:forbidigo // the test's own file
		tb.Fatal(err)
	}
}

// SetPod creates or replaces a pod and notifies no watch: see [Server.Set] for that.
func (s *Server) SetPod(p Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.objects[place{plural: "pods", namespace: p.Namespace, name: p.Name}.path()] = p.JSON(s.tb)
}

// Fail makes the next requests (or connections) fail, after earlier faults are consumed.
func (s *Server) Fail(fault Fault, times int) { s.FailOn("", fault, times) }

// FailOn makes the next requests fail whose "METHOD /path?query" contains part, for instance "/daemonsets/" or "watch=true". A $ at the
// end of part is the end of the request.
// Other requests do not consume the fault, and matching requests do not wait for earlier faults.
func (s *Server) FailOn(part string, fault Fault, times int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = append(s.faults, planned{part, fault, times})
}

// Heal removes all remaining faults.
func (s *Server) Heal() { s.locked(func() { s.faults = nil }) }

// SetRetryAfter sets the Retry-After of [TooMany] and [Budget] in seconds. The initial value is 1.
func (s *Server) SetRetryAfter(seconds int) { s.locked(func() { s.retryAfter = seconds }) }

// Requests returns the requests so far, as "METHOD /path?query".
func (s *Server) Requests() []string {
	return valueOf(s, func() []string { return append([]string(nil), s.requests...) })
}

// Connections returns the number of TCP connections so far.
func (s *Server) Connections() int { return valueOf(s, func() int { return s.connections }) }

// next consumes the next fault of a wanted type. A fault for other requests does not delay it.
func (s *Server) next(request string, wanted func(Fault) bool) (Fault, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = slices.DeleteFunc(s.faults, func(p planned) bool { return p.times <= 0 })
	for i := range s.faults {
		p := &s.faults[i]
		if p.request != "" && !strings.Contains(request+"$", p.request) {
			continue
		}
		if wanted(p.fault) {
			p.times--
			return p.fault, true
		}
		if p.request == "" {
			break
		}
	}
	return "", false
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	request := r.Method + " " + r.URL.RequestURI()
	s.mu.Lock()
	s.requests = append(s.requests, request)
	authorized := r.Header.Get("Authorization") == "Bearer "+s.token
	s.mu.Unlock()
	if fault, found := s.next(request, func(f Fault) bool { return !f.ofConnection() }); found {
		s.behave[fault](w, r)
		return
	}
	if !authorized {
		s.behave[Unauthorized](w, r)
		return
	}
	if r.Method != http.MethodGet {
		s.write(w, r)
		return
	}
	at := parsePath(r.URL.Path)
	within, err := selectionOf(r)
	switch object := s.Object(r.URL.Path); {
	case object != nil:
		answer(w, object)
	case at.kind() == "" || at.name != "":
		refuse(w, at.notFound())
	case err != nil:
		refuse(w, apierrors.NewBadRequest(err.Error()))
	case r.URL.Query().Get("watch") == "true":
		s.watch(w, r, within)
	default:
		answer(w, s.list(r, within))
	}
}

func answer(w http.ResponseWriter, body []byte) { send(w, http.StatusOK, body) }

func send(w http.ResponseWriter, code int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	w.Write(body) //nolint:errcheck,gosec // the client may be gone
}

// refuse responds with an object of kind Status.
func refuse(w http.ResponseWriter, why *apierrors.StatusError) {
	status := statusOf(why.ErrStatus)
	if status.Details != nil && status.Details.RetryAfterSeconds > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(status.Details.RetryAfterSeconds))) // the API server also sets the header
	}
	send(w, int(status.Code), marshal(status))
}

func statusOf(status metav1.Status) metav1.Status {
	status.Kind, status.APIVersion = "Status", "v1"
	return status
}

func failure(code int32, reason metav1.StatusReason, message string) *apierrors.StatusError {
	return &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: code, Reason: reason, Message: message}}
}
