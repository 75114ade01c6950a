package redirect_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
)

// TestExplain shows the rules with their reasons, for a person to review. What they do is to be shown by real packets (node/redirection).
func TestExplain(t *testing.T) {
	explained := func(t *testing.T, name string, sets ...ruleset.Set) {
		var got []string
		for _, set := range sets {
			got = append(got, set.Explain())
		}
		rulesettest.Golden(t, filepath.Join("explain", name+".txt"), strings.Join(got, "\n"))
	}
	explained(t, "rejected", redirect.RejectAll(ruleset.IPv4), redirect.RejectAll(ruleset.IPv6))
	for _, test := range []struct {
		name  string // of the file
		w     written
		tweak func(*redirect.Spec)
	}{
		{name: "default"},
		{name: "inbound-ports", w: written{redirect.FieldInbound: "8080,9090"}},
		{name: "excluded-ports", w: written{
			redirect.FieldInboundExclude: "22,15020,15021,15090", redirect.FieldOutboundPortsExclude: "3306,53",
		}},
		{name: "outbound-networks-and-ports", w: written{
			redirect.FieldOutbound: "10.0.0.7/8,fd00::/8", redirect.FieldOutboundExclude: "10.1.0.0/16,fd00:1::/32",
			redirect.FieldOutboundPorts: "443,8443",
		}},
		{name: "nothing", w: written{redirect.FieldInbound: "", redirect.FieldOutbound: "", redirect.FieldOutboundPortsExclude: ""}},
		{name: "loopback-captured", w: written{redirect.FieldOutbound: "127.0.0.0/8,10.0.0.0/8", redirect.FieldLoopback: "127.0.0.1/24"}},
		{name: "interfaces", w: written{redirect.FieldExcludeInterfaces: "eth1,net1", redirect.FieldRerouteInterfaces: "vm0,vm1"}},
		{name: "virtual-machines-and-networks", w: written{
			redirect.FieldRerouteInterfaces: "vm0,vm1", redirect.FieldOutbound: "10.0.0.0/8,fd00::/8,172.16.0.0/12",
		}},
		{name: "owner-groups", w: written{redirect.FieldOwnerGroups: "2000,3000"}},
		{name: "owner-groups-none", w: written{redirect.FieldOwnerGroups: ""}},
		{name: "owner-groups-excluded", w: written{redirect.FieldOwnerGroupsExclude: "2000,3000"}},
		{name: "identities-and-listeners", w: written{
			redirect.FieldUIDs: "1337,2000", redirect.FieldGIDs: "3000", redirect.FieldOutboundPort: "15101",
			redirect.FieldInboundPort: "15106", redirect.FieldTunnelPort: "15108",
		}},
		{name: "dns-all", tweak: func(s *redirect.Spec) { s.DNS = redirect.DNSAll }},
		{name: "dns-servers", tweak: func(s *redirect.Spec) { s.DNS, s.DNSServers = redirect.DNSServers, servers[3] }},
		{name: "dns-servers-of-one-family", tweak: func(s *redirect.Spec) { s.DNS, s.DNSServers = redirect.DNSServers, servers[1] }},
		{name: "tproxy", w: written{redirect.FieldMode: "TPROXY"}},
		{
			name: "tproxy-ports-interfaces-invalid", w: written{
				redirect.FieldMode: "TPROXY", redirect.FieldInbound: "8080", redirect.FieldExcludeInterfaces: "eth1", redirect.FieldMark: "4000",
			},
			tweak: func(s *redirect.Spec) { s.DropInvalid = true },
		},
		{name: "tproxy-no-inbound", w: written{redirect.FieldMode: "TPROXY", redirect.FieldInbound: ""}},
	} {
		t.Run(test.name, func(t *testing.T) {
			spec := test.w.spec(t)
			if test.tweak != nil {
				test.tweak(&spec)
			}
			explained(t, test.name, redirect.Rules(spec, ruleset.IPv4), redirect.Rules(spec, ruleset.IPv6))
		})
	}
}
