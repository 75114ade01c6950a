package taint

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// nodeState is a node with the status that its kubelet reports.
type nodeState struct {
	// taints have the form key=value:effect.
	taints []string
	// ready is the status of condition Ready: True, False, Unknown, or "" for no condition.
	ready string
	// since is the transition time, by default a day ago.
	since time.Time
}

// podState is an agent pod with the status that the kubelet reports. By default it has the node's name, the label
// k8s-app=istio-cni-node, and the namespace mesh.
type podState struct {
	name, namespace string
	labels          map[string]string
	ready           bool
	// noStatus creates the pod without a reported status.
	noStatus bool
	// since is the transition time of condition Ready, by default an hour ago.
	since time.Time
}

// taint parses key=value:effect.
func taint(text string) core.Taint {
	head, effect, _ := strings.Cut(text, ":")
	key, value, _ := strings.Cut(head, "=")
	return core.Taint{Key: key, Value: value, Effect: core.TaintEffect(effect)}
}

func show(t core.Taint) string {
	text := t.Key
	if t.Value != "" {
		text += "=" + t.Value
	}
	return text + ":" + string(t.Effect)
}

// node creates a node.
func (l *fixture) node(name string, is nodeState) {
	l.Helper()
	node := &core.Node{ObjectMeta: meta.ObjectMeta{Name: name}}
	for _, text := range is.taints {
		node.Spec.Taints = append(node.Spec.Taints, taint(text))
	}
	_, err := l.client.CoreV1().Nodes().Create(l.Context(), node, meta.CreateOptions{})
	l.Must(err)
	l.report(name, is)
}

// report patches the status of a node, as its kubelet does.
func (l *fixture) report(name string, is nodeState) {
	l.Helper()
	if is.since.IsZero() {
		is.since = time.Now().Add(-24 * time.Hour)
	}
	status := map[string]any{"nodeInfo": map[string]any{"bootID": "boot-1"}}
	if is.ready != "" {
		status["conditions"] = []core.NodeCondition{{
			Type: core.NodeReady, Status: core.ConditionStatus(is.ready), Reason: "Test", Message: "test",
			LastTransitionTime: meta.NewTime(is.since), LastHeartbeatTime: meta.Now(),
		}}
	}
	l.patchNode(name, types.StrategicMergePatchType, map[string]any{"status": status}, "status")
}

// setTaints replaces the taints of a node.
func (l *fixture) setTaints(name string, taints ...core.Taint) {
	l.Helper()
	l.patchNode(name, types.MergePatchType, map[string]any{"spec": map[string]any{"taints": taints}})
}

func (l *fixture) patchNode(name string, kind types.PatchType, patch any, part ...string) {
	l.Helper()
	text, err := json.Marshal(patch)
	l.Must(err)
	_, err = l.client.CoreV1().Nodes().Patch(l.Context(), name, kind, text, meta.PatchOptions{}, part...)
	l.Must(err)
}

func (l *fixture) deleteNode(name string) {
	l.Helper()
	l.Must(l.client.CoreV1().Nodes().Delete(l.Context(), name, meta.DeleteOptions{}))
}

// admissionTaint is added to each new node by the API server's admission (TaintNodesByCondition). The node lifecycle
// controller, which removes it, does not run here.
const admissionTaint = "node.kubernetes.io/not-ready:NoSchedule"

// taints returns the taints of a node in order, without admissionTaint.
func (l *fixture) taints(name string) []string {
	l.Helper()
	node, err := l.client.CoreV1().Nodes().Get(l.Context(), name, meta.GetOptions{})
	l.Must(err)
	all := []string{}
	for _, t := range node.Spec.Taints {
		all = append(all, show(t))
	}
	if !slices.Contains(all, admissionTaint) {
		l.Errorf("node %s has lost the taint %s, which is not the controller's: %q", name, admissionTaint, all)
	}
	return slices.DeleteFunc(all, func(text string) bool { return text == admissionTaint })
}

// untilTaints waits until a node has these taints.
func (l *fixture) untilTaints(name string, want ...string) {
	l.Helper()
	l.Until(fmt.Sprintf("node %s with taints %q", name, want), func() bool { return slices.Equal(l.taints(name), want) })
}

// pod creates a pod that is bound to a node.
func (l *fixture) pod(node string, is podState) {
	l.Helper()
	is = l.withDefaults(node, is)
	no := false
	pod := &core.Pod{
		ObjectMeta: meta.ObjectMeta{Namespace: is.namespace, Name: is.name, Labels: is.labels},
		Spec: core.PodSpec{
			NodeName: node, AutomountServiceAccountToken: &no, Containers: []core.Container{{Name: "c", Image: "i"}},
		},
	}
	_, err := l.client.CoreV1().Pods(is.namespace).Create(l.Context(), pod, meta.CreateOptions{})
	l.Must(err)
	if !is.noStatus {
		l.reportPod(node, is)
	}
}

func (l *fixture) withDefaults(node string, is podState) podState {
	if is.name == "" {
		is.name = node
	}
	if is.namespace == "" {
		is.namespace = l.mesh
	}
	if is.labels == nil {
		is.labels = map[string]string{"k8s-app": "istio-cni-node"}
	}
	if is.since.IsZero() {
		is.since = time.Now().Add(-time.Hour)
	}
	return is
}

// reportPod patches the status of a pod, as the kubelet does.
func (l *fixture) reportPod(node string, is podState) {
	l.Helper()
	is = l.withDefaults(node, is)
	status := core.ConditionFalse
	if is.ready {
		status = core.ConditionTrue
	}
	text, err := json.Marshal(map[string]any{"status": core.PodStatus{Phase: core.PodRunning, Conditions: []core.PodCondition{
		{Type: core.PodReady, Status: status, LastTransitionTime: meta.NewTime(is.since)},
	}}})
	l.Must(err)
	pods := l.client.CoreV1().Pods(is.namespace)
	_, err = pods.Patch(l.Context(), is.name, types.StrategicMergePatchType, text, meta.PatchOptions{}, "status")
	l.Must(err)
}

// deletePod deletes a node's agent with a grace period: 0, as the kubelet does after its containers have ended, or more. Then
// the pod stays terminating, because there is no kubelet.
func (l *fixture) deletePod(name string, grace int64) {
	l.Helper()
	l.Must(l.client.CoreV1().Pods(l.mesh).Delete(l.Context(), name, meta.DeleteOptions{GracePeriodSeconds: &grace}))
}

// configMapName is the name in the chart of Istio 1.8 to 1.17.
const configMapName = "istio-cni-taint-configmap"

// configMap creates or updates the ConfigMap with the requirements.
func (l *fixture) configMap(data map[string]string) {
	l.Helper()
	object := &core.ConfigMap{ObjectMeta: meta.ObjectMeta{Namespace: l.mesh, Name: configMapName}, Data: data}
	client := l.client.CoreV1().ConfigMaps(l.mesh)
	if _, err := client.Update(l.Context(), object, meta.UpdateOptions{}); err == nil {
		return
	}
	_, err := client.Create(l.Context(), object, meta.CreateOptions{})
	l.Must(err)
}

// requires returns the data of a ConfigMap with one requirement.
func (l *fixture) requires(selector string) map[string]string {
	return map[string]string{"config": fmt.Sprintf("- name: istio-cni\n  selector: %s\n  namespace: %s\n", selector, l.mesh)}
}

// event reports whether an object has an event with this reason whose message contains part.
func (l *fixture) event(namespace, name, reason, part string) bool {
	l.Helper()
	events, err := l.client.CoreV1().Events(namespace).List(l.Context(), meta.ListOptions{})
	l.Must(err)
	return slices.ContainsFunc(events.Items, func(e core.Event) bool {
		return e.InvolvedObject.Name == name && e.Reason == reason && strings.Contains(e.Message, part)
	})
}
