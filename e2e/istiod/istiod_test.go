package istiod

import (
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// TestIstiod installs istiod on a node with the taint, then the agent, whose readiness lets istiod remove the taint, and
// creates pods of each kind, which istiod injects.
func TestIstiod(t *testing.T) {
	s := newScenario(t)
	s.UntilNodeReady()
	s.installIstiod("minimal")
	if !s.subtest("istiod removes the taint when the agent is ready", (*scenario).untaint) {
		t.FailNow()
	}
	all := kinds()
	for _, k := range all {
		s.Pod(k.name, k.pod)
	}
	for _, k := range all {
		s.subtest(k.name, func(s *scenario) { s.kind(k) })
	}
	s.subtest("traffic passes both proxies", (*scenario).bothProxies)
	s.subtest("names are asked of the proxy", (*scenario).names)
	s.subtest("a default of the mesh is in each pod", (*scenario).meshDefault)
	s.subtest("the application waits for the proxy", (*scenario).held)
	s.subtest("a proxy with the user of an OpenShift namespace", (*scenario).openShift)
	s.subtest("no problem is reported", (*scenario).noProblems)
	// After that, because "doctor" tries what the agent has no right to.
	s.subtest("commands know what istiod injected", (*scenario).commands)
	s.subtest("sidecars beside ambient mode", (*scenario).besideAmbient)
}

// untaint: istiod keeps the taint, and so a pod away from the node, until our agent is ready, and removes it then.
func (s *scenario) untaint() {
	s.Helper()
	s.Pod("early", lab.Plain())
	s.Until("early to be unschedulable", func() bool {
		return slices.ContainsFunc(s.Get(lab.App, "early").Status.Conditions, func(c core.PodCondition) bool {
			return c.Type == core.PodScheduled && c.Reason == core.PodReasonUnschedulable && strings.Contains(c.Message, "taint")
		})
	})
	if !s.tainted() {
		s.Fatal("the node has no taint although the agent is not installed")
	}
	s.Install("{}")
	s.Until("the taint to be removed", func() bool { return !s.tainted() })
	all, err := s.Requests(lab.Mesh, "istiod")
	s.Must(err)
	if !slices.ContainsFunc(all, func(r cluster.Request) bool {
		return r.Verb == "patch" && r.Resource == "nodes" && r.Name == cluster.NodeName && r.Status == 200
	}) {
		s.Error("istiod has not patched the node")
	}
	s.UntilReady("early")
	s.Flows("early")
	s.Step("the taint is removed, and a pod that it kept away is redirected")
}

// tainted reports whether the node has the taint.
func (s *scenario) tainted() bool {
	s.Helper()
	node, err := s.Client().CoreV1().Nodes().Get(s.Context(), cluster.NodeName, meta.GetOptions{})
	s.Must(err)
	return slices.ContainsFunc(node.Spec.Taints, func(t core.Taint) bool { return t.Key == notReady.Key })
}

// bothProxies: the path between two pods has the outbound proxy of one and the inbound proxy of the other.
func (s *scenario) bothProxies() {
	s.Helper()
	for _, pair := range [][2]string{{"native", "classic"}, {"classic", "tproxy"}, {"tproxy", "native"}} {
		text, answered := s.GetFrom(pair[0], s.URL(pair[1], "", lab.AppPort))
		if want := "via outbound " + pair[0] + ", inbound " + pair[1]; !answered || !strings.Contains(text, want) {
			s.Errorf("want %q: %s", want, text)
		}
	}
}

// names: DNS queries are redirected with ISTIO_META_DNS_CAPTURE, and not without it.
func (s *scenario) names() {
	s.Helper()
	for pod, want := range map[string]bool{"dns": true, "native": false} {
		text, _ := s.Exec(lab.App, pod, "app", "/box", "lookup", "example.com")
		if strings.Contains(text, "udp [240.240.0.1]") != want || strings.Contains(text, "tcp [240.240.0.1]") != want {
			s.Errorf("%s: asked of the proxy: want %t: %s", pod, want, text)
		}
	}
}

// meshDefault: injection writes a default of the mesh as an annotation, and connections to that range pass no proxy.
func (s *scenario) meshDefault() {
	s.Helper()
	const annotation, want = "traffic.sidecar.istio.io/excludeOutboundIPRanges", "198.51.100.0/24"
	if got := s.Get(lab.App, "native").Annotations[annotation]; got != want {
		s.Errorf("%s is %q, want %q", annotation, got, want)
	}
	if text, _ := s.GetFrom("native", "http://198.51.100.1:9999"); strings.Contains(text, "via outbound") {
		s.Errorf("a connection to the excluded range: %s", text)
	}
}

// held: with holdApplicationUntilProxyStarts the proxy comes first and the kubelet waits for it.
func (s *scenario) held() {
	s.Helper()
	pod := s.Get(lab.App, "hold")
	if first := pod.Spec.Containers[0]; first.Name != lab.Proxy || first.Lifecycle == nil || first.Lifecycle.PostStart == nil {
		s.Errorf("the first container is %s, with lifecycle %+v", first.Name, first.Lifecycle)
	}
}

// openShift: istiod gives the proxy the highest user and group of the ranges in the annotations of an OpenShift namespace.
func (s *scenario) openShift() {
	s.Helper()
	const user = 1000659999
	_, err := s.Client().CoreV1().Namespaces().Patch(s.Context(), lab.App, types.MergePatchType, []byte(`{"metadata": {"annotations": {
		"openshift.io/sa.scc.uid-range": "1000650000/10000", "openshift.io/sa.scc.supplemental-groups": "1000650000/10000"}}}`), meta.PatchOptions{})
	s.Must(err)
	all := []kind{
		{name: "openshift", pod: annotated(native, "true"), want: lab.Redirected},
		{name: "openshift-classic", pod: annotated(native, "false"), want: lab.Redirected},
	}
	// istiod reads the annotations from a watch.
	s.Until("istiod to know the ranges", func() bool {
		template := annotated(native, "false")
		template.Name = "tried"
		pod, err := s.Client().CoreV1().Pods(lab.App).Create(s.Context(), &core.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec},
			meta.CreateOptions{DryRun: []string{meta.DryRunAll}})
		s.Must(err)
		return *pod.Spec.InitContainers[0].SecurityContext.RunAsUser == user
	})
	for _, k := range all {
		s.Pod(k.name, k.pod)
	}
	for _, k := range all {
		s.kind(k)
	}
}

// commands: "istio-cni why" names istiod's revision, and "istio-cni doctor" finds istiod's CNI integration enabled.
func (s *scenario) commands() {
	s.Helper()
	for _, c := range []struct{ command, want string }{
		{"why " + lab.App + "/native", `by revision "default" of istiod`},
		{"why " + lab.App + "/gateway", "its istio-proxy is not a sidecar"},
		{"doctor", "istiod injects istio-validation (pilot.cni.enabled)"},
	} {
		args := append([]string{"/usr/local/bin/istio-cni"}, strings.Fields(c.command)...)
		if text, _ := s.Exec(lab.Mesh, s.Agent().Name, "install-cni", args...); !strings.Contains(text, c.want) {
			s.Errorf("%s: want %q:\n%s", c.command, c.want, text)
		}
	}
}

// noProblems: no event of ours warns about an injected pod, and no request of the agent was forbidden.
func (s *scenario) noProblems() {
	s.Helper()
	events, err := s.Client().CoreV1().Events("").List(s.Context(), meta.ListOptions{})
	s.Must(err)
	for _, e := range events.Items {
		if e.Source.Component == "cni-repair" || e.Source.Component == "istio-cni" || e.Reason == "FailedCreatePodSandBox" {
			s.Errorf("%s/%s: %s: %s", e.InvolvedObject.Namespace, e.InvolvedObject.Name, e.Reason, e.Message)
		}
	}
	all, err := s.Requests(lab.Mesh, "istio-cni")
	s.Must(err)
	for _, r := range all {
		if r.Status == 401 || r.Status == 403 {
			s.Errorf("forbidden: %s %s: %d", r.Verb, r.URI, r.Status)
		}
	}
}
