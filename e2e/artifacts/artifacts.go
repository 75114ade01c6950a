// Package artifacts has the paths of the programs that the tests run, and of the directory for their logs.
//
// It promises paths of existing files, or an error that names the script that creates them. It is the only package of e2e that
// reads the tests' environment variables. It never builds anything.
//
// Start reading at Find.
package artifacts

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
)

// Artifacts has absolute paths.
type Artifacts struct {
	// Kube is the binary with the servers of Kubernetes, IstioCNI the program under test, Box the program of test
	// images, Chart the program that renders the chart.
	Kube, IstioCNI, Box, Chart string
	// Kubectl is the kubectl plugin.
	Kubectl string
	// Image is the archive of the program's image as released; BoxImage is Box's image.
	Image, BoxImage string
	// Contract is the test binary of internal/kube/kubetest, whose tests the fake API server passes.
	Contract string
	// CRDs is a directory with CustomResourceDefinitions.
	CRDs string
	// Flannel is a CNI plugin that delegates to other plugins.
	Flannel string
	// Metered is the CNI plugin that measures another.
	Metered string
	// Ztunnel is the stand-in for ztunnel.
	Ztunnel string
	// Logs is the directory for the logs of failed tests. It may not exist yet.
	Logs string
}

// The scripts that create the files.
const (
	byE2E       = "hack/e2e.sh"
	byImage     = "hack/image.sh"
	byKube      = "hack/kube.sh"
	byReference = "hack/reference.sh"
)

// Find reads KUBE_BIN, ISTIO_CNI_BIN, E2E_IMAGE, E2E_BOX_BIN, E2E_BOX_IMAGE, E2E_CHART_BIN, E2E_FLANNEL_BIN,
// E2E_CONTRACT_BIN, E2E_KUBECTL_BIN, E2E_METERED_BIN, E2E_ZTUNNEL_BIN, E2E_CRDS and E2E_LOGS, which hack/e2e.sh sets. Variables that are
// not set have a default below bin/ of the repository.
func Find() (Artifacts, error) {
	var f finder
	return Artifacts{
		Kube: f.kube(), IstioCNI: f.program(), Image: f.find("E2E_IMAGE", "image/istio-cni.tar", byImage),
		Box: f.box(), BoxImage: f.find("E2E_BOX_IMAGE", "e2e-images/box.tar", byE2E), Chart: f.find("E2E_CHART_BIN", "chart", byE2E),
		Flannel: f.find("E2E_FLANNEL_BIN", "flannel", byE2E), Contract: f.find("E2E_CONTRACT_BIN", "contract", byE2E),
		Kubectl: f.find("E2E_KUBECTL_BIN", "kubectl-istio_cni", byE2E), Metered: f.metered(), Ztunnel: f.ztunnel(),
		CRDs: f.find("E2E_CRDS", "crds", byE2E), Logs: logs(),
	}, f.err()
}

// FindProgram returns the program under test alone, for a test without a cluster.
func FindProgram() (string, error) {
	var f finder
	return f.program(), f.err()
}

// FindZtunnel reads E2E_ZTUNNEL_BIN as Find does.
func FindZtunnel() (string, error) {
	var f finder
	return f.ztunnel(), f.err()
}

// Reference has absolute paths of the reference's programs, image and chart, of Helm, and of the directory with all charts of
// the reference.
type Reference struct{ IstioCNI, Istioctl, Image, Chart, Helm, Charts string }

// FindReference reads REFERENCE_BIN, E2E_REFERENCE_IMAGE and E2E_REFERENCE_CHARTS, which hack/e2e.sh sets for the packages that
// need the reference. The defaults are below bin/ too, except for the charts, which are in the module.
func FindReference() (Reference, error) {
	var f finder
	dir := f.reference()
	return Reference{
		IstioCNI: filepath.Join(dir, "istio-cni"), Image: f.find("E2E_REFERENCE_IMAGE", "e2e-images/reference.tar", byE2E),
		Istioctl: filepath.Join(dir, "istioctl"), Helm: filepath.Join(dir, "helm"), Chart: filepath.Join(dir, "chart"),
		Charts: os.Getenv("E2E_REFERENCE_CHARTS"),
	}, f.err()
}

// FindContainerd reads CONTAINERD_BIN, which hack/e2e.sh sets for package runtimes, and returns the directory that
// hack/containerd.sh has built. The default is below bin/ too.
func FindContainerd() (string, error) {
	var f finder
	return f.find("CONTAINERD_BIN", "containerd/*", "hack/containerd.sh"), f.err()
}

// Sandbox has absolute paths of runsc, of the program under test and of Box.
type Sandbox struct{ Runsc, IstioCNI, Box string }

// FindSandbox reads E2E_RUNSC_BIN, which hack/e2e.sh sets for package gvisor. The defaults are below bin/ too.
func FindSandbox() (Sandbox, error) {
	var f finder
	return Sandbox{f.find("E2E_RUNSC_BIN", "runsc", byE2E), f.program(), f.box()}, f.err()
}

// Istiod has absolute paths of istioctl, of the image of its version of istiod, and of the image of the stand-in proxy.
type Istiod struct{ Istioctl, Pilot, Proxy string }

// FindIstiod reads REFERENCE_BIN, E2E_PILOT_IMAGE and E2E_PROXY_IMAGE, which hack/e2e.sh sets for package istiod. The
// defaults are below bin/ too.
func FindIstiod() (Istiod, error) {
	var f finder
	return Istiod{
		Istioctl: filepath.Join(f.reference(), "istioctl"), Pilot: f.find("E2E_PILOT_IMAGE", "e2e-images/pilot.tar", byE2E),
		Proxy: f.find("E2E_PROXY_IMAGE", "e2e-images/proxy.tar", byE2E),
	}, f.err()
}

// Ambient has absolute paths of the programs for a comparison in ambient mode, and of the directory for logs.
type Ambient struct{ Kube, IstioCNI, Metered, ReferenceAgent, ReferencePlugin, Logs string }

// FindAmbient reads KUBE_BIN, ISTIO_CNI_BIN, E2E_METERED_BIN and REFERENCE_BIN, which hack/e2e.sh sets for package ambient.
func FindAmbient() (Ambient, error) {
	var f finder
	dir := f.reference()
	return Ambient{f.kube(), f.program(), f.metered(), filepath.Join(dir, "install-cni"), filepath.Join(dir, "istio-cni"), logs()}, f.err()
}

// finder finds files, and joins an error for each missing one.
type finder struct{ missing error }

// err returns the error of all calls so far.
func (f *finder) err() error { return f.missing }

func (f *finder) kube() string { return f.find("KUBE_BIN", "kube/*/kube", byKube) }
func (f *finder) program() string {
	return f.find("ISTIO_CNI_BIN", "image/istio-cni-"+runtime.GOARCH, byImage)
}
func (f *finder) box() string       { return f.find("E2E_BOX_BIN", "box", byE2E) }
func (f *finder) metered() string   { return f.find("E2E_METERED_BIN", "metered", byE2E) }
func (f *finder) ztunnel() string   { return f.find("E2E_ZTUNNEL_BIN", "ztunnel", byE2E) }
func (f *finder) reference() string { return f.find("REFERENCE_BIN", "reference/*", byReference) }

// find returns the path in a variable, or the only one below bin/ that matches a pattern. script creates the file.
func (f *finder) find(variable, pattern, script string) string {
	path := os.Getenv(variable)
	if built, _ := filepath.Glob(below(pattern)); path == "" && len(built) == 1 {
		path = built[0]
	}
	if _, err := os.Stat(path); err != nil {
		f.missing = errors.Join(f.missing, fmt.Errorf("%s: %q does not exist, nor does bin/%s: %s creates it", variable, path, pattern, script))
	}
	return path
}

func logs() string { return cmp.Or(os.Getenv("E2E_LOGS"), below("e2e-logs")) }

// below returns a path below bin/ of the repository.
func below(name string) string {
	_, source, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(source), "..", "..", "bin", name)
}
