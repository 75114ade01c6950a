package imageonly

import (
	"net"
	"net/http"
	"os"
	"strings"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/lab"
)

// otherValues: values of that chart that change more than the image.
func (s *scenario) otherValues() {
	s.Helper()
	for _, with := range []struct {
		name   string
		values []string
		// file is the file with the stanza.
		file string
	}{
		{"owned", []string{"istioOwnedCNIConfig=true", "istioOwnedCNIConfigFileName=05-mesh.conflist"}, "05-mesh.conflist"},
		{"standalone", []string{"chained=false"}, "YYY-istio-cni.conf"},
		{
			"around", []string{
				"platform=minikube", "excludeNamespaces={kube-system,app}", "resourceQuotas.enabled=true", "global.networkPolicy.enabled=true",
				"global.logAsJson=true", "logging.level=debug", "useAppArmorAnnotation=false", "seccompProfile.type=RuntimeDefault",
				"seLinuxOptions.type=spc_t", "global.nativeNftables=true", "repair.enabled=false", "resources.limits.memory=200Mi", "resources.limits.cpu=1",
			}, "10-e2e.conflist",
		},
	} {
		s.Step("values: %s", with.name)
		var flags []string
		for _, value := range with.values {
			flags = append(flags, "--set="+value)
		}
		s.seen = len(s.requests())
		s.install(flags...)
		s.UntilRolledOut(lab.Image)
		if text := s.NetworkFile(with.file); !strings.Contains(text, `"istio-cni"`) {
			s.Errorf("%s: %s has no stanza: %s", with.name, with.file, text)
		}
		s.Pod(with.name, lab.Plain())
		s.UntilReady(with.name)
		s.quiet()
		s.uninstall()
		s.RemoveReleased(with.name)
	}
}

// bothModes: deletePods beside repairPods, for which that chart gives no right. The pod can only be reported.
func (s *scenario) bothModes() {
	s.Helper()
	s.Pod("job", lab.Injected(lab.Once))
	s.Until("the validation to fail", func() bool { return s.Failed("job") })
	s.install("--set=repair.deletePods=true")
	s.UntilRolledOut(lab.Image)
	s.Until("the event", func() bool { return s.Event("job", "BrokenPod", "delete it, so that its owner creates another one") })
	s.quiet("the pod has a problem", audited)
	s.uninstall()
	s.RemoveReleased("job")
}

// withRights: the rights of manifests/examples/image-only-rights.yaml in addition, with which no request is refused.
func (s *scenario) withRights() {
	s.Helper()
	text, err := os.ReadFile("../../manifests/examples/image-only-rights.yaml")
	s.Must(err)
	rights := s.Parse(text)
	s.Apply(rights)
	s.install()
	s.UntilRolledOut(lab.Image)
	configs := s.Client().CoreV1().ConfigMaps(lab.Mesh)
	config, err := configs.Get(s.Context(), "istio-cni-config", meta.GetOptions{})
	s.Must(err)
	config.Data["EXCLUDE_NAMESPACES"] = "kube-system,elsewhere"
	_, err = configs.Update(s.Context(), config, meta.UpdateOptions{})
	s.Must(err)
	s.Until("the live configuration", func() bool { return strings.Contains(s.NetworkFile("10-e2e.conflist"), `"elsewhere"`) })
	for _, r := range s.requests()[s.seen:] {
		if r.Status == 403 {
			s.Errorf("refused: %s %s", r.Verb, r.URI)
		}
	}
	s.quiet()
	s.uninstall()
	s.Delete(rights)
}

// ambient: the chart's rights and volumes are enough for the agent, beside pods with sidecars. There is no ztunnel here.
func (s *scenario) ambient() {
	s.Helper()
	s.install("--set=ambient.enabled=true")
	s.UntilRolledOut(lab.Image)
	s.captured("sidecar")
	s.Until("the metric of ambient mode", func() bool {
		text, answered := s.GetFrom("", "http://"+net.JoinHostPort(s.Agent().Status.PodIP, "15014")+"/metrics")
		return answered && strings.Contains(text, "\nztunnel_connected 0\n")
	})
	for _, r := range s.requests()[s.seen:] {
		if r.Status == http.StatusForbidden && !strings.Contains(r.URI, "/configmaps") {
			s.Errorf("refused: %s %s", r.Verb, r.URI)
		}
	}
	s.uninstall()
	s.RemoveReleased("sidecar")
}
