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

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// scenario is the state that one step leaves to the next.
type scenario struct {
	*lab.Beside

	// network is the node's CNI configuration before the first installation.
	network lab.NetworkList
	// made has the rules of each pod at its creation.
	made map[string]string
	// requestsBefore is the number of requests of the agents before the current step.
	requestsBefore int
}

// TestFromTheReferenceAndBack installs the reference, has an observer beside it, upgrades, rolls back, upgrades again and uninstalls.
func TestFromTheReferenceAndBack(t *testing.T) {
	s := newScenario(t)
	for _, step := range []struct {
		name string
		run  func(*scenario)
	}{
		{"reference", (*scenario).prepared},
		{"observer", (*scenario).observed},
		{"upgrade", (*scenario).upgraded},
		{"rollback", (*scenario).rolledBack},
		{"upgrade again", (*scenario).upgradedAgain},
		{"uninstall", (*scenario).uninstalled},
	} {
		s.Stage(step.name, func(t *testing.T) {
			here := *s
			here.Beside = s.With(t)
			here.requestsBefore = len(here.requests())
			step.run(&here)
		})
	}
}

// prepared: the reference is installed.
func (s *scenario) prepared() {
	s.Helper()
	s.installReference()
	s.checkInstalled(s.Reference.IstioCNI)
	s.checkCaptured("their-0")
	s.Step("the rules of a pod are\n%s", s.made["their-0"])
	s.checkCaptured("their-1", "their-2", "their-3", "their-4", "their-5")
}

// upgraded: helm upgrade to this program while pods are created and deleted.
func (s *scenario) upgraded() {
	s.Helper()
	underWay := s.begin("up", "their-0", "their-1")
	s.upgrade()
	// The reference removes its plugin configuration when it ends, and ours is written later (docs/install.md).
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
	s.RemoveReleased("their-2", "their-3")
	s.checkNoProblems()
}

// checkGap checks that only pods that were created during the gap started without redirection. These were repaired.
func (s *scenario) checkGap(underWay *churn) {
	s.Helper()
	captured, held := underWay.stop()
	// On an idle machine containerd reads a changed configuration within a second.
	const reads = time.Second
	since := underWay.restored.Add(reads)
	after := 0
	for _, made := range captured {
		if made.After(since) {
			after++
		}
	}
	s.Step("%d pods were created after the stanza was written", after)
	for name, made := range held {
		if made.After(since) {
			s.Errorf("%s started without redirection %s after the stanza was written", name, made.Sub(since)+reads)
		}
	}
}

// rolledBack: helm rollback while pods are created and deleted.
func (s *scenario) rolledBack() {
	s.Helper()
	underWay := s.begin("down", "ours-0", "ours-1")
	s.bash(s.TempDir(), documented.Find(s.Test, "helm", "rollback"))
	s.UntilRolledOut(lab.ReferenceImage)
	// The agent keeps the installation when its successor is the reference.
	if _, held := underWay.stop(); len(held) > 0 || underWay.missing > 0 {
		s.Errorf("the stanza was missing for %s, and %q started without redirection", underWay.missing, held)
	}
	s.checkInstalled(s.Reference.IstioCNI)
	s.checkCaptured("back-0", "back-1")
	s.checkUnchanged("their-4", "their-5", "ours-2", "ours-3")
	s.RemoveReleased("ours-2", "their-4")
}

// upgradedAgain: with maxSurge 1 our agent starts before the reference's ends, and the gap is shorter.
func (s *scenario) upgradedAgain() {
	s.Helper()
	const values = "--set=updateStrategy.rollingUpdate."
	underWay := s.begin("again", "back-1")
	s.upgrade(values+"maxSurge=1", values+"maxUnavailable=0")
	s.checkGap(underWay)
	s.checkInstalled(s.IstioCNI)
	s.checkCaptured("last-0")
	s.checkUnchanged("their-5", "ours-3", "back-0")
	s.RemoveReleased("back-0")
	s.checkNoProblems()
}

// uninstalled: the node is as it was before the first installation.
func (s *scenario) uninstalled() {
	s.Helper()
	s.Helm("uninstall", lab.Release)
	s.Until("the agent to go", func() bool {
		agents, err := s.Client().CoreV1().Pods(lab.Mesh).List(s.Context(), meta.ListOptions{})
		return err == nil && len(agents.Items) == 0
	})
	if have := s.Network(); !reflect.DeepEqual(have, s.network) {
		s.Errorf("the network's configuration was %v\nand is now %v", s.network, have)
	}
	s.logFiles()
	s.checkUnchanged("their-5", "ours-3", "last-0")
	s.RemoveReleased("their-5", "ours-3", "last-0")
	s.Pod("later", lab.Plain())
	s.UntilReady("later")
	s.RemoveReleased("later")
}

// checkCaptured creates pods and checks that they are redirected from their start, by the same rules as the
// reference's.
func (s *scenario) checkCaptured(names ...string) {
	s.Helper()
	s.Pods(names...)
	for _, name := range names {
		if n := s.restarts(name); n != 0 {
			s.Errorf("%s: %d restarts of the validation", name, n)
		}
		s.Flows(name)
		s.made[name] = s.Rules(name)
		if want := s.made["their-0"]; s.made[name] != want {
			s.Errorf("%s has rules\n%s\nand the reference writes\n%s", name, s.made[name], want)
		}
	}
	s.Step("%q are redirected from their start, by the same rules", names)
}

// checkUnchanged checks that existing pods have the same rules and no container restarts.
func (s *scenario) checkUnchanged(names ...string) {
	s.Helper()
	for _, name := range names {
		s.Flows(name)
		if have := s.Rules(name); have != s.made[name] {
			s.Errorf("%s had rules\n%s\nand has now\n%s", name, s.made[name], have)
		}
		for _, c := range s.Get(lab.App, name).Status.ContainerStatuses {
			if c.RestartCount != 0 || !c.Ready {
				s.Errorf("%s: container %s: %+v", name, c.Name, c)
			}
		}
	}
	s.Step("%q are still redirected, by the same rules", names)
}

// checkInstalled checks that the CNI configuration has one plugin more, the last one, that its kubeconfig exists,
// that there is no other configuration, and that the plugin binary equals the file program.
func (s *scenario) checkInstalled(program string) {
	s.Helper()
	s.logFiles()
	have := s.Network()
	n := len(have.Plugins) - 1
	stanza := have.Plugins[n]
	text, err := json.MarshalIndent(stanza, "", "  ")
	s.Must(err)
	s.Step("the stanza is %s", text)
	have.Plugins = have.Plugins[:n]
	if stanza["type"] != "istio-cni" || !reflect.DeepEqual(have, s.network) {
		s.Errorf("the network's configuration was %v\nand is now %v", s.network, have)
	}
	if names := s.Files("/etc/cni/net.d"); !slices.Equal(names, []string{"10-e2e.conflist"}) {
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

// kubeconfig is the plugin's kubeconfig, which both write to the same path.
const kubeconfig = "/var/run/istio-cni/istio-cni-kubeconfig"

// logFiles logs the directories that both write to.
func (s *scenario) logFiles() {
	s.Helper()
	for _, dir := range []string{"/etc/cni/net.d", "/opt/cni/bin", "/var/run/istio-cni"} {
		s.Step("%s has %q", dir, s.Files(dir))
	}
}

// checkNoProblems checks that our agent sent no warning event, except for repairs during the gap, and that no request
// was forbidden.
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
			s.Errorf("forbidden: %s %s: %d", r.Verb, r.URI, r.Status)
		}
	}
	for line := range strings.Lines(s.Output(lab.Mesh, s.Agent().Name, "install-cni", false)) {
		if strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR") {
			s.Step("agent's log: %s", line)
		}
	}
}

// requests returns the requests of the agents and plugins so far.
func (s *scenario) requests() []cluster.Request {
	s.Helper()
	all, err := s.Requests(lab.Mesh, "istio-cni")
	s.Must(err)
	return all
}
