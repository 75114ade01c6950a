package istiod

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/lab"
)

const (
	modeLabel   = "istio.io/dataplane-mode"
	injectLabel = sidecar + "inject"
	redirection = "ambient.istio.io/redirection"
)

// besideAmbient: istiod with the ambient profile injects the pods that ask for it, and has others reach the pods that our agent has enrolled
// by HBONE. The doctor finds what the profile before lacked.
func (s *scenario) besideAmbient() {
	s.Helper()
	found := s.doctor()
	s.wantChecks(found, "fail ambient-istiod: PILOT_ENABLE_AMBIENT is not true", "fail ambient-sidecars: ", "ok ambient-injection: ",
		"warn ambient-versions: ztunnel's version could not be checked")
	s.RemoveAll()
	s.installIstiod("ambient", "--force-conflicts") // istiod has changed its webhook
	s.Install("profile: ambient")
	s.Until("the agent of ambient mode", s.RolledOut)
	ztunnel := s.Start(nil, s.Ztunnel, fmt.Sprintf("/proc/%d/root/run/ztunnel/ztunnel.sock", s.Pid()))

	// A pod's label for ambient mode does not keep istiod from injecting it, and then the sidecar wins.
	s.Pod("side", lab.Plain())
	s.Pod("both", lab.Plain(labelled(modeLabel, "ambient")))
	s.Pod("only", lab.Plain(labelled(modeLabel, "ambient"), func(template *core.PodTemplateSpec) { template.Labels[injectLabel] = "false" }))
	s.UntilReady("side", "both", "only")
	s.must("label", "namespace", lab.App, "istio-injection-", modeLabel+"=ambient")
	s.Pod("namespaced", lab.Plain())
	s.Pod("out", lab.Plain(labelled(modeLabel, "none")))
	s.Pod("asked", lab.Plain(labelled(injectLabel, "true")))
	s.UntilReady("namespaced", "out", "asked")

	all := []member{
		{"side", "inbound ", "outbound "},
		{"both", "inbound ", "outbound "},
		{"asked", "inbound ", "outbound "},
		{"only", "ztunnel in ", "ztunnel out "},
		{"namespaced", "ztunnel in ", "ztunnel out "},
		{"out", "", ""},
	}
	s.Until("istiod's workload API", func() bool { return s.workloads() == tunnels(all) })
	for _, m := range all {
		s.member(m, all[0], all[3])
	}
	s.wantChecks(s.doctor(), "ok ambient: the agent serves ambient mode; connections of ztunnel: 1", "ok ambient-istiod: ", "ok ambient-sidecars: ", "ok ambient-injection: ", "ok ambient-policies: ")
	s.must("create", "clusterrole", "oncall", "--verb=get,list,create", "--resource=pods,pods/exec,daemonsets,nodes")
	s.must("create", "clusterrolebinding", "oncall", "--clusterrole=oncall", "--user=oncall")
	s.wantChecks(s.doctor("--as=oncall"), "ok ambient-istiod: ", "warn ambient-sidecars: whether sidecars accept HBONE could not be checked: ",
		"warn ambient-injection: pilot.cni.enabled could not be checked: ", "warn ambient-policies: network policies could not be checked: ")
	s.Stop(ztunnel)
}

// member is a pod with the proxies of its connections in both directions, as in the header Via.
type member struct{ name, in, out string }

// member checks a pod's annotations and its connections from a pod with a sidecar and to one of ambient mode.
func (s *scenario) member(m, from, to member) {
	s.Helper()
	annotations, want := s.Get(lab.App, m.name).Annotations, map[bool]string{true: "enabled"}[strings.HasPrefix(m.in, "ztunnel")]
	if _, injected := annotations[lab.StatusKey]; annotations[redirection] != want || injected != strings.HasPrefix(m.in, "inbound") {
		s.Errorf("%v: annotations %q, want %s=%q", m, annotations, redirection, want)
	}
	for _, pair := range [][2]member{{from, m}, {m, to}} {
		var via []string
		if pair[0].out != "" {
			via = append(via, pair[0].out+pair[0].name)
		}
		if pair[1].in != "" {
			via = append(via, pair[1].in+pair[1].name)
		}
		path := "via " + strings.Join(via, ", ") + "\nhello from " + pair[1].name
		if pair[0] == pair[1] { // a pod reaches itself directly
			continue
		}
		s.Until(path, func() bool { // a sidecar listens a moment after its pod is ready
			text, _ := s.GetFrom(pair[0].name, s.URL(pair[1].name, "", lab.AppPort))
			return strings.Contains(text, path)
		})
	}
	s.Step("%s: in %q, out %q", m.name, m.in, m.out)
}

// tunnels are the pods that others reach by HBONE: those of ambient mode, and with this profile those with a sidecar.
func tunnels(all []member) string {
	var names []string
	for _, m := range all {
		if m.in != "" {
			names = append(names, m.name)
		}
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

// workloads returns the pods that istiod tells ztunnels to reach by HBONE.
func (s *scenario) workloads() string {
	s.Helper()
	pods, err := s.Client().CoreV1().Pods(lab.Mesh).List(s.Context(), meta.ListOptions{LabelSelector: "app=istiod"})
	s.Must(err)
	text := s.OnNode("nsenter", "--net="+s.network(&pods.Items[0]), s.Box, "get", "http://127.0.0.1:8080/debug/ambientz")
	var index struct {
		Workloads []struct{ Name, Namespace, TunnelProtocol string }
	}
	s.Must(json.Unmarshal([]byte(text), &index))
	var names []string
	for _, w := range index.Workloads {
		if w.Namespace == lab.App && w.TunnelProtocol == "HBONE" {
			names = append(names, w.Name)
		}
	}
	slices.Sort(names)
	s.Step("istiod's workloads with HBONE: %q", names)
	return strings.Join(names, " ")
}

func (s *scenario) must(kubectl ...string) {
	s.Helper()
	if r := s.Kubectl(kubectl...); r.Code != 0 {
		s.Fatal(r)
	}
}

// doctor returns the results of "kubectl istio-cni doctor", by their names.
func (s *scenario) doctor(flags ...string) map[string]string {
	s.Helper()
	r := s.Kubectl(append([]string{"istio-cni", "doctor", "--for", "ambient", "-o", "json"}, flags...)...)
	var report struct {
		Items []struct{ Name, Result, Text string }
	}
	if err := json.Unmarshal([]byte(r.Stdout), &report); err != nil {
		s.Fatalf("%v: %s", err, r)
	}
	all := map[string]string{}
	for _, c := range report.Items {
		all[c.Name] = c.Result + " " + c.Name + ": " + c.Text
	}
	return all
}

// wantChecks checks the beginnings of results.
func (s *scenario) wantChecks(found map[string]string, want ...string) {
	s.Helper()
	for _, begin := range want {
		name := strings.TrimSuffix(strings.Fields(begin)[1], ":")
		if s.Step("%s", found[name]); !strings.HasPrefix(found[name], begin) {
			s.Errorf("doctor: %q, want %q", found[name], begin)
		}
	}
}
