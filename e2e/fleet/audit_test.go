package fleet

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// fault is a fault of a pod.
type fault struct {
	// pod is the name of the pod, changes make it.
	pod     string
	changes []lab.Change
	// script is run on the node in the pod's network namespace.
	script string
	// state is the result, reason the event's, words are in the event and in the pod's first problem.
	state, reason, words string
	// backend is the backend whose rules are found, "" for any.
	backend string
	// repaired reports whether the audit repairs the fault in mode repair.
	repaired bool
}

// cli is the program on the node.
const cli = "/opt/cni/bin/istio-cni iptables "

var faults = []fault{
	{
		pod: "deleted", script: `iptables -t nat -D ISTIO_OUTPUT 1`,
		state: "drifted", reason: "DriftedPod", words: "missing", backend: "netlink", repaired: true,
	},
	{
		pod: "flushed", script: `iptables -t nat -F`,
		state: "drifted", reason: "DriftedPod", words: "nat", repaired: true,
	},
	{
		pod: "lost", script: `nft flush ruleset`,
		state: "bypassed", reason: "BrokenPod", words: "no rule of the mesh", repaired: true,
	},
	{
		pod: "ahead", script: `iptables -t nat -I OUTPUT 1 -p tcp -j RETURN`,
		state: "foreign-rule", reason: "ForeignRule", words: "-A OUTPUT -p tcp -j RETURN", repaired: true,
	},
	{
		pod: "collision", changes: []lab.Change{func(template *core.PodTemplateSpec) {
			proxy := int64(1337)
			template.Spec.Containers[1].SecurityContext.RunAsUser = &proxy
		}},
		state: "uid-collision", reason: "ProxyUIDCollision", words: "uid 1337",
	},
	{
		pod: "killed", changes: []lab.Change{func(template *core.PodTemplateSpec) {
			template.Spec.Containers[0].Args = append(template.Spec.Containers[0].Args, "supervised")
		}},
		script: `for p in $(ip netns pids $n); do ! tr '\0' ' ' </proc/$p/cmdline | grep -q 'proxy sidecar $' || kill -KILL $p; done`,
		state:  "no-listener", reason: "ProxyNotListening", words: "nothing listens on 127.0.0.1:15001",
	},
	{
		pod: "legacy", script: cli + `--cleanup-only; ` + cli + `--backend=iptables --force-iptables-binary=legacy; iptables-legacy -t nat -D ISTIO_OUTPUT 1`,
		state: "not-inspected", reason: "UnverifiedPod", words: "rules of the mesh in the legacy iptables tables",
	},
	{
		pod: "native", script: cli + `--backend=native --reconcile; nft flush chain inet istio-proxy-nat istio-output`,
		state: "drifted", reason: "DriftedPod", words: "(native) istio-proxy-nat", repaired: true,
	},
}

// TestTheAudit: one node with an agent whose audit has a short interval.
func TestTheAudit(t *testing.T) {
	s := newScenario(t)
	s.UntilNodeReady()
	s.Install("audit: {interval: 2s}")
	names := []string{"fine", "exempt"}
	s.Pod("fine", lab.Injected())
	s.Pod("exempt", lab.Injected(lab.Annotated(map[string]string{"traffic.sidecar.istio.io/excludeOutboundPorts": "5432"})))
	s.Pod("plain", lab.Plain())
	for _, f := range faults {
		s.Pod(f.pod, lab.Injected(f.changes...))
		names = append(names, f.pod)
	}
	s.UntilReady(append(names, "plain")...)
	captured := map[string]string{}
	for _, name := range names {
		if name != "collision" {
			captured[name] = "captured"
		}
	}
	s.untilStates(captured, "--check")
	s.Step("the pods are captured")
	s.subtest("found", (*scenario).found)
	s.subtest("commands", (*scenario).commands)
	s.subtest("packets", (*scenario).packets)
	s.subtest("bundles", (*scenario).bundles)
	s.subtest("bad input", (*scenario).badInput)
	s.subtest("tenant", (*scenario).tenant)
	s.subtest("repaired", (*scenario).repaired)
}

// found makes each fault happen.
func (s *scenario) found() {
	s.Helper()
	want := map[string]string{"fine": "captured", "exempt": "captured"}
	for _, f := range faults {
		if f.script != "" {
			s.inPod(f.pod, f.script)
		}
		want[f.pod] = f.state
	}
	// The audit takes one percent of a core: without --check the last of ten pods could wait for minutes.
	s.untilStates(want, "--check")
	s.Step("the audit has found all states")
	found := s.pods()
	for _, f := range faults {
		s.Until("the event of "+f.pod, func() bool { return s.Event(f.pod, f.reason, f.words) })
		p := found[f.pod]
		if len(p.Problems) == 0 || !strings.Contains(p.Problems[0].Detail, f.words) || !strings.Contains(p.Backend, f.backend) || p.Node != cluster.NodeName {
			s.Errorf("%s: %+v", f.pod, p)
		}
		if !s.metric(`istio_cni_audit_offender{namespace="app",pod="`+f.pod+`",state="`+f.state+`"}`, "1") {
			s.Errorf("no metric of %s", f.pod)
		}
	}
	if !s.metric(`istio_cni_audit_pods{state="drifted"}`, "3") || !s.metric(`istio_cni_audit_pods{state="captured"}`, "2") {
		s.Error("the numbers of pods are wrong")
	}
	if len(found["exempt"].Exceptions) != 1 || found["plain"].State != "" {
		s.Errorf("exempt: %+v, plain: %+v", found["exempt"], found["plain"])
	}
}

// commands: a person's view of it.
func (s *scenario) commands() {
	s.Helper()
	table := s.want(3, "app/lost", "", "pods")
	for _, f := range faults {
		if !strings.Contains(table.Stdout, "app/"+f.pod+" ") {
			s.Errorf("the table lacks %s:\n%s", f.pod, table.Stdout)
		}
	}
	s.Logf("kubectl istio-cni pods\n%s", table.Stdout)
	if r := s.want(3, "", "", "pods", "--bypassing", "--check", "-n", lab.App); strings.Contains(r.Stdout, "app/fine") || !strings.Contains(r.Stdout, "app/lost") {
		s.Errorf("--bypassing: %s", r)
	}
	s.want(3, "app/ahead", "", "pods", "--state", "foreign-rule")
	s.want(0, "captured", "", "pods", "--state=captured", "-o", "yaml", "--node", cluster.NodeName)
	s.want(0, "", "", "why", "-n", lab.App, "fine")
	s.want(3, "RETURN", "", "why", "app/ahead")
	s.want(0, "15001", "", "why", "app/fine", "--to", "192.0.2.1:80")
	s.want(3, "excludeOutboundPorts", "", "why", "-n", lab.App, "exempt", "--to", "192.0.2.1:5432")
	s.want(0, "app/fine", "", "decisions", "--pod=app/fine")
	s.want(0, "--bypassing", "", "pods", "--help")
}

// packets: real packets of one pod on the way to its proxy, and of another past it.
func (s *scenario) packets() {
	s.Helper()
	for pod, code := range map[string]int{"fine": 0, "ahead": 3} {
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			s.inPod(pod, `for i in $(seq 16); do timeout 0.5 bash -c '</dev/tcp/192.0.2.1/8080' 2>/dev/null || true; sleep 0.5; done`)
		}()
		r := s.want(code, "192.0.2.1", "", "trace", "app/"+pod, "--to=192.0.2.1", "--for=5s")
		<-ended
		s.Logf("kubectl istio-cni trace app/%s\n%s", pod, r.Stdout)
	}
}

// bundles: a file of the node, and one of all nodes.
func (s *scenario) bundles() {
	s.Helper()
	all := s.bundle("cluster: done\nnode "+cluster.NodeName+": done, 1 of 1\n", "bundle")
	for name, want := range map[string]string{
		"nodes/" + cluster.NodeName + "/agent.json": `"version"`, "nodes/" + cluster.NodeName + "/cluster/daemonsets.json": `"numberReady": 1`,
		"cluster/daemonsets.json": `"numberReady": 1`, "cluster/configmaps.json": `"AUDIT_INTERVAL": "2s"`, "cluster/webhooks.json": `"items"`,
		"cluster/events.txt": "SuccessfulCreate",
	} {
		if !strings.Contains(all[name], want) {
			s.Errorf("the bundle of all nodes: %s has no %q: %.500s", name, want, all[name])
		}
	}
	s.Logf("cluster/events.txt\n%s\nmissing.txt\n%s\n%s", all["cluster/events.txt"], all["missing.txt"], all["nodes/"+cluster.NodeName+"/missing.txt"])
	one := s.bundle("", "bundle", "-n", lab.App, "exempt", "--since=1h")
	for name, want := range map[string]string{
		"nodes/" + cluster.NodeName + "/pods/app_exempt.json": "5432", "nodes/" + cluster.NodeName + "/cluster/pods.json": `"nodeName": "` + cluster.NodeName + `"`,
		"cluster/pod.json": `excludeOutboundPorts": "5432"`, "cluster/namespace.json": `"kubernetes.io/metadata.name": "app"`, "cluster/pod-events.txt": "Started",
		"cluster/proxy.log": "",
	} {
		if text, has := one[name]; !has || !strings.Contains(text, want) {
			s.Errorf("the bundle of a pod: %s has no %q: %.500s", name, want, text)
		}
	}
	s.Logf("cluster/pod.json\n%s\ncluster/proxy.log\n%s\nmissing.txt\n%s", one["cluster/pod.json"], one["cluster/proxy.log"], one["missing.txt"])
	doctor := s.plugin("doctor", "-o", "json")
	var checks []struct{ Node, Name, Result, Text string }
	if err := json.Unmarshal([]byte(doctor.Stdout), &checks); err != nil || len(checks) < 5 || checks[0].Node != cluster.NodeName || checks[0].Result == "" || doctor.Code > 1 {
		s.Errorf("%v: %s", err, doctor)
	}
	s.Logf("kubectl istio-cni doctor\n%s", s.plugin("doctor").Stdout)
}

// badInput: each mistake is named.
func (s *scenario) badInput() {
	s.Helper()
	s.want(1, "", `pods "nobody" not found`, "why", "app/nobody")
	s.want(2, "", "--state", "pods", "--state=sad")
	s.want(2, "", "unknown command", "dance")
	s.want(1, "", "node n7: no answer: it has no node agent", "pods", "--node=n7")
	s.want(1, "", "no node agent was found", "pods", "--agent-selector=a=b")
	s.want(1, "", `namespace "nowhere" has no pod with a network of its own on the nodes that answered`, "pods", "-n", "nowhere")
	s.want(1, "[]", `no such decision about a pod with "nobody"`, "decisions", "--pod=nobody", "--json")
	s.want(1, "", `context was not found for specified context: nowhere`, "pods", "--context=nowhere")
	s.want(1, "", "container", "pods", "--agent-container=other")
}

// tenant: a pod with the agents' label is not asked, and a DaemonSet with it in another namespace needs the user's choice.
func (s *scenario) tenant() {
	s.Helper()
	agents := map[string]string{"k8s-app": "istio-cni-node"}
	labelled := lab.Plain(func(template *core.PodTemplateSpec) { template.Labels = agents })
	s.Pod("aaa", labelled)
	s.UntilReady("aaa")
	s.want(3, "app/lost", "", "pods")
	s.Remove("aaa") // the DaemonSet would adopt it
	labelled.Spec.NodeSelector = map[string]string{"none": "none"}
	sets := s.Client().AppsV1().DaemonSets(lab.App)
	_, err := sets.Create(s.Context(), &apps.DaemonSet{
		ObjectMeta: meta.ObjectMeta{Name: "forged", Labels: agents},
		Spec:       apps.DaemonSetSpec{Selector: &meta.LabelSelector{MatchLabels: agents}, Template: labelled},
	}, meta.CreateOptions{})
	s.Must(err)
	s.want(2, "", "in the namespaces app, istio-system: name the agents' namespace", "pods")
	s.want(2, "", "in the namespaces app, istio-system: name the agents' namespace", "why", "app/fine")
	s.want(0, "", "", "why", "app/fine", "--agent-namespace="+lab.Mesh)
	s.Must(sets.Delete(s.Context(), "forged", meta.DeleteOptions{}))
}

// repaired: in mode repair the audit restores rules, and leaves other faults alone.
func (s *scenario) repaired() {
	s.Helper()
	s.Apply(s.Chart("audit: {interval: 2s, mode: repair}"))
	s.Until("the agent with the new mode", s.RolledOut)
	s.Step("the agent repairs")
	want := map[string]string{"fine": "captured"}
	for _, f := range faults {
		want[f.pod] = f.state
		if f.repaired {
			want[f.pod] = "captured"
		}
	}
	s.untilStates(want, "--check")
	s.Step("the audit has repaired what it may")
	for _, f := range faults {
		if f.repaired {
			s.Until("the event of "+f.pod, func() bool { return s.Event(f.pod, "RepairBrokenPod", f.words) })
			s.Flows(f.pod)
		} else if s.Event(f.pod, "RepairBrokenPod", "") {
			s.Errorf("%s was repaired", f.pod)
		}
	}
	if rules := s.inPod("ahead", "iptables -t nat -S OUTPUT"); !strings.Contains(rules, "-j ISTIO_OUTPUT\n-A OUTPUT -p tcp -j RETURN\n") {
		s.Errorf("the foreign rule is not behind the mesh's:\n%s", rules)
	}
	var others []string
	for _, f := range faults {
		others = append(others, f.pod)
	}
	s.Remove(append(others, "exempt")...)
	s.inPod("fine", `iptables -t nat -D ISTIO_OUTPUT 1`)
	s.Until("the repair of a pod that lost a rule", func() bool { return s.Event("fine", "RepairBrokenPod", "missing") })
	s.untilStates(map[string]string{"fine": "captured"})
	s.Step("the audit has repaired a pod by itself")
}

// bundle runs the plugin and returns the files of its output by their names without the first directory.
func (s *scenario) bundle(stderr string, args ...string) map[string]string {
	s.Helper()
	r := s.want(0, "", stderr, args...)
	unzipped, err := gzip.NewReader(strings.NewReader(r.Stdout))
	s.Must(err)
	files := map[string]string{}
	for archive := tar.NewReader(unzipped); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		s.Must(err)
		text, err := io.ReadAll(archive)
		s.Must(err)
		_, name, _ := strings.Cut(header.Name, "/")
		files[name] = string(text)
	}
}
