// Package artifacts has the paths of the programs that the tests run, and of the directory for their logs.
//
// It promises paths of existing files, or an error that names the script that creates them. It is the only package of e2e that
// reads the tests' environment variables. It never builds anything.
//
// Start reading at Find.
package artifacts

import (
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

// Find reads KUBE_BIN, ISTIO_CNI_BIN, E2E_IMAGE, E2E_BOX_BIN, E2E_BOX_IMAGE, E2E_CHART_BIN, E2E_FLANNEL_BIN,
// E2E_CONTRACT_BIN, E2E_KUBECTL_BIN, E2E_METERED_BIN, E2E_ZTUNNEL_BIN, E2E_CRDS and E2E_LOGS, which hack/e2e.sh sets. Variables that are
// not set, except the first, have a default below bin/ of the repository.
func Find() (Artifacts, error) {
	_, source, _, _ := runtime.Caller(0)
	bin := filepath.Join(filepath.Dir(source), "..", "..", "bin")
	a := Artifacts{
		Kube: os.Getenv("KUBE_BIN"), Box: from("E2E_BOX_BIN", bin, "box"), BoxImage: from("E2E_BOX_IMAGE", bin, "e2e-images/box.tar"),
		IstioCNI: from("ISTIO_CNI_BIN", bin, "image/istio-cni-"+runtime.GOARCH), Image: from("E2E_IMAGE", bin, "image/istio-cni.tar"),
		Chart: from("E2E_CHART_BIN", bin, "chart"), Flannel: from("E2E_FLANNEL_BIN", bin, "flannel"), Contract: from("E2E_CONTRACT_BIN", bin, "contract"),
		Metered: from("E2E_METERED_BIN", bin, "metered"), Ztunnel: from("E2E_ZTUNNEL_BIN", bin, "ztunnel"),
		Kubectl: from("E2E_KUBECTL_BIN", bin, "kubectl-istio_cni"), CRDs: from("E2E_CRDS", bin, "crds"), Logs: from("E2E_LOGS", bin, "e2e-logs"),
	}
	if a.Kube == "" {
		built, _ := filepath.Glob(filepath.Join(bin, "kube", "*", "kube"))
		if len(built) == 1 {
			a.Kube = built[0]
		}
	}
	return a, errors.Join(
		program(a.Kube, "KUBE_BIN", "hack/kube.sh builds it"),
		program(a.IstioCNI, "ISTIO_CNI_BIN", "hack/image.sh builds it"),
		file(a.Image, "E2E_IMAGE", "hack/image.sh packs it"),
		program(a.Box, "E2E_BOX_BIN", "hack/e2e.sh builds it"),
		file(a.BoxImage, "E2E_BOX_IMAGE", "hack/e2e.sh packs it"),
		program(a.Flannel, "E2E_FLANNEL_BIN", "hack/e2e.sh builds it"),
		program(a.Contract, "E2E_CONTRACT_BIN", "hack/e2e.sh builds it"),
		program(a.Kubectl, "E2E_KUBECTL_BIN", "hack/e2e.sh builds it"),
		program(a.Metered, "E2E_METERED_BIN", "hack/e2e.sh builds it"),
		program(a.Ztunnel, "E2E_ZTUNNEL_BIN", "hack/e2e.sh builds it"),
		program(a.Chart, "E2E_CHART_BIN", "hack/e2e.sh builds it"),
		directory(a.CRDs, "E2E_CRDS", "hack/e2e.sh fills it"))
}

// FindProgram returns the program under test alone, for a test without a cluster.
func FindProgram() (string, error) {
	_, source, _, _ := runtime.Caller(0)
	path := from("ISTIO_CNI_BIN", filepath.Join(filepath.Dir(source), "..", "..", "bin"), "image/istio-cni-"+runtime.GOARCH)
	return path, program(path, "ISTIO_CNI_BIN", "hack/image.sh builds it")
}

// FindZtunnel reads E2E_ZTUNNEL_BIN as Find does.
func FindZtunnel() (string, error) {
	_, source, _, _ := runtime.Caller(0)
	path := from("E2E_ZTUNNEL_BIN", filepath.Join(filepath.Dir(source), "..", "..", "bin"), "ztunnel")
	return path, program(path, "E2E_ZTUNNEL_BIN", "hack/e2e.sh builds it")
}

// Reference has absolute paths of the reference's programs, image and chart, of Helm, and of the directory with all charts of
// the reference.
type Reference struct{ IstioCNI, Istioctl, Image, Chart, Helm, Charts string }

// FindReference reads REFERENCE_BIN, E2E_REFERENCE_IMAGE and E2E_REFERENCE_CHARTS, which hack/e2e.sh sets for the packages that
// need the reference. The defaults are below bin/ too, except for the charts, which are in the module.
func FindReference() (Reference, error) {
	bin, dir := reference()
	r := Reference{
		IstioCNI: filepath.Join(dir, "istio-cni"), Image: from("E2E_REFERENCE_IMAGE", bin, "e2e-images/reference.tar"),
		Istioctl: filepath.Join(dir, "istioctl"), Helm: filepath.Join(dir, "helm"), Chart: filepath.Join(dir, "chart"),
		Charts: os.Getenv("E2E_REFERENCE_CHARTS"),
	}
	return r, errors.Join(
		program(r.IstioCNI, "REFERENCE_BIN", "hack/reference.sh builds it"),
		program(r.Istioctl, "REFERENCE_BIN", "hack/reference.sh builds it"),
		program(r.Helm, "REFERENCE_BIN", "hack/reference.sh builds it"),
		file(r.Image, "E2E_REFERENCE_IMAGE", "hack/e2e.sh packs it"))
}

// FindContainerd reads CONTAINERD_BIN, which hack/e2e.sh sets for package runtimes, and returns the directory that
// hack/containerd.sh has built. The default is below bin/ too.
func FindContainerd() (string, error) {
	_, source, _, _ := runtime.Caller(0)
	dir := os.Getenv("CONTAINERD_BIN")
	if dir == "" {
		built, _ := filepath.Glob(filepath.Join(filepath.Dir(source), "..", "..", "bin", "containerd", "*", "containerd"))
		if len(built) == 1 {
			dir = filepath.Dir(built[0])
		}
	}
	return dir, program(filepath.Join(dir, "containerd"), "CONTAINERD_BIN", "hack/containerd.sh builds it")
}

// Sandbox has absolute paths of runsc, of the program under test and of Box.
type Sandbox struct{ Runsc, IstioCNI, Box string }

// FindSandbox reads E2E_RUNSC_BIN, which hack/e2e.sh sets for package gvisor. The defaults are below bin/ too.
func FindSandbox() (s Sandbox, err error) {
	_, source, _, _ := runtime.Caller(0)
	bin := filepath.Join(filepath.Dir(source), "..", "..", "bin")
	s.Runsc, s.Box = from("E2E_RUNSC_BIN", bin, "runsc"), from("E2E_BOX_BIN", bin, "box")
	s.IstioCNI, err = FindProgram()
	return s, errors.Join(
		err, program(s.Runsc, "E2E_RUNSC_BIN", "hack/e2e.sh builds it"), program(s.Box, "E2E_BOX_BIN", "hack/e2e.sh builds it"))
}

// Istiod has absolute paths of istioctl, of the image of its version of istiod, and of the image of the stand-in proxy.
type Istiod struct{ Istioctl, Pilot, Proxy string }

// FindIstiod reads REFERENCE_BIN, E2E_PILOT_IMAGE and E2E_PROXY_IMAGE, which hack/e2e.sh sets for package istiod. The
// defaults are below bin/ too.
func FindIstiod() (Istiod, error) {
	bin, dir := reference()
	i := Istiod{
		Istioctl: filepath.Join(dir, "istioctl"), Pilot: from("E2E_PILOT_IMAGE", bin, "e2e-images/pilot.tar"),
		Proxy: from("E2E_PROXY_IMAGE", bin, "e2e-images/proxy.tar"),
	}
	return i, errors.Join(
		program(i.Istioctl, "REFERENCE_BIN", "hack/reference.sh builds it"),
		file(i.Pilot, "E2E_PILOT_IMAGE", "hack/e2e.sh packs it"),
		file(i.Proxy, "E2E_PROXY_IMAGE", "hack/e2e.sh packs it"))
}

// reference returns bin/ of the repository and the directory that hack/reference.sh builds.
func reference() (bin, dir string) {
	_, source, _, _ := runtime.Caller(0)
	bin = filepath.Join(filepath.Dir(source), "..", "..", "bin")
	if dir = os.Getenv("REFERENCE_BIN"); dir == "" {
		built, _ := filepath.Glob(filepath.Join(bin, "reference", "*"))
		if len(built) == 1 {
			dir = built[0]
		}
	}
	return bin, dir
}

func from(variable, dir, name string) string {
	if path := os.Getenv(variable); path != "" {
		return path
	}
	return filepath.Join(dir, name)
}

func program(path, variable, how string) error {
	info, err := os.Stat(path)
	if err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
		return fmt.Errorf("%s: %q is not an executable file: %s", variable, path, how)
	}
	return nil
}

func file(path, variable, how string) error {
	if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() {
		return fmt.Errorf("%s: %q is not a regular file: %s", variable, path, how)
	}
	return nil
}

func directory(path, variable, how string) error {
	if files, err := os.ReadDir(path); err != nil || len(files) == 0 {
		return fmt.Errorf("%s: %q is not a directory with files: %s", variable, path, how)
	}
	return nil
}

// Ambient has absolute paths of the programs for a comparison in ambient mode, and of the directory for logs.
type Ambient struct{ Kube, IstioCNI, Metered, ReferenceAgent, ReferencePlugin, Logs string }

// FindAmbient reads KUBE_BIN, ISTIO_CNI_BIN, E2E_METERED_BIN and REFERENCE_BIN, which hack/e2e.sh sets for package ambient.
func FindAmbient() (Ambient, error) {
	all, _ := Find() // which needs more than this package does
	_, dir := reference()
	a := Ambient{all.Kube, all.IstioCNI, all.Metered, filepath.Join(dir, "install-cni"), filepath.Join(dir, "istio-cni"), all.Logs}
	return a, errors.Join(
		program(a.Kube, "KUBE_BIN", "hack/kube.sh builds it"),
		program(a.IstioCNI, "ISTIO_CNI_BIN", "hack/image.sh builds it"),
		program(a.Metered, "E2E_METERED_BIN", "hack/e2e.sh builds it"),
		program(a.ReferenceAgent, "REFERENCE_BIN", "hack/reference.sh builds it"),
		program(a.ReferencePlugin, "REFERENCE_BIN", "hack/reference.sh builds it"))
}
