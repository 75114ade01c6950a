package plugin_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

// mostMemory is the bound in docs/parity.md for a call about the heaviest possible pod, in kB.
const mostMemory = 100 << 10

// list gives that many entries, in the one order or the other.
func list(n int, backwards bool, entry func(int) string) string {
	all := make([]string, n)
	for i := range all {
		at := i
		if backwards {
			at = n - 1 - i
		}
		all[at] = entry(i)
	}
	return strings.Join(all, ",")
}

// heaviest is a pod whose annotations have as many entries as they may have, and whose proxy has every switch on.
func heaviest(mode string, ipv6, backwards bool) func(*kubetest.Pod) {
	port := func(i int) string { return strconv.Itoa(10000 + i) }
	network := func(first int) func(int) string {
		return func(i int) string {
			if ipv6 {
				return fmt.Sprintf("fd%02x:1234:5678:9abc:def0:1234:%x:0/112", first, i)
			}
			return fmt.Sprintf("110.%d.%d.%d/32", first, i/256, i%256)
		}
	}
	link := func(kind string) func(int) string {
		return func(i int) string { return fmt.Sprintf("interface-%s%03d", kind, i) }
	}
	return func(p *kubetest.Pod) {
		chaintest.Sidecar(p)
		maps.Copy(p.Annotations, map[string]string{
			sidecar.ModeKey:                 mode,
			sidecar.OutboundKey:             list(1000, backwards, network(1)),
			sidecar.OutboundExcludeKey:      list(1000, backwards, network(2)),
			sidecar.InboundPortsKey:         map[string]string{"REDIRECT": "*", "TPROXY": list(1000, backwards, port)}[mode],
			sidecar.InboundPortsExcludeKey:  list(1000, backwards, port),
			sidecar.OutboundPortsKey:        list(1000, backwards, port),
			sidecar.OutboundPortsExcludeKey: list(1000, backwards, port),
			sidecar.ExcludeInterfacesKey:    list(100, backwards, link("x")),
			sidecar.RerouteInterfacesKey:    list(8, backwards, link("v")),
		})
		for _, name := range []string{"ISTIO_META_DNS_CAPTURE", "ISTIO_DUAL_STACK", "INVALID_DROP"} {
			p.Containers[1].Env = append(p.Containers[1].Env, kubetest.EnvVar{Name: name, Value: "true"})
		}
	}
}

// TestAdd_HeaviestPod holds each call about a pod whose annotations are all at their bounds to the memory that is promised:
// for a new pod, for one that has its rules, and for one whose rules are all others.
func TestAdd_HeaviestPod(t *testing.T) {
	for name, stanza := range backends() {
		for _, mode := range []string{"REDIRECT", "TPROXY"} {
			for _, ipv6 := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s %s IPv6 %t", name, mode, ipv6), func(t *testing.T) {
					t.Parallel() // whichever of agent and API server answers: memory is all that is measured
					s := newFixture(t, true, "shop", heaviest(mode, ipv6, true), stanza)
					for _, step := range []struct {
						command   string
						backwards bool
					}{{"ADD", true}, {"ADD", true}, {"CHECK", true}, {"ADD", false}, {"CHECK", false}} {
						s.describe(heaviest(mode, ipv6, step.backwards))
						r, stdout := s.node.Traced(step.command, s.pod, s.input)
						t.Logf("%s, backwards %t: %d MB", step.command, step.backwards, r.Memory>>10)
						if r.Status.ExitStatus() != 0 || r.Memory == 0 || r.Memory > mostMemory {
							t.Errorf("%s, backwards %t: %v, %d kB: %s", step.command, step.backwards, r.Status, r.Memory, stdout)
						}
					}
				})
			}
		}
	}
}

// TestAdd_TooLongList: nothing is done, and the answer is short and names all that is wrong.
func TestAdd_TooLongList(t *testing.T) {
	s := newFixture(t, true, "shop", func(p *kubetest.Pod) {
		chaintest.Sidecar(p)
		p.Annotations[sidecar.InboundPortsExcludeKey] = list(12000, false, func(i int) string { return strconv.Itoa(10000 + i) })
		p.Annotations[sidecar.OutboundKey] = "10.0.0.999"
	}, nil)
	for _, command := range []string{"ADD", "CHECK"} {
		r, stdout := s.node.Traced(command, s.pod, s.input)
		var answer struct {
			Code         int
			Msg, Details string
		}
		if err := json.Unmarshal(stdout, &answer); err != nil || answer.Code != 100 || r.Status.ExitStatus() != 1 || len(stdout) > 1<<10 {
			t.Errorf("%s: %v, %v, %d bytes: %.1000s", command, err, r.Status, len(stdout), stdout)
		}
		for _, part := range []string{
			"refuses pod shop/web", sidecar.InboundPortsExcludeKey, "lists 12000 entries, more than 1000", sidecar.OutboundKey, "10.0.0.999",
		} {
			if !strings.Contains(answer.Msg+answer.Details, part) {
				t.Errorf("%s: no %q in %.1000s", command, part, stdout)
			}
		}
		if r.Memory > mostMemory/2 || len(changes(r)) > 0 {
			t.Errorf("%s: %d kB, %d changes", command, r.Memory, len(changes(r)))
		}
	}
}
