package taint

import (
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/rights"
)

// TestTheRightsAreUsedAndEnough makes the controller use all of its features and compares its requests with
// e2e/rights: none is forbidden, and each rule is used.
func TestTheRightsAreUsedAndEnough(t *testing.T) {
	l := newFixture(t)
	granted := permissions{Taint: rights.Taint{Lease: "istio-taint-lock", ConfigMap: configMapName, Condition: true}}
	kubeconfig := l.grant(granted)
	l.configMap(map[string]string{"config": "{"})
	l.node("a", nodeState{ready: "True", taints: []string{legacy}})
	l.pod("a", podState{})
	c := l.begin(kubeconfig, "--configmap-namespace="+l.mesh, "--configmap-name="+configMapName, "--hysteresis=0",
		"--lease-namespace="+l.mesh, "--node-condition=cni.istio.io/MeshCNIReady",
		"--lease-duration=4s", "--renew-deadline=3s", "--retry-period=1s")
	l.Until("an event about the ConfigMap", func() bool { return l.event(l.mesh, configMapName, "InvalidTaintRequirements", "") })
	l.configMap(l.requires("k8s-app=istio-cni-node"))
	// A repeated event is a patch of the first one.
	for i := range 4 {
		l.reportPod("a", podState{ready: i%2 == 0, since: time.Now()})
		l.Until("the taint", func() bool { return len(l.taints("a")) == i%2 })
	}
	l.Until("events of the node", func() bool {
		return l.event("default", "a", "MeshCNINotReady", legacyKey) && l.event("default", "a", "MeshCNIReady", legacyKey)
	})
	want := map[string]bool{}
	for _, role := range l.roles(granted) {
		for _, rule := range role.Rules {
			for _, verb := range rule.Verbs {
				want[verb+" "+rule.Resources[0]] = true
			}
		}
	}
	used := func() map[string]bool {
		found := map[string]bool{}
		for _, r := range c.requests() {
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
	delete(want, "patch events") // the count of an event is patched after five minutes
	if !eventually(l, func() bool { return maps.Equal(used(), want) }) {
		t.Errorf("used %q\ngranted %q", slices.Sorted(maps.Keys(used())), slices.Sorted(maps.Keys(want)))
	}
	c.checkRequests()
	c.stop()
}

const legacyKey = "NodeReadiness"

// TestOnlyAgentsAreWatched, T-7: the watches have label selector and namespace, so the API server filters.
func TestOnlyAgentsAreWatched(t *testing.T) {
	l := newFixture(t)
	kubeconfig := l.grant(permissions{Taint: rights.Taint{Lease: "istio-node-untaint"}})
	l.node("a", nodeState{taints: []string{untaint}})
	l.pod("a", podState{ready: true})
	c := l.begin(kubeconfig, "--namespace="+l.mesh, "--leader-elect=false")
	l.Until("the removal", func() bool { return len(l.taints("a")) == 0 })
	found := map[string]int{}
	l.Until("the watches", func() bool {
		clear(found)
		for _, r := range c.requests() {
			if r.Resource == "pods" {
				at, err := url.Parse(r.URI)
				l.Must(err)
				found[fmt.Sprintf("%s %s %s", r.Verb, at.Path, at.Query().Get("labelSelector"))]++
			}
		}
		return len(found) >= 1
	})
	path := "/api/v1/namespaces/" + l.mesh + "/pods k8s-app=istio-cni-node"
	if len(found) != 1 || found["watch "+path] != 1 {
		t.Errorf("requests about pods: %v", found)
	}
	c.stop()
}

// unready starts a controller, with leader election, whose patch of node a was forbidden. It returns its health port
// and a function that adds the missing rule.
func unready(l *fixture) (c *controller, port int, restoreRights func()) {
	l.Helper()
	kubeconfig := l.grant(permissions{Taint: rights.Taint{Lease: leaseName}, account: "reader"})
	roles := l.client.RbacV1().ClusterRoles()
	role, err := roles.Get(l.Context(), rights.TaintNodes+"-"+l.mesh+"-reader", meta.GetOptions{})
	l.Must(err)
	allow := func(verbs ...string) {
		l.Helper()
		role.Rules[0].Verbs = verbs
		role, err = roles.Update(l.Context(), role, meta.UpdateOptions{})
		l.Must(err)
	}
	full := slices.Clone(role.Rules[0].Verbs)
	allow("list", "watch")
	l.node("a", nodeState{taints: []string{untaint}})
	l.pod("a", podState{ready: true})
	port = freePort(l.T)
	c = l.begin(kubeconfig, append(l.election(), fmt.Sprintf("--health-port=%d", port))...)
	l.Until("the refusal in /readyz", func() bool {
		status, text := get(l.T, port, "/readyz")
		return status == 503 && strings.Contains(text, "writes") && strings.Contains(text, "refused")
	})
	return c, port, func() { l.Helper(); allow(full...) }
}

// TestForbiddenPatchMakesUnready: without the rule to patch nodes /readyz fails with the reason, and the controller
// recovers when it has the rule.
func TestForbiddenPatchMakesUnready(t *testing.T) {
	l := newFixture(t)
	c, port, restoreRights := unready(l)
	if status, _ := get(t, port, "/healthz"); status != 200 {
		t.Errorf("/healthz: %d", status)
	}
	restoreRights()
	l.Until("the removal", func() bool { return len(l.taints("a")) == 0 })
	l.Until("to be ready", func() bool { status, _ := get(t, port, "/readyz"); return status == 200 })
	c.stop()
}

// TestReadyAgainWhenTheForbiddenPatchIsObsolete: the node of the forbidden patch was deleted, and the rule was added.
// No later patch could show that, as no other node needs one, so the controller has to drop the error.
func TestReadyAgainWhenTheForbiddenPatchIsObsolete(t *testing.T) {
	l := newFixture(t)
	c, port, restoreRights := unready(l)
	l.Must(l.client.CoreV1().Nodes().Delete(t.Context(), "a", meta.DeleteOptions{}))
	restoreRights()
	c.becomesReady(port)
	c.stop()
}

// TestReadyAgainAfterLosingTheLease: an error of the last leadership does not make a standby replica unready, nor the
// next leadership.
func TestReadyAgainAfterLosingTheLease(t *testing.T) {
	l := newFixture(t)
	c, port, restoreRights := unready(l)
	l.takeLease()
	l.Until("the lease to be lost", func() bool { return !c.leads() })
	restoreRights()
	l.Until("the removal in the next leadership", func() bool { return len(l.taints("a")) == 0 })
	c.becomesReady(port)
	c.stop()
}

func (c *controller) becomesReady(port int) {
	l := c.fixture
	l.Helper()
	if !eventually(l, func() bool { status, _ := get(l.T, port, "/readyz"); return status == 200 }) {
		_, text := get(l.T, port, "/readyz")
		l.Errorf("no error is left, and /readyz returns %s", text)
	}
}
