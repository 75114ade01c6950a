package upgrade

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/lab"
)

const release = "istio-cni"

// helm runs Helm with an empty home directory and returns its output.
func (s *scenario) helm(args ...string) string {
	s.Helper()
	home := filepath.Join(s.Dir(), "helm")
	args = append(args, "--namespace="+lab.Mesh, "--kubeconfig="+s.Kubeconfig())
	command := exec.CommandContext(s.Context(), s.reference.Helm, args...)
	command.Env = append(os.Environ(), "HOME="+home, "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
	text, err := command.CombinedOutput()
	s.Step("helm %s\n%s", strings.Join(args, " "), text)
	s.Must(err)
	return string(text)
}

// installReference installs the reference's chart with its defaults and another image.
func (s *scenario) installReference() {
	s.Helper()
	s.helm("install", release, s.reference.Chart, "--set=global.hub="+referenceHub, "--set=global.tag="+referenceTag)
	s.rolledOut(referenceImage)
}

// upgrade follows the steps of docs/install.md.
func (s *scenario) upgrade(flags ...string) {
	s.Helper()
	values := filepath.Join(s.TempDir(), "my-values.yaml")
	s.Must(os.WriteFile(values, []byte(s.helm("get", "values", release, "--output=yaml")), 0o600))
	_, file, _, _ := runtime.Caller(0)
	chart := filepath.Join(filepath.Dir(file), "..", "..", "manifests", "istio-cni")
	flags = append([]string{"--set=global.hub=" + oursHub, "--set=global.tag=" + oursTag}, flags...)
	s.helm(append([]string{"upgrade", release, chart, "-f=" + values}, flags...)...)
	s.rolledOut(lab.Image)
}

// rolledOut waits until the only agent pod is ready and has this image. Helm's --wait does not: with one node and
// maxUnavailable 1 it requires no ready pod.
func (s *scenario) rolledOut(image string) {
	s.Helper()
	s.Until("the agent", func() bool {
		agents, err := s.Client().CoreV1().Pods(lab.Mesh).List(s.Context(), meta.ListOptions{})
		return err == nil && len(agents.Items) == 1 && lab.Ready(&agents.Items[0]) && agents.Items[0].Spec.Containers[0].Image == image
	})
}
