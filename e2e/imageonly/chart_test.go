package imageonly

import (
	"maps"
	"net"
	"reflect"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/e2e/lab"
)

// TestChart installs by Istio's own chart.
func TestChart(t *testing.T) {
	run(t,
		step{"install", (*scenario).installed},
		step{"replace", (*scenario).replaced},
		step{"uninstall", (*scenario).uninstalled},
		step{"label and delete", (*scenario).labelledAndDeleted},
		step{"delete beside repair", (*scenario).bothModes},
		step{"rights", (*scenario).withRights},
		step{"values", (*scenario).otherValues},
		step{"ambient", (*scenario).ambient},
	)
}

// installed: the agent installs, pods are captured, and a pod from before is repaired in place.
func (s *scenario) installed() {
	s.Helper()
	s.broken("early")
	s.install()
	s.documented([]string{"kubectl", "rollout"})
	s.UntilRolledOut(lab.Image)
	s.captured("first", "second", "third")
	if d := s.Decision("first"); !d.Captured || d.Source == "" {
		s.Errorf("decision %+v", d)
	}
	s.UntilReady("early")
	s.Flows("early")
	s.Until("the event", func() bool { return s.Event("early", "RepairBrokenPod", "it is redirected now") })
	s.Until("the audit", func() bool {
		text, answered := s.GetFrom("", "http://"+net.JoinHostPort(s.Agent().Status.PodIP, "15014")+"/metrics")
		return answered && strings.Contains(text, `istio_cni_audit_pods{state="captured"} 4`)
	})
	s.quiet()
	s.RemoveReleased("early")
}

// replaced: the reference's image and ours by turns, by a change of the image alone, in each spelling.
func (s *scenario) replaced() {
	s.Helper()
	s.withoutGap(func() {
		s.documented([]string{"helm", "upgrade", "image=install-cni"}, "--set=global.hub="+lab.ReferenceHub, "--set=global.tag="+lab.ReferenceTag)
		s.UntilRolledOut(lab.ReferenceImage)
	})
	s.captured("theirs")
	s.unchanged("first", "second")
	s.RemoveReleased("second")
	s.documented([]string{"helm", "upgrade", "image=$HUB/install-cni:$TAG"})
	s.UntilRolledOut(lab.Image)
	s.captured("back")
	s.unchanged("first", "theirs")
	for _, spelling := range []string{"global.hub=" + lab.OursHub + ",global.tag=" + lab.OursTag, "hub=" + lab.OursHub + ",tag=" + lab.OursTag} {
		s.seen = len(s.requests())
		s.withoutGap(func() {
			s.change("--set=image=install-cni,podAnnotations.rollout=for-"+spelling[:1], "--set="+spelling)
			s.Until("the rollout", s.RolledOut)
			s.UntilRolledOut(lab.Image)
		})
	}
	s.captured("again")
	s.unchanged("first", "theirs", "back")
	s.quiet()
	s.RemoveReleased("back")
}

// uninstalled: the node is as it was, and pods run on.
func (s *scenario) uninstalled() {
	s.Helper()
	s.documented([]string{"helm", "uninstall"})
	s.untilGone()
	if have := s.Network(); !reflect.DeepEqual(have, s.network) {
		s.Errorf("the node's CNI configuration was\n%v\nand is now\n%v", s.network, have)
	}
	maps.Copy(s.networks, s.Networks()) // the reference has formatted the file
	s.unchanged("first", "theirs", "again")
	s.RemoveReleased("first", "theirs", "again", "third")
	s.Pod("later", lab.Plain())
	s.UntilReady("later")
	s.RemoveReleased("later")
}

// labelledAndDeleted: the other modes of race repair, with the rights that this chart has in each.
func (s *scenario) labelledAndDeleted() {
	s.Helper()
	s.broken("broken")
	s.install("--set=repair.repairPods=false", "--set=repair.labelPods=true")
	s.UntilRolledOut(lab.Image)
	s.Until("the label", func() bool { return s.Get(lab.App, "broken").Labels["cni.istio.io/uninitialized"] == "true" })
	s.quiet(audited)
	s.change("--set=repair.labelPods=false", "--set=repair.deletePods=true", "--set-string=podAnnotations.rollout=2")
	s.Until("the deletion", func() bool { return s.Get(lab.App, "broken") == nil })
	s.captured("whole")
	s.quiet(audited)
	s.uninstall()
	s.RemoveReleased("whole")
}
