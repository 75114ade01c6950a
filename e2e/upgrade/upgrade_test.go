package upgrade

import (
	"encoding/json"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// scenario is what one part hands on to the next.
type scenario struct {
	*lab.Lab

	reference artifacts.Reference
	// network is the node's, as it was before anybody came.
	network list
	// made are the rules of a pod when it was made.
	made map[string]string
	// asked is how much the agents had asked the API server for at the beginning of the part.
	requestsBefore int
}

// TestFromTheReferenceAndBack is a node that is the reference's, then ours, the reference's again, ours, and nobody's.
func TestFromTheReferenceAndBack(t *testing.T) {
	s := newScenario(t)
	for _, step := range []struct {
		name string
		run  func(*scenario)
	}{
		{"reference", (*scenario).prepared},
		{"upgrade", (*scenario).upgraded},
		{"rollback", (*scenario).rolledBack},
		{"upgrade again", (*scenario).upgradedAgain},
		{"uninstall", (*scenario).uninstalled},
	} {
		began := time.Now()
		if !t.Run(step.name, func(t *testing.T) {
			here := *s
			here.Lab = s.With(t)
			here.requestsBefore = len(here.requests())
			step.run(&here)
		}) {
			t.FailNow() // the next one begins where this one ended
		}
		s.Step("%s took %s", step.name, time.Since(began).Round(time.Second))
	}
}

// prepared: the reference's node.
func (s *scenario) prepared() {
	s.Helper()
	s.installReference()
	s.checkInstalled(s.reference.IstioCNI)
	s.checkCaptured("their-0")
	s.Step("the rules of a pod are\n%s", s.made["their-0"])
	s.checkCaptured("their-1", "their-2", "their-3", "their-4", "their-5")
}

// upgraded: the node is taken over while pods come and go.
func (s *scenario) upgraded() {
	s.Helper()
	underWay := s.begin("up", "their-0", "their-1")
	s.upgrade()
	// The reference takes its stanza along when it ends, so there is a gap until we are there: docs/install.md says so.
	s.checkGap(underWay)
	s.checkInstalled(s.IstioCNI)
	s.checkCaptured("ours-0", "ours-1", "ours-2", "ours-3")
	for _, name := range []string{"ours-0", "ours-1"} {
		d := s.Decision(name)
		s.Step("decision %+v", d)
		if !d.Captured || d.Reason != "captured" || d.Source == "" {
			s.Errorf("decision %+v", d)
		}
	}
	s.checkUnchanged("their-2", "their-3", "their-4", "their-5")
	s.remove("their-2", "their-3")
	s.checkNoProblems()
}

// checkGap: pods that were made when the stanza was back are captured from the beginning. Those that were not have been
// repaired.
func (s *scenario) checkGap(underWay *churn) {
	s.Helper()
	captured, held := underWay.stop()
	// The runtime reads what is new at once, on an idle machine.
	const reads = time.Second
	since := underWay.back.Add(reads)
	after := 0
	for _, made := range captured {
		if made.After(since) {
			after++
		}
	}
	s.Step("%d pods were made when the stanza was back", after)
	for name, made := range held {
		if made.After(since) {
			s.Errorf("%s began without redirection %s after the stanza was back", name, made.Sub(since)+reads)
		}
	}
}

// rolledBack: helm rollback, while pods come and go.
func (s *scenario) rolledBack() {
	s.Helper()
	underWay := s.begin("down", "ours-0", "ours-1")
	s.helm("rollback", release, "1")
	s.rolledOut(referenceImage)
	// We leave the node as it is for those who come.
	if _, held := underWay.stop(); len(held) > 0 || underWay.away > 0 {
		s.Errorf("the stanza was away for %s, and %q began without redirection", underWay.away, held)
	}
	s.checkInstalled(s.reference.IstioCNI)
	s.checkCaptured("back-0", "back-1")
	s.checkUnchanged("their-4", "their-5", "ours-2", "ours-3")
	s.remove("ours-2", "their-4")
}

// upgradedAgain: our agent is there before the reference's ends, and the gap shorter.
func (s *scenario) upgradedAgain() {
	s.Helper()
	const values = "--set=updateStrategy.rollingUpdate."
	underWay := s.begin("again", "back-1")
	s.upgrade(values+"maxSurge=1", values+"maxUnavailable=0")
	s.checkGap(underWay)
	s.checkInstalled(s.IstioCNI)
	s.checkCaptured("last-0")
	s.checkUnchanged("their-5", "ours-3", "back-0")
	s.remove("back-0")
	s.checkNoProblems()
}

// uninstalled: the node is as it was before the reference came.
func (s *scenario) uninstalled() {
	s.Helper()
	s.helm("uninstall", release)
	s.Until("the agent to go", func() bool {
		agents, err := s.Client().CoreV1().Pods(lab.Mesh).List(s.Context(), meta.ListOptions{})
		return err == nil && len(agents.Items) == 0
	})
	if have := s.networkNow(); !reflect.DeepEqual(have, s.network) {
		s.Errorf("the network's configuration was %v\nand is now %v", s.network, have)
	}
	s.logFiles()
	s.checkUnchanged("their-5", "ours-3", "last-0")
	s.remove("their-5", "ours-3", "last-0")
	s.Pod("later", lab.Plain())
	s.UntilReady("later")
	s.remove("later")
}

// checkCaptured: pods that are made now are redirected from the beginning.
func (s *scenario) checkCaptured(names ...string) {
	s.Helper()
	s.pods(names...)
	for _, name := range names {
		if n := s.restarts(name); n != 0 {
			s.Errorf("%s: its validation was tried %d times more", name, n)
		}
		s.Flows(name)
		s.made[name] = s.rules(name)
		if want := s.made["their-0"]; s.made[name] != want {
			s.Errorf("%s has rules\n%s\nand the reference makes\n%s", name, s.made[name], want)
		}
	}
	s.Step("%q are redirected from the beginning, by the same rules", names)
}

// checkUnchanged: pods of before go on as they were.
func (s *scenario) checkUnchanged(names ...string) {
	s.Helper()
	for _, name := range names {
		s.Flows(name)
		if have := s.rules(name); have != s.made[name] {
			s.Errorf("%s had rules\n%s\nand has now\n%s", name, s.made[name], have)
		}
		for _, c := range s.Get(lab.App, name).Status.ContainerStatuses {
			if c.RestartCount != 0 || !c.Ready {
				s.Errorf("%s: container %s: %+v", name, c.Name, c)
			}
		}
	}
	s.Step("%q of before are redirected, by the rules that they had", names)
}

// list is a network configuration.
type list struct {
	CNIVersion, Name string
	Plugins          []map[string]any
}

// network is the node's.
func (s *scenario) networkNow() (n list) {
	s.Helper()
	s.Must(json.Unmarshal([]byte(s.OnNode("cat", "/etc/cni/net.d/10-e2e.conflist")), &n))
	return n
}

// checkInstalled: the node's network is as it was but for one stanza at the end, and the program is that of a path here. What the
// stanza names is there, and no other configuration is.
func (s *scenario) checkInstalled(program string) {
	s.Helper()
	s.logFiles()
	have := s.networkNow()
	n := len(have.Plugins) - 1
	stanza := have.Plugins[n]
	text, err := json.MarshalIndent(stanza, "", "  ")
	s.Must(err)
	s.Step("the stanza is %s", text)
	have.Plugins = have.Plugins[:n]
	if stanza["type"] != "istio-cni" || !reflect.DeepEqual(have, s.network) {
		s.Errorf("the network's configuration was %v\nand is now %v", s.network, have)
	}
	if names := s.files("/etc/cni/net.d"); !slices.Equal(names, []string{"10-e2e.conflist"}) {
		s.Errorf("configuration: %q", names)
	}
	s.OnNode("test", "-s", kubeconfig)
	want, err := os.ReadFile(program)
	s.Must(err)
	on, err := os.ReadFile(s.NodeFile("/opt/cni/bin/istio-cni"))
	s.Must(err)
	if string(on) != string(want) {
		s.Errorf("the program on the node is not %s", program)
	}
}

// kubeconfig is where both have it.
const kubeconfig = "/var/run/istio-cni/istio-cni-kubeconfig"

// looks tells what is where the two keep something.
func (s *scenario) logFiles() {
	s.Helper()
	for _, dir := range []string{"/etc/cni/net.d", "/opt/cni/bin", "/var/run/istio-cni"} {
		s.Step("%s has %q", dir, s.files(dir))
	}
}

// checkNoProblems: our agent found nothing to complain of, at the pods of the reference either, and had all the rights it wants.
func (s *scenario) checkNoProblems() {
	s.Helper()
	events, err := s.Client().CoreV1().Events("").List(s.Context(), meta.ListOptions{})
	s.Must(err)
	for _, e := range events.Items {
		from := e.Source.Component
		underWay, _, _ := strings.Cut(e.InvolvedObject.Name, "-")
		repaired := e.Reason == "RepairBrokenPod" && (underWay == "up" || underWay == "again")
		if (from == "cni-repair" || from == "istio-cni") && !repaired {
			s.Errorf("%s/%s: %s: %s", e.InvolvedObject.Namespace, e.InvolvedObject.Name, e.Reason, e.Message)
		}
	}
	for _, r := range s.requests()[s.requestsBefore:] {
		if r.Status == 401 || r.Status == 403 {
			s.Errorf("requestsBefore: %s %s: %d", r.Verb, r.URI, r.Status)
		}
	}
	for line := range strings.Lines(s.Output(lab.Mesh, s.Agent().Name, "install-cni", false)) {
		if strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR") {
			s.Step("the agent says %s", line)
		}
	}
}

// requests are those of the agents and their plugins.
func (s *scenario) requests() []cluster.Request {
	s.Helper()
	all, err := s.Requests(lab.Mesh, "istio-cni")
	s.Must(err)
	return all
}
