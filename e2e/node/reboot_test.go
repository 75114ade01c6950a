package node

import (
	"os"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/lab"
	"github.com/meshcni/istio-cni/e2e/rights"
)

// flag is a file on the node whose existence makes the agent ready.
const flag = "/var/log/agent-may-be-ready"

// TestTaint_Reboot, T-4 and T-5: the node loses power. The controller runs outside of it, adds the taint after
// the reboot although the API still reports the agent ready, and removes it when the agent is ready again.
func TestTaint_Reboot(t *testing.T) {
	l := newFixture(t, "reboot")
	l.setFlag(true)
	l.deployFlaggedAgent()
	l.Until("the agent", func() bool { return l.isReady("k8s-app=istio-cni-node") })
	l.Must(shared.Namespace(t.Context(), l.namespace, lab.TaintAccount))
	l.GrantTaint(l.client, l.namespace, rights.Taint{Lease: "istio-node-untaint"})
	kubeconfig, err := shared.AccountKubeconfig(t.Context(), l.namespace, lab.TaintAccount)
	l.Must(err)
	l.Start([]string{"TAINT_HEALTH_PORT=0", "TAINT_MONITORING_PORT=0"}, shared.IstioCNI, "taint", "--kubeconfig="+kubeconfig,
		"--namespace="+l.namespace, "--lease-namespace="+l.namespace, "--add", "--hysteresis=1h")
	l.Until("the taint to go", func() bool { return !l.startupTaint() })
	before := l.node().Status.NodeInfo.BootID

	l.Must(shared.PowerOff())
	l.setFlag(false)
	l.Must(shared.PowerOn(t.Context()))
	l.Until("the taint", l.startupTaint)
	l.Until("the report of another boot", func() bool { return l.node().Status.NodeInfo.BootID != before })
	l.pod("application", nil, container("c", lab.BoxImage))
	l.Until("the agent not to be ready", func() bool { return !l.isReady("k8s-app=istio-cni-node") })
	if !l.startupTaint() || l.get("application").Spec.NodeName != "" {
		t.Error("pods are scheduled to the node although its agent is not ready since the reboot")
	}
	l.setFlag(true)
	l.Until("the taint to go again", func() bool { return !l.startupTaint() })
	l.Until("the application", func() bool { return ready(l.get("application")) })
}

func (l *fixture) setFlag(on bool) {
	l.Helper()
	path := shared.NodeFile(flag)
	if on {
		l.Must(os.WriteFile(path, []byte("yes\n"), 0o644))
		return
	}
	l.Must(os.Remove(path))
}

// deployFlaggedAgent creates an agent that is ready while the flag exists.
func (l *fixture) deployFlaggedAgent() {
	l.Helper()
	c := container("agent", lab.BoxImage)
	c.VolumeMounts = []core.VolumeMount{{Name: "log", MountPath: "/log"}}
	c.ReadinessProbe = &core.Probe{
		ProbeHandler:  core.ProbeHandler{Exec: &core.ExecAction{Command: []string{"/box", "cat", "/log/agent-may-be-ready"}}},
		PeriodSeconds: 1, FailureThreshold: 1,
	}
	agent := daemonSet("istio-cni-node", map[string]string{"k8s-app": "istio-cni-node"}, c)
	agent.Spec.Template.Spec.Volumes = []core.Volume{{
		Name: "log", VolumeSource: core.VolumeSource{HostPath: &core.HostPathVolumeSource{Path: "/var/log"}},
	}}
	_, err := l.client.AppsV1().DaemonSets(l.namespace).Create(l.Context(), agent, meta.CreateOptions{})
	l.Must(err)
}
