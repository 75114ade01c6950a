package walk_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestWays: the ends of each kind of packets by the live rules, and whether the wanted rules have them.
func TestWays(t *testing.T) {
	t.Parallel()
	insert := func(hook, table string, r ruleset.Rule) func(*walk.Namespace) {
		return func(n *walk.Namespace) {
			n.Live = append(slices.Clone(n.Live), ruleset.Set{Family: ruleset.IPv4, Tables: []ruleset.Table{{Name: table, Chains: []ruleset.Chain{{Name: hook, Rules: []ruleset.Rule{r}}}}}})
		}
	}
	tcp := ruleset.Protocol{Number: ruleset.TCP}
	const app, inbound = "the app's outbound TCP connections", "inbound TCP connections"
	for name, test := range map[string]struct {
		change func(*walk.Namespace)
		want   map[string]string
	}{
		"as wanted": {func(*walk.Namespace) {}, map[string]string{
			app: "[{redirected 15001 true}]", inbound: "[{redirected 15006 true}]", "the app's DNS queries": "[{redirected 15053 true}]",
			"inbound tunnels (HBONE)": "[{passed 0 true}]", "the node's probes": "[{passed 0 true}]", "the app's TCP connections to its own pod": "[{passed 0 true}]",
		}},
		"without rules": {func(n *walk.Namespace) { n.Live = nil }, map[string]string{app: "[{passed 0 false}]", inbound: "[{passed 0 false}]", "the node's probes": "[{passed 0 true}]"}},
		"dropped":       {insert("OUTPUT", "filter", ruleset.Rule{Matches: []ruleset.Match{tcp}, Target: ruleset.Drop}), map[string]string{app: "[{dropped 0 false}]", inbound: "[{redirected 15006 true} {fails 0 false}]"}},
		"a firewall":    {insert("INPUT", "filter", ruleset.Rule{Matches: []ruleset.Match{ruleset.Network{Source: true, Prefix: netip.MustParsePrefix("192.0.2.0/24")}}, Target: ruleset.Drop}), map[string]string{inbound: "[{redirected 15006 true}]"}},
		"unread":        {func(n *walk.Namespace) { n.Unread = map[ruleset.Family][]string{ruleset.IPv4: {"legacy tables"}} }, map[string]string{app: "[{cannot-tell 0 false}]"}},
	} {
		s := ambient.Spec{Config: ambient.DefaultConfig()}
		s.DNSCapture = true
		n := ambientPod(s, false)
		test.change(&n)
		got := map[string]string{}
		for _, w := range n.Ways() {
			if w.Family == ruleset.IPv4.String() {
				got[w.Packets] = fmt.Sprint(w.Ends)
			}
		}
		for packets, want := range test.want {
			check.Equal(t, got[packets], want, name, packets)
		}
	}
	if ways := (walk.Namespace{}).Ways(); ways != nil {
		t.Errorf("without wanted rules: %v", ways)
	}
	n := ambientPod(ambient.Spec{Config: ambient.DefaultConfig()}, false)
	n.Live = nil
	check.Contains(t, fmt.Sprint(n.Deviations()), "IPv4: the app's outbound TCP connections go out unredirected")
}
