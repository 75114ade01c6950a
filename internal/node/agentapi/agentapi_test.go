package agentapi_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// The fields of the facts. If a conversion fails because of a new field, raise sidecar.FactsVersion because an older agent
// does not deliver the field.
var (
	_ = struct {
		Namespace, Name, UID  string
		HostNetwork, Selected bool
		RuntimeClass          string
		Labels, Annotations   map[string]string
		RunAsUser, RunAsGroup *int64
		Containers            []sidecar.Container
	}(sidecar.Facts{})
	_ = struct {
		Name                  string
		Init                  bool
		Args                  []string
		Env                   []sidecar.EnvVar
		RunAsUser, RunAsGroup *int64
	}(sidecar.Container{})
	_ = struct{ Name, Value string }(sidecar.EnvVar{})
)

func TestFacts_SentWhole(t *testing.T) {
	user := int64(7)
	facts := sidecar.Facts{
		Namespace: "a", Name: "b", UID: "c", HostNetwork: true, Selected: true, RuntimeClass: "r", Labels: map[string]string{"l": "1"},
		Annotations: map[string]string{"n": "<&>"}, RunAsUser: &user,
		Containers: []sidecar.Container{{Name: "x", Init: true, Args: []string{"y"}, Env: []sidecar.EnvVar{{Name: "E", Value: "v"}}, RunAsGroup: &user}},
	}
	text, err := agentapi.PrintPod(facts, "asked")
	check.OK(t, err)
	got, err := agentapi.ReadPod(text, agentapi.Key{Namespace: "a", Name: "b", UID: "asked"})
	if err != nil || !reflect.DeepEqual(got, facts) {
		t.Errorf("got %+v, %v", got, err)
	}
	if _, err := agentapi.ReadPod(text, agentapi.Key{Namespace: "a", Name: "b"}); err == nil {
		t.Error("an answer without a UID is accepted")
	}
}

// serve returns the socket of an agent. It passes each state of a connection to state, unless that is nil.
func serve(t *testing.T, handler http.HandlerFunc, state func(net.Conn, http.ConnState)) string {
	t.Helper()
	socket := filepath.Join(agenttest.SocketDir(t), "s")
	listener := agenttest.Listen(t, socket)
	server := &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute, ConnState: state}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	return socket
}

func dial(t *testing.T, socket string) *agentapi.Agent {
	t.Helper()
	agent, err := agentapi.Dial(t.Context(), socket)
	check.OK(t, err)
	t.Cleanup(func() { _ = agent.Close() })
	return agent
}

func TestClient_OneConnection(t *testing.T) {
	from := map[string]int{}
	var connections int
	ended := make(chan struct{})
	socket := serve(t, func(w http.ResponseWriter, r *http.Request) {
		from[r.Method+" "+r.URL.Path]++
		if r.Method == http.MethodGet {
			text, _ := agentapi.PrintPod(sidecar.Facts{Namespace: "a", Name: "b"}, "u&v=1")
			_, _ = w.Write(text)
		}
	}, func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			connections++
		}
		if s == http.StateClosed {
			close(ended) // all requests are read
		}
	})
	agent := dial(t, socket)
	if _, err := agent.Pod(t.Context(), agentapi.Key{Namespace: "a", Name: "b", UID: "u&v=1"}, false); err != nil {
		t.Error(err)
	}
	check.OK(t, agent.Report(t.Context(), agentapi.Report{}))
	check.OK(t, agent.Close())
	<-ended
	if connections != 1 || from["GET /v1/pods/a/b"] != 1 || from["POST /v1/report"] != 1 {
		t.Errorf("%d connections, requests %v", connections, from)
	}
}

// servedAt names a socket for the process in which TestClient_OnlyRootIsTrusted serves as another user.
const servedAt = "AGENTAPI_TEST_SERVES"

// TestClient_OnlyRootIsTrusted serves the socket as another user.
func TestClient_OnlyRootIsTrusted(t *testing.T) {
	if socket := os.Getenv(servedAt); socket != "" {
		agenttest.Listen(t, socket)
		_, _ = os.Stdout.WriteString("up\n")
		_, _ = os.Stdin.Read(make([]byte, 1)) // until the parent has seen it
		return
	}
	dir := agenttest.SocketDir(t)
	check.OK(t, os.Chmod(dir, 0o777))
	socket := filepath.Join(dir, agentapi.EventSocketName)
	cmd := agenttest.Child(t, servedAt+"="+socket)
	cmd.Args = append(cmd.Args, "-test.run=^TestClient_OnlyRootIsTrusted$")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1337, Gid: 1337}}
	in, noInput := cmd.StdinPipe()
	out, noOutput := cmd.StdoutPipe()
	check.OK(t, errors.Join(noInput, noOutput, cmd.Start()))
	defer func() { _ = in.Close(); _ = cmd.Wait() }()
	check.OK(t, check.Err(out.Read(make([]byte, 8))))
	_, err := agentapi.Dial(t.Context(), socket)
	for _, err := range []error{err, agentapi.PostEvent(t.Context(), dir, agentapi.Event{})} {
		if err == nil || !strings.Contains(err.Error(), "user 1337") {
			t.Errorf("got %v", err)
		}
	}
}

func TestClient_ContextEnds(t *testing.T) {
	socket := serve(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, nil)
	agent := dial(t, socket)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := agent.Pod(ctx, agentapi.Key{Namespace: "a", Name: "b", UID: "c"}, false); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}
