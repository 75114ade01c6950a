package redirect_test

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func addresses(texts ...string) []netip.Addr {
	var out []netip.Addr
	for _, t := range texts {
		out = append(out, netip.MustParseAddr(t))
	}
	return out
}

// TestFamiliesOf covers every kind of pod with every setting.
func TestFamiliesOf(t *testing.T) {
	const v4, v4b, v6, v6b = "10.0.0.5", "10.0.0.6", "fd00::5", "2001:db8::6"
	type want struct {
		bypass, capture, reject, dual redirect.Treatment
		host                          string
		has4, has6                    bool
	}
	first := func(host string, has4 bool) want {
		x := redirect.Captured
		return want{x, x, x, x, host, has4, true}
	}
	second := func(host string) want {
		return want{redirect.Bypassed, redirect.Captured, redirect.Rejected, redirect.Captured, host, true, true}
	}
	// No IPv6 address yet: link-local addresses are always there, and others may follow.
	later := func(host string) want {
		return want{redirect.Unused, redirect.Captured, redirect.Rejected, redirect.Captured, host, true, false}
	}
	for _, test := range []struct {
		name string
		have []netip.Addr
		want want
	}{
		{"IPv4 alone", addresses(v4), later(v4)},
		{"two of IPv4", addresses(v4b, v4), later(v4b)},
		{"IPv6 alone", addresses(v6), first(v6, false)},
		{"IPv6 first", addresses(v6, v4), first(v6, true)},
		{"IPv4 first", addresses(v4, v6), second(v4)},
		{"IPv4 first and last", addresses(v4, v6b, v4b), second(v4)},
		{"IPv4 twice first", addresses(v4, v4b, v6), second(v4)},
		{"loopback does not count", addresses("127.0.0.1", "::1", "127.0.0.6", v4), later(v4)},
		{"link-local of IPv6 does not count", addresses(v4, "fe80::1%eth0"), later(v4)},
		{"link-local of IPv6 does not come first", addresses("fe80::1", v4, v6), second(v4)},
		{"link-local of IPv4 does not count", addresses("169.254.1.1", v6), first(v6, false)},
		{"link-local multicast does not count", addresses("224.0.0.1", "ff02::1", v4), later(v4)},
		{"the passthrough address does not count", addresses("127.0.0.1", v4, "::1", "::6"), later(v4)},
		{"an IPv4-mapped address is IPv4", addresses("::ffff:10.0.0.5"), later(v4)},
		{"a mapped loopback does not count", addresses("::ffff:127.0.0.1", v6), first(v6, false)},
		{"an invalid address does not count", append([]netip.Addr{{}}, addresses(v4)...), later(v4)},
		{"a zone is dropped", addresses("fd00::5%eth0"), first(v6, false)},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, setting := range []struct {
				name string
				spec redirect.Spec
				want redirect.Treatment
			}{
				{"bypass", redirect.Spec{SecondFamily: redirect.Bypass}, test.want.bypass},
				{"capture", redirect.Spec{SecondFamily: redirect.Capture}, test.want.capture},
				{"reject", redirect.Spec{SecondFamily: redirect.Reject}, test.want.reject},
				{"dual stack", redirect.Spec{DualStack: true}, test.want.dual},
				{"dual stack wins over reject", redirect.Spec{DualStack: true, SecondFamily: redirect.Reject}, test.want.dual},
			} {
				for _, kernel := range []bool{true, false} {
					got, err := setting.spec.FamiliesOf(test.have, kernel)
					check.OK(t, err)
					want := redirect.Families{
						IPv6: setting.want, HasIPv4: test.want.has4, HasIPv6: test.want.has6, Host: netip.MustParseAddr(test.want.host),
					}
					if !kernel && want.Host.Is4() {
						want.IPv6 = redirect.Unused
					}
					check.Equal(t, got, want, setting.name, "kernel with IPv6", kernel, "families are")
				}
			}
		})
	}
}

func TestFamiliesOf_NoAddress(t *testing.T) {
	for name, have := range map[string][]netip.Addr{
		"no address": nil, "loopback only": addresses("127.0.0.1", "::1"), "link-local only": addresses("fe80::1%eth0", "169.254.0.1"), "passthrough only": addresses("::6"), "invalid": {{}},
	} {
		got, err := redirect.Spec{DualStack: true}.FamiliesOf(have, true)
		if !errors.Is(err, redirect.ErrNoAddress) || got != (redirect.Families{}) {
			t.Errorf("%s: families are %+v, error %v, want ErrNoAddress", name, got, err)
		}
	}
}

// TestRouting covers families that are not captured; TestRouting_OfTheReference (node/redirection) covers captured ones.
func TestRouting(t *testing.T) {
	for mode, want := range map[string]redirect.Routing{
		"REDIRECT": {Mark: 1337, Table: 133}, "TPROXY": {MarkFamilies: families[:1], Mark: 1337, Table: 133},
	} {
		for _, ipv6 := range []redirect.Treatment{redirect.Unused, redirect.Bypassed, redirect.Rejected} {
			got := written{redirect.FieldMode: mode}.spec(t).Routing(redirect.Families{IPv6: ipv6})
			check.Diff(t, mode+", IPv6 "+ipv6.String(), want, got)
		}
	}
}
