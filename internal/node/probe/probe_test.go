package probe_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/probe"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func redirection(path string) probe.Redirection {
	return probe.Redirection{Namespace: netnstest.At(path), Listeners: []uint16{15001, 15006}, Port: 15002}
}

// namespace has lo up, ::6 on it and, if redirected, a redirection of every user's TCP to 15002.
func namespace(t *testing.T, redirected bool) string {
	t.Helper()
	path := netnstest.New(t)
	netnstest.Run(t, path, "ip", "link", "set", "lo", "up")
	netnstest.Run(t, path, "ip", "-6", "addr", "add", "::6/128", "dev", "lo")
	for _, tool := range []string{"iptables", "ip6tables"} {
		if redirected {
			netnstest.Run(t, path, tool, "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "--dport", "15002", "-j", "REDIRECT", "--to-ports", "15006")
		}
	}
	return path
}

// TestProbe_FoundOrMissing: the error reports the failure of the first dial even without a second one.
func TestProbe_FoundOrMissing(t *testing.T) {
	t.Parallel()
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		t.Run(f.String(), func(t *testing.T) {
			t.Parallel()
			check.OK(t, redirection(namespace(t, true)).Run(t.Context(), f))
			for _, wait := range []time.Duration{2 * time.Second, 300 * time.Millisecond} {
				late := errors.New("too late")
				ctx, cancel := context.WithTimeoutCause(t.Context(), wait, late)
				defer cancel()
				err := redirection(namespace(t, false)).Run(ctx, f)
				check.Is(t, err, late)
				check.Fails(t, err, "connection refused")
			}
		})
	}
}

// The proxy itself may already listen: one free port is enough, no free port is an error. Each case has its own namespace: a process
// that another test is starting keeps the sockets of this process open until its exec, also the ports of a finished probe.
func TestProbe_TakenPorts(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		taken []string
		want  string // part of the error; "" for no error
	}{
		{"the outbound port", []string{"127.0.0.1:15001"}, ""},
		{"both ports", []string{"127.0.0.1:15001", "127.0.0.1:15006"}, "listening in the proxy's place"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			path := namespace(t, true)
			for _, address := range tt.taken {
				labtest.Serve(t, labtest.Actor{Namespace: path}, labtest.Service{Via: labtest.TCP, At: netip.MustParseAddrPort(address)})
			}
			err := redirection(path).Run(t.Context(), ruleset.IPv4)
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
		})
	}
}

// A connection for another port gets that port as its answer, like from the reference's listener, and does not end the probe.
func TestProbe_ConnectionsForOtherPorts(t *testing.T) {
	t.Parallel()
	path := namespace(t, false)
	ctx, cancel := context.WithTimeoutCause(t.Context(), 5*time.Second, errors.New("over"))
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- redirection(path).Run(ctx, ruleset.IPv4) }()
	answered := false
	for !answered && ctx.Err() == nil {
		_ = netns.Do(path, func() error {
			conn, err := net.Dial("tcp", "127.0.0.1:15006") //nolint:noctx // loopback
			if err != nil {
				return err
			}
			text, err := io.ReadAll(conn)
			answered = err == nil && string(text) == "15006"
			return conn.Close()
		})
	}
	if !answered {
		t.Error("the listener does not answer with the port")
	}
	cancel()
	if err := <-done; err == nil {
		t.Error("a connection for another port counts as redirected")
	}
}
