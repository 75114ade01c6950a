package kube

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestError_OneLine(t *testing.T) {
	failed := &Error{
		Class: Unauthorized, Verb: "get", Object: "pods shop/cart", Server: "https://10.96.0.1:443",
		File: "/var/run/istio-cni/istio-cni-kubeconfig", Status: 401, Message: "Unauthorized", Attempts: 2,
		Elapsed: 110 * time.Millisecond,
	}
	const want = "get pods shop/cart at API server https://10.96.0.1:443: unauthorized (401) after 2 attempts in 0.1s: " +
		"Unauthorized. Remedy: the token in /var/run/istio-cni/istio-cni-kubeconfig was refused; the node agent " +
		"(istio-cni-node) rewrites the file: check that its pod runs on this node"
	check.Equal(t, failed.Error(), want)
	failed = &Error{
		Class: Unreachable, Verb: "get", Object: failed.Object, Server: failed.Server, File: "/f", Attempts: 14, Elapsed: 10 * time.Second,
		Exhausted: true, Err: errors.New("dial tcp:\n refused"),
	}
	const start = "get pods shop/cart at API server https://10.96.0.1:443: server unreachable after 14 attempts in 10.0s, time " +
		"budget used up: dial tcp: refused. Remedy: "
	if got := failed.Error(); !strings.HasPrefix(got, start) {
		t.Errorf("got  %s\nwant %s", got, start)
	}
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
		{"a resolver that is slow", &net.DNSError{Err: "i/o timeout", IsTimeout: true}, resolving, DNS},
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
		{"a certificate that is refused", &tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}, handshaking, TLS},
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
