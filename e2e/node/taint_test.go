package node

import (
	"fmt"
	"slices"
	"testing"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
	"github.com/meshcni/istio-cni/e2e/rights"
)

// TestTaint_UntilTheAgentIsReady shows the controller's purpose: the node registers with the taint, an
// application stays Pending until the agent is ready, and the controller runs as a pod with its ServiceAccount and
// RBAC rules.
func TestTaint_UntilTheAgentIsReady(t *testing.T) {
	l := newFixture(t, "mesh")
	l.put()
	l.Until("the node with its taint", func() bool { return l.startupTaint() })
	l.pod("application", nil, container("c", lab.BoxImage))
	l.Until("the application to be refused", func() bool {
		return slices.ContainsFunc(l.get("application").Status.Conditions, func(c core.PodCondition) bool {
			return c.Type == core.PodScheduled && c.Status == core.ConditionFalse && c.Reason == core.PodReasonUnschedulable
		})
	})
	l.Must(shared.Namespace(t.Context(), l.namespace, lab.TaintAccount))
	l.GrantTaint(l.client, l.namespace, rights.Taint{Lease: "istio-node-untaint"})
	l.deployController()
	l.Until("the controller", func() bool { return l.isReady("app=taint") })
	if !l.startupTaint() || l.get("application").Spec.NodeName != "" {
		t.Fatal("the taint was removed without an agent")
	}
	l.deployAgent()
	l.Until("the agent", func() bool { return l.isReady("k8s-app=istio-cni-node") })
	l.Until("the taint to go", func() bool { return !l.startupTaint() })
	l.Until("the application", func() bool { return ready(l.get("application")) })
	l.Until("an event of the node", func() bool {
		events, err := l.client.CoreV1().Events("default").List(t.Context(), meta.ListOptions{})
		l.Must(err)
		return slices.ContainsFunc(events.Items, func(e core.Event) bool {
			return e.InvolvedObject.Kind == "Node" && e.Reason == "MeshCNIReady" && e.Source.Component == "istio-cni-taint"
		})
	})
	requests, err := shared.Requests(l.namespace, lab.TaintAccount)
	l.Must(err)
	for _, r := range requests {
		if r.Status == 403 {
			t.Errorf("forbidden: %s %s", r.Verb, r.URI)
		}
	}
}

// put adds the taint as the kubelet does at registration: another test may have removed it.
func (l *fixture) put() {
	l.Helper()
	l.Until("the node", func() bool { return l.node().Name != "" })
	if l.startupTaint() {
		return
	}
	patch := fmt.Sprintf(`{"spec": {"taints": [{"key": %q, "value": "true", "effect": "NoSchedule"}]}}`, startupKey)
	_, err := l.client.CoreV1().Nodes().Patch(l.Context(), cluster.NodeName, types.StrategicMergePatchType, []byte(patch), meta.PatchOptions{})
	l.Must(err)
}

func (l *fixture) startupTaint() bool {
	l.Helper()
	return slices.ContainsFunc(l.node().Spec.Taints, func(t core.Taint) bool { return t.Key == startupKey })
}

// isReady reports whether there are pods with these labels and all are ready.
func (l *fixture) isReady(selector string) bool {
	l.Helper()
	pods, err := l.client.CoreV1().Pods(l.namespace).List(l.Context(), meta.ListOptions{LabelSelector: selector})
	l.Must(err)
	return len(pods.Items) > 0 && !slices.ContainsFunc(pods.Items, func(p core.Pod) bool { return !ready(&p) })
}

// deployController creates two replicas of the controller without any privileges on the node.
func (l *fixture) deployController() {
	l.Helper()
	replicas, yes, no, user, grace := int32(2), true, false, int64(65532), int64(5)
	c := container("taint", lab.Image, "istio-cni-taint")
	field := &core.ObjectFieldSelector{FieldPath: "metadata.namespace"}
	c.Env = []core.EnvVar{{Name: "POD_NAMESPACE", ValueFrom: &core.EnvVarSource{FieldRef: field}}}
	c.SecurityContext = &core.SecurityContext{
		RunAsUser: &user, RunAsNonRoot: &yes, AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
		Capabilities: &core.Capabilities{Drop: []core.Capability{"ALL"}},
	}
	c.ReadinessProbe = &core.Probe{
		ProbeHandler:  core.ProbeHandler{HTTPGet: &core.HTTPGetAction{Path: "/readyz", Port: intstr.FromInt32(8001)}},
		PeriodSeconds: 1,
	}
	labels := map[string]string{"app": "taint"}
	deployment := &apps.Deployment{ObjectMeta: meta.ObjectMeta{Name: "istio-cni-taint"}, Spec: apps.DeploymentSpec{
		Replicas: &replicas, Selector: &meta.LabelSelector{MatchLabels: labels},
		Template: core.PodTemplateSpec{ObjectMeta: meta.ObjectMeta{Labels: labels}, Spec: core.PodSpec{
			ServiceAccountName: lab.TaintAccount, Tolerations: anyTaint(), Containers: []core.Container{c}, TerminationGracePeriodSeconds: &grace,
		}},
	}}
	_, err := l.client.AppsV1().Deployments(l.namespace).Create(l.Context(), deployment, meta.CreateOptions{})
	l.Must(err)
}

// deployAgent creates a stand-in for the agent: the controller only looks at its labels.
func (l *fixture) deployAgent() {
	l.Helper()
	agent := daemonSet("istio-cni-node", map[string]string{"k8s-app": "istio-cni-node"}, container("agent", lab.BoxImage))
	_, err := l.client.AppsV1().DaemonSets(l.namespace).Create(l.Context(), agent, meta.CreateOptions{})
	l.Must(err)
}

// daemonSet returns a DaemonSet that tolerates all taints.
func daemonSet(name string, labels map[string]string, c core.Container) *apps.DaemonSet {
	grace := int64(1)
	return &apps.DaemonSet{ObjectMeta: meta.ObjectMeta{Name: name}, Spec: apps.DaemonSetSpec{
		Selector: &meta.LabelSelector{MatchLabels: labels},
		Template: core.PodTemplateSpec{ObjectMeta: meta.ObjectMeta{Labels: labels}, Spec: core.PodSpec{
			Tolerations: anyTaint(), Containers: []core.Container{c}, TerminationGracePeriodSeconds: &grace,
		}},
	}}
}
