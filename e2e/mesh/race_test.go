package mesh

import (
	"testing"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// TestRepairByDeletion: the agent deletes pods that started before it, and their replacements are redirected.
func TestRepairByDeletion(t *testing.T) {
	s := newScenario(t, cluster.Options{})
	s.UntilNodeReady()
	s.deployment("web", 3)
	s.Pod("plain", lab.Plain())
	var broken []core.Pod
	s.Until("three pods to fail", func() bool { broken = s.failed(); return len(broken) == 3 })
	s.UntilReady("plain")
	s.Step("three pods have failed their validation; the agent is installed, in mode delete")
	objects := s.Install("repair: {repairPods: false, deletePods: true}")
	gone := map[types.UID]bool{}
	for _, pod := range broken {
		gone[pod.UID] = true
	}
	s.Until("the replacements", func() bool {
		ready := 0
		for _, pod := range s.all("app=web") {
			if gone[pod.UID] || lab.Restarts(&pod) != 0 {
				continue
			}
			if lab.Ready(&pod) {
				ready++
			}
		}
		return ready == 3 && len(s.all("app=web")) == 3
	})
	for _, pod := range broken {
		if !s.Event(pod.Name, "DeleteBrokenPod", "") {
			t.Errorf("%s has no event", pod.Name)
		}
	}
	for _, pod := range s.all("app=web") {
		s.Flows(pod.Name)
	}
	if pod := s.Get(lab.App, "plain"); !lab.Ready(pod) || pod.DeletionTimestamp != nil {
		t.Error("a pod outside of the mesh was changed")
	}
	s.Step("three replacements are ready and redirected")
	s.Uninstall(objects)
	s.Must(s.Client().AppsV1().Deployments(lab.App).Delete(t.Context(), "web", meta.DeleteOptions{}))
	s.RemoveAll()
}

// TestRepairByLabel: the agent labels a pod that started before it, and changes nothing else.
func TestRepairByLabel(t *testing.T) {
	s := newScenario(t, cluster.Options{})
	s.UntilNodeReady()
	s.Pod("early", lab.Injected())
	s.Until("the pod to fail", func() bool { return s.Failed("early") })
	uid := s.Get(lab.App, "early").UID
	s.Install("repair: {repairPods: false, labelPods: true}")
	s.Until("the label", func() bool { return s.Get(lab.App, "early").Labels["cni.istio.io/uninitialized"] == "true" })
	s.Until("an event", func() bool { return s.Event("early", "LabelBrokenPod", "") })
	s.Pod("late", lab.Injected())
	s.UntilReady("late")
	pod := s.Get(lab.App, "early")
	if pod.UID != uid || pod.DeletionTimestamp != nil || lab.Ready(pod) {
		t.Errorf("the pod: another %t, being deleted: %v, ready: %t", pod.UID != uid, pod.DeletionTimestamp, lab.Ready(pod))
	}
	if _, labelled := s.Get(lab.App, "late").Labels["cni.istio.io/uninitialized"]; labelled {
		t.Error("a redirected pod has the label")
	}
	s.Step("the pod from before the installation is labelled, the later one is not")
}

// TestTheTaintControllerPreventsTheRace: the node registers with the taint, so no injected pod is scheduled to it
// before the agent is ready, and none needs repair.
func TestTheTaintControllerPreventsTheRace(t *testing.T) {
	s := newScenario(t, cluster.Options{RegisterWithTaints: []core.Taint{
		{Key: "cni.istio.io/not-ready", Value: "true", Effect: core.TaintEffectNoSchedule},
	}})
	s.UntilNodeReady()
	s.Pod("first", lab.Injected())
	s.Until("the scheduler to refuse the pod", func() bool { return s.Event("first", "FailedScheduling", "") })
	s.Step("the node is ready, and a pod is Pending because of the taint")
	objects := s.Chart("taint: {enabled: true}")
	before, err := s.Client().CoreV1().Pods("").List(s.Context(), meta.ListOptions{})
	s.Must(err)
	s.Apply(objects)
	s.UntilReady("first")
	pod := s.Get(lab.App, "first")
	if n := lab.Restarts(pod); n != 0 || s.Event("first", "RepairBrokenPod", "") {
		t.Errorf("%d container restarts; repaired: %t", n, s.Event("first", "RepairBrokenPod", ""))
	}
	s.Flows("first")
	if !s.agentReadyBeforeBinding("first", before.ResourceVersion) {
		t.Error("the pod was bound to the node before the agent was ready")
	}
	s.Step("the agent was ready, the taint was removed, and the pod was redirected from its start")
	s.Uninstall(objects)
}

// agentReadyBeforeBinding reports whether the agent was ready before the scheduler bound the pod, which has not been bound at
// this resource version. One watch returns changes in the order of the writes; times of conditions are whole seconds of a
// clock that can be set.
func (s *scenario) agentReadyBeforeBinding(name, resourceVersion string) bool {
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

// deployment creates a Deployment of injected pods.
func (s *scenario) deployment(name string, replicas int32) {
	s.Helper()
	labels := map[string]string{"app": name}
	template := lab.Injected()
	template.Labels = labels
	_, err := s.Client().AppsV1().Deployments(lab.App).Create(s.Context(), &apps.Deployment{
		ObjectMeta: meta.ObjectMeta{Name: name},
		Spec:       apps.DeploymentSpec{Replicas: &replicas, Selector: &meta.LabelSelector{MatchLabels: labels}, Template: template},
	}, meta.CreateOptions{})
	s.Must(err)
}

// all returns the pods in namespace App with these labels.
func (s *scenario) all(selector string) []core.Pod {
	s.Helper()
	pods, err := s.Client().CoreV1().Pods(lab.App).List(s.Context(), meta.ListOptions{LabelSelector: selector})
	s.Must(err)
	return pods.Items
}

// failed returns the pods whose validation has failed.
func (s *scenario) failed() (failed []core.Pod) {
	s.Helper()
	for _, pod := range s.all("") {
		if lab.ValidationFailed(&pod) {
			failed = append(failed, pod)
		}
	}
	return failed
}
