package plugin_test

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestLog_OnePost: the node agent gets the whole invocation in one request, the decision among it, and so does
// the file; neither has a secret of the pod or of the API server.
func TestLog_OnePost(t *testing.T) {
	t.Parallel()
	node := chaintest.New(t, chaintest.Program(t))
	posts := make(chan []string, 16)
	serve(t, node, logSocket, &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var batch []string
		if err := json.NewDecoder(r.Body).Decode(&batch); err != nil || r.Method != http.MethodPost || r.URL.Path != "/log" {
			t.Errorf("%s %s: %v", r.Method, r.URL, err)
		}
		posts <- batch
	})})
	pod := node.NewPod("apps", "mesh", func(p *kubetest.Pod) {
		chaintest.Sidecar(p)
		p.Containers[1].Env = []kubetest.EnvVar{{Name: "INVALID_DROP", Value: "hunter2-in-the-environment"}}
	})
	check.OK(t, check.Err(node.Add(node.Chain("1.0.0", nil), pod)))
	posted := strings.Join(<-posts, "")
	if len(posts) > 0 {
		t.Errorf("%d more requests for one ADD", len(posts))
	}
	file, err := os.ReadFile(filepath.Join(node.RunDir, "istio-cni.log"))
	check.OK(t, err)
	for _, log := range []string{posted, string(file)} {
		for _, want := range []string{`"reason":"captured"`, `"capture":true`, `"pod":"apps/mesh"`, "redirected the pod", "INVALID_DROP"} {
			if !strings.Contains(log, want) {
				t.Errorf("the log lacks %s:\n%s", want, log)
			}
		}
		if strings.Contains(log, "hunter2") || strings.Contains(log, node.API.Token()) {
			t.Errorf("the log has a secret:\n%s", log)
		}
	}
	if !strings.Contains(posted, `"scope":"cni-plugin"`) {
		t.Errorf("the agent's log lacks the scope:\n%s", posted)
	}
}
