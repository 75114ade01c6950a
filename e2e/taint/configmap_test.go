package taint

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/rights"
)

// TestConfigMap, T-3: the controller watches the ConfigMap; an invalid or missing one changes no taint.
func TestConfigMap(t *testing.T) {
	l := newFixture(t)
	kubeconfig := l.grant(rights.Taint{Lease: "istio-taint-lock", ConfigMap: configMapName})
	blue, green := map[string]string{"color": "blue"}, map[string]string{"color": "green"}
	l.node("blue", nodeState{ready: "True"})
	l.pod("blue", podState{ready: true, labels: blue})
	l.node("green", nodeState{ready: "True"})
	l.pod("green", podState{ready: true, labels: green})
	until := func(blue, green []string) {
		t.Helper()
		l.untilTaints("blue", blue...)
		l.untilTaints("green", green...)
	}
	untilRefused := func(words string) {
		t.Helper()
		l.Until("an event about "+words, func() bool { return l.event(l.mesh, configMapName, "InvalidTaintRequirements", words) })
	}
	none, one := []string(nil), []string{legacy}

	c := l.begin(kubeconfig, "--configmap-namespace="+l.mesh, "--configmap-name="+configMapName, "--hysteresis=0", "--leader-elect=false")
	untilRefused("there is no ConfigMap")
	if l.patches("") != 0 {
		t.Error("nodes were changed without requirements")
	}
	l.configMap(l.requires("color=blue"))
	until(none, one)
	l.configMap(l.requires("color=green"))
	until(one, none)
	before := l.patches("")

	l.configMap(map[string]string{"config": "- {name: x, selektor: color=blue}"})
	untilRefused("selektor")
	// The last valid requirements stay in force, for existing nodes and for changes.
	l.reportPod("green", podState{labels: green})
	until(one, one)
	l.reportPod("green", podState{labels: green, ready: true})
	until(one, none)

	written := len(c.Lines())
	l.Must(l.client.CoreV1().ConfigMaps(l.mesh).Delete(l.Context(), configMapName, meta.DeleteOptions{}))
	l.Until("a warning of the missing ConfigMap", func() bool {
		return c.logged(written, func(d decision) bool { return d.Msg == "requirements cannot be used" })
	})
	l.configMap(map[string]string{"first": l.requires("color=blue")["config"], "second": ""})
	until(none, one)
	if n := l.patches("") - before; n != 4 {
		t.Errorf("%d patches, want 4: invalid requirements caused patches", n)
	}
	// No requirements: every node meets them.
	l.configMap(map[string]string{})
	until(none, none)
	l.checkRequests()
	l.Stop(c.Program)
}

// TestOnce, T-1: a single run reads all nodes and pods first (the reference decided on an empty cache), takes no Lease, and does
// not wait for hysteresis. It has the name and the variables, which have dashes, of the chart of Istio 1.8 to 1.17.
func TestOnce(t *testing.T) {
	l := newFixture(t)
	kubeconfig := l.grant(rights.Taint{ConfigMap: configMapName})
	for name, ready := range map[string]string{"served": "True", "waiting": "True", "down": "False"} {
		l.node(name, nodeState{ready: ready, taints: []string{legacy}})
	}
	l.node("clean", nodeState{ready: "True"})
	l.node("bare", nodeState{ready: "True"})
	for _, name := range []string{"served", "clean", "down"} {
		l.pod(name, podState{ready: true})
	}
	path := filepath.Join(t.TempDir(), "istio-cni-taint")
	l.Must(os.Symlink(shared.IstioCNI, path))
	once := func() (status int, out string) {
		t.Helper()
		p := l.Start([]string{
			"TAINT_RUN-AS-DAEMON=false", "TAINT_CONFIGMAP-NAME=" + configMapName, "TAINT_CONFIGMAP-NAMESPACE=" + l.mesh, "KUBECONFIG=" + kubeconfig,
		}, path)
		return l.End(p), strings.Join(p.Lines(), "\n")
	}
	if status, out := once(); status != 1 || !strings.Contains(out, "there is no ConfigMap") || l.patches("") != 0 {
		t.Fatalf("without a ConfigMap: exit %d, %d patches: %s", status, l.patches(""), out)
	}
	l.configMap(l.requires("k8s-app=istio-cni-node"))
	for range 2 { // the second run finds no node to change
		if status, out := once(); status != 0 {
			t.Fatalf("exit %d: %s", status, out)
		}
		for node, want := range map[string][]string{"served": {}, "clean": {}, "waiting": {legacy}, "bare": {legacy}, "down": {legacy}} {
			if got := l.taints(node); !slices.Equal(got, want) {
				t.Errorf("node %s: %q, want %q", node, got, want)
			}
		}
		if n := l.patches(""); n != 2 {
			t.Errorf("%d patches, want one of each node that had to change", n)
		}
	}
	for _, r := range l.requests() {
		if r.Resource == "leases" {
			t.Errorf("it asked for a lease: %s %s", r.Verb, r.URI)
		}
	}
	l.checkRequests()
}
