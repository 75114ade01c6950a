package trace_test

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest/trace"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// run traces a command in its own network namespace.
func run(t *testing.T, ns, name string, args ...string) *trace.Record {
	t.Helper()
	var record *trace.Record
	check.OK(t, netns.Do(ns, func() (err error) {
		record, err = trace.Run(exec.CommandContext(t.Context(), name, args...))
		return err
	}))
	return record
}

// TestTrace_NetlinkMessages has each kind of message from a well-known program. TestBudget_SeesTools of role/plugin has processes and sockets.
func TestTrace_NetlinkMessages(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	for _, test := range []struct {
		command                 string
		netfilter               bool
		writes, batch, removing bool
	}{
		{"nft list ruleset", true, false, false, false},
		{"nft add table ip t", true, true, true, false},
		{"nft delete table ip t", true, true, true, true},
		{"iptables-nft -A INPUT -j ACCEPT", true, true, true, false},
		{"iptables-nft -D INPUT -j ACCEPT", true, true, true, true},
		{"ip address show", false, false, false, false},
		{"ip address add ::6/128 dev lo", false, true, false, false},
		{"ip address del ::6/128 dev lo", false, true, false, true},
		{"ip rule add fwmark 1 table 2", false, true, false, false},
		{"ip rule del fwmark 1 table 2", false, true, false, true},
	} {
		words := strings.Fields(test.command)
		r := run(t, ns, words[0], words[1:]...)
		check.Equal(t, r.Code, 0, test.command)
		all := r.Messages(func(m trace.Message) bool { return m.Netfilter == test.netfilter })
		for what, got := range map[string]struct{ got, want bool }{
			"any":     {len(all) > 0, true},
			"writes":  {slices.ContainsFunc(all, trace.Message.Writes), test.writes},
			"batch":   {slices.ContainsFunc(all, trace.Message.BeginsBatch), test.batch},
			"removes": {slices.ContainsFunc(all, trace.Message.Removes), test.removing},
		} {
			check.Equal(t, got.got, got.want, test.command, what, all)
		}
	}
}
