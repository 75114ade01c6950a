package nodepods

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// condition returns a pod's condition in the API, zero without one.
func (l *fixture) condition(p podSpec) (found corev1.PodCondition) {
	l.Helper()
	var pod corev1.Pod
	l.Do(json.Unmarshal(l.server.Object(p.path()), &pod))
	for _, c := range pod.Status.Conditions {
		if c.Type == kube.RedirectionVerified {
			found = c
		}
	}
	return found
}

// waitForCondition waits until the pod has the condition.
func (l *fixture) waitForCondition(p podSpec, status corev1.ConditionStatus, reason, text string) {
	l.Helper()
	agenttest.Eventually(l.T, "the condition is not published", func() bool {
		c := l.condition(p)
		return c.Status == status && c.Reason == reason && strings.Contains(c.Message, text)
	})
}

// TestThePodConditionFollowsTheState: each agent writes it only on a change, and only on pods of the mesh.
func TestThePodConditionFollowsTheState(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, auditor.Settings{PodCondition: true}, cniconf.NetConf{ExcludeNamespaces: []string{"kube-system"}})
	dns := podSpec{ns: "kube-system", name: "dns", uid: "d", phase: "Running"}.at("10.88.0.7/24")
	l.set(dns)
	l.want(audit.Captured, "")
	l.waitForCondition(l.pod, "True", "Captured", "the pod is redirected as wanted")
	netnstest.Run(t, l.path, "iptables-nft", "-t", "nat", "-D", "ISTIO_OUTPUT", "1")
	l.want(audit.Drifted, "")
	l.waitForCondition(l.pod, "False", "Drifted", "missing")
	for range 3 {
		l.want(audit.Drifted, "")
	}
	l.stop()
	l.controller = l.start()
	l.want(audit.Drifted, "")
	agenttest.Eventually(t, "one pod is missing", func() bool { return len(l.controller.Pods()) == 2 })
	all := l.controller.Pods()
	audit.Sort(all)
	if all[1].State != audit.Outside || !strings.Contains(all[1].Sentence, sidecar.ExcludedNamespace.Sentence()) || all[1].Faulty() {
		t.Errorf("got %+v", all[1])
	}
	l.wantEvents(dns)
	check.Equal(t, l.requests("/status"), 2, "requests that write the condition")
	if c := l.condition(dns); c.Type != "" {
		t.Errorf("the pod outside of the mesh has %+v", c)
	}
}

// TestThePodConditionIsRetried until the API server accepts it; a missing right is logged once.
func TestThePodConditionIsRetried(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, auditor.Settings{}, cniconf.NetConf{})
	l.want(audit.Captured, "")
	l.server.FailOn("/status", kubetest.ServerError, 2)
	l.stop()
	l.options.Audit.PodCondition = true
	l.controller = l.start()
	agenttest.Eventually(t, "the condition is not published", func() bool {
		l.clock.Step(time.Second)
		return l.condition(l.pod).Status == "True"
	})
	l.server.FailOn("/status", kubetest.Forbidden, kubetest.Forever)
	netnstest.Run(t, l.path, "nft", "flush", "ruleset")
	for range 3 {
		l.want(audit.Bypassed, "")
	}
	const text = "lacks the right to patch pods/status"
	agenttest.Eventually(t, "no warning", func() bool { return strings.Contains(l.log.String(), text) })
	l.server.Heal()
	l.want(audit.Bypassed, "")
	l.waitForCondition(l.pod, "False", "Bypassed", "no rule")
	check.Equal(t, strings.Count(l.log.String(), text), 1, "warnings")
}
