package mesh

import (
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// TestDualStack: both families are redirected if the proxy has ISTIO_DUAL_STACK, else only the family of the pod's first
// address.
func TestDualStack(t *testing.T) {
	s := newScenario(t, cluster.Options{Families: cluster.DualStack})
	s.UntilNodeReady()
	s.Install("{}")
	both := lab.ProxyEnv("ISTIO_DUAL_STACK", "true")
	s.Pod("both", lab.Injected(both))
	s.Pod("both-tproxy", lab.Injected(both, lab.Transparent))
	s.Pod("first", lab.Injected())
	s.Pod("plain", lab.Plain())
	s.Pod("other", lab.Injected(both))
	s.UntilReady("both", "both-tproxy", "first", "plain", "other")
	for _, c := range []struct {
		name, family string
		want         lab.Flow
	}{
		{"both", "4", lab.Redirected},
		{"both", "6", lab.Redirected},
		{"both-tproxy", "4", lab.Redirected},
		{"both-tproxy", "6", lab.Redirected},
		{"first", "4", lab.Redirected},
		{"first", "6", lab.Untouched},
		{"plain", "4", lab.Untouched},
		{"plain", "6", lab.Untouched},
	} {
		if got := s.Flow(c.name, c.family); got != c.want {
			t.Errorf("%s, IPv%s: traffic by the proxy: %+v, want %+v", c.name, c.family, got, c.want)
		}
		s.Step("%-12s IPv%s: %+v", c.name, c.family, c.want)
	}
	s.checkBothProxies("both", "other", "4")
	s.checkBothProxies("both", "other", "6")
}

// checkBothProxies checks that a request between two applications passes the proxies of both pods.
func (s *scenario) checkBothProxies(from, to, family string) {
	s.Helper()
	text, answered := s.GetFrom(from, s.URL(to, family, lab.AppPort))
	if !answered || !strings.Contains(text, "via outbound "+from+", inbound "+to) || !strings.Contains(text, "hello from "+to) {
		s.Errorf("from %s to %s: %s", from, to, text)
	}
	s.Step("from %s to %s: %s", from, to, strings.TrimSpace(text))
}

// TestIPv6: pods, the node and the Service network have only IPv6 addresses.
func TestIPv6(t *testing.T) {
	s := newScenario(t, cluster.Options{Families: cluster.IPv6})
	s.UntilNodeReady()
	s.Pod("early", lab.Injected())
	s.Until("the validation of a pod to fail", func() bool { return s.Failed("early") })
	objects := s.Install("{}")
	s.Pod("classic", lab.Injected())
	s.Pod("tproxy", lab.Injected(lab.Transparent))
	s.Pod("plain", lab.Plain())
	s.UntilReady("early", "classic", "tproxy", "plain")
	s.Flows("early", "classic", "tproxy")
	if flow := s.Flow("plain", ""); flow != lab.Untouched {
		t.Errorf("plain: traffic by a proxy: %+v", flow)
	}
	s.checkBothProxies("classic", "early", "6")
	s.checkBothProxies("tproxy", "classic", "6")
	s.checkBothProxies("classic", "tproxy", "6")
	s.Step("addresses %v; decision %+v", s.Get(lab.App, "classic").Status.PodIPs, s.Decision("classic"))
	s.Uninstall(objects)
	s.RemoveAll()
}
