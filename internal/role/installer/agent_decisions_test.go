package installer_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

// TestAgent_DecisionsOutliveIt, also one that is killed, and have pods without a report; uninstall removes their file.
func TestAgent_DecisionsOutliveIt(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	first := n.Start()
	first.AwaitReady()
	mesh := n.NewPod("apps", "mesh", chaintest.Sidecar)
	if _, err := n.Add(mesh); err != nil {
		t.Fatal(err)
	}
	// The plugin reports no pod that the runtime's annotations show to be outside, and the runtime calls it for none on the host's
	// network.
	plain := n.NewPod("apps", "plain", nil)
	plain.Annotations = map[string]string{"some": "thing"}
	publish := func(name, uid, hostNetwork string) {
		n.API.Set(fmt.Appendf(nil, `{"kind":"Pod","apiVersion":"v1","metadata":{"namespace":"apps","name":%q,"uid":%q},"spec":{"nodeName":%q,
			"hostNetwork":%s,"containers":[{"name":"istio-proxy"}]},"status":{"startTime":"2026-01-02T03:04:05Z","podIP":"10.0.0.1"}}`,
			name, uid, nodetest.NodeName, hostNetwork))
	}
	before := first.Metric(`istio_cni_pod_lookups_total{result="found"}`)
	if _, err := n.Add(plain); err != nil || plain.Captured(t) {
		t.Fatal(err)
	}
	publish("plain", plain.UID, "false")
	publish("host", "h", "true")
	want := []string{"host host-network watch", "mesh captured agent", "plain not-injected watch"}
	decisions := func() error {
		agent, err := agentapi.Dial(t.Context(), n.Path(nodetest.RunDir)+"/"+agentapi.SocketName)
		if err != nil {
			return err
		}
		defer agent.Close() //nolint:errcheck // all is said
		all, err := agent.Decisions(t.Context(), time.Minute)
		var got []string
		for _, r := range all {
			got = append(got, fmt.Sprint(r.Pod, " ", r.Reason, " ", r.Source))
		}
		if slices.Sort(got); err != nil || !slices.Equal(got, want) {
			return notYet("decisions %q, %w", got, err)
		}
		return nil
	}
	nodetest.Await(t, "the decisions", decisions)
	if after := first.Metric(`istio_cni_pod_lookups_total{result="found"}`); after != before || before != "1" {
		t.Errorf("the plugin asked the agent for the pod: %s lookups, before it %s", after, before)
	}
	nodetest.Await(t, "the file", func() error {
		if text := n.Tree(nodetest.RunDir)["decisions.json"]; !strings.HasPrefix(text, "-rw------- ") || strings.Count(text, `"uid"`) != 3 {
			return notYet("it has %s", text)
		}
		return nil
	})
	first.Kill()
	n.API.Delete("/api/v1/namespaces/apps/pods/host")
	second := n.Start()
	second.AwaitReady()
	nodetest.Await(t, "the decisions of the killed agent", decisions)
	if !ends(t, second) {
		return
	}
	n.Put(nodetest.RunDir+"/decisions.json", "{")
	third := n.Start("UNINSTALL_ON_EXIT=always")
	third.AwaitReady()
	third.AwaitLog("the saved decisions cannot be used, and are replaced")
	for _, p := range []chaintest.Pod{mesh, plain} {
		if err := n.Del(p, "pods"); err != nil {
			t.Error(err)
		}
	}
	if ends(t, third) {
		restored(t, n, map[string]string{"10-bridge.conflist": n.Tree(nodetest.NetDir)["10-bridge.conflist"]})
	}
}
