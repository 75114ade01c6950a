package kube

import (
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/util/cert"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

const podUID = "6f1e0c57-3d0e-4b5e-8c77-0d3f4a6f2b11"

// patient is the budget of look-ups that end before it. budget_test.go tests the budget with a fake clock.
const patient = time.Minute

func cart() PodRef { return PodRef{Namespace: "shop", Name: "cart", UID: podUID} }

func cartPod() kubetest.Pod {
	return kubetest.Pod{
		Namespace: "shop", Name: "cart", UID: podUID,
		Containers: []kubetest.Container{{Name: "app"}, {Name: "istio-proxy"}},
	}
}

func newServer(t *testing.T) *kubetest.Server {
	t.Helper()
	server := kubetest.NewServer(t)
	server.SetPod(cartPod())
	return server
}

func newClient(t *testing.T, kubeconfig string) *Client {
	t.Helper()
	client, err := NewClient(Config{Kubeconfig: kubeconfig, Once: true})
	check.OK(t, err)
	t.Cleanup(client.Close)
	return client
}

func TestPod_OneConnectionAndRequest(t *testing.T) {
	t.Parallel()
	server := newServer(t)
	client := newClient(t, server.Kubeconfig(t))
	got, err := client.Lookup(t.Context(), cart(), nil, 10*time.Second)
	check.OK(t, err)
	want, err := Facts(cartPod().JSON(t))
	check.OK(t, err)
	check.Diff(t, "facts", want, got)
	check.Diff(t, "requests", []string{"GET /api/v1/namespaces/shop/pods/cart"}, server.Requests())
	check.Equal(t, server.Connections(), 1, "connections")
	check.Equal(t, client.Server(), server.URL(), "Server() is")
}

func TestPod_Recovers(t *testing.T) {
	t.Parallel()
	for fault, times := range map[kubetest.Fault]int{
		kubetest.NotFound: 5, kubetest.ServerError: 5, kubetest.Unavailable: 5, kubetest.Hang: 1, kubetest.HangMidBody: 1,
		kubetest.Reset: 3, kubetest.ResetMidBody: 3, kubetest.Truncated: 3, kubetest.Garbage: 3,
		kubetest.WrongKind: 3, kubetest.WrongUID: 3, kubetest.WrongName: 3, kubetest.Unauthorized: 1, kubetest.Forbidden: 1,
		kubetest.UnknownCA: 1,
	} {
		t.Run(string(fault), func(t *testing.T) {
			t.Parallel()
			server := newServer(t)
			server.Fail(fault, times)
			check.OK(t, check.Err(newClient(t, server.Kubeconfig(t)).Lookup(t.Context(), cart(), nil, patient)))
			if made := max(len(server.Requests()), server.Connections()); made < times+1 {
				t.Errorf("%d attempts reached the server, want %d: the fault was not consumed", made, times+1)
			}
		})
	}
}

func wantError(t *testing.T, err error, class Class) Error {
	t.Helper()
	failed, ok := errors.AsType[*Error](err)
	if !ok {
		t.Fatalf("error is %T %v, want an Error", err, err)
	}
	check.Equal(t, failed.Class, class, "the class of", err)
	return *failed
}

func TestPod_401And403AreCountedTogether(t *testing.T) {
	t.Parallel()
	server := newServer(t)
	server.Fail(kubetest.NotFound, 2)
	server.Fail(kubetest.Forbidden, 1)
	server.Fail(kubetest.ServerError, 2)
	server.Fail(kubetest.Unauthorized, kubetest.Forever)
	_, err := newClient(t, server.Kubeconfig(t)).Lookup(t.Context(), cart(), nil, patient)
	if failed := wantError(t, err, Unauthorized); failed.Attempts != 6 || len(server.Requests()) != 6 {
		t.Errorf("%d requests, want 6: %v", len(server.Requests()), err)
	}
}

func TestPod_RereadsKubeconfig(t *testing.T) {
	t.Parallel()
	server, other := newServer(t), newServer(t)
	kubeconfig := server.Kubeconfig(t)
	client := newClient(t, kubeconfig)
	finds := func(what string, in *kubetest.Server) {
		t.Helper()
		check.OK(t, check.Err(client.Lookup(t.Context(), cart(), nil, patient)), what)
		check.Equal(t, client.Server(), in.URL(), what, "Server() is")
	}
	server.SetToken("rotated-token")
	server.WriteKubeconfig(t, kubeconfig)
	finds("a rotated token", server)
	check.Equal(t, len(server.Requests()), 2, "requests")
	before := server.Connections()
	server.Fail(kubetest.ServerError, 2)
	kubetest.Write(t, kubeconfig, "")
	finds("a damaged file changes nothing", server)
	check.Equal(t, server.Connections(), before, "connections")
	server.Stop()
	other.WriteKubeconfig(t, kubeconfig)
	finds("a server at another address with another authority", other)
}

func TestPod_Is(t *testing.T) {
	t.Parallel()
	const hash = "0123456789abcdef0123456789abcdef"
	for name, test := range map[string]struct {
		annotation, uid string
		want            bool
	}{
		"the same UID":                                  {"", podUID, true},
		"a mirror pod by its hash":                      {"kubernetes.io/config.hash", hash, true},
		"a mirror pod by its mirror annotation":         {"kubernetes.io/config.mirror", hash, true},
		"a mirror pod by its own UID":                   {"kubernetes.io/config.hash", podUID, true},
		"not a mirror pod of another hash":              {"kubernetes.io/config.hash", "other", false},
		"not a pod with the hash in another annotation": {"example.org/hash", hash, false},
	} {
		pod, err := decodePod(fmt.Appendf(nil, `{"metadata": {"uid": %q, "annotations": {%q: %q}}}`, podUID, test.annotation, hash))
		check.OK(t, err)
		check.Equal(t, pod.Is(test.uid), test.want, name)
	}
}

func TestPod_Concurrent(t *testing.T) {
	t.Parallel()
	server := newServer(t)
	kubeconfig := server.Kubeconfig(t)
	client := newClient(t, kubeconfig)
	server.SetToken("rotated-token")
	server.WriteKubeconfig(t, kubeconfig)
	server.Fail(kubetest.ServerError, 10)
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			check.Equal(t, check.Err(client.Lookup(t.Context(), cart(), nil, patient)), nil)
		})
	}
	all.Wait()
}

// configured returns a client with a kubeconfig that has these fields.
func configured(t *testing.T, cluster, user string) *Client {
	t.Helper()
	kubeconfig := filepath.Join(t.TempDir(), "config")
	kubetest.Write(t, kubeconfig, kubeconfigText(cluster, user))
	return newClient(t, kubeconfig)
}

// foreign starts a server with the test's handler and returns a client that does not verify it.
func foreign(t *testing.T, start func(*httptest.Server), user string, handler http.HandlerFunc) *Client {
	t.Helper()
	server := httptest.NewUnstartedServer(handler)
	start(server)
	t.Cleanup(server.Close)
	return configured(t, "server: '"+server.URL+"/prefix', insecure-skip-tls-verify: true", user)
}

func TestPod_ServerText(t *testing.T) {
	t.Parallel()
	client := foreign(t, (*httptest.Server).StartTLS, "token: "+secret, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusBadRequest)
		//nolint:errcheck // hostile text
		fmt.Fprintf(w, "bad\x1b[31m\r\nheader\u202e %s %s", r.Header.Get("Authorization"), strings.Repeat("ä\xff", 10000))
	})
	_, err := client.Lookup(t.Context(), cart(), nil, patient)
	failed := wantError(t, err, Rejected)
	if want := `bad\u001b[31m header\u202e Bearer [redacted] ä\ufffdä`; !strings.HasPrefix(failed.Message, want) {
		t.Errorf("message is %q, want %q and so on", failed.Message, want)
	}
	if len(failed.Message) > maxForeignText {
		t.Errorf("message has %d bytes", len(failed.Message))
	}
}

// requestOf looks up a pod on a server with the test's handler, and returns the request.
func requestOf(t *testing.T, start func(*httptest.Server), user string) *http.Request {
	t.Helper()
	var seen atomic.Pointer[http.Request]
	client := foreign(t, start, user, func(w http.ResponseWriter, r *http.Request) {
		seen.Store(r)
		w.Write(cartPod().JSON(t)) //nolint:errcheck // the client reports it
	})
	check.OK(t, check.Err(client.Lookup(t.Context(), cart(), nil, patient)))
	return seen.Load()
}

func TestPod_Request(t *testing.T) {
	t.Parallel()
	r := requestOf(t, func(s *httptest.Server) { s.EnableHTTP2 = true; s.StartTLS() }, "token: abc, as: alice")
	got := []string{
		r.Proto, r.URL.RequestURI(), r.Header.Get("Accept"), r.Header.Get("Accept-Encoding"), r.Header.Get("User-Agent"),
		r.Header.Get("Authorization"), r.Header.Get("Impersonate-User"),
	}
	want := []string{
		"HTTP/1.1", "/prefix/api/v1/namespaces/shop/pods/cart",
		"application/vnd.kubernetes.protobuf,application/json", "", "istio-cni", "Bearer abc", "alice",
	}
	check.Diff(t, "request", want, got)
}

func TestPod_NoTokenInClear(t *testing.T) {
	t.Parallel()
	check.Equal(t, requestOf(t, (*httptest.Server).Start, "token: abc").Header.Get("Authorization"), "", "Authorization is")
}

func TestPod_OtherCredentials(t *testing.T) {
	t.Parallel()
	certificate, key, err := cert.GenerateSelfSignedCertKey("node-agent", nil, nil)
	check.OK(t, err)
	inline := base64.StdEncoding.EncodeToString
	r := requestOf(t, func(s *httptest.Server) {
		s.TLS = &tls.Config{MinVersion: tls.VersionTLS12, ClientAuth: tls.RequestClientCert}
		s.StartTLS()
	}, "client-certificate-data: "+inline(certificate)+", client-key-data: "+inline(key))
	if peers := r.TLS.PeerCertificates; len(peers) == 0 || !strings.HasPrefix(peers[0].Subject.CommonName, "node-agent@") {
		t.Errorf("client certificates: %v", peers)
	}
	r = requestOf(t, (*httptest.Server).StartTLS, "username: me, password: pw")
	if name, password, _ := r.BasicAuth(); name != "me" || password != "pw" {
		t.Errorf("user %q, password %q", name, password)
	}
}

func TestPod_ServerWithoutTLS(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	_, err := configured(t, "server: '"+strings.Replace(server.URL, "http:", "https:", 1)+"'", "").Lookup(t.Context(), cart(), nil, patient)
	wantError(t, err, TLS)
}

func TestPod_LongAnswer(t *testing.T) {
	t.Parallel()
	var sent atomic.Int64
	client := foreign(t, (*httptest.Server).StartTLS, "", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		for blanks := make([]byte, 1<<20); ; {
			n, err := w.Write(blanks)
			if sent.Add(int64(n)); err != nil {
				return
			}
		}
	})
	_, err := client.Pod(t.Context(), cart())
	if failed := wantError(t, err, TooLarge); !strings.Contains(failed.Error(), "the response has more than 16777216 bytes") {
		t.Error(err)
	}
	if most := int64(maxObject + 16<<20); sent.Load() > most {
		t.Errorf("the server sent %d bytes", sent.Load())
	}
}

// TestPod_FailingProxy: the client dials the proxy, and the error does not contain its password.
func TestPod_FailingProxy(t *testing.T) {
	t.Parallel()
	proxy := httptest.NewServer(http.NotFoundHandler())
	proxy.Close()
	address := proxy.Listener.Addr().String()
	_, err := configured(t, fmt.Sprintf("server: 'https://10.0.0.1', proxy-url: 'http://me:%s@%s'", secret, address), "").Pod(t.Context(), cart())
	wantError(t, err, Unreachable)
	if want := "proxyconnect tcp: dial tcp " + address; !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), secret) {
		t.Errorf("error without %q, or with the password: %v", want, err)
	}
}
