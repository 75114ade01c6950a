package faults

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	authentication "k8s.io/api/authentication/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

const workers = 4

// TestFaults applies each fault to one node in turn, and uninstalls the agent in the end.
func TestFaults(t *testing.T) {
	s, installed := newScenario(t, "{}")
	for _, fault := range []struct {
		name string
		do   func(*scenario)
	}{
		{"the DaemonSet is updated", (*scenario).updated},
		{"the agent is killed", (*scenario).agentKilled},
		{"the agent's token is replaced", (*scenario).tokenReplaced},
		{"the API server ends and comes back", (*scenario).apiServerEnds},
		{"containerd is killed", (*scenario).containerdKilled},
		{"the kubelet is killed", (*scenario).kubeletKilled},
	} {
		t.Run(fault.name, func(t *testing.T) {
			sub := &scenario{Lab: s.With(t)}
			fault.do(sub)
			sub.UntilAgentReady()
			sub.steady(0)
			sub.others()
		})
	}
	t.Run("the node loses power", func(t *testing.T) {
		sub := &scenario{Lab: s.With(t)}
		sub.powerLost()
		sub.steady(1)
		sub.others()
	})
	s.Step("the agent is uninstalled while pods run, then the pods are deleted")
	s.Uninstall(installed)
	s.RemoveAll()
}

// updated: the DaemonSet is restarted twice and then updated with other settings, while pods come and go.
func (s *scenario) updated() {
	s.Helper()
	churn := s.Churn(workers)
	for range 2 {
		s.restartAgents()
		s.Step("rolled out again")
	}
	s.Apply(s.Chart("{logging: {level: debug}, excludeNamespaces: [kube-system, other]}"))
	s.Until("the update to be rolled out", s.RolledOut)
	s.Step("rolled out with other settings")
	churn.End(workers)
}

// agentKilled: the agent is killed three times.
func (s *scenario) agentKilled() {
	s.Helper()
	churn := s.Churn(workers)
	for range 3 {
		before := agentRestarts(s.Agent())
		s.Signal(s.Agent(), "SIGKILL")
		s.Until("the agent to be started again", func() bool { return agentRestarts(s.Agent()) > before })
		s.UntilAgentReady()
		s.Step("the agent was killed, and is ready again")
	}
	churn.End(workers)
}

// tokenReplaced: the agent's token is replaced as the kubelet does it, with one that is bound to the same pod. The
// agent stays ready and writes the token to the plugin's kubeconfig.
func (s *scenario) tokenReplaced() {
	s.Helper()
	agent := s.Agent()
	seconds := int64(3607)
	token, err := s.Client().CoreV1().ServiceAccounts(lab.Mesh).CreateToken(s.Context(), "istio-cni", &authentication.TokenRequest{
		Spec: authentication.TokenRequestSpec{ExpirationSeconds: &seconds, BoundObjectRef: &authentication.BoundObjectReference{
			Kind: "Pod", APIVersion: "v1", Name: agent.Name, UID: agent.UID,
		}},
	}, meta.CreateOptions{})
	s.Must(err)
	churn := s.Churn(workers)
	s.OnNode("sh", "-ec", `cd /var/lib/kubelet/pods/"$1"/volumes/kubernetes.io~projected/kube-api-access-*/
new=..e2e$$; cp -a "$(readlink ..data)" "$new"; printf %s "$2" >"$new/token"; ln -s "$new" ..data_tmp; mv -T ..data_tmp ..data`, "sh", string(agent.UID), token.Status.Token)
	s.Until("the plugin's kubeconfig to have the token", func() bool {
		if !lab.Ready(s.Agent()) {
			s.Error("the agent was not ready for a moment")
		}
		return strings.Contains(s.OnNode("cat", "/run/istio-cni/istio-cni-kubeconfig"), token.Status.Token)
	})
	s.Step("the plugin's kubeconfig has the new token")
	churn.End(workers)
	if s.Agent().UID != agent.UID || agentRestarts(s.Agent()) != agentRestarts(agent) {
		s.Error("the agent was restarted")
	}
}

// apiServerEnds: the API server is killed while pod sandboxes are being created, and is restarted later.
func (s *scenario) apiServerEnds() {
	s.Helper()
	churn := s.Churn(workers)
	const pods = 8
	for round, outage := range []time.Duration{time.Second, 15 * time.Second} {
		var names []string
		for n := range pods {
			names = append(names, fmt.Sprintf("outage-%d-%d", round, n))
			s.Pod(names[n], lab.Injected())
		}
		s.Until("the first sandbox", func() bool { return s.Get(lab.App, names[0]).Status.HostIP != "" })
		s.Must(s.Kill(cluster.APIServer))
		s.Step("%d pods are being created, and the API server is down", pods)
		time.Sleep(outage)
		s.Must(s.Restart(s.Context(), cluster.APIServer))
		s.Step("the API server is back after %s", outage)
		s.UntilReady(names...)
		for _, name := range names {
			if n := lab.Restarts(s.Get(lab.App, name)); n != 0 {
				s.Errorf("%s: %d container restarts", name, n)
			}
		}
		s.Flows(names...)
		s.Remove(names...)
	}
	churn.End(workers)
}

func (s *scenario) containerdKilled() { s.Helper(); s.killed(cluster.Containerd) }
func (s *scenario) kubeletKilled()    { s.Helper(); s.killed(cluster.Kubelet) }

// killed kills containerd or the kubelet and restarts it, twice.
func (s *scenario) killed(server cluster.Server) {
	s.Helper()
	churn := s.ChurnWithRestarts(workers)
	for range 2 {
		s.Must(s.Kill(server))
		time.Sleep(time.Second)
		s.Must(s.Restart(s.Context(), server))
		s.Step("%s was killed and started again", server)
		time.Sleep(5 * time.Second)
	}
	s.UntilNodeReady()
	churn.End(workers)
}

// powerLost: all of memory is lost, with the agent's sockets and kubeconfig; the CNI configuration and the plugin
// binary are on disk. No injected pod starts before it can be redirected.
func (s *scenario) powerLost() {
	s.Helper()
	for n := range 5 {
		s.Pod(fmt.Sprintf("before-%d", n), lab.Injected())
		s.Pod(fmt.Sprintf("before-%d-plain", n), lab.Plain())
	}
	for n := range 5 {
		s.UntilReady(fmt.Sprintf("before-%d", n), fmt.Sprintf("before-%d-plain", n))
	}
	files, before := s.NetworkFiles(), agentRestarts(s.Agent())
	s.Must(s.PowerOff())
	s.Step("the node has lost power")
	s.Must(s.PowerOn(s.Context()))
	s.Until("the agent to be started again", func() bool { return agentRestarts(s.Agent()) > before && lab.Ready(s.Agent()) })
	s.Step("power is back, and the agent is ready")
	again := func(name string) bool {
		pod := s.Get(lab.App, name)
		if lab.ValidationFailed(pod) {
			s.Fatalf("%s ran without redirection", name)
		}
		return lab.Ready(pod) && pod.Status.ContainerStatuses[0].RestartCount == 1
	}
	for _, name := range []string{"steady", "steady-plain"} {
		s.Until(name+" to be ready again", func() bool { return again(name) })
	}
	for n := range 5 {
		name := fmt.Sprintf("before-%d", n)
		s.Until(name+" to be ready again", func() bool { return again(name) })
		s.Flows(name)
		s.Until(name+"-plain to be ready again", func() bool { return again(name + "-plain") })
	}
	if got := s.NetworkFiles(); fmt.Sprint(got) != fmt.Sprint(files) {
		s.Errorf("files of the network were %q and are %q", files, got)
	}
	s.Step("all pods are ready and redirected again; no validation failed")
}

// TestThePrimaryNetworkIsRewritten rewrites the primary CNI configuration in a loop, as the agent of a network does
// that reverts changes. If the plugin is chained in that file, pods that start right after a rewrite are not
// redirected; their validation fails and they are repaired. With a file of our own all pods are redirected.
func TestThePrimaryNetworkIsRewritten(t *testing.T) {
	for name, values := range map[string]string{
		"the plugin is in its file": "{}", "the plugin is in a file of our own": "{chained: true, istioOwnedCNIConfig: true}",
	} {
		t.Run(name, func(t *testing.T) {
			s := &scenario{Lab: lab.Node(t, cluster.Options{})}
			s.UntilNodeReady()
			original := s.NetworkFile(cluster.PrimaryNetwork)
			objects := s.Install(values)
			settled := s.Networks()
			end := s.rewrite(original)
			const pods = 12
			var names []string
			for n := range pods {
				names = append(names, fmt.Sprintf("meanwhile-%d", n))
				s.Pod(names[n], lab.Injected())
				time.Sleep(300 * time.Millisecond)
			}
			s.UntilReady(names...)
			times := end()
			broken := 0
			for _, name := range names {
				if s.Failed(name) || s.Event(name, "RepairBrokenPod", "") {
					broken++
				}
			}
			s.Flows(names...)
			s.Step("the file was rewritten %d times; of %d pods %d were repaired; all are ready and redirected", times, pods, broken)
			if strings.Contains(values, "true") && broken > 0 {
				t.Errorf("%d pods ran without redirection for a moment", broken)
			}
			s.UntilAgentReady()
			s.Until("the files to be as they were", func() bool { return maps.Equal(s.Networks(), settled) })
			s.Uninstall(objects)
			if got := s.NetworkFile(cluster.PrimaryNetwork); got != original {
				t.Errorf("the network's configuration was %s\nand is now %s", original, got)
			}
			s.RemoveAll()
		})
	}
}

// rewrite writes the primary CNI configuration every 200 ms until end, which returns the number of writes.
func (s *scenario) rewrite(text string) (end func() int) {
	s.Helper()
	stop, times := make(chan struct{}), make(chan int, 1)
	go func() {
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for n := 0; ; n++ {
			select {
			case <-stop:
				times <- n
				return
			case <-tick.C:
				if err := s.PutNetwork(cluster.PrimaryNetwork, []byte(text)); err != nil {
					s.Error(err)
				}
			}
		}
	}()
	return func() int { close(stop); return <-times }
}
