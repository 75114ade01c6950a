package ambient_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/ambient/ambienttest"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestSets_OfTheReference compares the texts; node/nftables compares the native tables, which nft spells in its own way.
func TestSets_OfTheReference(t *testing.T) {
	for name, s := range ambienttest.Specs() {
		f := ambienttest.Families(s)
		for _, got := range s.Sets(f) {
			want := ""
			if got.Family == ruleset.IPv4 || s.IPv6 {
				want = ambienttest.Restore(s, got.Family)
			}
			check.Diff(t, name+", "+got.Family.String(), byChain(want), byChain(got.String()))
		}
		for _, r := range rulesettest.Rules(append(s.Sets(f), s.NativeSet(f))...) {
			if r.Why == "" {
				t.Errorf("%s: rule %q has no reason", name, r)
			}
		}
	}
}

// TestSets_ReadBack: the text of each rule has the meaning of the rule; only iptables needs the name of a protocol without options.
func TestSets_ReadBack(t *testing.T) {
	s := ambienttest.Specs()["default, virtual interfaces, DNS, IPv6"]
	for _, want := range rulesettest.Rules(s.Sets(ambienttest.Families(s))...) {
		got := ruleset.Read(want.String())
		matches := slices.DeleteFunc(slices.Clone(want.Matches), func(m ruleset.Match) bool { return m == ruleset.Match(ruleset.Header(ruleset.TCP)) })
		check.Diff(t, want.String(), matches, got.Matches, cmpopts.EquateComparable(netip.Prefix{}), cmpopts.EquateEmpty())
		check.Equal(t, got.Target, want.Target, want)
	}
}

// byChain returns the rules of a text by table and chain.
func byChain(text string) map[string][]string {
	chains, table := map[string][]string{}, ""
	for line := range strings.Lines(text) {
		switch words := strings.Fields(line); {
		case line[0] == '*':
			table = line
		case words[0] == "-A":
			chains[table+words[1]] = append(chains[table+words[1]], line)
		}
	}
	return chains
}

func TestFamiliesOf_Treatments(t *testing.T) {
	v4, v6, lo := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fe80::1")
	for _, tt := range []struct {
		ipv6, kernel bool
		addresses    []netip.Addr
		want         redirect.Treatment
	}{
		{true, true, []netip.Addr{v4}, redirect.Captured},
		{true, true, []netip.Addr{v6}, redirect.Captured},
		{true, false, []netip.Addr{v4}, redirect.Unused},
		{false, true, []netip.Addr{v4, lo}, redirect.Unused},
		{false, true, []netip.Addr{v4, v6}, redirect.Bypassed},
		{false, true, nil, redirect.Unused},
	} {
		got, err := ambient.Spec{Config: ambient.Config{IPv6: tt.ipv6}}.FamiliesOf(tt.addresses, tt.kernel)
		check.OK(t, err)
		check.Equal(t, got.IPv6, tt.want, tt)
	}
}

func TestRouting_CapturedFamilies(t *testing.T) {
	for _, s := range ambienttest.Specs() {
		r := s.Routing(ambienttest.Families(s))
		check.Equal(t, len(r.MarkFamilies), map[bool]int{false: 1, true: 2}[s.IPv6])
		check.Equal(t, [4]uint32{r.Mark, r.Mask, r.Table, r.Priority}, [4]uint32{0x111, 0xfff, 100, 32764})
	}
}

func TestOf_Annotations(t *testing.T) {
	on := ambient.DefaultConfig()
	on.DNSCapture = true
	for _, tt := range []struct {
		config      ambient.Config
		key, value  string
		dns, bypass bool
		interfaces  string
		warning     string
	}{
		{on, "", "", true, false, "", ""},
		{on, ambient.DNSCaptureKey, "false", false, false, "", ""},
		{on, ambient.DNSCaptureKey, "F", false, false, "", ""},
		{ambient.DefaultConfig(), ambient.DNSCaptureKey, "1", true, false, "", ""},
		{ambient.DefaultConfig(), ambient.DNSCaptureKey, "yes", false, false, "", `annotation ambient.istio.io/dns-capture: value "yes": want true or false`},
		{on, ambient.DNSCaptureKey, "", true, false, "", "want true or false"},
		{on, ambient.BypassInboundKey, "true", true, true, "", ""},
		{on, ambient.BypassInboundKey, "\x1b[2J", true, false, "", `"\u001b[2J"`},
		{on, ambient.RerouteInterfacesKey, " v1, ,v2 ", true, false, "v1 v2", ""},
		{on, ambient.RerouteInterfacesKey, "", true, false, "", ""},
		{on, ambient.RerouteInterfacesKey, "v1,-j ACCEPT", true, false, "", "is not an interface name"},
		{on, ambient.RerouteInterfacesKey, strings.Repeat("v", 16), true, false, "", "is longer than 15 characters"},
		{on, ambient.RerouteInterfacesKey, "1,2,3,4,5,6,7,8,9", true, false, "", "reroute-virtual-interfaces"},
		{on, "traffic.sidecar.istio.io/excludeInterfaces", "v1", true, false, "", ""},
	} {
		s, warnings := ambient.Of(tt.config, map[string]string{tt.key: tt.value})
		check.Equal(t, s.DNSCapture, tt.dns, tt)
		check.Equal(t, s.Ingress, tt.bypass, tt)
		check.Equal(t, strings.Join(s.Interfaces, " "), tt.interfaces, tt)
		if text := strings.Join(warnings, "\n"); (text == "") != (tt.warning == "") || !strings.Contains(text, tt.warning) {
			t.Errorf("%+v: warnings %q", tt, warnings)
		}
	}
}
