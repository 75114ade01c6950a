package imageonly

import (
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/e2e/lab"
)

// TestIstioctl installs by istioctl, which has Istio's charts in itself.
func TestIstioctl(t *testing.T) {
	run(t, step{"istioctl", (*scenario).byIstioctl})
}

// istioctl runs a command of istioctl, which must succeed.
func (s *scenario) istioctl(args ...string) string {
	s.Helper()
	text, err := s.Program(s.Reference.Istioctl, append(args, "--kubeconfig="+s.Kubeconfig())...)
	s.Must(err)
	return text
}

// byIstioctl: the agent is installed, changed and removed by istioctl, which has nothing to say about the agent.
func (s *scenario) byIstioctl() {
	s.Helper()
	s.istioctl("experimental", "precheck")
	s.documented([]string{"istioctl", "install"})
	s.UntilRolledOut(lab.Image)
	s.captured("first", "second")
	s.quiet()
	text := s.istioctl("experimental", "precheck") + s.istioctl("analyze", "--all-namespaces") + s.istioctl("version")
	if strings.Contains(text, "cni") {
		s.Errorf("istioctl says about the agent:\n%s", text)
	}
	s.withoutGap(func() {
		s.documented([]string{"istioctl", "upgrade"}, "--set=values.cni.podAnnotations.rollout=two")
		s.UntilRolledOut(lab.Image)
	})
	s.unchanged("first", "second")
	s.captured("third")
	for _, at := range []string{"global", "cni"} {
		s.istioctl("install", "--skip-confirmation", "--set=profile=minimal", "--set=components.cni.enabled=true", "--set=components.pilot.enabled=false",
			"--set=components.base.enabled=false", "--set=values."+at+".hub="+lab.OursHub, "--set=values."+at+".tag="+lab.OursTag)
		s.UntilRolledOut(lab.Image)
	}
	s.unchanged("first", "third")
	s.documented([]string{"istioctl", "uninstall"})
	s.untilAsBefore()
	s.unchanged("first", "second", "third")
	s.RemoveReleased("first", "second", "third")
}
