package mesh

import (
	"testing"

	core "k8s.io/api/core/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// verified is the condition that the audit publishes.
const verified core.PodConditionType = "cni.istio.io/RedirectionVerified"

// TestAReadinessGateFollowsTheAudit: a pod whose rules are lost is not ready until they are restored.
func TestAReadinessGateFollowsTheAudit(t *testing.T) {
	s := newScenario(t, cluster.Options{})
	s.UntilNodeReady()
	s.Install("audit: {interval: 5s, podCondition: true}")
	s.Pod("gated", lab.Injected(func(template *core.PodTemplateSpec) {
		template.Spec.ReadinessGates = []core.PodReadinessGate{{ConditionType: verified}}
	}))
	s.Pod("plain", lab.Plain())
	s.UntilReady("gated", "plain")
	s.wantCondition("gated", core.ConditionTrue, "Captured")
	s.Flows("gated")
	s.Step("a pod with the readiness gate is ready; another program removes its rules")
	s.OnNode("sh", "-c", `for n in /run/netns/*; do nsenter --net="$n" nft flush ruleset; done`)
	s.Until("the pod to be unready", func() bool { return !s.IsReady("gated") })
	s.wantCondition("gated", core.ConditionFalse, "Bypassed")
	s.Until("an event", func() bool { return s.Event("gated", "BrokenPod", "audit.mode=repair") })
	s.Step("the pod is not ready; the audit is set to repair")
	objects := s.Chart("audit: {interval: 5s, mode: repair, podCondition: true}")
	s.Apply(objects)
	s.UntilReady("gated")
	s.wantCondition("gated", core.ConditionTrue, "Captured")
	s.Until("an event", func() bool { return s.Event("gated", "RepairBrokenPod", "its rules are restored") })
	s.Flows("gated")
	for _, c := range s.Get(lab.App, "plain").Status.Conditions {
		if c.Type == verified {
			t.Errorf("a pod outside of the mesh has %+v", c)
		}
	}
	s.Uninstall(objects)
}

// wantCondition checks the pod's condition.
func (s *scenario) wantCondition(name string, status core.ConditionStatus, reason string) {
	s.Helper()
	for _, c := range s.Get(lab.App, name).Status.Conditions {
		if c.Type == verified && c.Status == status && c.Reason == reason {
			return
		}
	}
	s.Errorf("%s has not %s=%s, %s: %+v", name, verified, status, reason, s.Get(lab.App, name).Status.Conditions)
}
