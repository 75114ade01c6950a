package installer_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// events are those that the API server has.
func events(t *testing.T, n *nodetest.Node) []corev1.Event {
	t.Helper()
	var all []corev1.Event
	for _, text := range n.API.Events() {
		var one corev1.Event
		check.OK(t, json.Unmarshal(text, &one))
		all = append(all, one)
	}
	return all
}

// background repeats a check until the returned function is called, which fails the test with the first objection.
func background(t *testing.T, what string, check func() error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	objection := make(chan error, 1)
	go func() {
		var err error
		for ; err == nil && ctx.Err() == nil; time.Sleep(300 * time.Microsecond) {
			err = check()
		}
		objection <- err
	}()
	return func() {
		t.Helper()
		cancel()
		if err := <-objection; err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestAgent_ConfigMapChanges: so does race repair, whose pod waits while its namespace is excluded.
func TestAgent_ConfigMapChanges(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := newUnredirected(t, n)
	p.register(n)
	a := n.Start("EXCLUDE_NAMESPACES=apps", "REPAIR_ENABLED=true", "REPAIR_REPAIR_PODS=true")
	a.AwaitReady()
	if p.Captured(t) {
		t.Fatal("a pod of an excluded namespace was redirected")
	}
	followsConfiguration(t, n, a, "configmap", func(excluded string) {
		n.API.Set(configMap(map[string]string{"EXCLUDE_NAMESPACES": excluded}))
	})
	awaitMetric(t, a, repairedInPlace, "1")
	// A removed key has its default, whatever the environment was at the start; without the object the environment
	// counts again.
	n.API.Set(configMap(map[string]string{"UNRELATED": "key"}))
	awaitExcluded(t, n)
	n.API.Delete("/api/v1/namespaces/" + nodetest.Namespace + "/configmaps/istio-cni-config")
	awaitExcluded(t, n, "apps")
}

func TestAgent_ConfigDirectoryChanges(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.Project("/etc/config", map[string]string{"EXCLUDE_NAMESPACES": "before-the-start"})
	args := []string{"EXCLUDE_NAMESPACES=kube-system", "--config-dir=/etc/config", "--config-map="}
	a := n.Start(args...)
	a.AwaitReady()
	awaitExcluded(t, n, "before-the-start")
	followsConfiguration(t, n, a, "directory", func(excluded string) {
		n.Project("/etc/config", map[string]string{"EXCLUDE_NAMESPACES": excluded})
	})
	// A restart reverts nothing: the first stanza has the configuration that the agent can read at its start.
	stop := background(t, "the stanza", func() error { return excluded(n, "shop") })
	for range 3 {
		a.Kill()
		a = n.Start(args...)
		a.AwaitLog("agent is ready")
	}
	stop()
	// The environment has the value of a key at the start of the container.
	n.Project("/etc/config", map[string]string{"UNRELATED": "key"})
	awaitExcluded(t, n)
}

// followsConfiguration gives an agent good and bad content.
func followsConfiguration(t *testing.T, n *nodetest.Node, a *nodetest.Agent, source string, set func(excluded string)) {
	t.Helper()
	stopAsking := background(t, "readiness", a.Ready)
	set("shop,bank")
	awaitExcluded(t, n, "shop", "bank")

	set("Not_A_Namespace")
	a.AwaitLog("live configuration is not usable: the last good one stays in force")
	nodetest.Await(t, "the event", func() error {
		if !slices.ContainsFunc(events(t, n), func(e corev1.Event) bool {
			return e.Reason == "CNIConfigRefused" && strings.Contains(e.Message, "Not_A_Namespace") &&
				e.InvolvedObject.Kind == "Node" && e.InvolvedObject.Name == nodetest.NodeName
		}) {
			return notYet("the API server has %+v", events(t, n))
		}
		return nil
	})
	awaitExcluded(t, n, "shop", "bank")

	set("shop")
	awaitExcluded(t, n, "shop")
	if err := a.Running(); err != nil {
		t.Error(err)
	}
	// One bad content is one problem, however many events the kubelet's exchange makes.
	check.Equal(t, a.Metric(`istio_cni_config_problems_total{source="`+source+`"}`), "1", "1 bad content was counted as")
	stopAsking()
}

// awaitExcluded waits for namespaces in the stanza that the runtime loads.
func awaitExcluded(t *testing.T, n *nodetest.Node, want ...string) {
	t.Helper()
	nodetest.Await(t, fmt.Sprintf("%q in the stanza", want), func() error { return excluded(n, want...) })
}

// excluded is nil if the stanza excludes just these namespaces.
func excluded(n *nodetest.Node, want ...string) error {
	list, err := n.Load()
	if err != nil {
		return err
	}
	var stanza struct {
		Excluded []string `json:"exclude_namespaces"`
	}
	last := list.Plugins[len(list.Plugins)-1]
	if err := json.Unmarshal(last.Bytes, &stanza); err != nil {
		return err
	}
	if last.Network.Type != "istio-cni" || !slices.Equal(stanza.Excluded, want) {
		return notYet("the last plugin is %s", last.Bytes)
	}
	return nil
}
