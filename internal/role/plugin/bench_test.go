package plugin_test

import (
	"cmp"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// The benchmarks time whole invocations, from process start to exit: the runtime's waiting time and the node's CPU time.
// Each run is paired with a run of a static Go program that does nothing, so that a figure can be given relative to it:
// absolute times change with the machine and its load. With REFERENCE_BIN, the directory of hack/reference.sh, each
// pair has a third run, of Istio's plugin.
//
// The same bytes cost a start up to 1.7 times as much when they came into memory page by page. So each benchmark writes the programs
// again and reports the page faults: figures with different page faults are not comparable. The agent runs in the
// process of the test, so that it does not share the plugin's file.

// floor is the program that does nothing, built once.
func floor(b *testing.B) string {
	b.Helper()
	file := filepath.Join(filepath.Dir(chaintest.Program(b)), "empty")
	if _, err := os.Stat(file); err == nil {
		return file
	}
	return chaintest.BuildPackage(b, file, "github.com/meshcni/istio-cni/hack/bench/empty")
}

// lay writes a copy of a program to a new file.
func lay(b *testing.B, program string) string {
	b.Helper()
	content, err := os.ReadFile(program)
	check.OK(b, err)
	file := filepath.Join(b.TempDir(), filepath.Base(program))
	netnstest.WriteProgram(b, file, content)
	return file
}

// cost is the cost of one process, including its children.
type cost struct {
	cpu, wall time.Duration
	faults    int64
}

// timed runs a command in the node's namespace.
func (s fixture) timed(tb testing.TB, cmd *exec.Cmd) cost {
	tb.Helper()
	var c cost
	if err := netns.Do(s.node.Netns, func() error {
		began := time.Now()
		err := cmd.Run()
		c.wall = time.Since(began)
		return err
	}); err != nil {
		tb.Fatal(err)
	}
	used := cmd.ProcessState.SysUsage().(*syscall.Rusage) //nolint:forcetypeassert // of Linux
	c.cpu, c.faults = cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime(), used.Minflt+used.Majflt
	return c
}

// pairs runs commands, the empty program and, if with is set, Istio's plugin in turn, and reports medians.
func (s fixture) pairs(b *testing.B, with bool, next func(b *testing.B) *exec.Cmd) {
	b.Helper()
	nothing, ours, other := lay(b, floor(b)), lay(b, chaintest.Program(b)), ""
	if dir := os.Getenv("REFERENCE_BIN"); with && dir != "" {
		other = lay(b, filepath.Join(dir, "istio-cni"))
	}
	run := func(program string) cost {
		cmd := next(b)
		cmd.Path = program
		return s.timed(b, cmd)
	}
	run(ours) // the files are in memory from now on
	all := map[string][]float64{}
	for b.Loop() {
		b.StopTimer()
		empty := s.timed(b, exec.CommandContext(b.Context(), nothing))
		var reference cost
		if other != "" {
			reference = run(other)
		}
		cmd := next(b)
		cmd.Path = ours
		b.StartTimer()
		c := s.timed(b, cmd)
		for unit, value := range compared(c, empty, reference) {
			all[unit] = append(all[unit], value)
		}
	}
	for unit, values := range all {
		b.ReportMetric(quantile(values, 0.5), unit)
	}
}

// compared returns the figures of a run by their units.
func compared(c, empty, reference cost) map[string]float64 {
	figures := map[string]float64{
		"cpu-ms": c.cpu.Seconds() * 1000, "faults": float64(c.faults),
		"x-empty-cpu": float64(c.cpu) / float64(empty.cpu), "x-empty-wall": float64(c.wall) / float64(empty.wall),
	}
	if reference.wall > 0 {
		figures["x-reference-cpu"], figures["reference-faults"] = float64(c.cpu)/float64(reference.cpu), float64(reference.faults)
	}
	return figures
}

// quantile returns a value that q of the others do not exceed.
func quantile[T cmp.Ordered](all []T, q float64) T {
	all = slices.Sorted(slices.Values(all))
	return all[min(int(q*float64(len(all))), len(all)-1)]
}

// fresh returns the fixture's pod with a new sandbox.
func (s fixture) fresh(tb testing.TB) chaintest.Pod {
	tb.Helper()
	p := s.pod
	p.Netns = netnstest.New(tb)
	netnstest.Run(tb, p.Netns, "ip", "link", "set", "lo", "up")
	addressed(tb, p)
	return p
}

// ready is a fixture with an agent that also receives the log.
func ready(b *testing.B, withAgent bool, namespace string, describe func(*kubetest.Pod), stanza chaintest.Stanza) fixture {
	b.Helper()
	s := newFixture(b, withAgent, namespace, describe, stanza)
	if !withAgent {
		return s
	}
	serve(b, s.node, logSocket, &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
	})})
	return s
}

// BenchmarkCommand times each command.
func BenchmarkCommand(b *testing.B) {
	excluded := chaintest.Stanza{"exclude_namespaces": []string{"kube-system"}}
	for _, c := range []struct {
		name, command string
		agent         bool
		namespace     string
		describe      func(*kubetest.Pod)
		stanza        chaintest.Stanza
		// again reports that the pod has its rules already, afresh that each run gets a new pod, reference that Istio's
		// plugin is compared.
		again, afresh, reference bool
	}{
		{name: "VERSION", command: "VERSION", describe: chaintest.PlainPod, reference: true},
		{name: "DEL", command: "DEL", describe: chaintest.PlainPod},
		{name: "ADD/excluded", command: "ADD", agent: true, namespace: "kube-system", describe: chaintest.PlainPod, stanza: excluded},
		{name: "ADD/annotations", command: "ADD", agent: true, describe: chaintest.PlainPod, stanza: delivered(`{"a":"b"}`)},
		{name: "ADD/plain-agent", command: "ADD", agent: true, describe: chaintest.PlainPod},
		{name: "ADD/plain-api", command: "ADD", describe: chaintest.PlainPod},
		{name: "ADD/mesh-agent", command: "ADD", agent: true, describe: chaintest.Sidecar, afresh: true, reference: true},
		{name: "ADD/mesh-api", command: "ADD", describe: chaintest.Sidecar, afresh: true, reference: true},
		{name: "ADD/again-agent", command: "ADD", agent: true, describe: chaintest.Sidecar, again: true},
		{name: "CHECK/agent", command: "CHECK", agent: true, describe: chaintest.Sidecar, again: true},
		{name: "CHECK/api", command: "CHECK", describe: chaintest.Sidecar, again: true},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := ready(b, c.agent, cmp.Or(c.namespace, "shop"), c.describe, c.stanza)
			if c.again {
				s.timed(b, s.node.Command("ADD", s.pod, s.input))
			}
			s.pairs(b, c.reference, func(b *testing.B) *exec.Cmd {
				p := s.pod
				if c.afresh {
					p = s.fresh(b)
				}
				return s.node.Command(c.command, p, s.input)
			})
		})
	}
}

func backends() map[string]chaintest.Stanza {
	return map[string]chaintest.Stanza{
		"netlink": {"backend": "netlink"}, "native": {"backend": "native"},
		"iptables-nft":    {"backend": "iptables", "force_iptables_binary": "nft"},
		"iptables-legacy": {"backend": "iptables", "force_iptables_binary": "legacy"},
	}
}

// BenchmarkHundredPods times 100 ADDs, one at a time and eight at a time.
func BenchmarkHundredPods(b *testing.B) {
	for name, withAgent := range map[string]bool{"agent": true, "api": false} {
		b.Run(name, func(b *testing.B) {
			s := ready(b, withAgent, "shop", chaintest.Sidecar, nil)
			all := map[string][]float64{}
			for b.Loop() {
				one, eight := s.hundred(b, 1), s.hundred(b, 8)
				for what := range one {
					all[what+"@1"], all[what+"@8"] = append(all[what+"@1"], one[what]), append(all[what+"@8"], eight[what])
				}
				all["p99@8/p50@1"] = append(all["p99@8/p50@1"], eight["p99-ms"]/one["p50-ms"])
			}
			for what, values := range all {
				b.ReportMetric(quantile(values, 0.5), what)
			}
		})
	}
}

// hundred adds 100 new pods, a number of them at a time.
func (s fixture) hundred(b *testing.B, atOnce int) map[string]float64 {
	b.Helper()
	b.StopTimer()
	pods := make(chan chaintest.Pod, 100)
	for range cap(pods) {
		pods <- s.fresh(b)
	}
	close(pods)
	b.StartTimer()
	var mu sync.Mutex
	var all []float64
	var workers sync.WaitGroup
	began := time.Now()
	for range atOnce {
		workers.Go(func() {
			for p := range pods {
				c := s.timed(b, s.node.Command("ADD", p, s.input))
				mu.Lock()
				all = append(all, c.wall.Seconds()*1000)
				mu.Unlock()
			}
		})
	}
	workers.Wait()
	return map[string]float64{
		"p50-ms": quantile(all, 0.5), "p99-ms": quantile(all, 0.99), "pods/s": float64(len(all)) / time.Since(began).Seconds(),
	}
}
