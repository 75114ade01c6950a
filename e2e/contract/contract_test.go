// Package contract runs the tests of the unit tests' fake API server against a real API server: the behaviour that unit
// tests rely on equals the real one's.
//
// The tests are TestContract of internal/kube/kubetest, built as a test binary.
package contract

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// shared is the cluster of all tests.
var shared lab.Cluster

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(lab.ControlPlane(m, "contract", &shared))
}

func TestTheRealAPIServerKeepsTheContractOfTheFakeOne(t *testing.T) {
	// A restarted API server has an empty watch cache.
	if err := shared.Kill(cluster.APIServer); err != nil {
		t.Fatal(err)
	}
	if err := shared.Restart(t.Context(), cluster.APIServer); err != nil {
		t.Fatal(err)
	}
	command := exec.CommandContext(t.Context(), shared.Contract, "-test.v", "-test.run=^TestContract$")
	command.Env = append(os.Environ(), "KUBETEST_CONTRACT_KUBECONFIG="+shared.Kubeconfig())
	text, err := command.CombinedOutput()
	t.Logf("%s", text)
	if err != nil {
		t.Error(err)
	}
	if passed := strings.Count(string(text), "--- PASS: TestContract/"); passed < 15 {
		t.Errorf("%d tests of the contract passed, want all of them", passed)
	}
}
