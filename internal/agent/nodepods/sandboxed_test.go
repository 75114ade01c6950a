package nodepods

import (
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// sandboxes returns a configuration with gVisor and Kata Containers.
func sandboxes() cniconf.NetConf {
	return cniconf.NetConf{SandboxedRuntimes: cniconf.SandboxedRuntimes()}
}

// TestAudit_Sandboxed: a pod in a sandbox is never captured, whatever its namespace has, and its namespace is never searched or changed.
func TestAudit_Sandboxed(t *testing.T) {
	t.Parallel()
	for runtime, test := range map[string]struct{ detail, remedy string }{
		"gvisor":    {`RuntimeClass "gvisor": gVisor has a network stack of its own`, "set reproduce-nftables"},
		"kata-qemu": {`RuntimeClass "kata-qemu": Kata Containers passes packets to a virtual machine`, "no setting helps"},
	} {
		t.Run(runtime, func(t *testing.T) {
			t.Parallel()
			l := newAuditFixture(t, auditor.Settings{Repair: true, PodCondition: true}, sandboxes())
			l.want(audit.Captured, "redirected as wanted")
			l.pod.runtime, l.pod.uid = runtime, "u2" // another pod, because a pod's class never changes
			l.cache(l.pod, l.path)
			l.publish(running())
			l.becomes(audit.Sandboxed)
			netnstest.Run(t, l.path, "nft", "flush", "ruleset")
			searches := l.searches.Load()
			s := l.want(audit.Sandboxed, test.detail)
			if !strings.Contains(s.Remedy, test.remedy) || !strings.Contains(s.Why(), "its istio-validation has found the redirection inside") || !s.Faulty() {
				t.Errorf("got %+v", s)
			}
			l.waitForEvent(l.pod, "Warning", podwork.ReasonSandboxed, test.detail, test.remedy)
			l.waitForCondition(l.pod, "Unknown", "Sandboxed", test.detail)
			if state := l.pods(metrics.PodUnknown); state != 1 || captured(t, l.path) || l.searches.Load() != searches {
				t.Errorf("%d unknown pods, captured %v, %d searches", state, captured(t, l.path), l.searches.Load()-searches)
			}
			l.explains(test.detail)

			l.pod.now = waiting("PodInitializing")
			l.publish(nil)
			agenttest.Eventually(t, "the validation counts", func() bool {
				return strings.Contains(l.check().Why(), "no istio-validation has found the redirection inside")
			})

			l.conf.Store(&cniconf.NetConf{SandboxedRuntimes: []string{"other"}})
			l.want(audit.Captured, "") // the inspection writes the lost rules
			netnstest.Run(t, l.path, "ip", "address", "flush", "dev", "eth0")
			l.want(audit.NotInspected, `If pods of RuntimeClass "`+runtime+`" have a network stack of their own, add it to sandboxedRuntimes`)
		})
	}
}

// becomes waits until the watch has delivered the change that leads to the state.
func (l *auditFixture) becomes(state audit.State) {
	l.Helper()
	agenttest.Eventually(l.T, "the state stays", func() bool { return l.check().State == state })
}

// explains checks that the explanation describes the sandbox and reads no rules.
func (l *auditFixture) explains(text string) {
	l.Helper()
	e, err := l.controller.Explain(l.Context(), auditor.Socket, web, nil)
	unseen := strings.Contains(e.InspectionError, "the node cannot see") && len(e.Chains) == 0
	if err != nil || e.State != audit.Sandboxed || !unseen || !strings.Contains(e.Why(), text) {
		l.Errorf("got %v, %+v", err, e)
	}
}

// TestRepair_Sandboxed: rules are never written into the namespace of a sandboxed pod. A pod of gVisor whose validation fails is deleted,
// which helps if it started without the plugin; a pod of Kata Containers is only reported.
func TestRepair_Sandboxed(t *testing.T) {
	t.Parallel()
	for runtime, reason := range map[string]kube.EventReason{"gvisor": podwork.ReasonDeleted, "kata-qemu": podwork.ReasonBroken} {
		t.Run(runtime, func(t *testing.T) {
			t.Parallel()
			l := newFixture(t, repair.Switches{InPlace: true, Delete: true})
			conf := sandboxes()
			l.conf.Store(&conf)
			p := crashing("web").at("10.88.0.2/24")
			p.runtime = runtime
			path := l.place(p)
			fine := podSpec{name: "fine", uid: "f", phase: "Running", runtime: runtime}.at("10.88.0.3/24")
			l.set(p)
			l.set(fine)
			l.run()
			l.waitForEvent(p, "Warning", reason, "found that its traffic is not redirected", `RuntimeClass "`+runtime+`"`)
			deleted := l.repaired(metrics.RepairDelete, metrics.RepairSuccess)
			if (deleted == 1) != (runtime == "gvisor") || l.repaired(metrics.RepairPod, metrics.RepairSuccess) != 0 {
				t.Errorf("%d deletions", deleted)
			}
			agenttest.Eventually(t, "the metric", func() bool { return l.pods(metrics.PodBroken) == 1-deleted })
			l.untouched(path)
			l.wantEvents(fine)
			check.Equal(t, l.searches.Load(), 0, "searches")
		})
	}
}
