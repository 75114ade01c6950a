//go:build realapi

// These tests need a real API server, which a plain run has not; they are left out of it and not skipped:
//
//	TAINT_TEST_SERVER=https://… TAINT_TEST_TOKEN=… go test -tags realapi,urfave_cli_no_docs ./internal/role/tainter

package tainter

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
)

// realServer is a real API server, for an administrator with a token.
type realServer struct {
	*testing.T
	url, token string
	client     http.Client
}

// reality needs TAINT_TEST_SERVER, an API server's URL, and TAINT_TEST_TOKEN. Its nodes and pods are the test's.
func reality(t *testing.T) (*realServer, string) {
	t.Helper()
	r := &realServer{T: t, url: os.Getenv("TAINT_TEST_SERVER"), token: os.Getenv("TAINT_TEST_TOKEN")}
	if r.url == "" {
		t.Fatal("TAINT_TEST_SERVER names no API server")
	}
	r.client.Transport = &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, MaxIdleConnsPerHost: 32,
	}
	kubeconfig := t.TempDir() + "/config"
	kubetest.Write(t, kubeconfig, fmt.Sprintf(`{"clusters": [{"name": "c", "cluster": {"server": %q, "insecure-skip-tls-verify": true}}],
		"users": [{"name": "u", "user": {"token": %q}}], "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
		"current-context": "x"}`, r.url, r.token))
	return r, kubeconfig
}

// do sends a request and gives the answer's body; what is there already may stay.
func (r *realServer) do(method, path, content, body string) string {
	r.Helper()
	request, err := http.NewRequestWithContext(r.Context(), method, r.url+path, strings.NewReader(body))
	if err != nil {
		r.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+r.token)
	request.Header.Set("Content-Type", content)
	response, err := r.client.Do(request)
	if err != nil {
		r.Fatal(err)
	}
	defer response.Body.Close() //nolint:errcheck // only read from
	text, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode >= 300 && response.StatusCode != http.StatusConflict {
		r.Fatalf("%s %s: %d %s, %v", method, path, response.StatusCode, text, err)
	}
	return string(text)
}

const (
	plainJSON = "application/json"
	mergeJSON = "application/merge-patch+json"
)

func (r *realServer) node(name, taints string) {
	r.Helper()
	r.do(http.MethodPost, "/api/v1/nodes", plainJSON, fmt.Sprintf(`{"kind": "Node", "apiVersion": "v1", "metadata": {"name": %q}, "spec": {%s}}`, name, taints))
	r.do(http.MethodPatch, "/api/v1/nodes/"+name+"/status", mergeJSON, `{"status": {"nodeInfo": {"bootID": "boot-1"}, "conditions": [
		{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}]}}`)
}

func (r *realServer) pod(namespace, name, node, label string) {
	r.Helper()
	r.do(http.MethodPost, "/api/v1/namespaces/"+namespace+"/pods", plainJSON, fmt.Sprintf(`{"kind": "Pod", "apiVersion": "v1",
		"metadata": {"name": %q, "labels": {"k8s-app": %q}}, "spec": {"nodeName": %q, "automountServiceAccountToken": false,
		"terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "i"}]}}`, name, label, node))
	r.do(http.MethodPatch, "/api/v1/namespaces/"+namespace+"/pods/"+name+"/status", mergeJSON, fmt.Sprintf(`{"status": {"conditions": [
		{"type": "Ready", "status": "True", "lastTransitionTime": %q}]}}`, time.Now().UTC().Format(time.RFC3339)))
}

func (r *realServer) get(path string) string {
	r.Helper()
	return r.do(http.MethodGet, path, plainJSON, "")
}

func (r *realServer) tainted(name string) bool {
	r.Helper()
	return strings.Contains(r.get("/api/v1/nodes/"+name), `"cni.istio.io/not-ready"`)
}

// begin runs the controller; the function that it gives ends it and gives its log.
func begin(t *testing.T, kubeconfig string, args ...string) (end func() string) {
	t.Helper()
	var log safeBuffer
	done := make(chan int, 1)
	args = append([]string{"--kubeconfig", kubeconfig, "--health-port=0", "--monitoring-port=0", "--log_output_level=debug"}, args...)
	go func() {
		done <- Run(applet.Call{Args: args, Stdout: io.Discard, Stderr: &log, Getenv: func(string) (string, bool) { return "", false }})
	}()
	return sync.OnceValue(func() string {
		if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		select {
		case code := <-done:
			if code != exitOK {
				t.Errorf("exit %d", code)
			}
		case <-time.After(30 * time.Second):
			t.Error("it does not end")
		}
		return log.String()
	})
}

func TestARealAPIServer(t *testing.T) {
	r, kubeconfig := reality(t)
	r.do(http.MethodPost, "/api/v1/namespaces", plainJSON, `{"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "istio-system"}}`)
	const ours = `{"key": "cni.istio.io/not-ready", "value": "true", "effect": "NoSchedule"}`
	r.node("ready", `"taints": [`+ours+`, {"key": "other", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}]`)
	r.pod("istio-system", "agent-ready", "ready", "istio-cni-node")
	r.node("waiting", `"taints": [`+ours+`]`)
	r.node("clean", "")
	r.pod("istio-system", "agent-clean", "clean", "istio-cni-node")
	end := begin(t, kubeconfig, "--add", "--hysteresis=1s", "--node-condition=cni.istio.io/MeshCNIReady")
	defer func() { t.Log(end()) }()

	until(t, func() bool { return !r.tainted("ready") })
	if text := r.get("/api/v1/nodes/ready"); !strings.Contains(text, `"timeAdded":"2026-01-01T00:00:00Z"`) {
		t.Errorf("the other taint: %s", text)
	}
	until(t, func() bool { return strings.Contains(r.get("/api/v1/nodes/ready"), "cni.istio.io/MeshCNIReady") })
	// A node without any taint is given one: the test for null.
	r.do(http.MethodPatch, "/api/v1/nodes/clean", mergeJSON, `{"spec": {"taints": null}}`)
	r.do(http.MethodDelete, "/api/v1/namespaces/istio-system/pods/agent-clean", plainJSON, "")
	until(t, func() bool { return r.tainted("clean") })
	// A second writer adds its own taints as fast as it can.
	for i := range 30 {
		r.do(http.MethodPatch, "/api/v1/nodes/waiting", "application/json-patch+json",
			fmt.Sprintf(`[{"op": "add", "path": "/spec/taints/-", "value": {"key": "k%d", "effect": "NoExecute"}}]`, i))
		if i == 10 {
			r.pod("istio-system", "agent-waiting", "waiting", "istio-cni-node")
		}
	}
	until(t, func() bool { return !r.tainted("waiting") })
	if text := r.get("/api/v1/nodes/waiting"); strings.Count(text, `{"key":"k`) != 30 {
		t.Errorf("the other writer lost: %s", text)
	}
	// A reboot.
	r.do(http.MethodPatch, "/api/v1/nodes/ready/status", mergeJSON, fmt.Sprintf(`{"status": {"nodeInfo": {"bootID": "boot-2"}, "conditions": [
		{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z", "lastHeartbeatTime": %q}]}}`,
		time.Now().Add(time.Minute).UTC().Format(time.RFC3339)))
	until(t, func() bool { return r.tainted("ready") })
	text := end()
	if !strings.Contains(text, "the lease is given back") {
		t.Error("the lease was not given back")
	}
	if lease := r.get("/apis/coordination.k8s.io/v1/namespaces/istio-system/leases/istio-node-untaint"); !strings.Contains(lease, `"leaseDurationSeconds":1`) {
		t.Errorf("lease %s", lease)
	}
	for _, name := range []string{"ready", "waiting", "clean"} {
		r.do(http.MethodDelete, "/api/v1/nodes/"+name, plainJSON, "")
	}
	if events := r.get("/api/v1/namespaces/default/events"); !strings.Contains(events, "MeshCNINotReady") {
		t.Error("no event")
	}
}

func TestManyNodesOfARealAPIServer(t *testing.T) {
	r, kubeconfig := reality(t)
	const nodes, pods = 500, 5000
	for _, name := range []string{"istio-system", "shop"} {
		r.do(http.MethodPost, "/api/v1/namespaces", plainJSON, fmt.Sprintf(`{"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": %q}}`, name))
	}
	var work sync.WaitGroup
	todo := make(chan int)
	for range 16 {
		work.Go(func() {
			for i := range todo {
				node := fmt.Sprintf("many-%03d", i%nodes)
				switch {
				case i < nodes:
					r.node(node, `"taints": [{"key": "cni.istio.io/not-ready", "effect": "NoSchedule"}]`)
				case i < 2*nodes:
					r.pod("istio-system", "many-"+node, node, "istio-cni-node")
				default:
					r.pod("shop", fmt.Sprintf("app-%d", i), node, "app")
				}
			}
		})
	}
	for i := range nodes + pods {
		todo <- i
	}
	close(todo)
	work.Wait()
	before := r.count()
	began := time.Now()
	end := begin(t, kubeconfig)
	until(t, func() bool {
		return !bytes.Contains([]byte(r.get("/api/v1/nodes?limit=600")), []byte(`"cni.istio.io/not-ready"`))
	})
	took := time.Since(began)
	end()
	t.Logf("%d nodes and %d pods: untainted in %s; requests of istio-cni at the server: %s", nodes, pods, took.Round(time.Millisecond), diff(before, r.count()))
}

// count is what the server counted of patches of nodes, and lists and watches of nodes and pods.
func (r *realServer) count() map[string]int {
	r.Helper()
	found := map[string]int{}
	for line := range strings.Lines(r.get("/metrics")) {
		if !strings.HasPrefix(line, "apiserver_request_total{") {
			continue
		}
		for _, verb := range []string{"PATCH", "LIST", "WATCH", "POST", "PUT"} {
			for _, resource := range []string{"nodes", "pods", "leases", "events"} {
				if strings.Contains(line, `verb="`+verb+`"`) && strings.Contains(line, `resource="`+resource+`"`) {
					var n float64
					if _, err := fmt.Sscan(line[strings.LastIndex(line, " ")+1:], &n); err == nil {
						found[verb+" "+resource] += int(n)
					}
				}
			}
		}
	}
	return found
}

func diff(before, after map[string]int) string {
	grown := map[string]int{}
	for name, n := range after {
		if n > before[name] {
			grown[name] = n - before[name]
		}
	}
	text, _ := json.Marshal(grown) //nolint:errchkjson // numbers
	return string(text)
}
