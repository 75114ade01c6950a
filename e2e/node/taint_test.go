package node

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// startupKey is the key of the taint with which the kubelet registers the node.
const startupKey = "cni.istio.io/not-ready"

// scenario is the fixture: a node and its taint.
type scenario struct{ *lab.Lab }

// TestTaint: the node registers with the taint, which the controller removes and adds.
func TestTaint(t *testing.T) {
	s := scenario{lab.Node(t, cluster.Options{
		RegisterWithTaints: []core.Taint{{Key: startupKey, Value: "true", Effect: core.TaintEffectNoSchedule}},
	})}
	s.UntilNodeReady()
	s.Stage("until the agent is ready", func(t *testing.T) { scenario{s.With(t)}.untilTheAgentIsReady() })
	s.Stage("after a reboot", func(t *testing.T) { scenario{s.With(t)}.afterAReboot() })
}

func (s scenario) tainted() bool {
	s.Helper()
	node, err := s.Client().CoreV1().Nodes().Get(s.Context(), cluster.NodeName, meta.GetOptions{})
	s.Must(err)
	return slices.ContainsFunc(node.Spec.Taints, func(t core.Taint) bool { return t.Key == startupKey })
}

// refused waits until the scheduler has refused a new pod because of the taint.
func (s scenario) refused(name string) {
	s.Helper()
	s.Pod(name, lab.Injected())
	s.Until("the scheduler to refuse "+name, func() bool { return s.Event(name, "FailedScheduling", "untolerated taint") })
	if !s.tainted() || s.Get(lab.App, name).Spec.NodeName != "" {
		s.Error("pods are scheduled to the node although its agent is not ready")
	}
}

// untilTheAgentIsReady: no pod of the mesh is scheduled before the agent is ready, and none needs repair. The controller runs as a
// pod with its ServiceAccount and RBAC rules, at first without an agent.
func (s scenario) untilTheAgentIsReady() {
	s.Helper()
	all := s.Chart("taint: {enabled: true}")
	controller := slices.DeleteFunc(slices.Clone(all), func(o lab.Object) bool { return o.GetKind() == "DaemonSet" })
	s.Apply(controller)
	s.Until("the controller", func() bool {
		deployment, err := s.Client().AppsV1().Deployments(lab.Mesh).Get(s.Context(), lab.TaintAccount, meta.GetOptions{})
		s.Must(err)
		return deployment.Status.ReadyReplicas == *deployment.Spec.Replicas
	})
	s.refused("first")
	before, err := s.Client().CoreV1().Pods("").List(s.Context(), meta.ListOptions{})
	s.Must(err)
	s.Apply(all)
	s.Until("the taint to go", func() bool { return !s.tainted() })
	s.UntilReady("first")
	if n := lab.Restarts(s.Get(lab.App, "first")); n != 0 || s.Event("first", "RepairBrokenPod", "") {
		s.Errorf("%d container restarts; repaired: %t", n, s.Event("first", "RepairBrokenPod", ""))
	}
	s.Flows("first")
	if !s.agentReadyBeforeBinding("first", before.ResourceVersion) {
		s.Error("the pod was bound to the node before the agent was ready")
	}
	s.Until("an event of the node", func() bool {
		events, listErr := s.Client().CoreV1().Events(meta.NamespaceDefault).List(s.Context(), meta.ListOptions{})
		s.Must(listErr)
		return slices.ContainsFunc(events.Items, func(e core.Event) bool {
			return e.InvolvedObject.Kind == "Node" && e.Reason == "MeshCNIReady" && e.Source.Component == "istio-cni-taint"
		})
	})
	requests, err := s.Requests(lab.Mesh, lab.TaintAccount)
	s.Must(err)
	for _, r := range requests {
		if r.Status == 403 {
			s.Errorf("forbidden: %s %s", r.Verb, r.URI)
		}
	}
	s.Must(s.Client().AppsV1().Deployments(lab.Mesh).Delete(s.Context(), lab.TaintAccount, meta.DeleteOptions{}))
}

// afterAReboot, T-4 and T-5: the node loses power. The controller runs outside of it, adds the taint after the reboot although the
// API still reports the agent ready, and removes it when the agent is ready again.
func (s scenario) afterAReboot() {
	s.Helper()
	kubeconfig, err := s.AccountKubeconfig(s.Context(), lab.Mesh, lab.TaintAccount)
	s.Must(err)
	s.Start([]string{"TAINT_HEALTH_PORT=0", "TAINT_MONITORING_PORT=0"}, s.IstioCNI, "taint", "--kubeconfig="+kubeconfig,
		"--namespace="+lab.Mesh, "--lease-namespace="+lab.Mesh, "--add", "--hysteresis=1h")
	s.Must(s.PowerOff())
	// Without the plugin, which is in the chain, the agent's pod cannot start.
	plugin := s.NodeFile(filepath.Join(s.BinDir(), "istio-cni"))
	s.Must(os.Rename(plugin, plugin+".away"))
	s.Must(s.PowerOn(s.Context()))
	s.Until("the taint", s.tainted)
	s.Until("the agent not to be ready", func() bool { return !lab.Ready(s.Agent()) })
	s.UntilNodeReady()
	s.refused("second")
	s.Must(os.Rename(plugin+".away", plugin))
	s.Until("the taint to go again", func() bool { return !s.tainted() })
	s.UntilReady("second")
}

// agentReadyBeforeBinding reports whether the agent was ready before the scheduler bound the pod, which has not been bound at
// this resource version. One watch returns changes in the order of the writes; times of conditions are whole seconds of a
// clock that can be set.
func (s scenario) agentReadyBeforeBinding(name, resourceVersion string) bool {
	s.Helper()
	changes, err := s.Client().CoreV1().Pods("").Watch(s.Context(), meta.ListOptions{ResourceVersion: resourceVersion})
	s.Must(err)
	defer changes.Stop()
	for change := range changes.ResultChan() {
		switch pod, ok := change.Object.(*core.Pod); {
		case !ok:
			s.Fatalf("the watch: %v", change.Object)
		case pod.Labels["k8s-app"] == "istio-cni-node" && lab.Ready(pod):
			return true
		case pod.Name == name && pod.Spec.NodeName != "":
			return false
		}
	}
	s.Fatal("the watch ended")
	return false
}
