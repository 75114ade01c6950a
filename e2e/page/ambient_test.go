package page

import (
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	core "k8s.io/api/core/v1"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/program"
)

// labelled is a running pod of ambient mode.
func labelled(namespace, name, address string) core.Pod {
	p := plain(namespace, name)
	p.Labels = map[string]string{"istio.io/dataplane-mode": "ambient"}
	p.Status.PodIP, p.Status.PodIPs = address, []core.PodIP{{IP: address}}
	p.Status.ContainerStatuses = []core.ContainerStatus{{Name: "app", State: core.ContainerState{Running: &core.ContainerStateRunning{}}}}
	return p
}

// serveAmbient are the settings of an agent that serves ambient mode.
func (n *node) serveAmbient() []string {
	return []string{
		"AMBIENT_ENABLED=true", "ZTUNNEL_UDS_ADDRESS=" + n.dir + "/ztunnel.sock", "ALLOW_SWITCH_TO_HOST_NS=true",
		`AMBIENT_ENABLEMENT_SELECTOR=[{"podSelector":{"matchLabels":{"istio.io/dataplane-mode":"ambient"}}}]`,
		"AMBIENT_DNS_CAPTURE=true", "AMBIENT_IPV6=true",
	}
}

// ztunnel starts the stand-in for ztunnel.
func (n *node) ztunnel() {
	n.Helper()
	bin, err := artifacts.FindZtunnel()
	n.Must(err)
	z, err := program.Start(nil, bin, filepath.Join(n.dir, "ztunnel.sock"))
	n.Must(err)
	n.Cleanup(func() {
		z.Signal(unix.SIGKILL)
		<-z.Ended()
	})
}

// TestAmbient looks at a pod of ambient mode before and after its enrolment.
func TestAmbient(t *testing.T) {
	pod := labelled("calm", "web", "10.88.0.12")
	n := newNode(t, pod)
	n.start(n.serveAmbient()...)
	n.sandbox(pod)
	n.Until("the step of ztunnel", func() bool { return strings.Contains(n.answer("/api/pods/calm/web"), "waiting for ztunnel") })
	b := open(t, n.origin)
	b.look(wide)
	b.visit("#calm/web")
	b.see("#state", "! pending", "waits to be taken into the ambient mesh", "waiting for ztunnel: no ztunnel is connected", "kubectl get pods -A -l app=ztunnel")
	b.see("#state .steps .warn", "! waiting for ztunnel")
	b.see("#state .steps", "✓ namespace", "○ rules", "○ annotation")
	b.see("#summary.warn", "Not yet as wanted", "past ztunnel")
	b.see(`[data-lane="outbound"]`, "missing: TCP connections to ztunnel", "! TCP connections: past ztunnel")

	n.ztunnel()
	n.Until("the enrolment", func() bool { return strings.Contains(n.answer("/api/pods/calm/web"), `"state": "captured"`) })
	b.see("#state", "✓ captured, enrolled in ambient mode", "✓ annotation")
	b.see("#summary.good", "Inbound and outbound TCP connections go through ztunnel")
	b.see(`[data-lane="inbound"]`, "ztunnel :15006", "tunnels of other ztunnels (HBONE)", "ztunnel :15008", "the kubelet's probes: past ztunnel")
	b.see(`[data-lane="outbound"]`, "ztunnel :15001", "DNS queries", "ztunnel :15053", "127.0.0.1", "stays in the pod")
	if faults := b.count(`#path .bad, #path .warn, #path .missing`); faults != 0 {
		t.Errorf("%d parts of an enrolled pod are not as wanted", faults)
	}
	b.look(narrow)
	b.fits()
	b.visit("#")
	b.see("#headline.good", "✓ The mesh pod on "+nodeName+" is redirected as wanted")
}
