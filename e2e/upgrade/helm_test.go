package upgrade

import (
	"path/filepath"

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
	dir := s.TempDir()
	s.bash(dir, documented.Find(s.Test, "helm", "values"))
	s.bash(dir, documented.Find(s.Test, "helm", "upgrade"), flags...)
	s.UntilRolledOut(lab.Image)
}

func (s *scenario) bash(dir, command string, more ...string) {
	s.Helper()
	s.Bash(dir, filepath.Dir(s.Reference.Helm), command, more...)
}

// restarts returns the restart count of a pod's first init container, the validation.
func (s *scenario) restarts(name string) int32 {
	s.Helper()
	return s.Get(lab.App, name).Status.InitContainerStatuses[0].RestartCount
}
