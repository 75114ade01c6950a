package upgrade

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const release = "istio-cni"

// helm runs Helm to its end, as a user does who has nothing in his home.
func (l *lab) helm(args ...string) string {
	l.Helper()
	home := filepath.Join(shared.Dir(), "helm")
	args = append(args, "--namespace="+meshNamespace, "--kubeconfig="+shared.Kubeconfig())
	command := exec.CommandContext(l.Context(), shared.reference.Helm, args...)
	command.Env = append(os.Environ(), "HOME="+home, "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
	text, err := command.CombinedOutput()
	l.Logf("helm %s\n%s", strings.Join(args, " "), text)
	l.must(err)
	return string(text)
}

// installReference installs the reference's chart as it is, but for the place of the image.
func (l *lab) installReference() {
	l.Helper()
	l.helm("install", release, shared.reference.Chart, "--set=global.hub="+theirHub, "--set=global.tag="+theirTag)
	l.rolledOut(theirImage)
}

// upgrade does what docs/install.md says.
func (l *lab) upgrade(flags ...string) {
	l.Helper()
	values := filepath.Join(l.TempDir(), "my-values.yaml")
	l.must(os.WriteFile(values, []byte(l.helm("get", "values", release, "--output=yaml")), 0o600))
	_, file, _, _ := runtime.Caller(0)
	chart := filepath.Join(filepath.Dir(file), "..", "..", "manifests", "istio-cni")
	flags = append([]string{"--set=global.hub=" + oursHub, "--set=global.tag=" + oursTag}, flags...)
	l.helm(append([]string{"upgrade", release, chart, "-f=" + values}, flags...)...)
	l.rolledOut(oursImage)
}

// rolledOut waits until the agent is of an image and ready, and is the only one. With one node and maxUnavailable 1 Helm's own
// --wait is content with none.
func (l *lab) rolledOut(image string) {
	l.Helper()
	l.until("the agent", func() bool {
		agents, err := l.client.CoreV1().Pods(meshNamespace).List(l.Context(), meta.ListOptions{})
		return err == nil && len(agents.Items) == 1 && ready(&agents.Items[0]) && agents.Items[0].Spec.Containers[0].Image == image
	})
}
