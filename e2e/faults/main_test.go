// Package faults applies to a node with the agent the faults that nodes have: updates, kills, outages, replaced tokens and
// files, a power failure. Meanwhile pods with and without sidecar are created and deleted.
//
// After each fault it checks that no injected pod ran without redirection or is stuck, that existing pods are unchanged, and
// that no pod outside of the mesh failed.
//
// Start reading at TestFaults.
package faults

import (
	"os"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(m.Run())
}

// scenario is the fixture of one test.
type scenario struct{ *lab.Lab }

// newScenario starts a node with the agent and two pods that stay until the end.
func newScenario(t *testing.T, values string) (s *scenario, installed lab.Objects) {
	t.Helper()
	s = &scenario{Lab: lab.Node(t, cluster.Options{})}
	s.UntilNodeReady()
	installed = s.Install(values)
	s.Pod("steady", lab.Injected())
	s.Pod("steady-plain", lab.Plain())
	s.UntilReady("steady", "steady-plain")
	s.steady(0)
	s.Step("the agent is ready, an injected pod is redirected")
	return s, installed
}

// steady checks that the two pods are ready and unchanged, with this many container restarts.
func (s *scenario) steady(restarts int32) {
	s.Helper()
	for name, want := range map[string]lab.Flow{"steady": lab.Redirected, "steady-plain": lab.Untouched} {
		pod := s.Get(lab.App, name)
		if !lab.Ready(pod) {
			s.Errorf("%s is not ready: %+v", name, pod.Status.Conditions)
			continue
		}
		for _, c := range pod.Status.ContainerStatuses {
			if c.RestartCount != restarts {
				s.Errorf("%s: container %s has %d restarts, want %d", name, c.Name, c.RestartCount, restarts)
			}
		}
		var got lab.Flow
		s.Until("the traffic of "+name, func() bool { got = s.Flow(name, ""); return got.Out == want.Out })
		if got != want {
			s.Errorf("%s: traffic by a proxy: %+v, want %+v", name, got, want)
		}
	}
	s.Step("the steady pods are unchanged")
}

// others checks that the plugin failed no pod outside of the mesh.
func (s *scenario) others() {
	s.Helper()
	events, err := s.Client().CoreV1().Events(lab.App).List(s.Context(), meta.ListOptions{FieldSelector: "reason=FailedCreatePodSandBox"})
	s.Must(err)
	pods := map[string]bool{}
	for _, e := range events.Items {
		if !strings.Contains(e.Message, "istio-cni") {
			continue
		}
		pods[e.InvolvedObject.Name] = true
		if plain(e.InvolvedObject.Name) {
			s.Errorf("%s: %s", e.InvolvedObject.Name, e.Message)
		}
	}
	s.Step("the plugin rejected %d injected pods for a while, and no other pod", len(pods))
}

// plain reports whether a pod of these tests is outside of the mesh, by the suffix of its name.
func plain(name string) bool {
	return strings.HasSuffix(name, "-plain")
}

// restartAgents does the same as "kubectl rollout restart".
func (s *scenario) restartAgents() {
	s.Helper()
	set := s.DaemonSet(s.Context())
	set.Spec.Template.Annotations["kubectl.kubernetes.io/restartedAt"] = time.Now().Format(time.RFC3339Nano)
	_, err := s.Client().AppsV1().DaemonSets(lab.Mesh).Update(s.Context(), set, meta.UpdateOptions{})
	s.Must(err)
	s.Until("the update to be rolled out", s.RolledOut)
}

// agentRestarts returns the restart count of the agent's container.
func agentRestarts(pod *core.Pod) int32 { return pod.Status.ContainerStatuses[0].RestartCount }
