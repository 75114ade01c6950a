package mesh

import (
	"strings"
	"testing"

	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// kind is a kind of pod and the flow that it must have: inbound to lab.AppPort, outbound to port 9999 of an
// unassigned address.
type kind struct {
	name string
	pod  core.PodTemplateSpec
	want lab.Flow
	// noValidation removes the validation container: its probe uses ports that this pod's settings do not redirect.
	noValidation bool
}

const traffic = "traffic.sidecar.istio.io/"

func annotated(pairs ...string) core.PodTemplateSpec {
	all := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		all[pairs[i]] = pairs[i+1]
	}
	return lab.Injected(lab.Annotated(all))
}

// kinds has each annotation that the plugin reads, with a value that changes the redirection, and native sidecars if the cluster
// has them.
func kinds(native bool) []kind {
	in, out := lab.Flow{In: true}, lab.Flow{Out: true}
	all := []kind{
		{name: "classic", pod: lab.Injected(), want: lab.Redirected},
		{name: "tproxy", pod: lab.Injected(lab.Transparent), want: lab.Redirected},
		{name: "dns", pod: lab.Injected(lab.ProxyEnv("ISTIO_META_DNS_CAPTURE", "true")), want: lab.Redirected},
		{name: "redirect", pod: annotated("sidecar.istio.io/interceptionMode", "REDIRECT"), want: lab.Redirected},
		{name: "no-inject", pod: annotated("sidecar.istio.io/inject", "false"), want: lab.Untouched, noValidation: true},
		{name: "in-some", pod: annotated(traffic+"includeInboundPorts", "80,"+lab.AppPort), want: lab.Redirected, noValidation: true},
		{name: "in-others", pod: annotated(traffic+"includeInboundPorts", "80,443"), want: out, noValidation: true},
		{name: "in-none", pod: annotated(traffic+"includeInboundPorts", ""), want: out, noValidation: true},
		{name: "in-excluded", pod: annotated(traffic+"excludeInboundPorts", lab.AppPort), want: out},
		{name: "out-excluded-port", pod: annotated(traffic+"excludeOutboundPorts", "80,9999"), want: in},
		{name: "out-excluded-ports", pod: annotated("cni.istio.io/excludeOutboundPorts", "80,9990-10000"), want: in},
		{name: "out-excluded-range", pod: annotated(traffic+"excludeOutboundIPRanges", "192.0.2.0/24"), want: in},
		{name: "out-range", pod: annotated(traffic+"includeOutboundIPRanges", "192.0.2.0/25"), want: lab.Redirected, noValidation: true},
		{name: "out-other-range", pod: annotated(traffic+"includeOutboundIPRanges", "10.0.0.0/8"), want: in, noValidation: true},
		{name: "out-port-only", pod: annotated(traffic+"includeOutboundIPRanges", "", traffic+"includeOutboundPorts", "9999"), want: lab.Redirected, noValidation: true},
		{name: "out-other-port-only", pod: annotated(traffic+"includeOutboundIPRanges", "", traffic+"includeOutboundPorts", "80"), want: in, noValidation: true},
		{name: "interface", pod: annotated(traffic+"excludeInterfaces", "eth0"), want: lab.Untouched},
		{name: "other-interface", pod: annotated(traffic+"excludeInterfaces", "eth1,net1"), want: lab.Redirected},
		{name: "vm", pod: annotated("istio.io/reroute-virtual-interfaces", "eth0"), want: out},
		{name: "vm-kubevirt", pod: annotated(traffic+"kubevirtInterfaces", "eth0"), want: out},
	}
	if native {
		all = append(all, kind{name: "native", pod: lab.Injected(lab.Native), want: lab.Redirected},
			kind{name: "tproxy-native", pod: lab.Injected(lab.Transparent, lab.Native), want: lab.Redirected})
	}
	return all
}

// TestKindsOfPods creates one pod of each kind, and a job, on a node with the agent.
func TestKindsOfPods(t *testing.T) {
	s := newScenario(t, cluster.Options{})
	s.UntilNodeReady()
	objects := s.Install("{}")
	s.Step("the agent is ready")
	native := s.NativeSidecars()
	all := kinds(native)
	for _, k := range all {
		if k.noValidation {
			k.pod.Spec.InitContainers = k.pod.Spec.InitContainers[1:]
		}
		s.Pod(k.name, k.pod)
	}
	s.Pod("invalid", annotated("sidecar.istio.io/interceptionMode", "tproxy"))
	for _, k := range all {
		s.subtest(k.name, func(s *scenario) { s.kind(k) })
	}
	s.subtest("traffic of a virtual machine is redirected to the outbound port", (*scenario).virtualMachine)
	s.subtest("names are asked of the proxy", (*scenario).names)
	s.subtest("a setting that is not valid keeps the pod from starting", (*scenario).invalid)
	if native { // any other sidecar keeps its job from completing
		s.subtest("a job", (*scenario).completes)
	}
	s.Step("the agent is uninstalled while %d pods run, then the pods are deleted", len(all))
	s.Uninstall(objects)
	s.RemoveAll()
}

// kind checks the flow of a pod, and that it had no container restarts.
func (s *scenario) kind(k kind) {
	s.Helper()
	s.UntilReady(k.name)
	if n := lab.Restarts(s.Get(lab.App, k.name)); n != 0 {
		s.Errorf("%d container restarts", n)
	}
	// The proxy listens a moment after its container starts.
	var flow lab.Flow
	if k.want.Out {
		s.Until("the proxy of "+k.name, func() bool { flow = s.Flow(k.name, ""); return flow.Out })
	} else {
		flow = s.Flow(k.name, "")
	}
	if flow != k.want {
		s.Errorf("traffic by the proxy: %+v, want %+v", flow, k.want)
	}
	s.Step("%-20s %v: inbound by the proxy: %t, outbound: %t", k.name, k.pod.Annotations, flow.In, flow.Out)
}

// virtualMachine: inbound packets from the interface of a virtual machine are redirected to the outbound port, and
// the proxy forwards them to their original destination, the application.
func (s *scenario) virtualMachine() {
	s.Helper()
	for _, name := range []string{"vm", "vm-kubevirt"} {
		text, answered := s.GetFrom("", s.URL(name, "", lab.AppPort))
		if !answered || !strings.Contains(text, "via outbound "+name) || !strings.Contains(text, "hello from "+name) {
			s.Errorf("%s: %s", name, text)
		}
	}
}

// names: DNS queries are redirected to the proxy over UDP and TCP with ISTIO_META_DNS_CAPTURE, and not without it.
func (s *scenario) names() {
	s.Helper()
	lookup := func(pod string) string {
		text, _ := s.Exec(lab.App, pod, "app", "/box", "lookup", "example.com")
		return text
	}
	if text := lookup("dns"); !strings.Contains(text, "udp [240.240.0.1]") || !strings.Contains(text, "tcp [240.240.0.1]") {
		s.Errorf("with ISTIO_META_DNS_CAPTURE: %s", text)
	}
	if text := lookup("classic"); strings.Contains(text, "240.240.0.1") {
		s.Errorf("without ISTIO_META_DNS_CAPTURE: %s", text)
	}
}

// invalid: the event on the pod has the annotation and its value, and the pod can be deleted.
func (s *scenario) invalid() {
	s.Helper()
	s.Until("an event on the pod", func() bool { return s.Event("invalid", "FailedCreatePodSandBox", "sidecar.istio.io/interceptionMode") })
	if !s.Event("invalid", "FailedCreatePodSandBox", "tproxy") {
		s.Error("the event does not name the value")
	}
	if pod := s.Get(lab.App, "invalid"); pod.Status.Phase != core.PodPending {
		s.Errorf("its phase is %s", pod.Status.Phase)
	}
	s.Remove("invalid")
}

// completes: a job with a native sidecar requests another pod through both proxies, and completes.
func (s *scenario) completes() {
	s.Helper()
	template := lab.Injected(lab.Native, lab.Once)
	template.Spec.Containers[0].Args = []string{"get", s.URL("classic", "", lab.AppPort)}
	none := int32(0)
	_, err := s.Client().BatchV1().Jobs(lab.App).Create(s.Context(), &batch.Job{
		ObjectMeta: meta.ObjectMeta{Name: "client"}, Spec: batch.JobSpec{Template: template, BackoffLimit: &none},
	}, meta.CreateOptions{})
	s.Must(err)
	s.Until("the job", func() bool {
		job, getErr := s.Client().BatchV1().Jobs(lab.App).Get(s.Context(), "client", meta.GetOptions{})
		s.Must(getErr)
		if job.Status.Failed > 0 {
			s.Fatalf("it failed: %v", job.Status.Conditions)
		}
		return job.Status.Succeeded == 1
	})
	pods, err := s.Client().CoreV1().Pods(lab.App).List(s.Context(), meta.ListOptions{LabelSelector: "batch.kubernetes.io/job-name=client"})
	s.Must(err)
	text := s.Output(lab.App, pods.Items[0].Name, "app", false)
	if !strings.Contains(text, "via outbound "+pods.Items[0].Name+", inbound classic") {
		s.Errorf("response: %s", text)
	}
	s.Step("a job is done; response: %s", strings.TrimSpace(text))
}
