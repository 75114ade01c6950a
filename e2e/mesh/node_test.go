package mesh

import (
	"os"
	"slices"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// TestANewNode: pods start before the agent, the agent is installed from the manifest, more pods start, and the agent
// is uninstalled.
func TestANewNode(t *testing.T) {
	s := newScenario(t, cluster.Options{})
	s.UntilNodeReady()
	before := s.NetworkFile(cluster.PrimaryNetwork)
	s.Step("pods of the mesh start on a node without the plugin")
	s.Pod("early", lab.Injected())
	s.statefulSet("set")
	s.job()
	s.Pod("plain-early", lab.Plain())
	s.Until("the pods to fail", func() bool {
		return s.Failed("early") && s.Failed("set-0") && s.jobPod() != "" && s.Failed(s.jobPod()) && s.IsReady("plain-early")
	})
	s.Step("their validation has exited with 126; manifests/istio-cni.yaml is applied")

	objects := s.Manifest()
	s.Apply(objects)
	s.UntilAgentReady()
	s.Step("the agent is ready")
	s.subtest("repaired in place", (*scenario).repaired)
	s.subtest("failed permanently", (*scenario).failedPermanently)
	s.subtest("deleted by hand", (*scenario).deletedByHand)
	s.subtest("captured", (*scenario).captured)
	s.subtest("outside of the mesh", (*scenario).outside)
	s.subtest("another pod of the name", (*scenario).replaced)
	s.subtest("another broken pod of the name", func(s *scenario) { s.replacedAndBroken(before) })
	if text := s.NetworkFile(cluster.PrimaryNetwork); text == before {
		t.Errorf("the agent is ready, and the network's configuration is as before: %s", text)
	}

	s.Step("the manifest is deleted, with pods running")
	s.Uninstall(objects)
	if text := s.NetworkFile(cluster.PrimaryNetwork); text != before {
		t.Errorf("the network's configuration was %s\nand is now %s", before, text)
	}
	// The plugin binary stays: the runtime calls it for the DEL of sandboxes that were created with it.
	if _, err := os.Stat(s.NodeFile("/opt/cni/bin/istio-cni")); err != nil {
		t.Error(err)
	}
	s.Must(s.Client().AppsV1().StatefulSets(lab.App).Delete(t.Context(), "set", meta.DeleteOptions{}))
	s.RemoveAll()
	s.Step("the earlier pods are gone")
	s.Pod("later", lab.Plain())
	s.UntilReady("later")
	s.Step("a pod outside of the mesh started after it")
}

// repaired: pods that started before the agent become ready, with the same UID, and are redirected.
func (s *scenario) repaired() {
	s.Helper()
	names := []string{"early", "set-0"}
	uids := map[string]types.UID{}
	for _, name := range names {
		uids[name] = s.Get(lab.App, name).UID
	}
	for _, name := range names {
		s.Until("an event of "+name, func() bool { return s.Event(name, "RepairBrokenPod", "") })
		s.UntilReady(name)
		if pod := s.Get(lab.App, name); pod.UID != uids[name] {
			s.Errorf("%s was replaced", name)
		}
		s.Flows(name)
	}
	s.Step("%q are ready, and redirected both ways", names)
}

// failedPermanently: a pod with restartPolicy Never cannot be repaired in place, and mode repair only reports an
// event.
func (s *scenario) failedPermanently() {
	s.Helper()
	name := s.jobPod()
	s.Until("an event of the job's pod", func() bool { return s.Event(name, "BrokenPod", "cannot be redirected in place any more") })
	if pod := s.Get(lab.App, name); pod == nil || pod.Status.Phase != core.PodFailed {
		s.Errorf("the job's pod: %v", pod)
	}
}

// deletedByHand: "istio-cni repair" on the node, next to the agent, deletes only the pods that cannot be repaired in
// place.
func (s *scenario) deletedByHand() {
	s.Helper()
	name := s.jobPod()
	uid := s.Get(lab.App, name).UID
	text := s.OnNode(s.IstioCNI, "repair", "--repair-pods", "--delete-pods", "--node-name="+cluster.NodeName,
		"--host="+cluster.NodeName, "--exclude-namespaces=kube-system", "--kubeconfig="+s.Kubeconfig())
	s.Until("the job's pod to go", func() bool { pod := s.Get(lab.App, name); return pod == nil || pod.UID != uid })
	if !s.Event(name, "DeleteBrokenPod", "it is deleted") {
		s.Errorf("no event; output: %s", text)
	}
	for _, name := range []string{"early", "set-0", "plain-early"} {
		if pod := s.Get(lab.App, name); !lab.Ready(pod) || pod.DeletionTimestamp != nil || s.Event(name, "DeleteBrokenPod", "") {
			s.Errorf("%s was changed: %s", name, text)
		}
	}
}

// captured: the plugin redirects a pod that starts after the agent.
func (s *scenario) captured() {
	s.Helper()
	s.Pod("late", lab.Injected())
	s.UntilReady("late")
	if n := s.Get(lab.App, "late").Status.InitContainerStatuses[0].RestartCount; n != 0 {
		s.Errorf("%d restarts of the validation", n)
	}
	s.Flows("late")
	if d := s.Decision("late"); !d.Captured || d.Reason != "captured" || d.Source == "" {
		s.Errorf("decision %+v", d)
	} else {
		s.Step("decision %+v", d)
	}
	if s.Event("late", "RepairBrokenPod", "") {
		s.Error("it was repaired")
	}
	s.Until("an application to reach another", func() bool {
		text, _ := s.GetFrom("early", s.URL("late", "", lab.AppPort))
		return strings.Contains(text, "via outbound early, inbound late") && strings.Contains(text, "hello from late to 127.0.0.6")
	})
	s.Step("the application of one pod reaches the other's application through both proxies")
}

// outside: the plugin and the repairer do not change pods outside of the mesh, and send no requests about them.
func (s *scenario) outside() {
	s.Helper()
	s.Pod("plain", lab.Plain())
	s.Pod("host", lab.Injected(lab.HostNetwork, func(template *core.PodTemplateSpec) {
		template.Spec.InitContainers = nil // it would fail: host network pods are not redirected
	}))
	s.UntilReady("plain", "host")
	for _, name := range []string{"plain", "plain-early"} {
		if flow := s.Flow(name, ""); flow != lab.Untouched {
			s.Errorf("%s: traffic by a proxy: %+v", name, flow)
		}
	}
	requests, err := s.Requests(lab.Mesh, "istio-cni")
	s.Must(err)
	for _, r := range requests {
		if r.Status == 403 || r.Resource == "pods" && strings.HasPrefix(r.Name, "plain") {
			s.Errorf("unexpected request: %s %s: %d", r.Verb, r.URI, r.Status)
		}
	}
	// The plugin does not report a decision for which the annotations passed by the runtime suffice: the agent adds it from its watch.
	if d := s.Decision("plain"); d.Source != "watch" || d.Captured {
		s.Errorf("the annotations did not suffice: %+v", d)
	}
	for _, name := range []string{"plain", "plain-early", "host"} {
		for _, reason := range []string{"RepairBrokenPod", "BrokenPod", "UnverifiedPod"} {
			if s.Event(name, reason, "") {
				s.Errorf("%s has an event %s", name, reason)
			}
		}
	}
	if rules := s.OnNode("iptables-save"); strings.Contains(rules, "ISTIO_") {
		s.Errorf("rules in the node's own namespace:\n%s", rules)
	}
	s.Step("pods outside of the mesh are not redirected, and no request was about them (%d requests in all)", len(requests))
}

// replaced: a repaired pod is replaced by another of the same name.
func (s *scenario) replaced() {
	s.Helper()
	s.recreatePod(func(pod *core.Pod) bool { return lab.Ready(pod) })
	s.Flows("set-0")
}

// recreatePod deletes the pod of the StatefulSet and waits until the next one meets the condition.
func (s *scenario) recreatePod(as func(*core.Pod) bool) {
	s.Helper()
	uid := s.Get(lab.App, "set-0").UID
	s.Must(s.Client().CoreV1().Pods(lab.App).Delete(s.Context(), "set-0", meta.DeleteOptions{}))
	s.Until("another pod", func() bool {
		pod := s.Get(lab.App, "set-0")
		return pod != nil && pod.UID != uid && as(pod)
	})
}

// replacedAndBroken, W-8: the next pod of the same name is broken too, because the network's configuration was
// rewritten while the agent was stopped. It is repaired like its predecessor.
func (s *scenario) replacedAndBroken(conflist string) {
	s.Helper()
	s.Signal(s.Agent(), "SIGSTOP")
	s.Must(s.PutNetwork(cluster.PrimaryNetwork, []byte(conflist)))
	// containerd may need a moment to read the file.
	for !s.Failed("set-0") {
		s.recreatePod(func(pod *core.Pod) bool { return lab.Ready(pod) || lab.ValidationFailed(pod) })
	}
	uid := s.Get(lab.App, "set-0").UID
	s.Signal(s.Agent(), "SIGCONT")
	s.Until("an event of this pod", func() bool {
		events, err := s.Client().CoreV1().Events(lab.App).List(s.Context(), meta.ListOptions{})
		s.Must(err)
		return slices.ContainsFunc(events.Items, func(e core.Event) bool {
			return e.Reason == "RepairBrokenPod" && e.InvolvedObject.UID == uid
		})
	})
	s.UntilReady("set-0")
	s.UntilAgentReady()
	if got := s.Get(lab.App, "set-0").UID; got != uid {
		s.Error("the pod was replaced")
	}
	s.Flows("set-0")
	s.Step("the next pod of the same name, broken while the agent was stopped, was repaired too")
}

// statefulSet creates a StatefulSet with one pod, NAME-0.
func (s *scenario) statefulSet(name string) {
	s.Helper()
	labels := map[string]string{"app": name}
	template := lab.Injected()
	template.Labels = labels
	_, err := s.Client().AppsV1().StatefulSets(lab.App).Create(s.Context(), &apps.StatefulSet{
		ObjectMeta: meta.ObjectMeta{Name: name}, Spec: apps.StatefulSetSpec{
			Selector: &meta.LabelSelector{MatchLabels: labels}, Template: template, ServiceName: name,
		},
	}, meta.CreateOptions{})
	s.Must(err)
}

// job creates a Job with backoffLimit 0.
func (s *scenario) job() {
	s.Helper()
	once := int32(0)
	_, err := s.Client().BatchV1().Jobs(lab.App).Create(s.Context(), &batch.Job{
		ObjectMeta: meta.ObjectMeta{Name: "job"}, Spec: batch.JobSpec{Template: lab.Injected(lab.Once), BackoffLimit: &once},
	}, meta.CreateOptions{})
	s.Must(err)
}

// jobPod returns the name of the job's pod, "" as long as it has none.
func (s *scenario) jobPod() string {
	s.Helper()
	pods, err := s.Client().CoreV1().Pods(lab.App).List(s.Context(), meta.ListOptions{LabelSelector: "job-name=job"})
	s.Must(err)
	if len(pods.Items) == 0 {
		return ""
	}
	return pods.Items[0].Name
}
