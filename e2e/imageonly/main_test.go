// Package imageonly installs this program's image by Istio's own chart and by istioctl, which are unchanged: only hub, tag and
// image are ours. The commands are from docs/install.md.
//
// Each test starts one node. Its steps follow each other, and each installation ends with the node's CNI configuration byte for
// byte as it was before. The agents' logs and the API server's audit log are checked in each step: what that chart's rights do
// not allow is logged once, below the level of a warning, and not requested again and again.
//
// Start reading at TestChart; main_test.go has the helpers.
package imageonly

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(documented.Main(m))
}

// documented are the commands of docs/install.md.
var documented = lab.Commands("e2e/imageonly")

const container = "install-cni"

// scenario is the state that one step leaves to the next.
type scenario struct {
	*lab.Beside

	// networks are the files of the node's CNI configuration before the first installation.
	// network is the primary one of them.
	networks map[string]string
	network  lab.NetworkList
	// rules has each pod's rules at its start.
	rules map[string]string
	// seen is the number of requests of agents before the last two of the current step started, or the only one.
	seen int
}

// step is a subtest.
type step struct {
	name string
	run  func(*scenario)
}

// run starts a node and runs the steps on it.
func run(t *testing.T, steps ...step) {
	t.Helper()
	s := &scenario{Beside: lab.NodeBeside(t, cluster.Options{}), rules: map[string]string{}}
	s.networks, s.network = s.Networks(), s.Network()
	for _, step := range steps {
		s.Stage(step.name, func(t *testing.T) {
			here := *s
			here.Beside = s.With(t)
			here.seen = len(here.requests())
			step.run(&here)
		})
	}
}

// documented runs the command of docs/install.md that has all these words, on this test's files, with more arguments.
func (s *scenario) documented(words []string, more ...string) {
	s.Helper()
	here := strings.NewReplacer(
		"istio/cni", s.Reference.Chart, "-n istio-system", "", "$HUB", lab.OursHub, "$TAG", lab.OursTag,
		// profile=empty is the agent alone: istiod has no image here.
		"profile=default", "profile=empty",
	).Replace(documented.Find(s.Test, words...))
	program, args := strings.Fields(here)[0], append(strings.Fields(here)[1:], more...)
	switch program {
	case "helm":
		s.Helm(args...)
	case "istioctl":
		s.istioctl(args...)
	case "kubectl":
		if r := s.Kubectl(append(args, "--namespace="+lab.Mesh)...); r.Code != 0 {
			s.Fatal(r)
		}
	default:
		s.Fatalf("the command is %q", here)
	}
}

// install installs Istio's own chart with our image.
func (s *scenario) install(values ...string) {
	s.Helper()
	s.documented([]string{"helm", "install"}, values...)
}

// change upgrades the release to other values.
func (s *scenario) change(values ...string) {
	s.Helper()
	s.Helm(append([]string{"upgrade", lab.Release, s.Reference.Chart, "--reuse-values"}, values...)...)
}

// uninstall uninstalls the release and checks that the node is as it was.
func (s *scenario) uninstall() {
	s.Helper()
	s.documented([]string{"helm", "uninstall"})
	s.untilAsBefore()
}

// untilGone waits until the agent's pod is gone.
func (s *scenario) untilGone() {
	s.Helper()
	s.Until("the agent to go", func() bool {
		agents, err := s.Client().CoreV1().Pods(lab.Mesh).List(s.Context(), meta.ListOptions{})
		return err == nil && len(agents.Items) == 0
	})
}

// untilAsBefore waits until the agent's pod is gone and checks that its files are, too.
func (s *scenario) untilAsBefore() {
	s.Helper()
	s.untilGone()
	if have := s.Networks(); !maps.Equal(have, s.networks) {
		s.Errorf("the node's CNI configuration was\n%q\nand is now\n%q", s.networks, have)
	}
	if text, err := os.ReadFile(s.NodeFile("/var/run/istio-cni/istio-cni-kubeconfig")); err == nil {
		s.Errorf("the plugin's kubeconfig is still there: %d bytes", len(text))
	}
	s.Step("/opt/cni/bin has %q, /var/run/istio-cni has %q", s.Files("/opt/cni/bin"), s.Files("/var/run/istio-cni"))
}

// captured creates pods and checks that they are redirected from their start.
func (s *scenario) captured(names ...string) {
	s.Helper()
	s.Pods(names...)
	s.Flows(names...)
	for _, name := range names {
		if n := lab.Restarts(s.Get(lab.App, name)); n != 0 {
			s.Errorf("%s: %d restarts", name, n)
		}
		s.rules[name] = s.Rules(name)
	}
}

// unchanged checks that running pods kept their rules and containers.
func (s *scenario) unchanged(names ...string) {
	s.Helper()
	s.Flows(names...)
	for _, name := range names {
		if have := s.Rules(name); have != s.rules[name] {
			s.Errorf("%s had rules\n%s\nand has now\n%s", name, s.rules[name], have)
		}
		if n := lab.Restarts(s.Get(lab.App, name)); n != 0 {
			s.Errorf("%s: %d restarts", name, n)
		}
	}
}

// withoutGap checks that the stanza is in the node's configuration at all times while do runs.
func (s *scenario) withoutGap(do func()) {
	s.Helper()
	path := filepath.Clean(s.NodeFile("/etc/cni/net.d/10-e2e.conflist"))
	end, ended := make(chan struct{}), make(chan int)
	go func() {
		missing := 0
		for {
			select {
			case <-end:
				ended <- missing
				return
			case <-time.After(10 * time.Millisecond):
			}
			if text, err := os.ReadFile(path); err == nil && !bytes.Contains(text, []byte(`"istio-cni"`)) {
				missing++
			}
		}
	}()
	do()
	close(end)
	if missing := <-ended; missing > 0 {
		s.Errorf("the stanza was missing %d times", missing)
	}
}

// broken creates an injected pod without an agent and waits until its validation has failed.
func (s *scenario) broken(name string) {
	s.Helper()
	s.Pod(name, lab.Injected())
	s.Until("the validation to fail", func() bool { return s.Failed(name) })
}

// log returns the log of the agent.
func (s *scenario) log() string {
	s.Helper()
	return s.Output(lab.Mesh, s.Agent().Name, container, false)
}

// warning is the level of a record, as text or JSON.
var warning = regexp.MustCompile(`level(=|":")(WARN|ERROR)`)

// audited is what the agent says of a pod that race repair does not redirect, if the audit looks at it before it is gone.
const audited = "the audit found a problem"

// quiet checks that the log of the agent has no warning except for those that contain one of the texts, and that no refused
// request was repeated: each of two agents, one after the other, may ask once.
func (s *scenario) quiet(expected ...string) {
	s.Helper()
	text := s.log()
	said := map[string]int{}
	for line := range strings.Lines(text) {
		if !warning.MatchString(line) {
			continue
		}
		if !slices.ContainsFunc(expected, func(text string) bool { return strings.Contains(line, text) }) {
			s.Errorf("the agent logged: %s", line)
		}
		message := line[warning.FindStringIndex(line)[1]:]
		if said[message]++; said[message] == 2 {
			s.Errorf("the agent logged more than once: %s", line)
		}
	}
	s.Step("the log of the agent:\n%s", text)
	refused := map[string]int{}
	for _, r := range s.requests()[s.seen:] {
		if r.Status == 401 || r.Status == 403 {
			refused[fmt.Sprintf("%s %s %s: %d", r.Verb, r.Resource, r.Name, r.Status)]++
		}
	}
	s.Step("refused requests: %v", refused)
	for request, n := range refused {
		if n > 2 {
			s.Errorf("%d times: %s", n, request)
		}
	}
}

// requests returns the requests of the agents and plugins so far.
func (s *scenario) requests() []cluster.Request {
	s.Helper()
	all, err := s.Requests(lab.Mesh, "istio-cni")
	s.Must(err)
	return all
}
