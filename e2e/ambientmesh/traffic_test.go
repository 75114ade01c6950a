package ambientmesh

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/meshcni/istio-cni/e2e/lab"
)

const (
	modeLabel   = "istio.io/dataplane-mode"
	redirection = "ambient.istio.io/redirection"
	// probeSource is the source of the node's own connections to pods of ambient mode.
	probeSource = "169.254.7.127"
)

// dataplane is what takes a pod's traffic.
type dataplane string

const (
	ambient dataplane = "ambient"
	sidecar dataplane = "sidecar"
	outside dataplane = "outside"
)

// member is a pod of namespace App.
type member struct {
	name string
	in   dataplane
}

// Changes of pods.

func labelled(template *core.PodTemplateSpec) {
	template.Labels = map[string]string{modeLabel: "ambient"}
}

func optedOut(template *core.PodTemplateSpec) {
	template.Labels = map[string]string{modeLabel: "none"}
}

// injected returns a pod whose sidecar takes both families.
func injected() core.PodTemplateSpec {
	return lab.Injected(probed, lab.ProxyEnv("ISTIO_DUAL_STACK", "true"))
}

// probed has the kubelet probe the application by HTTP.
func probed(template *core.PodTemplateSpec) {
	all := template.Spec.Containers
	all[len(all)-1].ReadinessProbe = &core.Probe{
		ProbeHandler:  core.ProbeHandler{HTTPGet: &core.HTTPGetAction{Path: "/", Port: intstr.Parse(lab.AppPort)}},
		PeriodSeconds: 1, TimeoutSeconds: 5,
	}
}

// client makes the application a client, whose end is the end of the pod.
func client(args ...string) lab.Change {
	return func(template *core.PodTemplateSpec) {
		lab.Once(template)
		template.Spec.Containers[0].Args = args
	}
}

// untilKept waits until each of the clients has had more answers, by its connection.
func (s *scenario) untilKept(names ...string) {
	s.Helper()
	for _, name := range names {
		answers := func() int { return strings.Count(s.Output(lab.App, name, "app", false), "hello from") }
		before := answers()
		s.Until("answers to "+name, func() bool {
			if phase := s.Get(lab.App, name).Status.Phase; phase != core.PodRunning {
				s.Fatalf("%s is %s: %s", name, phase, s.Output(lab.App, name, "app", false))
			}
			return answers() > before+2
		})
	}
	s.Step("the connections of %q live", names)
}

// label changes the labels of namespace App.
func (s *scenario) label(change string) {
	s.Helper()
	s.kubectl("label", "namespace", lab.App, "--overwrite", change)
}

func (s *scenario) kubectl(args ...string) {
	s.Helper()
	if r := s.Kubectl(args...); r.Code != 0 {
		s.Fatalf("kubectl %q: %s", args, r)
	}
}

// startZtunnel starts the stand-in on the node. It ends with the whole test.
func (s *scenario) startZtunnel() {
	s.Helper()
	s.ztunnel = s.node.Start(nil, s.Ztunnel, fmt.Sprintf("/proc/%d/root/run/ztunnel/ztunnel.sock", s.Pid()))
}

// check waits until the annotations are those of the members, and checks the node's table, and the traffic, also the node's own, such
// as the kubelet's probes.
func (s *scenario) check() {
	s.Helper()
	for _, m := range s.members {
		want := ""
		if m.in == ambient {
			want = "enabled"
		}
		s.Until("annotation "+want+" of "+m.name, func() bool { return s.Get(lab.App, m.name).Annotations[redirection] == want })
	}
	table := ""
	if !s.reference {
		table = s.table()
	}
	if text := s.OnNode("sh", "-c", "iptables-nft-save && iptables-legacy-save"); strings.Contains(text, "ISTIO_POSTRT") != s.reference {
		s.Errorf("rules of the reference on the node, want %t:\n%s", s.reference, text)
	}
	for _, m := range s.members {
		pod := s.Get(lab.App, m.name)
		for _, at := range pod.Status.PodIPs {
			if entry := fmt.Sprintf("%s comment %q", at.IP, pod.UID); !s.reference && strings.Contains(table, entry) != (m.in == ambient) {
				s.Errorf("%v has %s, and the node's table is\n%s", m, at.IP, table)
			}
		}
		text, _ := s.GetFrom("", s.URL(m.name, "4", lab.AppPort))
		if want := "hello from " + m.name + " to " + probeSource + ":"; strings.HasPrefix(text, want) != (m.in == ambient) {
			s.Errorf("from the node to %v:\n%s", m, text)
		}
	}
	s.checkTraffic()
}

// table returns the node's table.
func (s *scenario) table() string {
	s.Helper()
	return s.OnNode("nft", "list", "table", "inet", "istio-ambient-nat")
}

// checkTraffic checks the path and the source of connections between all members.
func (s *scenario) checkTraffic() {
	s.Helper()
	for _, to := range s.members {
		for _, from := range s.members {
			if from != to || to.in != sidecar {
				s.checkPath(from, to, "")
			}
		}
	}
	// The first and the last also by IPv6.
	first, last := s.members[0], s.members[len(s.members)-1]
	s.checkPath(first, last, "6")
	s.checkPath(last, first, "6")
	s.Step("traffic is as it should be between %v", s.members)
}

// A sidecar listens a moment after its pod is ready.
const tries, pause = 20, 250 * time.Millisecond

// checkPath sends a request from one member to another, and checks which proxies it passes and from where it reaches the application.
func (s *scenario) checkPath(from, to member, family string) {
	s.Helper()
	want := path(from, to)
	if to.in == ambient || from.in == outside && to.in == outside {
		want += s.address(from.name, family)
	}
	for try := 1; ; try++ {
		text, _ := s.GetFrom(from.name, s.URL(to.name, family, lab.AppPort))
		switch {
		case strings.HasPrefix(text, want):
			return
		case try == tries || from.in != sidecar && to.in != sidecar:
			s.Errorf("from %v to %v:\n%s\nwant\n%s", from, to, text, want)
			return
		}
		time.Sleep(pause)
	}
}

// path is the begin of a response. A pod reaches itself directly.
func path(from, to member) string {
	if from == to {
		from.in, to.in = outside, outside
	}
	var via []string
	switch from.in {
	case ambient:
		via = append(via, "ztunnel out "+from.name)
	case sidecar:
		via = append(via, "outbound "+from.name)
	case outside:
	}
	switch to.in {
	case ambient:
		via = append(via, "ztunnel in "+to.name)
	case sidecar:
		via = append(via, "inbound "+to.name)
	case outside:
	}
	text := "hello from " + to.name + " to "
	if len(via) > 0 {
		text = "via " + strings.Join(via, ", ") + "\n" + text
	}
	return text
}

// address returns a pod's address as in an address with a port.
func (s *scenario) address(name, family string) string {
	s.Helper()
	return strings.TrimSuffix(strings.TrimPrefix(s.URL(name, family, lab.AppPort), "http://"), lab.AppPort)
}

// rules returns the rules, policies and routes in a pod's network namespace.
func (s *scenario) rules(name string) string {
	s.Helper()
	const script = `for n in /run/netns/*; do
  in="nsenter --net=$n"
  $in ip -o addr | grep -qF " $1/" && $in nft list ruleset && $in ip rule && $in ip -6 rule && $in ip route show table all
done; true`
	return s.OnNode("sh", "-c", script, "sh", s.Get(lab.App, name).Status.PodIP)
}

// checkRights checks that the agents and the plugin had all rights that they used.
func (s *scenario) checkRights() {
	s.Helper()
	all, err := s.Requests(lab.Mesh, "istio-cni")
	s.Must(err)
	for _, r := range all {
		if r.Status == 401 || r.Status == 403 {
			s.Errorf("forbidden: %s %s: %d", r.Verb, r.URI, r.Status)
		}
	}
}

// untilAudited waits until the audit has exactly the members that are in the mesh, as they should be.
func (s *scenario) untilAudited() {
	s.Helper()
	var want []string
	for _, m := range s.members {
		if m.in != outside {
			want = append(want, m.name+" captured")
		}
	}
	slices.Sort(want)
	s.Until("the audit", func() bool {
		r := s.Kubectl("istio-cni", "pods", "-n", lab.App, "-o", "json")
		if r.Code != 0 && r.Code != 3 { // the audit may not have begun
			return false
		}
		var all struct{ Pods []struct{ Pod, State string } }
		s.Must(json.Unmarshal([]byte(r.Stdout), &all))
		var have []string
		for _, p := range all.Pods {
			have = append(have, p.Pod+" "+p.State)
		}
		slices.Sort(have)
		return slices.Equal(have, want)
	})
	s.Step("the audit has %q", want)
}
