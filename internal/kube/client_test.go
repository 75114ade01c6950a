package kube

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/url"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// account is a client with its files.
type account struct {
	*Client
	token, authority string
}

// connected returns a client of a server, with short pauses. change may be nil.
func connected(t *testing.T, server *kubetest.Server, change func(*Config)) account {
	t.Helper()
	host, port := server.Address()
	token, authority := server.ServiceAccount(t)
	access := Config{
		Server: Address{Host: host, Port: port}, TokenFile: token, CAFile: authority, Timeout: time.Minute,
		IdleTimeout: time.Hour, Backoff: &wait.Backoff{Duration: time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 3, Cap: 4 * time.Millisecond},
	}
	if change != nil {
		change(&access)
	}
	api, err := NewClient(access)
	check.OK(t, err)
	t.Cleanup(api.Close)
	return account{api, token, authority}
}

func TestRequest_FailureClasses(t *testing.T) {
	for _, test := range []struct {
		fault     kubetest.Fault
		class     Class
		transient bool
		want      string
	}{
		{kubetest.Unauthorized, Unauthorized, false, ": unauthorized (401): Unauthorized"},
		{kubetest.Forbidden, Forbidden, false, "forbidden (403): pods is forbidden"},
		{kubetest.NotFound, NotFound, false, `: not found (404): daemonsets.apps "istio-cni-node" not found`},
		{kubetest.UnauthorizedPage, Undecodable, true, "(401)"},
		{kubetest.ForbiddenPage, Undecodable, true, "(403)"},
		{kubetest.NotFoundPage, Undecodable, true, "(404)"},
		{kubetest.UnknownPath, Rejected, false, "(404): the server could not find the requested resource"},
		{kubetest.BadRequest, Rejected, false, "(400)"},
		{kubetest.Gone, Rejected, false, "(410)"},
		{kubetest.Redirect, Rejected, false, "(302)"},
		{kubetest.TooMany, TooManyRequests, true, "(429)"},
		{kubetest.ServerError, ServerError, true, "(500)"},
		{kubetest.Unavailable, ServerError, true, "(503)"},
		{kubetest.Garbage, Undecodable, true, "response not understood (200)"},
		{kubetest.WrongKind, Undecodable, true, `got Status of v1`},
		{kubetest.WrongName, Undecodable, true, `name "another"`},
		{kubetest.Truncated, ConnectionLost, true, "reading the response"},
		{kubetest.Reset, ConnectionLost, true, ""},
		{kubetest.ResetMidBody, ConnectionLost, true, ""},
		{kubetest.Hang, Timeout, true, ""},
		{kubetest.HangMidBody, Timeout, true, ""},
		{kubetest.UnknownCA, TLS, false, "unknown authority"},
	} {
		t.Run(string(test.fault), func(t *testing.T) {
			server := kubetest.NewServer(t)
			server.SetRetryAfter(7)
			server.Set(kubetest.DaemonSet("istio-system", "istio-cni-node", ""))
			api := connected(t, server, func(c *Config) {
				if test.class == Timeout {
					c.Timeout = 50 * time.Millisecond
				}
			})
			server.Fail(test.fault, kubetest.Forever)
			_, err := api.DaemonSet(t.Context(), "istio-system", "istio-cni-node")
			failed := wantError(t, err, test.class)
			check.Equal(t, failed.Transient(), test.transient, "transient")
			check.Contains(t, err.Error(), test.want)
			if test.fault == kubetest.TooMany && failed.RetryAfter != 7*time.Second {
				t.Errorf("RetryAfter is %v, want 7s", failed.RetryAfter)
			}
			check.Equal(t, strings.Contains(err.Error(), server.Token()), false, "the token is in", err)
			if !failed.Transient() && test.class != NotFound {
				lookUpFails(t, server, test.class)
			}
			server.Heal()
			if _, err := api.DaemonSet(t.Context(), "istio-system", "istio-cni-node"); err != nil && test.class != Timeout {
				t.Errorf("the next one: %v", err)
			}
		})
	}
}

// lookUpFails checks that a look-up ends after the attempts of the class, with a one-line error.
func lookUpFails(t *testing.T, server *kubetest.Server, class Class) {
	t.Helper()
	before := len(server.Requests())
	_, err := newClient(t, server.Kubeconfig(t)).Lookup(t.Context(), cart(), nil, patient)
	failed := wantError(t, err, class)
	attempts, remedy := failed.policy()
	sent := attempts
	if class == TLS {
		sent = 0
	}
	if requests := len(server.Requests()) - before; failed.Attempts != attempts || requests != sent || failed.Exhausted {
		t.Errorf("%d requests, want %d; exhausted %t: %v", requests, sent, failed.Exhausted, err)
	}
	after := map[int]string{1: " after 1 attempt in ", 2: " after 2 attempts in "}[attempts]
	check.Contains(t, err.Error(), "get pods shop/cart at API server "+server.URL()+": "+string(class), after, ". Remedy: "+remedy)
	check.Equal(t, strings.Contains(err.Error(), server.Token()), false, "the token is in", err)
}

func TestRequest_InvalidName(t *testing.T) {
	server := kubetest.NewServer(t)
	api := connected(t, server, nil)
	for _, key := range []PodRef{
		{},
		{Namespace: "shop"},
		{Name: "cart"},
		{Namespace: "..", Name: "cart"},
		{Namespace: "a/b", Name: "cart"},
		{Namespace: "shop", Name: "."},
		{Namespace: "shop", Name: "../secrets/x"},
		{Namespace: "shop", Name: "a%2fb"},
		{Namespace: "shop", Name: "a?b"},
		{Namespace: "sh\nop", Name: "cart"},
		{Namespace: "shop", Name: strings.Repeat("x", 254)},
		{Namespace: "shöp", Name: "cart"},
	} {
		_, lookup := api.Lookup(t.Context(), key, nil, patient)
		_, once := api.Pod(t.Context(), key)
		all := []error{lookup, once}
		for _, action := range podActions() {
			all = append(all, action.do(api.Client, t.Context(), PodRef{Namespace: key.Namespace, Name: key.Name, UID: "u", Version: "1"}))
		}
		for _, err := range all {
			if wantError(t, err, InvalidKey); strings.ContainsAny(err.Error(), "\n\r") {
				t.Errorf("error has more than a line: %q", err)
			}
		}
	}
	for _, action := range podActions() {
		wantError(t, action.do(api.Client, t.Context(), PodRef{Namespace: "shop", Name: "web-1", Version: "1"}), InvalidKey)
		if action.verb != "patch" { // a patch needs no version
			wantError(t, action.do(api.Client, t.Context(), PodRef{Namespace: "shop", Name: "web-1", UID: "u"}), InvalidKey)
		}
	}
	wantError(t, check.Err(api.Node(t.Context(), "")), InvalidKey)
	h := &calls{t: t}
	api.WatchConfigMap(t.Context(), "", "a", nil, h.onError)
	h.wants("error: " + string(InvalidKey))
	check.Diff(t, "requests", []string(nil), server.Requests())
}

func TestClient_FilesReadAgain(t *testing.T) {
	server := kubetest.NewServer(t)
	server.Set(kubetest.Node("n", nil, ""))
	api := connected(t, server, nil)
	check.OK(t, os.Remove(api.token))
	_, err := api.Node(t.Context(), "n")
	if ClassOf(err) != NoCredentials || !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), api.token) {
		t.Errorf("got %v, want NoCredentials that names the file", err)
	}
	check.Equal(t, len(server.Requests()), 0, "requests without a token")
	for _, step := range []struct {
		name  string
		given func()
		want  Class
	}{
		{"a token, and another authority", func() {
			kubetest.Write(t, api.token, server.Token())
			kubetest.Write(t, api.authority, string(kubetest.NewServer(t).CA()))
		}, TLS},
		{"a damaged authority: the last one stays in use", func() { kubetest.Write(t, api.authority, "half a certi") }, TLS},
		{"the right authority", func() { kubetest.Write(t, api.authority, string(server.CA())) }, ""},
		{"an expired token", func() { server.SetToken("the-next-one") }, Unauthorized},
		{"an empty token file: the last token stays in use", func() { kubetest.Write(t, api.token, "") }, Unauthorized},
		{"the new token", func() { kubetest.Write(t, api.token, "the-next-one\n") }, ""},
		{"no token file, after a good one", func() { _ = os.Remove(api.token) }, ""},
	} {
		step.given()
		check.Equal(t, ClassOf(check.Err(api.Node(t.Context(), "n"))), step.want, step.name)
	}
}

func TestClient_SkipVerify(t *testing.T) {
	server := kubetest.NewServer(t)
	server.Set(kubetest.Node("n", nil, ""))
	server.Fail(kubetest.UnknownCA, kubetest.Forever)
	api := connected(t, server, func(a *Config) { a.SkipVerify, a.CAFile = true, "/no/such/file" })
	check.OK(t, check.Err(api.Node(t.Context(), "n")))
}

func TestNewClient_Addresses(t *testing.T) {
	for want, address := range map[string]Address{
		"KUBERNETES_SERVICE_HOST": {}, "KUBERNETES_SERVICE_PORT": {Host: "10.96.0.1"}, `port "https"`: {Host: "10.96.0.1", Port: "https"},
		`port "0"`: {Host: "10.96.0.1", Port: "0"}, `port "65536"`: {Host: "10.96.0.1", Port: "65536"},
		`host "a/b"`: {Host: "a/b", Port: "443"}, `host "a\nb"`: {Host: "a\nb", Port: "443"}, `host "me@there"`: {Host: "me@there", Port: "443"},
		`host "fe80::1%eth0"`: {Host: "fe80::1%eth0", Port: "443"}, `protocol "ftp"`: {Protocol: "ftp", Host: "10.96.0.1", Port: "443"},
	} {
		check.Fails(t, check.Err(NewClient(Config{Server: address})), want)
	}
}

func TestError_OneLine(t *testing.T) {
	failed := &Error{
		Class: Unauthorized, Verb: "get", Object: "pods shop/cart", Server: "https://10.96.0.1:443",
		File: "/var/run/istio-cni/istio-cni-kubeconfig", Status: 401, Err: errors.New("the server:\n refuses"), Attempts: 2,
		Elapsed: 110 * time.Millisecond, Exhausted: true,
	}
	const want = "get pods shop/cart at API server https://10.96.0.1:443: unauthorized (401) after 2 attempts in 0.1s, " +
		"time budget used up: the server: refuses. Remedy: the token in /var/run/istio-cni/istio-cni-kubeconfig was refused; the node agent " +
		"(istio-cni-node) rewrites the file: check that its pod runs on this node"
	check.Equal(t, failed.Error(), want)
}

func TestClass_RemedyAndBound(t *testing.T) {
	for class, want := range map[Class]int{
		NotFound: 0, WrongPod: 0, TooManyRequests: 0, ServerError: 0, Timeout: 0, Unreachable: 0, DNS: 0, ConnectionLost: 0,
		Undecodable: 0, Unauthorized: 2, Forbidden: 2, TLS: 2, Rejected: 1, TooLarge: 1, InvalidKey: 1, Canceled: 1,
	} {
		if got, remedy := (&Error{Class: class, File: "/f"}).policy(); got != want || remedy == "" || remedy == agentRewrites {
			t.Errorf("%q has %d attempts, want %d; remedy %q", class, got, want, remedy)
		}
	}
	if got, remedy := (&Error{Class: InvalidConfig}).policy(); got != 1 || remedy != agentRewrites {
		t.Errorf("a bad kubeconfig has %d attempts: %q", got, remedy)
	}
}

func TestClassify(t *testing.T) {
	dial := func(err error) error {
		return &url.Error{Op: "Get", URL: "https://x", Err: &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", err)}}
	}
	for _, test := range []struct {
		name string
		err  error
		at   stage
		want Class
	}{
		{"an unknown name", &net.DNSError{Err: "no such host", Name: "api.example", IsNotFound: true}, resolving, DNS},
		{"a slow resolver", &net.DNSError{Err: "i/o timeout", IsTimeout: true}, resolving, DNS},
		{"a deadline while resolving", context.DeadlineExceeded, resolving, DNS},
		{"a deadline while connecting", context.DeadlineExceeded, connecting, Timeout},
		{"a deadline of the socket", os.ErrDeadlineExceeded, reading, Timeout},
		{"a SYN without a response", dial(syscall.ETIMEDOUT), connecting, Timeout},
		{"a refused connection", dial(syscall.ECONNREFUSED), connecting, Unreachable},
		{"no route", dial(syscall.EHOSTUNREACH), connecting, Unreachable},
		{"no network", dial(syscall.ENETUNREACH), connecting, Unreachable},
		{"a firewall that rejects", dial(syscall.EPERM), connecting, Unreachable},
		{"a reset", dial(syscall.ECONNRESET), waiting, ConnectionLost},
		{"a reset in the handshake", dial(syscall.ECONNRESET), handshaking, ConnectionLost},
		{"a close before the answer", &url.Error{Err: io.EOF}, waiting, ConnectionLost},
		{"a close in the answer", io.ErrUnexpectedEOF, reading, ConnectionLost},
		{"a refused certificate", &tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}, handshaking, TLS},
		{"no TLS at all", tls.RecordHeaderError{Msg: "first record does not look like a TLS handshake"}, handshaking, TLS},
		{"an alert", tls.AlertError(42), waiting, TLS},
		{"anything else", errors.New("novelty"), waiting, ConnectionLost},
		{"a token file that cannot be read", errors.New("x"), authenticating, NoCredentials},
		{"cancellation", context.Canceled, waiting, Canceled},
	} {
		t.Run(test.name, func(t *testing.T) {
			check.Equal(t, classify(fmt.Errorf("wrapped: %w", test.err), test.at), test.want, "class is")
		})
	}
}

func FuzzClean(f *testing.F) {
	f.Add("plain")
	f.Add("a\x00b\x1b[0m\u202e\xff\n" + strings.Repeat("ä", 200))
	f.Fuzz(func(t *testing.T, text string) {
		got := clean(text)
		if len(got) > maxForeignText || !utf8.ValidString(got) || strings.ContainsAny(got, "\n\r\t\x00\x1b\x7f") {
			t.Errorf("clean(%q) is %q", text, got)
		}
	})
}
