package redirection_test

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
)

// A lateFixture is a pod that has at most a link-local IPv6 address when it is programmed, and can be reached by IPv6
// later.
type lateFixture struct {
	*labtest.Fixture

	at netip.AddrPort // the app's address then
}

// A lateness has two shell scripts: the pod's IPv6 state before it is programmed, and how it gets an address later.
type lateness struct{ name, before, later, at string }

func latenesses() []lateness {
	const sysctl, global = " >/proc/sys/net/ipv6/conf/all/disable_ipv6", "ip address add fd00:1::77/64 dev eth0 nodad"
	return []lateness{
		{"by its link-local address", "ip address add fe80::77/64 dev eth0 nodad", "", "fe80::77%eth0"},
		{"by an address that comes later", "", global, "fd00:1::77"},
		{
			"by an address that comes after IPv6 was switched on",
			"echo 1" + sysctl, "echo 0" + sysctl + "\n" + global + "\nip address replace ::1/128 dev lo nodad", "fd00:1::77",
		},
	}
}

func newLateComer(t *testing.T, how lateness) lateFixture {
	t.Helper()
	l := lateFixture{labtest.New(t, ruleset.IPv4), netip.AddrPortFrom(netip.MustParseAddr(how.at), 80)}
	for _, address := range []string{"fe80::78/64", "fd00:1::78/64"} {
		netnstest.Run(t, l.Peer().Namespace, "ip", "address", "add", address, "dev", "eth0", "nodad")
	}
	netnstest.Run(t, l.Path(), "sh", "-ec", how.before)
	return l
}

// serve starts the app on IPv6, and the proxy if one listens there.
func (l lateFixture) serve(t *testing.T, mode redirect.Mode, proxied bool) {
	t.Helper()
	everywhere := netip.IPv6Unspecified()
	labtest.Serve(t, l.App(),
		labtest.Service{By: labtest.ByApp, Via: labtest.TCP, At: netip.AddrPortFrom(everywhere, 80)},
		labtest.Service{By: labtest.ByApp, Via: labtest.UDP, At: netip.AddrPortFrom(everywhere, 80)})
	if proxied {
		labtest.Proxy{Actor: l.Proxy(mode), Mode: mode, Families: families[1:]}.Start(t)
	}
}

// reach sends a neighbour's request to the app and compares the name in the answer, "" for none: then it waits only briefly. Native
// tables (their rules name no family) and TPROXY drop packets for a proxy that listens only on IPv4; others refuse.
func (l lateFixture) reach(t *testing.T, v iptables.Variant, via labtest.Protocol, want string) {
	t.Helper()
	ctx := t.Context()
	if want == "" {
		limited, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		ctx = limited
	}
	answer, got := labtest.Request{From: l.Peer(), Via: via, To: l.at, SourcePort: l.FreshPort()}.Send(ctx), ""
	if len(answer.Hops) > 0 {
		got = answer.Hops[0].By
	}
	closed := errors.Is(answer.Err, labtest.ErrRefused) || errors.Is(answer.Err, labtest.ErrSilent)
	if got != want || want == "" && !closed {
		t.Errorf("%s by %s: %q answers (%v), want %q\n%s", l.at, via, got, answer.Err, want, counters(t, l.Fixture, v, ruleset.FamilyOf(l.at.Addr())))
	}
}

// TestPackets_IPv6OfLater: with reject, capture or dual stack a neighbour never reaches the app past the sidecar by
// IPv6, whatever addresses the pod had when it was programmed. Without rules it does, which checks the harness, and
// with bypass as well.
func TestPackets_IPv6OfLater(t *testing.T) {
	capture := func(s *redirect.Spec) { s.SecondFamily = redirect.Capture }
	settings := []struct {
		name     string
		set      func(*redirect.Spec)
		tcp, udp string // the name in the answer, "" for none
		of       []lateness
	}{
		{"bypass", func(*redirect.Spec) {}, labtest.ByApp, labtest.ByApp, latenesses()[:1]},
		{"reject", func(s *redirect.Spec) { s.SecondFamily = redirect.Reject }, "", "", latenesses()},
		{"capture", capture, labtest.ByInbound, labtest.ByApp, latenesses()},
		{"dual stack", func(s *redirect.Spec) { s.DualStack = true }, labtest.ByInbound, labtest.ByApp, latenesses()[:1]},
		{"capture, and a proxy of IPv4 alone", capture, "", labtest.ByApp, latenesses()[2:]},
	}
	eachCell(t, func(t *testing.T, v iptables.Variant, mode redirect.Mode) {
		t.Helper()
		for _, setting := range settings {
			for _, how := range setting.of {
				if setting.name == "bypass" && v == byTables {
					continue // its rules name no family without an IPv6 address
				}
				t.Run(setting.name+"/"+how.name, func(t *testing.T) {
					t.Parallel()
					l := newLateComer(t, how)
					spec := packetCase{set: setting.set}.spec(mode, ruleset.IPv4)
					n := namespaceOf(l.Fixture, v)
					mustApply(t, n, spec)
					verified(t, n, spec)
					netnstest.Run(t, l.Path(), "sh", "-ec", how.later)
					l.serve(t, mode, setting.tcp == labtest.ByInbound)
					l.compare(t, v, setting.tcp, setting.udp)
					l.agrees(t, n, spec)
					l.compare(t, v, setting.tcp, setting.udp)
				})
			}
		}
	})
}

// compare connects from a neighbour by TCP and by UDP, and compares the names in the answers.
func (l lateFixture) compare(t *testing.T, v iptables.Variant, tcp, udp string) {
	t.Helper()
	var both sync.WaitGroup // waiting for silence takes time
	both.Go(func() { l.reach(t, v, labtest.TCP, tcp) })
	l.reach(t, v, labtest.UDP, udp)
	both.Wait()
}

// agrees verifies the pod again, like CHECK and repair: the rules are still the wanted ones, even if routing is missing
// that the kernel refused before, and a second Apply changes no rule.
func (l lateFixture) agrees(t *testing.T, n redirection.Namespace, spec redirect.Spec) {
	t.Helper()
	r := verify(t, n, spec)
	// With bypass, native tables differ once there is an IPv6 address.
	if bypass := spec.SecondFamily == redirect.Bypass && !spec.DualStack; len(r.Diffs) > 0 && !bypass {
		t.Errorf("the rules differ: %v", r.Diffs)
	}
	again := mustApply(t, n, spec)
	if len(r.Diffs) == 0 && len(again.Programs) > 0 {
		t.Errorf("it was programmed again: %v", again.Programs)
	}
	verified(t, n, spec)
}

// TestPackets_ProxyNotListening: before the proxy listens, and after it has ended, a connection to a captured
// port fails, whatever the backend and the mode.
func TestPackets_ProxyNotListening(t *testing.T) {
	eachCell(t, func(t *testing.T, v iptables.Variant, mode redirect.Mode) {
		t.Helper()
		lab := labtest.New(t, families...)
		check := func(want string) {
			var both sync.WaitGroup
			for _, f := range families {
				both.Go(func() { lateFixture{lab, labtest.Pod.Port(f, labtest.AppPorts()[0])}.reach(t, v, labtest.TCP, want) })
			}
			both.Wait()
		}
		check(labtest.ByApp) // without rules
		mustApply(t, namespaceOf(lab, v), dualStack(mode))
		check("")
	})
}
