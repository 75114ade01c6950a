package istiod

import (
	"slices"
	"strconv"
	"strings"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/meshcni/istio-cni/e2e/lab"
)

// kind is a pod as its author writes it, the flow that it must have when istiod has injected it, and the reason of the
// plugin's decision ("captured" if empty).
type kind struct {
	name   string
	pod    core.PodTemplateSpec
	want   lab.Flow
	reason string
}

const (
	traffic = "traffic.sidecar.istio.io/"
	sidecar = "sidecar.istio.io/"
	config  = "proxy.istio.io/config"
	native  = sidecar + "nativeSidecar"
)

func annotated(pairs ...string) core.PodTemplateSpec {
	all := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		all[pairs[i]] = pairs[i+1]
	}
	return lab.Plain(lab.Annotated(all))
}

// kinds has the settings of injection that the redirection depends on.
func kinds() []kind {
	in, out := lab.Flow{In: true}, lab.Flow{Out: true}
	return []kind{
		{name: "default", pod: lab.Plain(), want: lab.Redirected},
		{name: "native", pod: annotated(native, "true"), want: lab.Redirected},
		{name: "classic", pod: annotated(native, "false"), want: lab.Redirected},
		{name: "tproxy", pod: annotated(native, "true", sidecar+"interceptionMode", "TPROXY"), want: lab.Redirected},
		{name: "tproxy-classic", pod: annotated(native, "false", sidecar+"interceptionMode", "TPROXY"), want: lab.Redirected},
		{name: "none", pod: annotated(sidecar+"interceptionMode", "NONE"), want: lab.Untouched, reason: "mode-none"},
		{name: "hold", pod: annotated(native, "false", config, `{"holdApplicationUntilProxyStarts": true}`), want: lab.Redirected},
		{name: "dns", pod: annotated(config, `{"proxyMetadata": {"ISTIO_META_DNS_CAPTURE": "true"}}`), want: lab.Redirected},
		{name: "drop-invalid", pod: annotated(config, `{"proxyMetadata": {"INVALID_DROP": "true"}}`), want: lab.Redirected},
		{name: "in-excluded", pod: annotated(traffic+"excludeInboundPorts", "9090,"+lab.AppPort), want: out},
		{name: "in-some", pod: annotated(traffic+"includeInboundPorts", "80,"+lab.AppPort), want: lab.Redirected},
		{name: "in-others", pod: annotated(traffic+"includeInboundPorts", "80,443"), want: out},
		{name: "in-none", pod: annotated(traffic+"includeInboundPorts", ""), want: out},
		{name: "out-port", pod: annotated(traffic+"excludeOutboundPorts", "80,9999"), want: in},
		{name: "out-range", pod: annotated(traffic+"excludeOutboundIPRanges", "192.0.2.0/24"), want: in},
		{name: "out-other-range", pod: annotated(traffic+"includeOutboundIPRanges", "10.0.0.0/8"), want: in},
		{name: "out-port-only", pod: annotated(traffic+"includeOutboundIPRanges", "", traffic+"includeOutboundPorts", "9999"), want: lab.Redirected},
		{name: "interface", pod: annotated(traffic+"excludeInterfaces", "eth0"), want: lab.Untouched},
		{name: "vm", pod: annotated("istio.io/reroute-virtual-interfaces", "eth0"), want: out},
		{name: "vm-kubevirt", pod: annotated(traffic+"kubevirtInterfaces", "eth0"), want: out},
		{name: "status-port", pod: annotated("status."+sidecar+"port", "15099"), want: lab.Redirected},
		{name: "bind", pod: annotated(sidecar+"capNetBindService", "true"), want: lab.Redirected},
		{name: "several", pod: lab.Plain(several), want: lab.Redirected},
		{name: "gateway", pod: gateway(), want: lab.Untouched, reason: "not-sidecar"},
		{name: "off", pod: lab.Plain(labelled(sidecar+"inject", "false")), want: lab.Untouched, reason: "no-proxy"},
	}
}

func labelled(key, value string) lab.Change {
	return func(template *core.PodTemplateSpec) { template.Labels = map[string]string{key: value} }
}

// several adds an init container, a second application, and probes, which injection sends to pilot-agent's port.
func several(template *core.PodTemplateSpec) {
	spec := &template.Spec
	spec.InitContainers = []core.Container{lab.Container("setup", lab.BoxImage, 1000, "ls", "/")}
	probe := func(path string) *core.Probe {
		return &core.Probe{PeriodSeconds: 1, ProbeHandler: core.ProbeHandler{HTTPGet: &core.HTTPGetAction{Path: path, Port: intstr.FromString("web")}}}
	}
	first := &spec.Containers[0]
	first.Ports = []core.ContainerPort{{Name: "web", ContainerPort: 8080}}
	first.ReadinessProbe, first.LivenessProbe, first.StartupProbe = probe("/ready"), probe("/live"), probe("/start")
	spec.Containers = append(spec.Containers, lab.Container("other", lab.BoxImage, 2000, "serve", ":8081"))
}

// gateway is a pod of a gateway, which has a proxy only.
func gateway() core.PodTemplateSpec {
	template := annotated("inject.istio.io/templates", "gateway")
	proxy := lab.Container(lab.Proxy, "auto", 1337)
	proxy.Args = nil
	template.Spec.Containers = []core.Container{proxy}
	return template
}

// kind checks the flow of a pod, the plugin's decision about it, and that its rules are those that istiod wrote for
// istio-validation.
func (s *scenario) kind(k kind) {
	s.Helper()
	s.UntilReady(k.name)
	pod := s.Get(lab.App, k.name)
	if n := lab.Restarts(pod); n != 0 {
		s.Errorf("%d container restarts", n)
	}
	var flow lab.Flow
	if slices.ContainsFunc(pod.Spec.Containers, func(c core.Container) bool { return c.Name == "app" }) {
		flow = s.Flow(k.name, "")
	} else if text, _ := s.GetFrom("", s.URL(k.name, "", lab.AppPort)); strings.Contains(text, "via") {
		s.Errorf("its inbound traffic is redirected: %s", text)
	}
	if flow != k.want {
		s.Errorf("traffic by the proxy: %+v, want %+v", flow, k.want)
	}
	reason := k.reason
	if reason == "" {
		reason = "captured"
		s.wantRules(pod)
	}
	s.Until("the decision", func() bool { return s.Decision(k.name).Reason != "" })
	if d := s.Decision(k.name); d.Reason != reason || d.Captured != (reason == "captured") {
		s.Errorf("decision %+v, want reason %s", d, reason)
	}
	s.Step("%-16s inbound by the proxy: %t, outbound: %t; %s; %s", k.name, flow.In, flow.Out, reason, pod.Annotations[lab.StatusKey])
}

// wantRules compares the rules of a pod with the command line that istiod wrote for istio-validation.
func (s *scenario) wantRules(pod *core.Pod) {
	s.Helper()
	i := slices.IndexFunc(pod.Spec.InitContainers, func(c core.Container) bool { return c.Name == lab.Validation })
	if i < 0 {
		s.Errorf("there is no %s", lab.Validation)
		return
	}
	validation := pod.Spec.InitContainers[i]
	command := []string{"nsenter", "--net=" + s.network(pod), "--", "env"}
	for _, e := range validation.Env {
		command = append(command, e.Name+"="+e.Value)
	}
	group := strconv.FormatInt(*validation.SecurityContext.RunAsGroup, 10)
	command = slices.Concat(command, []string{s.IstioCNI, "iptables", "--verify", "-g", group}, rulesOf(validation.Args[1:]))
	if text, err := s.Command(s.Context(), command[0], command[1:]...).CombinedOutput(); err != nil {
		s.Errorf("the rules are not what %q writes: %v: %s", validation.Args, err, text)
	}
}

// rulesOf returns the arguments of istio-validation that are about rules, with what the reference's plugin does otherwise than
// the command: all DNS if any, an outbound port, and the ports of the proxy's status last.
func rulesOf(validation []string) (args []string) {
	args = append(args, "--capture-all-dns")
	if !slices.Contains(validation, "-o") {
		args = append(args, "-o", "15020")
	}
	for i, arg := range validation {
		switch {
		case arg == "--run-validation" || arg == "--skip-rule-apply":
		case i > 0 && validation[i-1] == "-d":
			var ports []string
			for port := range strings.SplitSeq(strings.TrimPrefix(arg, "15090,15021,")+",15020,15021,15090", ",") {
				if !slices.Contains(ports, port) {
					ports = append(ports, port)
				}
			}
			args = append(args, strings.Join(ports, ","))
		default:
			args = append(args, arg)
		}
	}
	return args
}

// network returns the path of a pod's network namespace on the node.
func (s *scenario) network(pod *core.Pod) string {
	s.Helper()
	id := strings.TrimPrefix(pod.Status.ContainerStatuses[0].ContainerID, "containerd://")
	for line := range strings.Lines(s.OnNode("ctr", "--namespace", "k8s.io", "task", "ls")) {
		if task := strings.Fields(line); task[0] == id {
			return "/proc/" + task[1] + "/ns/net"
		}
	}
	s.Fatalf("%s has no running container", pod.Name)
	return ""
}
