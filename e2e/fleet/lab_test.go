package fleet

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// scenario is the fixture of one test.
type scenario struct {
	*lab.Lab
	// bin is a directory with kubectl and the plugin.
	bin string
}

func newScenario(t *testing.T) *scenario {
	t.Helper()
	s := &scenario{Lab: lab.Node(t, cluster.Options{}), bin: t.TempDir()}
	s.Must(os.Symlink(s.Kube, filepath.Join(s.bin, "kubectl")))
	s.Must(os.Symlink(s.Kubectl, filepath.Join(s.bin, "kubectl-istio_cni")))
	return s
}

// subtest runs a part of the scenario as a subtest.
func (s *scenario) subtest(name string, run func(*scenario)) {
	s.Helper()
	s.Run(name, func(t *testing.T) { t.Helper(); run(&scenario{Lab: s.With(t), bin: s.bin}) })
}

// result is the end of a program.
type result struct {
	code           int
	stdout, stderr string
}

func (r result) String() string {
	return fmt.Sprintf("exit code %d, stdout:\n%s\nstderr:\n%s", r.code, r.stdout, r.stderr)
}

// kubectl runs kubectl with the administrator's kubeconfig.
func (s *scenario) kubectl(args ...string) result {
	s.Helper()
	var stdout, stderr bytes.Buffer
	command := exec.CommandContext(s.Context(), filepath.Join(s.bin, "kubectl"), args...)
	command.Env = append(os.Environ(), "PATH="+s.bin+":"+os.Getenv("PATH"), "KUBECONFIG="+s.Kubeconfig())
	command.Stdout, command.Stderr = &stdout, &stderr
	err := command.Run()
	var ended *exec.ExitError
	if err != nil && !errors.As(err, &ended) {
		s.Fatal(err)
	}
	return result{command.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// plugin runs "kubectl istio-cni".
func (s *scenario) plugin(args ...string) result {
	s.Helper()
	return s.kubectl(append([]string{"istio-cni"}, args...)...)
}

// want runs the plugin and compares the exit code and parts of the outputs.
func (s *scenario) want(code int, stdout, stderr string, args ...string) result {
	s.Helper()
	r := s.plugin(args...)
	if r.code != code || !strings.Contains(r.stdout, stdout) || !strings.Contains(r.stderr, stderr) {
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
	if r.code != 0 && r.code != 3 {
		s.Fatal(r)
	}
	var all []status
	s.Must(json.Unmarshal([]byte(r.stdout), &all))
	pods := map[string]status{}
	for _, p := range all {
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
	r := s.kubectl("get", "--raw", "/api/v1/namespaces/"+lab.Mesh+"/pods/"+s.Agent().Name+":15014/proxy/metrics")
	if r.code != 0 {
		s.Fatal(r)
	}
	return strings.Contains(r.stdout, "\n"+series+" "+value+"\n")
}

// inPod runs a shell script on the node, in the network namespace of a pod; $n is the namespace's name.
func (s *scenario) inPod(pod, script string) string {
	s.Helper()
	const find = `for n in $(ls /run/netns); do
  if nsenter --net=/run/netns/$n ip -o addr | grep -qF " $1/"; then export n; exec nsenter --net=/run/netns/$n sh -euc "$2"; fi
done; echo "no namespace has $1" >&2; exit 1`
	return s.OnNode("sh", "-c", find, "sh", s.Get(lab.App, pod).Status.PodIP, script)
}
