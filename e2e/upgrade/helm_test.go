package upgrade

import (
	"os"
	"path/filepath"
	"runtime"

	"github.com/meshcni/istio-cni/e2e/lab"
)

// installReference installs the reference's chart with its defaults and another image.
func (s *scenario) installReference() {
	s.Helper()
	s.Helm("install", lab.Release, s.Reference.Chart, "--set=global.hub="+lab.ReferenceHub, "--set=global.tag="+lab.ReferenceTag)
	s.UntilRolledOut(lab.ReferenceImage)
}

// upgrade follows the steps of docs/install.md.
func (s *scenario) upgrade(flags ...string) {
	s.Helper()
	values := filepath.Join(s.TempDir(), "my-values.yaml")
	s.Must(os.WriteFile(values, []byte(s.Helm("get", "values", lab.Release, "--output=yaml")), 0o600))
	_, file, _, _ := runtime.Caller(0)
	chart := filepath.Join(filepath.Dir(file), "..", "..", "manifests", "istio-cni")
	flags = append([]string{"--set=global.hub=" + lab.OursHub, "--set=global.tag=" + lab.OursTag}, flags...)
	s.Helm(append([]string{"upgrade", lab.Release, chart, "-f=" + values}, flags...)...)
	s.UntilRolledOut(lab.Image)
}

// restarts returns the restart count of a pod's first init container, the validation.
func (s *scenario) restarts(name string) int32 {
	s.Helper()
	return s.Get(lab.App, name).Status.InitContainerStatuses[0].RestartCount
}
