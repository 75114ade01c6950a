package explain

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// TestReserveTrace_TooMany: concurrent traces are bounded, whatever the number of pods.
func TestReserveTrace_TooMany(t *testing.T) {
	t.Parallel()
	x := New(Options{Present: func(types.NamespacedName, string) bool { return true }})
	for i := range maxTraces + 1 {
		_, err := x.reserveTrace(types.NamespacedName{Name: fmt.Sprint(i)}, &tracing{ended: make(chan struct{})})
		if want := i == maxTraces; errors.Is(err, errTraces) != want {
			t.Errorf("trace %d: %v", i, err)
		}
	}
}

// TestModes: the labels are those that the selectors of the node want.
func TestModes(t *testing.T) {
	t.Parallel()
	const ofChart = `[{"podSelector":{"matchLabels":{"istio.io/dataplane-mode":"ambient"}}},{"podSelector":{"matchExpressions":` +
		`[{"key":"istio.io/dataplane-mode","operator":"NotIn","values":["none"]}]},"namespaceSelector":{"matchLabels":{"istio.io/dataplane-mode":"ambient"}}}]`
	const own = `[{"podSelector":{"matchLabels":{"mesh":"yes"}}}]`
	injected := map[string]string{sidecar.StatusKey: "{}"}
	for name, test := range map[string]struct {
		selectors        string
		facts            sidecar.Facts
		ambient, sidecar string
	}{
		"in neither":       {ofChart, sidecar.Facts{}, "label the pod or its namespace istio.io/dataplane-mode=ambient; the agent enrols", "istio-injection=enabled"},
		"opted out":        {ofChart, sidecar.Facts{Labels: map[string]string{modeKey: "none"}}, "its label istio.io/dataplane-mode=none outweighs", "restart the pod"},
		"other selectors":  {own, sidecar.Facts{}, own, "restart the pod"},
		"no ambient mode":  {"", sidecar.Facts{}, "not on this node", "restart the pod"},
		"a sidecar":        {ofChart, sidecar.Facts{Annotations: injected, Containers: []sidecar.Container{{Name: sidecar.ProxyContainer}}}, "then end the injection", ""},
		"a sidecar alone":  {"", sidecar.Facts{Annotations: injected, Containers: []sidecar.Container{{Name: sidecar.ProxyContainer}}}, "", ""},
		"selected sidecar": {ofChart, sidecar.Facts{Annotations: injected, Containers: []sidecar.Container{{Name: sidecar.ProxyContainer}}, Selected: true}, "it is selected already; then end", ""},
		"in ambient mode":  {ofChart, sidecar.Facts{Selected: true}, "", "istio.io/rev=REVISION"},
	} {
		test.facts.Namespace, test.facts.Name = "shop", "web"
		conf := cniconf.NetConf{AmbientEnabled: test.selectors != "", EnablementSelectors: json.RawMessage(test.selectors)}
		m := modes(sidecar.Decide(test.facts, conf.Policy()), test.facts, conf)
		for got, want := range map[string]string{m.Ambient: test.ambient, m.Sidecar: test.sidecar} {
			if !strings.Contains(got, want) || want == "" && got != "" {
				t.Errorf("%s: %q, want %q", name, got, want)
			}
		}
		test.facts.HostNetwork = true
		if m = modes(sidecar.Decide(test.facts, conf.Policy()), test.facts, conf); m != nil {
			t.Errorf("%s with hostNetwork: %+v", name, m)
		}
	}
}
