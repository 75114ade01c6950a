package runtimes

import (
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// network is a list of the version for which containerd 2 calls STATUS.
const network = `{"cniVersion": "1.1.0", "name": "e2e", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [{{.Ranges}}], "routes": [{{.Routes}}], "dataDir": "/run/cni-ipam"}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
`

// dropIn is the plugin's file in mode dropin.
const dropIn = "/etc/cni/net.d/e2e/zzz-istio-cni.conf"

// TestContainerd2: the life of a node with containerd 2, in mode dropin and then inline.
func TestContainerd2(t *testing.T) {
	s := newScenario(t, map[string]string{cluster.PrimaryNetwork: network})
	s.UntilNodeReady()
	before := s.Networks()
	s.Pod("early", lab.Injected())
	s.Until("the pod to fail", func() bool { return s.Failed("early") })
	// Else the agent installs into the first directory of this runtime, the recorder's.
	objects := s.Chart("{confMode: auto, cniBinDir: /opt/cni/bin, audit: {interval: 2s}}")
	s.Apply(objects)
	s.UntilAgentReady()
	s.subtest("the drop-in file", func(s *scenario) { s.dropsIn(before[cluster.PrimaryNetwork]) })
	s.subtest("an earlier pod is repaired", (*scenario).repaired)
	s.subtest("pods", (*scenario).pods)
	s.subtest("annotations", (*scenario).annotations)
	s.subtest("a user namespace", (*scenario).userNamespace)
	s.subtest("CHECK and GC", (*scenario).checked)
	s.subtest("containerd is killed", (*scenario).killed)
	s.subtest("power failure", (*scenario).powerLost)
	s.subtest("inline", (*scenario).inline)

	s.Must(os.Remove(s.NodeFile(cluster.Recorders + "/istio-cni"))) // uninstallation removes the plugin behind it
	s.Uninstall(objects)
	if after := s.NetworkFiles(); !slices.Equal(after, []string{cluster.PrimaryNetwork}) {
		t.Fatalf("files %q remain", after)
	}
	if after := s.Networks(); !maps.Equal(before, after) {
		t.Errorf("files were %q\nand are now %q", before, after)
	}
	s.RemoveAll()
	s.Pod("later", lab.Plain())
	s.UntilReady("later")
	s.Step("the agent is uninstalled, the files are as before, and pods start and end")
}

// dropsIn: mode auto is dropin on this runtime, and the primary configuration stays as it is.
func (s *scenario) dropsIn(primary string) {
	s.Helper()
	found, err := s.Client().CoreV1().Nodes().Get(s.Context(), cluster.NodeName, meta.GetOptions{})
	s.Must(err)
	s.Until("the drop-in file", func() bool { _, err := os.Stat(s.NodeFile(dropIn)); return err == nil })
	if now := s.NetworkFile(cluster.PrimaryNetwork); now != primary {
		s.Errorf("the primary configuration was %s\nand is now %s", primary, now)
	}
	s.untilStatus(time.Now())
	s.Step("%s: a drop-in file, and STATUS succeeds", found.Status.NodeInfo.ContainerRuntimeVersion)
}

// untilStatus waits for a STATUS that the runtime calls after a time, and checks its result and version.
func (s *scenario) untilStatus(after time.Time) call {
	s.Helper()
	var found call
	s.Until("a call of STATUS", func() bool {
		all := s.since(after)
		i := slices.IndexFunc(all, func(c call) bool { return c.command() == "STATUS" })
		if i >= 0 {
			found = all[i]
		}
		return i >= 0
	})
	if version := s.configuration(found).CNIVersion; found.code != 0 || version != "1.1.0" {
		s.Errorf("STATUS of version %q ended with %d", version, found.code)
	}
	return found
}

// repaired: race repair finds the namespace of a sandbox by this runtime's paths and cache.
func (s *scenario) repaired() {
	s.Helper()
	s.UntilReady("early")
	if !s.Event("early", "RepairBrokenPod", "") {
		s.Error("no event of its repair")
	}
	s.Flows("early")
}

// pods: injected pods are redirected from their start, both ways and from one to another; other pods are not.
func (s *scenario) pods() {
	s.Helper()
	s.Pod("one", lab.Injected())
	s.Pod("two", lab.Injected(lab.Native))
	s.Pod("plain", lab.Plain())
	s.UntilReady("one", "two", "plain")
	for _, name := range []string{"one", "two"} {
		if lab.ValidationFailed(s.Get(lab.App, name)) || s.Event(name, "RepairBrokenPod", "") {
			s.Errorf("%s was not redirected from its start", name)
		}
		if d := s.Decision(name); !d.Captured || d.Reason != "captured" {
			s.Errorf("decision %+v", d)
		}
	}
	s.Flows("one", "two")
	if flow := s.Flow("plain", ""); flow != lab.Untouched {
		s.Errorf("plain: traffic by a proxy: %+v", flow)
	}
	s.Until("an application to reach another", func() bool {
		text, _ := s.GetFrom("one", s.URL("two", "", lab.AppPort))
		return strings.Contains(text, "via outbound one, inbound two")
	})
}

// annotations: the runtime hands over the annotations of pods. With them alone, while the agent does not answer, the plugin passes
// a pod without sidecar, and sends no request.
func (s *scenario) annotations() {
	s.Helper()
	for _, name := range []string{"one", "plain"} {
		want, got := s.Get(lab.App, name).Annotations, s.configuration(s.add(name)).RuntimeConfig.Annotations
		for key, value := range want {
			if got[key] != value {
				s.Errorf("%s: the runtime hands over the annotations %q, the pod has %q", name, got, want)
			}
		}
	}
	s.Signal(s.Agent(), "SIGSTOP")
	s.Pod("unasked", lab.Plain(lab.Annotated(map[string]string{"example.com/team": "a"})))
	s.UntilReady("unasked")
	s.Signal(s.Agent(), "SIGCONT")
	if got := s.configuration(s.add("unasked")).RuntimeConfig.Annotations; got["example.com/team"] != "a" {
		s.Errorf("annotations %q", got)
	}
	requests, err := s.Requests(lab.Mesh, "istio-cni")
	s.Must(err)
	for _, r := range requests {
		if r.Resource == "pods" && r.Name == "unasked" || r.Status == 403 {
			s.Errorf("unexpected request: %s %s: %d", r.Verb, r.URI, r.Status)
		}
	}
	s.UntilAgentReady()
	s.Step("a pod started while the agent was stopped, without a request")
}

// userNamespace: a pod with users of its own is redirected, by native rules, and the audit inspects them.
func (s *scenario) userNamespace() {
	s.Helper()
	no := false
	s.Pod("mapped", lab.Injected(func(template *core.PodTemplateSpec) { template.Spec.HostUsers = &no }))
	s.UntilReady("mapped")
	if lab.ValidationFailed(s.Get(lab.App, "mapped")) {
		s.Error("it was not redirected from its start")
	}
	mapping, err := s.Exec(lab.App, "mapped", "app", "/box", "cat", "/proc/self/uid_map")
	if fields := strings.Fields(mapping); err != nil || len(fields) < 2 || fields[1] == "0" {
		s.Errorf("it has no user namespace of its own: %v: %s", err, mapping)
	}
	s.Flows("mapped")
	s.broken("mapped", "native", "nft", "flush", "chain", "inet", "istio-proxy-nat", "istio-output")
}

// broken runs a program in the network namespace of a pod that damages its rules, which the agent must find.
func (s *scenario) broken(pod, backend, program string, args ...string) {
	s.Helper()
	enter := []string{"--net=" + s.add(pod).variable("CNI_NETNS"), program}
	s.OnNode("nsenter", append(enter, args...)...)
	text, _ := s.Exec(lab.Mesh, s.Agent().Name, "install-cni", "/usr/local/bin/istio-cni", "pods", "--check") // fails: a pod is broken
	for line := range strings.Lines(text) {
		if fields := strings.Fields(line); len(fields) > 4 && fields[0] == lab.App+"/"+pod && fields[1] == "drifted" && fields[4] == backend {
			s.Step("the audit has found the lost rules of %s, of backend %s", pod, backend)
			return
		}
	}
	s.Errorf("the audit has not found the lost rules of %s: %s", pod, text)
}

// checked: the runtime calls neither CHECK nor GC. Called by hand like its other calls, CHECK finds a lost rule, and GC succeeds.
func (s *scenario) checked() {
	s.Helper()
	add := s.add("one")
	if code, output := s.again(add, "CHECK"); code != 0 {
		s.Errorf("CHECK ended with %d: %s", code, output)
	}
	s.broken("one", "netlink", "iptables", "-t", "nat", "-D", "ISTIO_OUTPUT", "1")
	if code, output := s.again(add, "CHECK"); code == 0 || !strings.Contains(output, "not redirected as it should be") {
		s.Errorf("CHECK of a pod without a rule ended with %d: %s", code, output)
	}
	s.Remove("one")
	if code, output := s.again(s.untilStatus(time.Now()), "GC"); code != 0 {
		s.Errorf("GC ended with %d: %s", code, output)
	}
	s.Flows("two")
}

// killed: containerd is killed while pods are created and deleted.
func (s *scenario) killed() {
	s.Helper()
	const workers = 2
	churn := s.ChurnWithRestarts(workers)
	s.Must(s.Kill(cluster.Containerd))
	time.Sleep(time.Second)
	s.Must(s.Restart(s.Context(), cluster.Containerd))
	s.Step("containerd was killed and started again")
	s.UntilNodeReady()
	churn.End(workers)
	s.Flows("early", "two")
}

// powerLost: the agent's directory is empty after a power failure, and its stanza is still there. STATUS succeeds, so that the node
// becomes ready and the agent's pod starts; injected pods wait for it.
func (s *scenario) powerLost() {
	s.Helper()
	s.Must(s.PowerOff())
	off := time.Now()
	s.Must(s.PowerOn(s.Context()))
	first := s.untilStatus(off)
	if strings.Contains(first.run, "kubeconfig") {
		s.Errorf("the agent was there already: %s", first.run)
	}
	s.Step("STATUS succeeds without the agent")
	s.UntilNodeReady()
	again := func(name string) bool {
		pod := s.Get(lab.App, name)
		if pod.Status.ContainerStatuses[0].RestartCount == 0 {
			return false
		}
		if lab.ValidationFailed(pod) {
			s.Fatalf("%s ran without redirection", name)
		}
		return lab.Ready(pod)
	}
	for _, name := range []string{"two", "mapped", "plain"} {
		s.Until(name+" to be ready again", func() bool { return again(name) })
	}
	s.UntilAgentReady()
	s.Flows("two", "mapped")
	s.Step("node, agent and pods are ready again")
}

// inline: the stanza moves to the list. No call was a CHECK or a GC so far: containerd 2 knows neither.
func (s *scenario) inline() {
	s.Helper()
	s.Apply(s.Chart("{confMode: inline, cniBinDir: /opt/cni/bin, audit: {interval: 2s}}"))
	s.Until("the update to be rolled out", s.RolledOut)
	s.Until("the stanza in the list", func() bool {
		_, err := os.Stat(s.NodeFile(dropIn))
		return os.IsNotExist(err) && strings.Contains(s.NetworkFile(cluster.PrimaryNetwork), `"istio-cni"`)
	})
	moved := time.Now()
	s.untilStatus(moved)
	s.Pod("inlined", lab.Injected())
	s.UntilReady("inlined")
	if lab.ValidationFailed(s.Get(lab.App, "inlined")) {
		s.Error("it was not redirected from its start")
	}
	s.Flows("inlined")
	count := map[string]int{}
	for _, c := range s.since(time.Time{}) {
		count[c.command()]++
	}
	s.Step("calls of the plugin: %v", count)
	if count["CHECK"]+count["GC"] > 0 {
		s.Error("containerd calls commands that docs/agent.md says it does not call")
	}
}
