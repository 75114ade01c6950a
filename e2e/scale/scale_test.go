// Package scale creates many pods at once on a node: without a plugin, with this one, and with the reference's agent and plugin.
//
// Times and CPU are measured and printed and never asserted, because machines differ and may be busy. The test asserts that all pods
// become ready, that they are redirected from their start if a plugin is in the chain, and the number of requests.
//
// Start reading at TestAHundredPods; usage_test.go has the CPU time of the agent and of the runtime's plugins.
package scale

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(m.Run())
}

const pods = 100

// rounds returns SCALE_ROUNDS, by default 1. A round takes three to six minutes.
func rounds(t *testing.T) int {
	t.Helper()
	text := os.Getenv("SCALE_ROUNDS")
	if text == "" {
		return 1
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("SCALE_ROUNDS=%q: want a positive number", text)
	}
	return n
}

type scenario struct {
	*lab.Lab

	reference artifacts.Reference
}

// kind is what is in the chain of CNI plugins.
type kind string

const (
	none      kind = "none"
	ours      kind = "ours"
	reference kind = "reference"
)

// TestAHundredPods starts the same pods without a plugin, with this one and with the reference, by turns on one node.
func TestAHundredPods(t *testing.T) {
	found, err := artifacts.FindReference()
	if err != nil {
		t.Fatal(err)
	}
	s := &scenario{lab.Node(t, cluster.Options{Images: []string{found.Image}, BinDir: meteredPlugins}), found}
	s.meter()
	s.UntilNodeReady()
	s.sizes()
	// As many pods as in a turn: each turn begins while the node still removes what the last one left.
	s.together(none, "warm", pods)
	all := map[kind][]result{}
	for round := range rounds(t) {
		// Each kind is first in one of three rounds.
		turns := []kind{none, ours, reference}
		for i := range turns {
			k := turns[(round+i)%len(turns)]
			all[k] = append(all[k], s.turn(k, round))
		}
		s.compare(all, round)
	}
}

// sizes prints the sizes of the programs that an agent's image has, and puts on a node.
func (s *scenario) sizes() {
	s.Helper()
	size := func(path string) float64 {
		info, err := os.Stat(path)
		s.Must(err)
		return float64(info.Size()) / 1e6
	}
	s.Step("programs: ours %.1f MB; the reference's agent %.1f MB, plugin %.1f MB", size(s.IstioCNI),
		size(filepath.Join(filepath.Dir(s.reference.IstioCNI), "install-cni")), size(s.reference.IstioCNI))
}

// turn installs a kind, starts the pods and removes both.
func (s *scenario) turn(k kind, round int) result {
	s.Helper()
	prefix := fmt.Sprintf("%s-%d", k, round)
	switch k {
	case ours:
		objects := s.Install("cniBinDir: " + pluginDir)
		defer s.Uninstall(objects)
		r := s.together(k, prefix, pods)
		s.phases(r.requests)
		return r
	case reference:
		objects := s.InstallChart(s.reference.Chart, "global: {hub: localhost/reference, tag: e2e}")
		defer s.Uninstall(objects)
	case none:
	}
	return s.together(k, prefix, pods)
}

// result is what the pods of a turn took until all were ready, and the requests about single ones until then.
type result struct {
	wall     time.Duration
	requests int
	usage
}

// compare prints a round: times and the CPU time of the whole node, also as multiples of the same without a plugin, and of each
// pod the CPU time of the plugin's ADD, its duration, and the CPU time of the agent.
func (s *scenario) compare(all map[kind][]result, round int) {
	s.Helper()
	base := all[none][round]
	perPod := func(d time.Duration) float64 { return 1000 * d.Seconds() / pods }
	for _, k := range []kind{none, ours, reference} {
		r := all[k][round]
		s.Step("round %d, %-10s %d pods are ready after %6.2f s, %.2f x; CPU time of the node %6.2f s, %.2f x; a pod: plugin %.1f ms in %.1f, agent %.1f ms; the agent's memory %.1f MiB, %.1f its own; %d requests for single pods",
			round, string(k)+":", pods, r.wall.Seconds(), r.wall.Seconds()/base.wall.Seconds(),
			r.node.Seconds(), r.node.Seconds()/base.node.Seconds(), perPod(r.plugin), perPod(r.call), perPod(r.agent), float64(r.resident)/1024, float64(r.own)/1024, r.requests)
	}
}

// together creates pods at once, waits until all are ready, deletes them, and returns what they took until the last one was
// ready.
func (s *scenario) together(k kind, prefix string, n int) result {
	s.Helper()
	before, requests := s.usage(), s.podRequests()
	began := time.Now()
	for i := range n {
		template := lab.Injected()
		// The validation fails without a plugin, so no pod has one.
		template.Spec.InitContainers = nil
		s.Pod(fmt.Sprintf("%s-%d", prefix, i), template)
	}
	const steps = 4 // each within the limit of Until: the machine may be busy
	for step := 1; step <= steps; step++ {
		s.Until(fmt.Sprintf("%d pods", n*step/steps), func() bool { return s.ready() >= n*step/steps })
	}
	r := result{wall: time.Since(began), usage: s.usage().minus(before)}
	r.requests = s.podRequests() - requests
	want := lab.Redirected
	if k == none {
		want = lab.Untouched
	}
	for _, name := range []string{prefix + "-0", fmt.Sprintf("%s-%d", prefix, n/2), fmt.Sprintf("%s-%d", prefix, n-1)} {
		if got := s.Flow(name, ""); got != want {
			s.Errorf("%s: traffic by the proxy: %+v, want %+v", name, got, want)
		}
	}
	if k != none && r.calls < n {
		s.Errorf("%d calls of the plugin, for %d pods", r.calls, n)
	}
	if k == ours {
		s.reported(prefix, n)
	}
	s.RemoveAll()
	return r
}

// reported checks that the agent has a decision for each pod: the plugin writes its report to a socket and does not
// wait for the agent. For a pod without a decision the failure has its flow.
func (s *scenario) reported(prefix string, n int) {
	s.Helper()
	known := map[string]bool{}
	for _, d := range s.Decisions("/" + prefix) {
		known[d.Pod] = true
	}
	for i := range n {
		name := fmt.Sprintf("%s-%d", prefix, i)
		if !known[name] {
			s.Errorf("the agent has no decision for %s; its traffic by the proxy is %+v", name, s.Flow(name, ""))
		}
	}
}

// ready counts the ready pods in namespace App.
func (s *scenario) ready() (n int) {
	s.Helper()
	all, err := s.Client().CoreV1().Pods(lab.App).List(s.Context(), meta.ListOptions{ResourceVersion: "0"})
	s.Must(err)
	for i := range all.Items {
		if lab.Ready(&all.Items[i]) {
			n++
		}
	}
	return n
}

// podRequests counts the GET requests of the plugin and the agent for single pods in namespace App.
func (s *scenario) podRequests() (n int) {
	s.Helper()
	requests, err := s.Requests(lab.Mesh, "istio-cni")
	s.Must(err)
	for _, r := range requests {
		if r.Resource == "pods" && r.Namespace == lab.App && r.Verb == "get" {
			n++
		}
	}
	return n
}

// phases prints the duration of the plugin's calls from the agent's histograms.
func (s *scenario) phases(requests int) {
	s.Helper()
	text := s.OnNode(s.Box, "get", "http://"+s.Agent().Status.PodIP+":15014/metrics")
	var total sample
	for _, phase := range []string{"read", "decide", "program", "total"} {
		one := histogram(text, phase)
		s.Step("the plugin, phase %-8s %4.0f calls, %6.2f ms each", phase+":", one.count, 1000*one.sum/one.count)
		total = one
	}
	if total.count < pods {
		s.Errorf("the agent's histogram has %v calls of the plugin, for %d pods", total.count, pods)
	}
	// The plugin waits at most 250 ms for the agent and then asks the API server itself.
	if requests > pods {
		s.Errorf("%d requests for %d pods", requests, pods)
	}
}

// sample is the sum and the count of a histogram.
type sample struct{ sum, count float64 }

// histogram reads one phase of istio_cni_add_duration_seconds.
func histogram(text, phase string) (h sample) {
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		name, value, found := strings.Cut(lines.Text(), "} ")
		if !found || !strings.Contains(name, `phase="`+phase+`"`) {
			continue
		}
		number, err := strconv.ParseFloat(value, 64)
		if err != nil {
			continue
		}
		switch {
		case strings.HasPrefix(name, "istio_cni_add_duration_seconds_sum"):
			h.sum += number
		case strings.HasPrefix(name, "istio_cni_add_duration_seconds_count"):
			h.count += number
		}
	}
	return h
}
