// Package scale creates many pods at once on a node, with the plugin in the chain and without it.
//
// Times are measured and printed and never asserted, as machines differ and may be busy. The test asserts that all pods become
// ready, that they are redirected from their start if the plugin is in the chain, and the number of requests.
//
// Start reading at TestAHundredPods.
package scale

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(m.Run())
}

const pods = 100

// rounds returns SCALE_ROUNDS, by default 1. A round takes two to four minutes.
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

type scenario struct{ *lab.Lab }

// TestAHundredPods starts the same pods without and with the plugin, alternately on one node.
func TestAHundredPods(t *testing.T) {
	s := &scenario{Lab: lab.Node(t, cluster.Options{})}
	s.UntilNodeReady()
	s.together("warm", 10)
	for round := range rounds(t) {
		without := s.together(fmt.Sprintf("without-%d", round), pods)
		s.Step("without the plugin: %d pods are ready after %s", pods, rounded(without))

		objects := s.Install("{}")
		requests := s.podRequests()
		with := s.together(fmt.Sprintf("with-%d", round), pods)
		s.Step("with the plugin:    %d pods are ready after %s, %.2f x", pods, rounded(with), with.Seconds()/without.Seconds())
		s.share(s.podRequests()-requests, with)
		s.Uninstall(objects)
	}
}

func rounded(d time.Duration) time.Duration { return d.Round(10 * time.Millisecond) }

// together creates pods at once, waits until all are ready, deletes them, and returns the time until the last one was
// ready.
func (s *scenario) together(prefix string, n int) time.Duration {
	s.Helper()
	began := time.Now()
	for i := range n {
		template := lab.Injected()
		// The validation fails without the plugin, so the pods of both measurements have none.
		template.Spec.InitContainers = nil
		s.Pod(fmt.Sprintf("%s-%d", prefix, i), template)
	}
	s.Until(fmt.Sprintf("%d pods", n), func() bool { return s.ready() == n })
	took := time.Since(began)
	inMesh := strings.HasPrefix(prefix, "with-")
	for _, name := range []string{prefix + "-0", fmt.Sprintf("%s-%d", prefix, n/2), fmt.Sprintf("%s-%d", prefix, n-1)} {
		want := lab.Untouched
		if inMesh {
			want = lab.Redirected
		}
		if got := s.Flow(name, ""); got != want {
			s.Errorf("%s: traffic by the proxy: %+v, want %+v", name, got, want)
		}
	}
	if inMesh {
		s.reported(prefix, n)
	}
	s.RemoveAll()
	return took
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

// share prints the duration of the plugin's calls from the agent's histograms.
func (s *scenario) share(requests int, took time.Duration) {
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
	s.Step("the plugin's share: %.2f s in all, spread over %s and %d cores; %d requests about these pods", total.sum, rounded(took), runtime.NumCPU(), requests)
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
