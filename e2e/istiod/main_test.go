// Package istiod tests the program with Istio's own istiod, on a real node: istiod injects the pods of the test and removes the
// taint of the node, with our agent in the place of its own.
//
// istiod and istioctl are built from the Go module, at the version of the reference; istioctl prints the manifests, which are
// applied without the objects of Istio's own agent. Only images are the test's own: istiod's has the program alone, istio-validation
// is run by our image, and the proxy is the stand-in of e2e/images/box, which does what the pod needs of pilot-agent.
//
// Start reading at TestIstiod. kind_test.go has the pods, ambient_test.go istiod with the ambient profile.
package istiod

import (
	"bytes"
	_ "embed"
	"os"
	"path/filepath"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// install is what istioctl is told to install.
//
//go:embed install.yaml
var install []byte

// notReady is the taint that istiod's untaint controller removes.
var notReady = core.Taint{Key: "cni.istio.io/not-ready", Value: "true", Effect: core.TaintEffectNoSchedule}

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(documented.Main(m))
}

// documented are the commands of docs/install.md.
var documented = lab.Commands("e2e/istiod")

// scenario is the fixture of the test.
type scenario struct {
	*lab.Lab

	istioctl string
}

// newScenario starts a node with the taint and with istiod's images. Pods in namespace lab.App are injected.
func newScenario(t *testing.T) *scenario {
	t.Helper()
	found, err := artifacts.FindIstiod()
	if err != nil {
		t.Fatal(err)
	}
	s := &scenario{
		Lab: lab.Node(t, cluster.Options{
			Images: []string{found.Pilot, found.Proxy}, RegisterWithTaints: []core.Taint{notReady},
		}),
		istioctl: found.Istioctl,
	}
	_, err = s.Client().CoreV1().Namespaces().Patch(t.Context(), lab.App, types.MergePatchType,
		[]byte(`{"metadata": {"labels": {"istio-injection": "enabled"}}}`), meta.PatchOptions{})
	s.Must(err)
	return s
}

// subtest runs a part of the scenario as a subtest.
func (s *scenario) subtest(name string, run func(*scenario)) bool {
	s.Helper()
	return s.Run(name, func(t *testing.T) {
		t.Helper()
		sub := *s
		sub.Lab = s.With(t)
		run(&sub)
	})
}

// installIstiod runs the command of docs/install.md for a profile of Istio. The command leaves out the objects of Istio's own agent. It waits
// until istiod is ready, and the only one.
func (s *scenario) installIstiod(profile string, flags ...string) {
	s.Helper()
	// kubectl asks for the kinds of all objects before it leaves some out, and OpenShift has this one.
	if r := s.Kubectl("apply", "-f", filepath.Join(s.CRDs, "networks-crd.yaml")); r.Code != 0 {
		s.Fatal(r)
	}
	dir := s.TempDir()
	s.Must(os.WriteFile(filepath.Join(dir, "istio.yaml"), bytes.Replace(install, []byte("profile: minimal"), []byte("profile: "+profile), 1), 0o600))
	s.Bash(dir, filepath.Dir(s.istioctl), documented.Find(s.Test, "istioctl", "manifest"), flags...)
	s.Until("istiod", func() bool {
		deployment, err := s.Client().AppsV1().Deployments(lab.Mesh).Get(s.Context(), "istiod", meta.GetOptions{})
		s.Must(err)
		have := deployment.Status
		return have.ObservedGeneration == deployment.Generation && have.UpdatedReplicas == 1 && have.ReadyReplicas == 1 && have.Replicas == 1
	})
	s.Step("istiod is ready, with profile %s", profile)
}
