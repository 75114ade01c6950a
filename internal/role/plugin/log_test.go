package plugin_test

import (
	"encoding/json"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

// The node agent gets the whole invocation in one request, the decision among it.
func TestTheAgentGetsTheLogInOnePost(t *testing.T) {
	t.Parallel()
	node := chaintest.New(t, program(t))
	posts := make(chan []string, 16)
	serve(t, node, logSocket, &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var batch []string
		if err := json.NewDecoder(r.Body).Decode(&batch); err != nil || r.Method != http.MethodPost || r.URL.Path != "/log" {
			t.Errorf("%s %s: %v", r.Method, r.URL, err)
		}
		posts <- batch
	})})
	if _, err := node.Add(node.Chain("1.0.0", nil), node.NewPod("apps", "mesh", chaintest.Sidecar)); err != nil {
		t.Fatal(err)
	}
	text := strings.Join(<-posts, "")
	if len(posts) > 0 {
		t.Errorf("%d more requests for one ADD", len(posts))
	}
	for _, want := range []string{`"reason":"captured"`, `"scope":"cni-plugin"`, `"pod":"apps/mesh"`, "redirected the pod"} {
		if !strings.Contains(text, want) {
			t.Errorf("the agent's log lacks %s:\n%s", want, text)
		}
	}
}

// An agent that takes the connection and never answers costs a pod next to nothing, and no failure.
func TestAnAgentThatHangsDoesNotFailTheAdd(t *testing.T) {
	t.Parallel()
	node := chaintest.New(t, program(t))
	listener, err := net.Listen("unix", filepath.Join(node.RunDir, "log.sock")) //nolint:noctx // ends with the test
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	pod := node.NewPod("apps", "mesh", chaintest.Sidecar)
	if _, err := node.Add(node.Chain("1.0.0", nil), pod); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(rules(t, pod), "ISTIO_OUTPUT") {
		t.Error("not captured")
	}
}
