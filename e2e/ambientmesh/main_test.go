// Package ambientmesh tests ambient mode on a real node: pods of ambient mode beside pods with a sidecar and pods outside of the mesh,
// their traffic and the kubelet's probes, while agent, ztunnel and labels change.
//
// Ztunnel is a stand-in that forwards HTTP like ztunnel and, as the stand-in for Envoy, adds a Via header: a response tells which
// proxies of which pods its connection has passed.
//
// There are two scenarios, each on a node of its own. Start reading at TestAmbientMesh; reference_test.go has the upgrade from the
// reference, traffic_test.go the helpers.
package ambientmesh

import (
	"os"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
	"github.com/meshcni/istio-cni/e2e/program"
)

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(m.Run())
}

// scenario is the fixture of a stage, and the state that one stage leaves to the next.
type scenario struct {
	*lab.Lab
	*state
}

type state struct {
	node    *lab.Lab // of the whole test
	objects lab.Objects
	ztunnel *program.Program
	// reference is set while the agent is the reference, whose node has no table.
	reference bool
	// members are the pods whose traffic is checked.
	members []member
}

// TestAmbientMesh installs the agent, changes what can change in a node's life, and uninstalls the agent.
func TestAmbientMesh(t *testing.T) {
	all := &state{node: lab.Node(t, cluster.Options{Families: cluster.DualStack})}
	all.node.UntilNodeReady()
	for _, stage := range []struct {
		name string
		run  func(*scenario)
	}{
		{"without ztunnel", (*scenario).withoutZtunnel},
		{"labels", (*scenario).labels},
		{"restarts", (*scenario).restarts},
		{"release", (*scenario).release},
		{"migration", (*scenario).migration},
		{"power failure", (*scenario).powerFailure},
		{"uninstall", (*scenario).uninstall},
	} {
		all.node.Stage(stage.name, func(t *testing.T) { stage.run(&scenario{Lab: all.node.With(t), state: all}) })
	}
}

// withoutZtunnel: a pod of ambient mode does not start before ztunnel does. Its event says why. Other pods start, and a running one that
// gets the label keeps its traffic.
func (s *scenario) withoutZtunnel() {
	s.Helper()
	s.objects = s.Install("profile: ambient")
	s.Pod("labelled", lab.Plain(labelled, probed))
	s.Pod("plain", lab.Plain(probed))
	s.UntilReady("plain")
	s.Until("an event that names ztunnel", func() bool { return s.Event("labelled", "FailedCreatePodSandBox", "no ztunnel is connected") })
	if s.IsReady("labelled") {
		s.Error("a pod of ambient mode is ready without ztunnel")
	}
	s.kubectl("label", "pod", "plain", "--namespace="+lab.App, modeLabel+"=ambient")
	s.Until("the audit", func() bool {
		return strings.Contains(s.Kubectl("istio-cni", "pods", "-n", lab.App).Stdout, "waiting for ztunnel: no ztunnel is connected")
	})
	s.members = []member{{"plain", outside}}
	s.checkTraffic()

	s.startZtunnel()
	s.UntilReady("labelled")
	s.members = []member{{"labelled", ambient}, {"plain", ambient}}
	s.check()
	s.kubectl("label", "pod", "plain", "--namespace="+lab.App, modeLabel+"-")
	s.members = []member{{"labelled", ambient}, {"plain", outside}}
	s.check()
}

// labels: the namespace's label enrols its pods, new ones and running ones, but not those that opt out or have a sidecar.
func (s *scenario) labels() {
	s.Helper()
	s.label(modeLabel + "=ambient")
	s.Pod("new", lab.Plain(probed))
	s.Pod("side", injected())
	s.Pod("out", lab.Plain(probed, optedOut))
	s.UntilReady("new", "side", "out")
	s.Pod("first", lab.Plain(client("get", s.URL("labelled", "", lab.AppPort))))
	s.Until("a client to end", func() bool { return s.Get(lab.App, "first").Status.Phase == core.PodSucceeded })
	if text := s.Output(lab.App, "first", "app", false); !strings.Contains(text, path(member{"first", ambient}, member{"labelled", ambient})) {
		s.Errorf("the first connection of a new pod: %s", text)
	}
	s.members = []member{{"labelled", ambient}, {"plain", ambient}, {"new", ambient}, {"side", sidecar}, {"out", outside}}
	s.check()
	s.untilAudited()
}

// restarts: connections live through an upgrade and the deletion of the agent while pods come and go. Pods live through a restart of
// ztunnel.
func (s *scenario) restarts() {
	s.Helper()
	url := s.URL("labelled", "", lab.AppPort)
	s.Pod("keep", lab.Plain(client("keep", url)))
	s.Pod("keep-out", lab.Plain(client("keep", url), optedOut))
	s.Pod("keep-side", lab.Plain(client("keep", s.URL("side", "6", lab.AppPort))))
	s.UntilReady("keep", "keep-out", "keep-side")
	s.untilKept("keep", "keep-out", "keep-side")

	churn := s.Churn(2)
	s.kubectl("rollout", "restart", "daemonset/istio-cni-node", "--namespace="+lab.Mesh)
	s.Until("the restart", s.RolledOut)
	s.untilKept("keep", "keep-out", "keep-side")
	before := s.Agent().UID
	s.kubectl("delete", "pod", s.Agent().Name, "--namespace="+lab.Mesh)
	s.Until("another agent", func() bool { agent := s.Agent(); return lab.Ready(agent) && agent.UID != before })
	s.untilKept("keep", "keep-out", "keep-side")
	churn.End(2)
	s.check()

	s.Remove("keep", "keep-out", "keep-side")
	s.Stop(s.ztunnel)
	s.startZtunnel()
	s.check()
}

// release: pods without a label have no rules any more, and are outside until it is set again.
func (s *scenario) release() {
	s.Helper()
	s.label(modeLabel + "-")
	s.members = []member{{"labelled", ambient}, {"plain", outside}, {"new", outside}, {"side", sidecar}}
	s.check()
	for name, want := range map[string]bool{"labelled": true, "plain": false, "new": false, "out": false} {
		if text := s.rules(name); strings.Contains(text, "ISTIO") != want || strings.Contains(text, "fwmark") != want {
			s.Errorf("%s: rules: %t, want %t:\n%s", name, !want, want, text)
		}
	}
	s.label(modeLabel + "=ambient")
	s.members = []member{{"labelled", ambient}, {"plain", ambient}, {"new", ambient}, {"side", sidecar}}
	s.check()
	s.label(modeLabel + "-")
	s.Remove("labelled", "plain", "new", "side", "out", "first")
	s.Until("the node's table to be empty", func() bool { return !strings.Contains(s.table(), "elements") })
}

// migration: a namespace moves from sidecars to ambient mode and back, pod by pod, and its pods reach each other at each step.
func (s *scenario) migration() {
	s.Helper()
	move := func(to dataplane, names ...string) {
		s.Helper()
		for _, name := range names {
			if s.Get(lab.App, name) != nil {
				s.Remove(name)
			}
			template := lab.Plain(probed)
			if to == sidecar {
				template = injected()
			}
			s.Pod(name, template)
		}
		s.UntilReady(names...)
	}
	move(sidecar, "one", "two")
	s.members = []member{{"one", sidecar}, {"two", sidecar}}
	s.check()
	s.label(modeLabel + "=ambient")
	for i := range s.members {
		move(ambient, s.members[i].name)
		s.members[i].in = ambient
		s.check()
	}
	s.label(modeLabel + "-")
	for i := range s.members {
		s.members[i].in = outside
	}
	for i := range s.members {
		move(sidecar, s.members[i].name)
		s.members[i].in = sidecar
		s.check()
	}
	s.Remove("one")
	s.label(modeLabel + "=ambient")
	move(ambient, "one")
	s.members[0].in = ambient
	s.check()
}

// powerFailure: the same pods run again on the node, in new network namespaces, and are enrolled again.
func (s *scenario) powerFailure() {
	s.Helper()
	s.Pod("out", lab.Plain(probed, optedOut))
	s.UntilReady("out")
	s.members = append(s.members, member{"out", outside})
	s.check()
	s.Must(s.PowerOff())
	s.Stop(s.ztunnel)
	s.Must(s.PowerOn(s.Context()))
	s.startZtunnel()
	for _, m := range s.members {
		s.Until(m.name+" to run again", func() bool {
			pod := s.Get(lab.App, m.name)
			return lab.Ready(pod) && lab.Restarts(pod) > 0
		})
	}
	s.UntilAgentReady()
	s.check()
	s.untilAudited()
}

// uninstall: the node has no table any more, enrolled pods have traffic while ztunnel runs, and pods start as on any other node.
func (s *scenario) uninstall() {
	s.Helper()
	s.checkRights()
	s.Uninstall(s.objects)
	if tables := s.OnNode("nft", "list", "tables"); strings.Contains(tables, "istio") {
		s.Errorf("the node has tables\n%s", tables)
	}
	s.Pod("later", lab.Plain(probed))
	s.UntilReady("later")
	s.members = append(s.members, member{"later", outside})
	s.checkTraffic()
	s.Stop(s.ztunnel)
	s.RemoveAll()
}
