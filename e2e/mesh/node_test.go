package mesh

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
)

// TestANewNode is pods that were there before the agent, the agent, pods that come after it, and its end.
func TestANewNode(t *testing.T) {
	l := newLab(t)
	before := l.conflist()
	l.pod("early", injected())
	l.statefulSet("set")
	l.job()
	l.pod("plain-early", plain(false))
	l.until("the pods to fail", func() bool {
		return l.failed("early") && l.failed("set-0") && l.jobPod() != "" && l.failed(l.jobPod()) && l.isReady("plain-early")
	})

	objects := l.manifest()
	l.apply(objects)
	l.until("the agent", func() bool { return l.agent() != nil && ready(l.agent()) })
	t.Run("repaired in place", func(t *testing.T) { l.with(t).repaired() })
	t.Run("failed for good", func(t *testing.T) { l.with(t).failedForGood() })
	t.Run("deleted by hand", func(t *testing.T) { l.with(t).deletedByHand() })
	t.Run("captured", func(t *testing.T) { l.with(t).captured() })
	t.Run("outside of the mesh", func(t *testing.T) { l.with(t).outside() })
	t.Run("another pod of the name", func(t *testing.T) { l.with(t).replaced() })
	t.Run("another broken pod of the name", func(t *testing.T) { l.with(t).replacedAndBroken(before) })
	if text := l.conflist(); text == before {
		t.Errorf("the agent is ready, and the network's configuration is as before: %s", text)
	}

	l.remove(objects)
	l.until("the agent to go", func() bool { return l.agent() == nil })
	if text := l.conflist(); text != before {
		t.Errorf("the network's configuration was %s\nand is now %s", before, text)
	}
	// Sandboxes that were made with the program are still there, and may ask for it at their end.
	if _, err := os.Stat(shared.NodeFile("/opt/cni/bin/istio-cni")); err != nil {
		t.Error(err)
	}
	l.must(l.client.AppsV1().StatefulSets(appNamespace).Delete(t.Context(), "set", meta.DeleteOptions{}))
	l.must(l.client.CoreV1().Pods(appNamespace).DeleteCollection(t.Context(), meta.DeleteOptions{}, meta.ListOptions{}))
	l.until("the pods to go", func() bool {
		pods, err := l.client.CoreV1().Pods(appNamespace).List(t.Context(), meta.ListOptions{})
		return err == nil && len(pods.Items) == 0
	})
	l.pod("later", plain(false))
	l.until("a pod that comes later", func() bool { return l.isReady("later") })
}

// with is the lab for a part of the test.
func (l *lab) with(t *testing.T) *lab { t.Helper(); return &lab{T: t, client: l.client} }

// agent is its pod, nil if there is none.
func (l *lab) agent() *core.Pod {
	l.Helper()
	pods, err := l.client.CoreV1().Pods(meshNamespace).List(l.Context(), meta.ListOptions{LabelSelector: "k8s-app=istio-cni-node"})
	l.must(err)
	if len(pods.Items) == 0 {
		return nil
	}
	return &pods.Items[0]
}

// repaired: pods of before the agent come to be ready as the pods that they are, and their traffic is the proxy's.
func (l *lab) repaired() {
	l.Helper()
	uids := map[string]any{"early": l.get(appNamespace, "early").UID, "set-0": l.get(appNamespace, "set-0").UID}
	for name, uid := range uids {
		l.until("an event of "+name, func() bool { return l.event(name, "RepairBrokenPod", "") })
		l.until(name, func() bool { return l.isReady(name) })
		if pod := l.get(appNamespace, name); pod.UID != uid {
			l.Errorf("%s is another pod", name)
		}
		l.flows(name)
	}
}

func (l *lab) flows(name string) {
	l.Helper()
	if in, out := l.redirected(name); !in || !out {
		l.Errorf("%s: traffic comes in by the proxy: %t, goes out by it: %t", name, in, out)
	}
}

// failedForGood: a pod that is not restarted cannot be helped in place, and mode repair does no more than say so.
func (l *lab) failedForGood() {
	l.Helper()
	name := l.jobPod()
	l.until("an event of the job's pod", func() bool { return l.event(name, "BrokenPod", "cannot be redirected in place any more") })
	if pod := l.get(appNamespace, name); pod == nil || pod.Status.Phase != core.PodFailed {
		l.Errorf("the job's pod: %v", pod)
	}
}

// deletedByHand: "istio-cni repair" on the node, beside the agent, deletes what cannot be helped in place and nothing else.
func (l *lab) deletedByHand() {
	l.Helper()
	name := l.jobPod()
	uid := l.get(appNamespace, name).UID
	text, err := shared.Command(l.Context(), shared.IstioCNI, "repair", "--repair-pods", "--delete-pods", "--node-name="+cluster.NodeName,
		"--host="+cluster.NodeName, "--exclude-namespaces=kube-system", "--kubeconfig="+shared.Kubeconfig()).CombinedOutput()
	if err != nil {
		l.Fatalf("%v: %s", err, text)
	}
	l.until("the job's pod to go", func() bool { pod := l.get(appNamespace, name); return pod == nil || pod.UID != uid })
	if !l.event(name, "DeleteBrokenPod", "it is deleted") {
		l.Errorf("no event; it says %s", text)
	}
	for _, name := range []string{"early", "set-0", "plain-early"} {
		if pod := l.get(appNamespace, name); !ready(pod) || pod.DeletionTimestamp != nil || l.event(name, "DeleteBrokenPod", "") {
			l.Errorf("%s was not left alone: %s", name, text)
		}
	}
}

// captured: a pod that comes after the agent is redirected from the beginning, by the plugin.
func (l *lab) captured() {
	l.Helper()
	l.pod("late", injected())
	l.until("the pod", func() bool { return l.isReady("late") })
	if n := l.get(appNamespace, "late").Status.InitContainerStatuses[0].RestartCount; n != 0 {
		l.Errorf("its validation was tried %d times more", n)
	}
	l.flows("late")
	if d := l.decision("late"); !d.Captured || d.Reason != "captured" || d.Source == "" {
		l.Errorf("decision %+v", d)
	} else {
		l.Logf("decision %+v", d)
	}
	if l.event("late", "RepairBrokenPod", "") {
		l.Error("it was repaired")
	}
}

// decision is what "istio-cni decisions" says of a pod.
type decision struct {
	Pod, Reason, Source string
	Captured            bool
	Requests            int
}

// decision asks in the agent's container. The zero value is for a pod that is not known there.
func (l *lab) decision(pod string) decision {
	l.Helper()
	text, err := l.inside(meshNamespace, l.agent().Name, "install-cni", "/usr/local/bin/istio-cni", "decisions", "--json", "--pod="+appNamespace+"/"+pod)
	if err != nil {
		l.Fatalf("%v: %s", err, text)
	}
	var all []decision
	l.must(json.Unmarshal([]byte(text), &all))
	if len(all) == 0 {
		return decision{}
	}
	return all[0]
}

// outside: the plugin and repair leave a pod alone that is not in the mesh, and ask nobody about it.
func (l *lab) outside() {
	l.Helper()
	l.pod("plain", plain(false))
	l.pod("host", plain(true))
	l.until("the pods", func() bool { return l.isReady("plain") && l.isReady("host") })
	for _, name := range []string{"plain", "plain-early"} {
		if in, out := l.redirected(name); in || out {
			l.Errorf("%s: traffic comes in by a proxy: %t, goes out by one: %t", name, in, out)
		}
	}
	requests, err := shared.Requests(meshNamespace, "istio-cni")
	l.must(err)
	for _, r := range requests {
		if r.Status == 403 || r.Resource == "pods" && strings.HasPrefix(r.Name, "plain") {
			l.Errorf("asked: %s %s: %d", r.Verb, r.URI, r.Status)
		}
	}
	// What the runtime's annotations are enough for is not reported to the agent.
	if d := l.decision("plain"); d != (decision{}) {
		l.Errorf("the annotations were not enough: %+v", d)
	}
	for _, name := range []string{"plain", "plain-early", "host"} {
		for _, reason := range []string{"RepairBrokenPod", "BrokenPod", "UnverifiedPod"} {
			if l.event(name, reason, "") {
				l.Errorf("%s has an event %s", name, reason)
			}
		}
	}
	rules, err := shared.Command(l.Context(), "iptables-save").CombinedOutput()
	l.must(err)
	if strings.Contains(string(rules), "ISTIO_") {
		l.Errorf("rules in the node's own namespace:\n%s", rules)
	}
}

// replaced: a pod that was repaired makes way for another one of its name.
func (l *lab) replaced() {
	l.Helper()
	uid := l.get(appNamespace, "set-0").UID
	l.must(l.client.CoreV1().Pods(appNamespace).Delete(l.Context(), "set-0", meta.DeleteOptions{}))
	l.until("another pod", func() bool {
		pod := l.get(appNamespace, "set-0")
		return pod != nil && pod.UID != uid && ready(pod)
	})
	l.flows("set-0")
}

// replacedAndBroken, W-8: one of the same name is broken once more, as the agent hung when somebody wrote the network's
// configuration anew. It is repaired as the one before it was.
func (l *lab) replacedAndBroken(conflist string) {
	l.Helper()
	l.signal("SIGSTOP")
	l.must(shared.PutConflist("10-e2e.conflist", []byte(conflist)))
	// The runtime may need a moment to read it.
	for broken := false; !broken; {
		uid := l.get(appNamespace, "set-0").UID
		l.must(l.client.CoreV1().Pods(appNamespace).Delete(l.Context(), "set-0", meta.DeleteOptions{}))
		l.until("another pod, captured or not", func() bool {
			pod := l.get(appNamespace, "set-0")
			broken = l.failed("set-0")
			return pod != nil && pod.UID != uid && (ready(pod) || broken)
		})
	}
	uid := l.get(appNamespace, "set-0").UID
	l.signal("SIGCONT")
	l.until("an event of this pod", func() bool {
		events, err := l.client.CoreV1().Events(appNamespace).List(l.Context(), meta.ListOptions{})
		l.must(err)
		return slices.ContainsFunc(events.Items, func(e core.Event) bool {
			return e.Reason == "RepairBrokenPod" && e.InvolvedObject.UID == uid
		})
	})
	l.until("the pod", func() bool { return l.isReady("set-0") })
	l.until("the agent", func() bool { return ready(l.agent()) })
	if got := l.get(appNamespace, "set-0").UID; got != uid {
		l.Error("it is another pod")
	}
	l.flows("set-0")
}

// signal is sent to the agent.
func (l *lab) signal(name string) {
	l.Helper()
	id := strings.TrimPrefix(l.agent().Status.ContainerStatuses[0].ContainerID, "containerd://")
	text, err := l.ctr("task", "kill", "--signal", name, id)
	if err != nil {
		l.Fatalf("%v: %s", err, text)
	}
}
