package installer_test

import (
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

func TestSecondAgentWaitsForTheFirst(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*nodetest.Agent){
		"SIGTERM": func(a *nodetest.Agent) { a.Terminate(); a.Wait() },
		"SIGKILL": (*nodetest.Agent).Kill,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			first := n.Start()
			first.AwaitReady()
			second := n.Start("EXCLUDE_NAMESPACES=namespace-of-the-second", "--health-port=8001", "--monitoring-port=15015", "--ctrlz_port=9877")
			second.AwaitLog("waiting for another node agent to end")
			// The node is served, and a rollout that starts it first waits for nothing else.
			second.AwaitReady()
			if strings.Contains(n.Read(listFile), "namespace-of-the-second") {
				t.Error("both are at work")
			}
			if err := first.Ready(); err != nil {
				t.Errorf("the first one: %v", err)
			}
			began := time.Now()
			end(first)
			second.AwaitReady()
			awaitExcluded(t, n, "namespace-of-the-second")
			t.Logf("taken over %s after the end of the first began", time.Since(began))
		})
	}
}

// The reference's agent takes no lock: it is known by the socket that it serves.
func TestAgentWaitsForTheReferences(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	// What there is to serve the node.
	before := n.Start("EXCLUDE_NAMESPACES=namespace-of-the-first")
	before.AwaitReady()
	before.Kill()
	socket := n.Path(nodetest.RunDir + "/log.sock")
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	reference, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer reference.Close() //nolint:errcheck // the test is over
	a := n.Start("EXCLUDE_NAMESPACES=namespace-of-the-second")
	a.AwaitLog("waiting for another node agent to end")
	// As a rollout with maxSurge ends the reference's only then.
	a.AwaitReady()
	if strings.Contains(n.Read(listFile), "namespace-of-the-second") {
		t.Error("both are at work")
	}
	if err := reference.Close(); err != nil {
		t.Fatal(err)
	}
	awaitExcluded(t, n, "namespace-of-the-second")
	a.AwaitReady()
}

// An agent that waits for another one can be terminated.
func TestWaitingAgentEnds(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	first := n.Start()
	first.AwaitReady()
	second := n.Start("UNINSTALL_ON_EXIT=always", "--health-port=8001", "--monitoring-port=15015", "--ctrlz_port=9877")
	second.AwaitLog("waiting for another node agent to end")
	ends(t, second)
	if diff := cmp.Diff(withUs(), types(t, n)); diff != "" {
		t.Errorf("it took the first one's work away: -want +got:\n%s", diff)
	}
	if err := first.Ready(); err != nil {
		t.Errorf("the first one: %v", err)
	}
}

// TestW29APortInUseIsReportedBeforeAnythingIsTouched: an agent that never becomes ready and does not say why is worse than
// one that does not start.
func TestW29APortInUseIsReportedBeforeAnythingIsTouched(t *testing.T) {
	t.Parallel()
	for flag, port := range map[string]string{
		"--health-port": nodetest.HealthPort, "--monitoring-port": nodetest.MonitoringPort, "--ctrlz_port": "9876",
	} {
		t.Run(flag, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			before := n.Tree(".")
			n.Listen(port)
			code, a := n.Run()
			if code != 1 || !strings.Contains(a.Log(), flag+" "+port+": address already in use") {
				t.Errorf("exit code %d, log %s", code, a.Log())
			}
			if diff := cmp.Diff(before, n.Tree(".")); diff != "" {
				t.Errorf("it touched: -before +after:\n%s", diff)
			}
		})
	}
}

// The plugin's records of an ADD appear in the agent's log, marked as the plugin's.
func TestAgentRelaysThePluginsLog(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := n.Start("--log_as_json")
	a.AwaitReady()
	pod := n.NewPod("apps", "mesh", chaintest.Sidecar)
	if _, err := n.Add(pod); err != nil {
		t.Fatal(err)
	}
	for _, message := range []string{"decided about the pod", "redirected the pod"} {
		nodetest.Await(t, message+" in the log", func() error {
			for line := range strings.Lines(a.Log()) {
				if strings.Contains(line, `"`+message+`"`) && strings.Contains(line, `"pod":"apps/mesh"`) && strings.Contains(line, `"scope":"cni-plugin"`) {
					return nil
				}
			}
			return notYet("it is not there")
		})
	}
	nodetest.Await(t, "the metric", func() error {
		if got := a.Metric(`istio_cni_log_records_total{outcome="relayed"}`); got == "0" || got == "" {
			return notYet("it is %q", got)
		}
		return nil
	})
	// Somebody removes the socket.
	before := strings.Count(a.Log(), "redirected the pod")
	if err := n.Remove(nodetest.RunDir + "/log.sock"); err != nil {
		t.Fatal(err)
	}
	nodetest.Await(t, "the socket", func() error {
		if !n.Has(nodetest.RunDir + "/log.sock") {
			return notYet("it is not there")
		}
		return nil
	})
	again := n.NewPod("apps", "again", chaintest.Sidecar)
	if _, err := n.Add(again); err != nil {
		t.Fatal(err)
	}
	nodetest.Await(t, "the next pod's record", func() error {
		if strings.Count(a.Log(), "redirected the pod") == before {
			return notYet("it is not there")
		}
		return nil
	})
}
