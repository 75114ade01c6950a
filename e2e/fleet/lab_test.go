package fleet

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// scenario is the fixture of one test.
type scenario struct{ *lab.Lab }

func newScenario(t *testing.T) *scenario {
	t.Helper()
	return &scenario{Lab: lab.Node(t, cluster.Options{})}
}

// subtest runs a part of the scenario as a subtest.
func (s *scenario) subtest(name string, run func(*scenario)) {
	s.Helper()
	s.Run(name, func(t *testing.T) { t.Helper(); run(&scenario{Lab: s.With(t)}) })
}

// plugin runs "kubectl istio-cni".
func (s *scenario) plugin(args ...string) lab.Result {
	s.Helper()
	return s.Kubectl(append([]string{"istio-cni"}, args...)...)
}

// want runs the plugin and compares the exit code and parts of the outputs.
func (s *scenario) want(code int, stdout, stderr string, args ...string) lab.Result {
	s.Helper()
	r := s.plugin(args...)
	if r.Code != code || !strings.Contains(r.Stdout, stdout) || !strings.Contains(r.Stderr, stderr) {
		s.Errorf("%q: want exit code %d, stdout %q, stderr %q: %s", args, code, stdout, stderr, r)
	}
	return r
}

// status is a pod in the answer to "kubectl istio-cni pods".
type status struct {
	Node, Pod, State, Backend string
	Problems                  []struct{ Detail string }
	Exceptions                []struct{ Setting string }
}

// pods are the pods of namespace App by name.
func (s *scenario) pods(flags ...string) map[string]status {
	s.Helper()
	r := s.plugin(append([]string{"pods", "-n", lab.App, "-o", "json"}, flags...)...)
	if r.Code != 0 && r.Code != 3 {
		s.Fatal(r)
	}
	var all struct {
		Kind  string
		Nodes []struct{ Name, Agent, Error string }
		Items []status
	}
	s.Must(json.Unmarshal([]byte(r.Stdout), &all))
	if all.Kind != "PodList" || len(all.Nodes) != 1 || all.Nodes[0].Name != cluster.NodeName || !strings.HasPrefix(all.Nodes[0].Agent, lab.Mesh+"/") || all.Nodes[0].Error != "" {
		s.Errorf("%s of nodes %+v", all.Kind, all.Nodes)
	}
	pods := map[string]status{}
	for _, p := range all.Items {
		pods[p.Pod] = p
	}
	return pods
}

// untilStates waits until the audit has found the states of pods.
func (s *scenario) untilStates(want map[string]string, flags ...string) {
	s.Helper()
	var last map[string]status
	defer func() {
		if s.T.Failed() {
			s.Logf("the states are %v", last)
		}
	}()
	s.Until(fmt.Sprintf("the states %v", want), func() bool {
		last = s.pods(flags...)
		for name, state := range want {
			if last[name].State != state {
				return false
			}
		}
		return true
	})
}

// metric reports whether the agent has a metric with this value.
func (s *scenario) metric(series, value string) bool {
	s.Helper()
	r := s.Kubectl("get", "--raw", "/api/v1/namespaces/"+lab.Mesh+"/pods/"+s.Agent().Name+":15014/proxy/metrics")
	if r.Code != 0 {
		s.Fatal(r)
	}
	return strings.Contains(r.Stdout, "\n"+series+" "+value+"\n")
}

// inPod runs a shell script on the node, in the network namespace of a pod; $n is the namespace's name.
func (s *scenario) inPod(pod, script string) string {
	s.Helper()
	const find = `for n in $(ls /run/netns); do
  if nsenter --net=/run/netns/$n ip -o addr | grep -qF " $1/"; then export n; exec nsenter --net=/run/netns/$n sh -euc "$2"; fi
done; echo "no namespace has $1" >&2; exit 1`
	return s.OnNode("sh", "-c", find, "sh", s.Get(lab.App, pod).Status.PodIP, script)
}
