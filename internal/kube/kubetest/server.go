// Package kubetest is an API server for tests: a real HTTPS server that knows pods, checks the token, counts what
// reaches it, and fails on demand in all the ways that [Fault] lists.
//
// It promises that faults are used up in the order in which they were asked for, and that nothing outlives the test.
//
// It never listens on anything but the address given, and is imported by tests only.
//
// Start reading at [NewServer].
package kubetest

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// Forever is a number of times that no test outlasts.
const Forever = 1 << 30

// Server is one API server.
type Server struct {
	tb     testing.TB
	http   *httptest.Server
	issuer *authority
	other  *authority // an authority that no kubeconfig knows
	behave map[Fault]http.HandlerFunc
	done   chan struct{}
	stop   func()

	mu          sync.Mutex
	token       string
	retryAfter  int
	pods        map[string][]byte // by path
	faults      []planned
	requests    []string
	connections int
}

type planned struct {
	fault Fault
	times int
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
	if err != nil {
		tb.Fatalf("listening on %s: %v", address, err)
	}
	s := &Server{
		tb:         tb,
		issuer:     newAuthority(tb),
		other:      newAuthority(tb),
		done:       make(chan struct{}),
		token:      "secret-token-of-the-node-agent",
		retryAfter: 1,
		pods:       map[string][]byte{},
	}
	s.behave = s.behaviours()
	s.http = &httptest.Server{
		Listener: listener,
		Config: &http.Server{ //nolint:gosec // no header timeout: hanging is what it is for
			Handler:  http.HandlerFunc(s.serve),
			ErrorLog: log.New(io.Discard, "", 0),
			ConnState: func(_ net.Conn, state http.ConnState) {
				if state == http.StateNew {
					s.mu.Lock()
					s.connections++
					s.mu.Unlock()
				}
			},
		},
		TLS: &tls.Config{MinVersion: tls.VersionTLS12},
	}
	s.http.TLS.GetConfigForClient = s.certificates(listener.Addr())
	s.stop = sync.OnceFunc(func() {
		close(s.done)
		s.http.Close()
	})
	s.http.StartTLS()
	tb.Cleanup(s.Stop)
	return s
}

// URL is https://ADDRESS:PORT.
func (s *Server) URL() string { return "https://" + s.http.Listener.Addr().String() }

// CA is the server's authority in PEM.
func (s *Server) CA() []byte { return s.issuer.pem }

// Stop ends the server: later connections are refused. It may be called twice.
func (s *Server) Stop() { s.stop() }

// Token is the bearer token that the server accepts.
func (s *Server) Token() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.token
}

// SetToken makes another token the accepted one. Kubeconfigs written before keep theirs.
func (s *Server) SetToken(token string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.token = token
}

// Kubeconfig writes a kubeconfig as the node agent does, with the authority and the token inside, and gives its path.
func (s *Server) Kubeconfig(tb testing.TB) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "istio-cni-kubeconfig")
	s.WriteKubeconfig(tb, path)
	return path
}

// WriteKubeconfig writes [Server.Kubeconfig] to a path, replacing what is there.
func (s *Server) WriteKubeconfig(tb testing.TB, path string) {
	tb.Helper()
	text := fmt.Sprintf(`apiVersion: v1
clusters:
- cluster:
    certificate-authority-data: %s
    server: %s
  name: local
contexts:
- context:
    cluster: local
    user: istio-cni
  name: istio-cni-context
current-context: istio-cni-context
kind: Config
preferences: {}
users:
- name: istio-cni
  user:
    token: %s
`, base64Of(s.CA()), s.URL(), s.Token())
	Write(tb, path, text)
}

// Write writes a file that only its owner reads.
func Write(tb testing.TB, path, text string) {
	tb.Helper()
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600) //nolint:gosec // the test's own path
	if err != nil {
		tb.Fatal(err)
	}
	if _, err := io.WriteString(file, text); err != nil {
		tb.Fatal(err)
	}
	if err := file.Close(); err != nil {
		tb.Fatal(err)
	}
}

// SetPod makes a pod known, or replaces it.
func (s *Server) SetPod(p Pod) { s.SetPodJSON(p.JSON(s.tb)) }

// SetPodJSON makes a pod known in whatever form the API has; its metadata says where.
func (s *Server) SetPodJSON(pod []byte) {
	var object struct {
		Metadata struct{ Namespace, Name string }
	}
	if err := json.Unmarshal(pod, &object); err != nil || object.Metadata.Name == "" || object.Metadata.Namespace == "" {
		s.tb.Fatalf("kubetest: not a pod with name and namespace (%v): %.80s", err, pod)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pods[podPath(object.Metadata.Namespace, object.Metadata.Name)] = pod
}

// Fail makes the next requests (or connections) fail, after those that were asked for before.
func (s *Server) Fail(fault Fault, times int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = append(s.faults, planned{fault, times})
}

// Heal forgets all faults that are still to come.
func (s *Server) Heal() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = nil
}

// SetRetryAfter sets the seconds that [TooMany] asks for; 1 at the beginning.
func (s *Server) SetRetryAfter(seconds int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.retryAfter = seconds
}

// Requests are the requests so far, as "METHOD /path?query".
func (s *Server) Requests() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.requests...)
}

// Connections counts the TCP connections so far.
func (s *Server) Connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.connections
}

func podPath(namespace, name string) string {
	return "/api/v1/namespaces/" + namespace + "/pods/" + name
}

func (s *Server) pod(path string) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pods[path]
}

// next takes the next fault if it is of the wanted sort.
func (s *Server) next(wanted func(Fault) bool) (Fault, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.faults) > 0 && s.faults[0].times <= 0 {
		s.faults = s.faults[1:]
	}
	if len(s.faults) == 0 || !wanted(s.faults[0].fault) {
		return "", false
	}
	s.faults[0].times--
	return s.faults[0].fault, true
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.requests = append(s.requests, r.Method+" "+r.URL.RequestURI())
	authorized := r.Header.Get("Authorization") == "Bearer "+s.token
	s.mu.Unlock()
	if fault, found := s.next(func(f Fault) bool { return !f.ofConnection() }); found {
		s.behave[fault](w, r)
		return
	}
	pod := s.pod(r.URL.Path)
	switch {
	case !authorized:
		s.behave[Unauthorized](w, r)
	case r.Method != http.MethodGet || pod == nil:
		notFound(w, r)
	default:
		answer(w, pod)
	}
}

func answer(w http.ResponseWriter, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Write(body) //nolint:errcheck,gosec // the client may be gone
}

// status answers with an object of kind Status.
func status(w http.ResponseWriter, code int, reason, message string) {
	outcome := "Failure"
	if code == http.StatusOK {
		outcome = "Success"
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(object{ //nolint:errcheck,errchkjson,gosec // the client may be gone
		"kind": "Status", "apiVersion": "v1", "metadata": object{}, "status": outcome, "message": message,
		"reason": reason, "code": code,
	})
}
