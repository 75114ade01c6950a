package walk_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/ambient/ambienttest"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
)

// ambientPod is a namespace with the rules of a pod in ambient mode.
func ambientPod(s ambient.Spec, native bool) walk.Namespace {
	f := ambienttest.Families(s)
	if f.HasIPv6 = true; !s.IPv6 {
		f.IPv6 = redirect.Bypassed
	}
	w := walk.WantedOf(s, f, native)
	n := walk.Namespace{
		Owner: s.Owner(), Wanted: w, Live: asRead(w.Sets()), Delivered: map[ruleset.Family][]ruleset.Mark{}, Links: []string{"eth0"},
		Own: []netip.Addr{netip.MustParseAddr("10.0.0.5"), netip.MustParseAddr("fd00::5")},
	}
	routing := s.Routing(f)
	for _, family := range routing.MarkFamilies {
		n.Delivered[family] = []ruleset.Mark{{Value: routing.Mark, Mask: routing.Mask}}
	}
	return n
}

// TestInferAmbient_Configuration: for any Spec, the inferred Spec has the same rules, and packets go as these want.
func TestInferAmbient_Configuration(t *testing.T) {
	for name, spec := range ambienttest.Specs() {
		for _, native := range []bool{false, true} {
			n := ambientPod(spec, native)
			got, isNative, found := n.InferAmbient()
			again := walk.WantedOf(got, n.Wanted.Families, native)
			if want, have := text(*n.Wanted), text(*again); !found || isNative != native || want != have {
				t.Errorf("%s, native %t: %t %t\n%s", name, native, found, isNative, cmp.Diff(want, have))
			}
			if ways := n.Deviations(); len(ways) > 0 {
				t.Errorf("%s, native %t: %s", name, native, ways)
			}
			if _, _, found := (walk.Namespace{Live: walk.Wanted{Spec: redirect.Default(), Native: native}.Sets()}).InferAmbient(); found {
				t.Errorf("native %t: found in the rules of a sidecar", native)
			}
		}
	}
}

// TestWalk_Ambient: ways of packets and their reasons, in both dialects.
func TestWalk_Ambient(t *testing.T) {
	at := netip.MustParseAddrPort
	plain, open := ambient.Spec{Config: ambient.DefaultConfig()}, ambient.Spec{Config: ambient.DefaultConfig(), Ingress: true}
	plain.IPv6 = true
	in := func(src, dst string) walk.Packet {
		return walk.Packet{In: "eth0", Protocol: ruleset.TCP, Src: at(src), Dst: at(dst)}
	}
	out := func(mark uint32, link, src, dst string) walk.Packet {
		return walk.Packet{Outgoing: true, Out: link, Protocol: ruleset.TCP, Src: at(src), Dst: at(dst), Mark: mark}
	}
	const passes = ", as in every pod: "
	for _, test := range []struct {
		spec   ambient.Spec
		packet walk.Packet
		want   string
	}{
		{plain, out(0, "eth0", "10.0.0.5:4000", "192.0.2.1:80"), "is redirected to port 15001: all other TCP goes to ztunnel's"},
		{plain, out(0, "eth0", "[fd00::5]:4000", "[2001:db8::1]:80"), "is redirected to port 15001"},
		{plain, out(ambient.ProxyMark, "eth0", "10.0.0.5:4000", "192.0.2.1:80"), "goes out unredirected" + passes},
		{plain, out(0xabc000|ambient.ProxyMark, "eth0", "10.0.0.5:4000", "192.0.2.1:80"), "goes out unredirected" + passes},
		{plain, out(0, "lo", "10.0.0.5:4000", "10.0.0.5:80"), "goes out unredirected" + passes + "the app calls its own pod"},
		{plain, out(ambient.ProxyMark, "lo", "192.0.2.1:4000", "10.0.0.5:80"), "goes out unredirected" + passes},
		{plain, in("192.0.2.1:4000", "10.0.0.5:80"), "is redirected to port 15006: incoming TCP outside of a tunnel"},
		{plain, in("192.0.2.1:4000", "10.0.0.5:15008"), "comes in unredirected" + passes},
		{plain, in("169.254.7.127:4000", "10.0.0.5:80"), "comes in unredirected" + passes + "the node's own connections"},
		{open, in("192.0.2.1:4000", "10.0.0.5:80"), "comes in unredirected, because bypass-inbound-capture=true (annotation " + ambient.BypassInboundKey + ")"},
		{open, in("192.0.2.1:4000", "10.0.0.5:15008"), "comes in unredirected" + passes},
		{open, out(0, "eth0", "[fd00::5]:4000", "[2001:db8::1]:80"), "goes out unredirected, because AMBIENT_IPV6=false"},
	} {
		for _, native := range []bool{false, true} {
			n := ambientPod(test.spec, native)
			if r := n.Walk(test.packet); !strings.HasPrefix(r.Summary, test.want) || r.Verdict != r.Expected || r.To != r.ExpectedTo {
				t.Errorf("native %t, %s -> %s: %q (expected %s), want %q", native, test.packet.Src, test.packet.Dst, r.Summary, r.Expected, test.want)
			}
		}
	}
}

// TestDeviations_Ambient: foreign rules that take what only pods in ambient mode get, and the marks of ztunnel.
func TestDeviations_Ambient(t *testing.T) {
	spec := ambient.Spec{Config: ambient.DefaultConfig()}
	for rule, want := range map[string]string{
		"nat PREROUTING -p tcp -m tcp --dport 15008 -j REDIRECT --to-ports 9":                                     "are redirected to port 9",
		"mangle PREROUTING -s 169.254.7.127/32 -j DROP":                                                           "the node's probes are dropped",
		"mangle OUTPUT -m mark --mark 0x539/0xfff -j DROP":                                                        "the app's outbound TCP connections fail",
		"mangle OUTPUT -m mark --mark 0x539/0xfff -m conntrack --ctstate NEW -j DROP":                             "the proxy's outbound TCP connections are dropped",
		"mangle OUTPUT -m connmark --mark 0x111/0xfff -j DROP":                                                    "fail",
		"nat OUTPUT -p tcp -j RETURN":                                                                             "",
		"nat PREROUTING -m mark --mark 0x539/0xfff -j REDIRECT --to-ports 9":                                      "",
		"mangle PREROUTING -p tcp -m tcp --dport 80 -m mark ! --mark 0x539/0xfff -j MARK --set-xmark 0x539/0xfff": "inbound TCP connections",
	} {
		n := ambientPod(spec, false)
		n.Live = append([]ruleset.Set{rulesettest.Set(rule)}, n.Live...)
		if got := fmt.Sprint(n.Deviations()); !strings.Contains(got, want) || (want == "") != (got == "[]") {
			t.Errorf("%s: got %s, want %q", rule, got, want)
		}
	}
}
