package taint

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/e2e/rights"
)

// TestRights_UsedAndEnough makes the controller use all of its features and compares its requests with
// e2e/rights: none is forbidden, and each rule is used.
func TestRights_UsedAndEnough(t *testing.T) {
	l := newFixture(t)
	granted := rights.Taint{Lease: "istio-taint-lock", ConfigMap: configMapName, Condition: true}
	kubeconfig := l.grant(granted)
	l.configMap(map[string]string{"config": "{"})
	l.node("a", nodeState{ready: "True", taints: []string{legacy}})
	l.pod("a", podState{})
	c := l.begin(kubeconfig, "--configmap-namespace="+l.mesh, "--configmap-name="+configMapName, "--hysteresis=0",
		"--lease-namespace="+l.mesh, "--node-condition=cni.istio.io/MeshCNIReady",
		"--lease-duration=4s", "--renew-deadline=3s", "--retry-period=1s")
	l.Until("an event about the ConfigMap", func() bool { return l.event(l.mesh, configMapName, "InvalidTaintRequirements", "") })
	l.configMap(l.requires("k8s-app=istio-cni-node"))
	l.reportPod("a", podState{ready: true, since: time.Now()})
	l.untilTaints("a")
	l.reportPod("a", podState{since: time.Now()})
	l.untilTaints("a", legacy)
	l.Until("events of the node", func() bool {
		return l.event("default", "a", "MeshCNINotReady", "NodeReadiness") && l.event("default", "a", "MeshCNIReady", "NodeReadiness")
	})
	want := map[string]bool{}
	roles, err := granted.Roles()
	l.Must(err)
	for _, role := range roles {
		for _, rule := range role.Rules {
			for _, verb := range rule.Verbs {
				want[verb+" "+rule.Resources[0]] = true
			}
		}
	}
	delete(want, "patch events") // the count of an event is patched after five minutes
	var used map[string]bool
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("used %q\ngranted %q", slices.Sorted(maps.Keys(used)), slices.Sorted(maps.Keys(want)))
		}
	})
	l.Until("each rule to be used", func() bool { used = l.used(); return maps.Equal(used, want) })
	l.checkRequests()
	l.Stop(c.Program)
}

// used returns the verbs and resources of the requests so far.
func (l *fixture) used() map[string]bool {
	l.Helper()
	found := map[string]bool{}
	for _, r := range l.requests() {
		resource := r.Resource
		if r.Subresource != "" {
			resource += "/" + r.Subresource
		}
		found[r.Verb+" "+resource] = true
		if strings.Contains(r.URI, "sendInitialEvents=true") {
			found["list "+resource] = true // an API server without streaming lists gets a list
		}
	}
	return found
}
