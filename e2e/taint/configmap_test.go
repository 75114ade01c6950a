package taint

import (
	"slices"
	"strings"
	"testing"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/rights"
)

// event reports whether an object has an event with this reason whose message contains part.
func (l *fixture) event(namespace, name, reason, part string) bool {
	l.Helper()
	events, err := l.client.CoreV1().Events(namespace).List(l.Context(), meta.ListOptions{})
	l.Must(err)
	for _, e := range events.Items {
		if e.InvolvedObject.Name == name && e.Reason == reason && strings.Contains(e.Message, part) {
			return true
		}
	}
	return false
}

// TestRequirementsChange, T-3: the controller watches the ConfigMap; an invalid or missing one changes no taint.
func TestRequirementsChange(t *testing.T) {
	l := newFixture(t)
	kubeconfig := l.grant(permissions{Taint: rights.Taint{Lease: "istio-taint-lock", ConfigMap: configMapName}})
	blue, green := map[string]string{"color": "blue"}, map[string]string{"color": "green"}
	l.node("blue", nodeState{ready: "True"})
	l.pod("blue", podState{ready: true, labels: blue})
	l.node("green", nodeState{ready: "True"})
	l.pod("green", podState{ready: true, labels: green})
	are := func(blue, green []string) func() bool {
		return func() bool { return slices.Equal(l.taints("blue"), blue) && slices.Equal(l.taints("green"), green) }
	}
	none, one := []string{}, []string{legacy}

	c := l.begin(kubeconfig, "--configmap-namespace="+l.mesh, "--configmap-name="+configMapName, "--hysteresis=0", "--leader-elect=false")
	l.Until("a warning of the missing ConfigMap", func() bool { return c.logged("requirements cannot be used") })
	l.Until("its event", func() bool {
		return l.event(l.mesh, configMapName, "InvalidTaintRequirements", "there is no ConfigMap")
	})
	if c.patches("") != 0 {
		t.Error("nodes were changed without requirements")
	}
	l.configMap(l.requires("color=blue"))
	l.Until("the requirement of blue", are(none, one))
	l.configMap(l.requires("color=green"))
	l.Until("the requirement of green", are(one, none))
	before := c.patches("")

	for _, bad := range []struct{ text, message string }{
		{"- {name: x, selector: 'color in blue', namespace: n}", "selector"},
		{"- {name: x, selektor: color=blue}", "selektor"},
		{"{", "decoding"},
	} {
		l.configMap(map[string]string{"config": bad.text})
		l.Until("an event about "+bad.text, func() bool { return l.event(l.mesh, configMapName, "InvalidTaintRequirements", bad.message) })
	}
	// The last valid requirements stay in force, for existing nodes and for changes.
	l.reportPod("green", podState{labels: green})
	l.Until("the last valid requirements to stay in force", are(one, one))
	l.reportPod("green", podState{labels: green, ready: true})
	l.Until("the last valid requirements to stay in force", are(one, none))

	logged := len(c.log())
	l.Must(l.client.CoreV1().ConfigMaps(l.mesh).Delete(l.Context(), configMapName, meta.DeleteOptions{}))
	l.Until("a warning of the missing ConfigMap", func() bool {
		return slices.ContainsFunc(c.log()[logged:], func(d decision) bool { return d.Msg == "requirements cannot be used" })
	})
	l.configMap(map[string]string{"first": l.requires("color=blue")["config"], "second": ""})
	l.Until("the requirement of blue again", are(none, one))
	if n := c.patches("") - before; n != 4 {
		t.Errorf("%d patches, want 4: invalid requirements caused patches", n)
	}
	// No requirements: every node meets them.
	l.configMap(map[string]string{})
	l.Until("nothing to be required", are(none, none))
	c.checkRequests()
	c.stop()
}

// TestWrongNamespaceLogsAWarning, T-6: a wrong --namespace is the usual reason for nodes that stay tainted.
func TestWrongNamespaceLogsAWarning(t *testing.T) {
	l := newFixture(t)
	kubeconfig := l.grant(permissions{Taint: rights.Taint{Lease: "istio-node-untaint"}, pods: []string{l.mesh, l.other}})
	l.node("a", nodeState{taints: []string{untaint}})
	l.pod("a", podState{ready: true})
	c := l.begin(kubeconfig, "--namespace="+l.other, "--leader-elect=false")
	l.Until("a warning", func() bool {
		return c.logged("no pod meets the requirement on any node: are namespace and selector those of the agent?")
	})
	c.stop()
	if len(l.taints("a")) != 1 {
		t.Error("the node was changed")
	}
	c = l.begin(kubeconfig, "--namespace="+l.other+","+l.mesh, "--leader-elect=false")
	l.Until("the removal", func() bool { return len(l.taints("a")) == 0 })
	if c.logged("no pod meets the requirement on any node: are namespace and selector those of the agent?") {
		t.Error("a warning although there is an agent")
	}
	c.stop()
}
