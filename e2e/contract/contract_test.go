// Package contract holds a real API server to the tests that the fake one of the unit tests passes: what those rely on is
// what the real one does.
//
// The tests are TestContract of internal/kube/kubetest, built as a program of their own.
package contract

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// shared is the cluster.
var shared lab.Cluster

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(lab.ControlPlane(m, "contract", &shared))
}

func TestTheRealAPIServerKeepsTheContractOfTheFakeOne(t *testing.T) {
	// One that was started again does not know what was before.
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
