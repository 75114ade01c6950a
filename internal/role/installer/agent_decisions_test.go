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

// TestDecisionsOutliveTheAgent, also one that is killed, and have pods without a report; uninstall removes their file.
func TestDecisionsOutliveTheAgent(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	first := n.Start()
	first.AwaitReady()
	mesh := n.NewPod("apps", "mesh", chaintest.Sidecar)
	if _, err := n.Add(mesh); err != nil {
		t.Fatal(err)
	}
	n.API.Set(fmt.Appendf(nil, `{"kind":"Pod","apiVersion":"v1","metadata":{"namespace":"apps","name":"host","uid":"h"},"spec":{"nodeName":%q,
		"hostNetwork":true,"containers":[{"name":"app"}]},"status":{"startTime":"2026-01-02T03:04:05Z","podIP":"10.0.0.1"}}`, nodetest.NodeName))
	want := []string{"host host-network watch", "mesh captured agent"}
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
	nodetest.Await(t, "the file", func() error {
		if text := n.Tree(nodetest.RunDir)["decisions.json"]; !strings.HasPrefix(text, "-rw------- ") || strings.Count(text, "uid") != 2 {
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
	if err := n.Del(mesh, "pods"); err != nil {
		t.Error(err)
	}
	if ends(t, third) {
		restored(t, n, map[string]string{"10-bridge.conflist": n.Tree(nodetest.NetDir)["10-bridge.conflist"]})
	}
}
