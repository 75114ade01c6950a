package plugin_test

import (
	"bytes"
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

// TestReport_EveryCall: whatever a pod's author or a runtime writes where the plugin quotes it, the agent gets the report, and
// report, log and the runtime's error are bounded and printable.
func TestReport_EveryCall(t *testing.T) {
	t.Parallel()
	const terminal = "\x1b[2J\u009b2J\x7f\u202e\u200b\n"
	annotated := func(value string) func(*kubetest.Pod) {
		return func(p *kubetest.Pod) {
			chaintest.Sidecar(p)
			p.Annotations["traffic.sidecar.istio.io/excludeInboundPorts"] = value
		}
	}
	for _, test := range []struct {
		name     string
		describe func(*kubetest.Pod)
		extra    []string
		reason   string
		fails    bool
	}{
		{"an annotation that is refused", annotated(strings.Repeat("<"+terminal, 10_000)), nil, "invalid-settings", true},
		{"an argument of a container", func(p *kubetest.Pod) {
			chaintest.Sidecar(p)
			for i := range p.Containers {
				if p.Containers[i].Name == "istio-proxy" {
					p.Containers[i].Args = []string{"proxy", strings.Repeat("r", 1_400_000) + terminal}
				}
			}
		}, nil, "not-sidecar", false},
		// The sandbox has no address: the call fails after the decision.
		{"a sandbox's name", chaintest.Sidecar, []string{"CNI_CONTAINERID=" + strings.Repeat("c", 120_000)}, "captured", true},
		{"arguments of the runtime", chaintest.Sidecar, []string{"CNI_ARGS=" + strings.Repeat("a"+terminal, 5000)}, "", true},
		{"a name", chaintest.Sidecar, []string{"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_UID=u;K8S_POD_NAME=" + strings.Repeat(terminal, 5000)}, "", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			n := chaintest.New(t, chaintest.Program(t))
			var log bytes.Buffer
			n.Log = &log
			a := serveAgent(t, n)
			// On a busy machine the agent may not answer in time; the plugin then queries the API server.
			pod := n.NewPod("shop", "web", test.describe)
			a.knows(pod, test.describe)
			out, err := n.Ours(n.Chain("1.0.0", longTimeout()), pod, nil, test.extra...)
			if (err != nil) != test.fails {
				t.Errorf("%v, %.500s", err, out)
			}
			var answer struct{ Msg, Details string }
			if err := json.Unmarshal(out, &answer); err != nil {
				t.Errorf("%v, %.500s", err, out)
			}
			a.settle(t)
			latest := a.ring.Page(math.MaxUint64, 512)
			if len(latest) != 1 {
				t.Fatalf("%d reports", len(latest))
			}
			r := latest[0]
			if r.Reason != test.reason || (r.Error != "") != test.fails || len(r.Container) > 253 || len(r.Detail) > 1<<10 || len(r.Error) > 4<<10 {
				t.Errorf("reported %+v", r)
			}
			if len(answer.Msg) > 4<<10 || len(answer.Details) > 4<<10 {
				t.Errorf("an error of %d and %d bytes", len(answer.Msg), len(answer.Details))
			}
			all := r.Namespace + r.Pod + r.UID + r.Container + r.Detail + r.Error + answer.Msg + answer.Details + strings.ReplaceAll(log.String(), "\n", "")
			if strings.ContainsFunc(all, func(c rune) bool { return !printable.Is(c) }) {
				t.Errorf("not printable: %q", all)
			}
			if log.Len() > 64<<10 {
				t.Errorf("a log of %d bytes", log.Len())
			}
		})
	}
}
