package referencetest_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/referencetest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// The texts were written by hand from the description of the reference's rules.
func TestRestore(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		spec   func(*redirect.Spec)
		family ruleset.Family
		want   string
	}{
		{
			"a pod that says nothing", func(*redirect.Spec) {}, ruleset.IPv4,
			`* nat
-N ISTIO_INBOUND
-N ISTIO_REDIRECT
-N ISTIO_IN_REDIRECT
-N ISTIO_OUTPUT
-A ISTIO_INBOUND -p tcp --dport 15008 -j RETURN
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A ISTIO_INBOUND -p tcp --dport 15020 -j RETURN
-A ISTIO_INBOUND -p tcp --dport 15021 -j RETURN
-A ISTIO_INBOUND -p tcp --dport 15090 -j RETURN
-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -p tcp --dport 15020 -j RETURN
-A ISTIO_OUTPUT -p udp --dport 15020 -j RETURN
-A ISTIO_OUTPUT -o lo -s 127.0.0.6/32 -j RETURN
-A ISTIO_OUTPUT -o lo ! -d 127.0.0.1/32 -p tcp ! --dport 15008 -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -m owner ! --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -o lo ! -d 127.0.0.1/32 -p tcp ! --dport 15008 -m owner --gid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -m owner ! --gid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --gid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN
-A ISTIO_OUTPUT -j ISTIO_REDIRECT
COMMIT
`,
		},
		{
			"TPROXY for a list of ports in IPv6, with DNS servers that are all IPv4", func(s *redirect.Spec) {
				s.Mode, s.Mark = redirect.TPROXY, 7
				s.Inbound = redirect.Ports{List: []uint16{80, 443}}
				s.UIDs, s.GIDs = []uint32{5, 6}, []uint32{8}
				s.ExcludeInterfaces, s.RerouteInterfaces = []string{"x1", "x2"}, []string{"v1", "v2"}
				s.Outbound = redirect.Networks{List: prefixes("10.1.2.3/8", "2001:db8::1/64", "::1/128")}
				s.OutboundExclude = prefixes("fd00::/8", "10.9.0.0/16", "::ffff:1.2.3.4/104")
				s.OutboundPortsExclude, s.OutboundPorts = nil, []uint16{3306}
				s.DropInvalid = true
				s.DNS, s.DNSServers = redirect.DNSServers, []netip.Addr{netip.MustParseAddr("10.0.0.10")}
				s.OwnerGroups = redirect.Groups{List: []uint32{21, 22}}
			}, ruleset.IPv6,
			`* mangle
-N ISTIO_DROP
-N ISTIO_DIVERT
-N ISTIO_TPROXY
-N ISTIO_INBOUND
-A PREROUTING -i x1 -j RETURN
-A OUTPUT -o x1 -j RETURN
-A PREROUTING -i x2 -j RETURN
-A OUTPUT -o x2 -j RETURN
-A PREROUTING -m conntrack --ctstate INVALID -j ISTIO_DROP
-A ISTIO_DROP -j DROP
-A ISTIO_DIVERT -j MARK --set-mark 7
-A ISTIO_DIVERT -j ACCEPT
-A ISTIO_TPROXY ! -d ::1/128 -p tcp -j TPROXY --tproxy-mark 7/0xffffffff --on-port 15006
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A ISTIO_INBOUND -p tcp --dport 80 -m conntrack --ctstate RELATED,ESTABLISHED -j ISTIO_DIVERT
-A ISTIO_INBOUND -p tcp --dport 80 -j ISTIO_TPROXY
-A ISTIO_INBOUND -p tcp --dport 443 -m conntrack --ctstate RELATED,ESTABLISHED -j ISTIO_DIVERT
-A ISTIO_INBOUND -p tcp --dport 443 -j ISTIO_TPROXY
-A PREROUTING -p tcp -m mark --mark 7 -j CONNMARK --save-mark
-A OUTPUT -p tcp -o lo -m mark --mark 7 -j RETURN
-A OUTPUT ! -d ::1/128 -p tcp -o lo -m owner --uid-owner 5 -j MARK --set-mark 1338
-A OUTPUT ! -d ::1/128 -p tcp -o lo -m owner --uid-owner 6 -j MARK --set-mark 1338
-A OUTPUT ! -d ::1/128 -p tcp -o lo -m owner --gid-owner 8 -j MARK --set-mark 1338
-A OUTPUT -p tcp -m connmark --mark 7 -j CONNMARK --restore-mark
-I ISTIO_INBOUND 1 -p tcp -m mark --mark 7 -j RETURN
-I ISTIO_INBOUND 2 -p tcp -s ::6/128 -i lo -j RETURN
-I ISTIO_INBOUND 3 -p tcp -i lo -m mark ! --mark 1338 -j RETURN
COMMIT
* nat
-N ISTIO_INBOUND
-N ISTIO_REDIRECT
-N ISTIO_IN_REDIRECT
-N ISTIO_OUTPUT
-A PREROUTING -i x1 -j RETURN
-A OUTPUT -o x1 -j RETURN
-A PREROUTING -i x2 -j RETURN
-A OUTPUT -o x2 -j RETURN
-I PREROUTING 1 -i v1 -j RETURN
-I PREROUTING 1 -i v2 -j RETURN
-A ISTIO_INBOUND -p tcp --dport 15008 -j RETURN
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -o lo -s ::6/128 -j RETURN
-A ISTIO_OUTPUT -o lo ! -d ::1/128 -p tcp -m multiport ! --dports 53,15008 -m owner --uid-owner 5 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -m owner --uid-owner 5 -j RETURN
-A ISTIO_OUTPUT -o lo ! -d ::1/128 -p tcp -m multiport ! --dports 53,15008 -m owner --uid-owner 6 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -m owner --uid-owner 6 -j RETURN
-A ISTIO_OUTPUT -o lo ! -d ::1/128 -p tcp ! --dport 15008 -m owner --gid-owner 8 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -m owner --gid-owner 8 -j RETURN
-A ISTIO_OUTPUT -m owner ! --gid-owner 21 -m owner ! --gid-owner 22 -j RETURN
-A ISTIO_OUTPUT -d ::1/128 -j RETURN
-A ISTIO_OUTPUT -d fd00::/8 -j RETURN
-A ISTIO_OUTPUT -d ::ffff:1.2.3.4/104 -j RETURN
-A ISTIO_OUTPUT -p tcp --dport 3306 -j ISTIO_REDIRECT
-I PREROUTING 1 -i v1 -d 2001:db8::1/64 -j ISTIO_REDIRECT
-I PREROUTING 1 -i v2 -d 2001:db8::1/64 -j ISTIO_REDIRECT
-A ISTIO_OUTPUT -d 2001:db8::1/64 -j ISTIO_REDIRECT
-I PREROUTING 1 -i v1 -d ::1/128 -j ISTIO_REDIRECT
-I PREROUTING 1 -i v2 -d ::1/128 -j ISTIO_REDIRECT
-A ISTIO_OUTPUT -d ::1/128 -j ISTIO_REDIRECT
COMMIT
* raw
-N ISTIO_OUTPUT_DNS
-A OUTPUT -j ISTIO_OUTPUT_DNS
-A ISTIO_OUTPUT_DNS -p udp --dport 53 -m owner --uid-owner 5 -j CT --zone 1
-A ISTIO_OUTPUT_DNS -p udp --sport 15053 -m owner --uid-owner 5 -j CT --zone 2
-A ISTIO_OUTPUT_DNS -p udp --dport 53 -m owner --uid-owner 6 -j CT --zone 1
-A ISTIO_OUTPUT_DNS -p udp --sport 15053 -m owner --uid-owner 6 -j CT --zone 2
-A ISTIO_OUTPUT_DNS -p udp --dport 53 -m owner --gid-owner 8 -j CT --zone 1
-A ISTIO_OUTPUT_DNS -p udp --sport 15053 -m owner --gid-owner 8 -j CT --zone 2
COMMIT
`,
		},
		{
			"DNS to two servers, nothing inbound, no address outbound", func(s *redirect.Spec) {
				s.Inbound, s.InboundExclude = redirect.Ports{}, []uint16{9}
				s.Outbound, s.OutboundPortsExclude = redirect.Networks{}, nil
				s.GIDs = nil
				s.OwnerGroupsExclude = []uint32{31, 32}
				s.DNS, s.DNSServers = redirect.DNSServers, []netip.Addr{
					netip.MustParseAddr("10.0.0.10"), netip.MustParseAddr("fd00::a"), netip.MustParseAddr("10.0.0.11"),
				}
				s.Loopback = netip.MustParsePrefix("127.1.2.3/8")
			}, ruleset.IPv4,
			`* nat
-N ISTIO_INBOUND
-N ISTIO_REDIRECT
-N ISTIO_IN_REDIRECT
-N ISTIO_OUTPUT
-N ISTIO_OUTPUT_DNS
-A ISTIO_INBOUND -p tcp --dport 15008 -j RETURN
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -o lo -s 127.0.0.6/32 -j RETURN
-A ISTIO_OUTPUT -o lo ! -d 127.1.2.3/8 -p tcp -m multiport ! --dports 53,15008 -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -p tcp ! --dport 53 -m owner ! --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --gid-owner 31 -j RETURN
-A ISTIO_OUTPUT -m owner --gid-owner 32 -j RETURN
-A ISTIO_OUTPUT -j ISTIO_OUTPUT_DNS
-A ISTIO_OUTPUT_DNS -p tcp --dport 53 -d 10.0.0.10/32 -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT_DNS -p tcp --dport 53 -d 10.0.0.11/32 -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT_DNS -p udp --dport 53 -d 10.0.0.10/32 -j REDIRECT --to-port 15053
-A ISTIO_OUTPUT_DNS -p udp --dport 53 -d 10.0.0.11/32 -j REDIRECT --to-port 15053
-A ISTIO_OUTPUT -d 127.1.2.3/8 -j RETURN
COMMIT
* raw
-N ISTIO_OUTPUT_DNS
-N ISTIO_INBOUND
-A OUTPUT -j ISTIO_OUTPUT_DNS
-A ISTIO_OUTPUT_DNS -p udp --dport 53 -m owner --uid-owner 1337 -j CT --zone 1
-A ISTIO_OUTPUT_DNS -p udp --sport 15053 -m owner --uid-owner 1337 -j CT --zone 2
-A PREROUTING -j ISTIO_INBOUND
-A ISTIO_OUTPUT_DNS -p udp --dport 53 -d 10.0.0.10/32 -j CT --zone 2
-A ISTIO_INBOUND -p udp --sport 53 -s 10.0.0.10/32 -j CT --zone 1
-A ISTIO_OUTPUT_DNS -p udp --dport 53 -d 10.0.0.11/32 -j CT --zone 2
-A ISTIO_INBOUND -p udp --sport 53 -s 10.0.0.11/32 -j CT --zone 1
COMMIT
`,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := redirect.Default()
			test.spec(&s)
			got := referencetest.Restore(s, test.family)
			if diff := cmp.Diff(strings.Split(test.want, "\n"), strings.Split(got, "\n")); diff != "" {
				t.Errorf("not as described (-described +written):\n%s", diff)
			}
		})
	}
}

func prefixes(texts ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, text := range texts {
		out = append(out, netip.MustParsePrefix(text))
	}
	return out
}
