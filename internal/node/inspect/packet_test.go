package inspect_test

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/inspect"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// lab is a redirected pod of one family.
type lab struct {
	*labtest.Fixture
	space  redirection.Namespace
	family ruleset.Family
}

// newLab makes a pod without a proxy, so its ports refuse connections.
func newLab(t *testing.T, f ruleset.Family) lab {
	t.Helper()
	l := lab{Fixture: labtest.New(t, f), family: f}
	l.space = redirection.Namespace{NetNS: l.NetNS(), Backend: redirect.Netlink, Log: slog.New(slog.DiscardHandler)}
	check.OK(t, check.Err(l.space.Apply(t.Context(), redirect.Default(), redirection.Reconcile)))
	return l
}

// ip runs commands of ip, separated by semicolons, for the family. NET, PEER, SIDE, GATEWAY and POD stand for networks and addresses.
func (l lab) ip(t *testing.T, commands string) {
	t.Helper()
	names := []string{"NET", labtest.Far.Network(l.family).String()}
	for name, p := range map[string]labtest.Place{"PEER": labtest.Peer, "SIDE": labtest.Side, "GATEWAY": labtest.Resolver, "POD": labtest.Pod} {
		names = append(names, name, p.Addr(l.family).String())
	}
	for command := range strings.SplitSeq(strings.NewReplacer(names...).Replace(commands), ";") {
		netnstest.Run(t, l.Path(), "ip", append([]string{fmt.Sprintf("-%d", l.family)}, strings.Fields(command)...)...)
	}
}

// far is an actor's request to a place that only the default route reaches.
func (l lab) far(from labtest.Actor, via labtest.Protocol, port uint16) labtest.Request {
	return labtest.Request{From: from, Via: via, To: labtest.Far.Port(l.family, port)}
}

// ask returns the answer for a request of the pod, and the kernel's answer.
func (l lab) ask(t *testing.T, q labtest.Request) (document.Answer, labtest.Answer) {
	t.Helper()
	of := inspect.Question{To: q.To, UID: uint32(q.From.UID), GID: uint32(q.From.GID), UDP: q.Via == labtest.UDP}
	a, err := inspect.Walk(t.Context(), l.space, nil, of)
	check.OK(t, err, q)
	return a, q.Send(t.Context())
}

// ends requires that a connect fails with the errno and the answer names it; for 0, that both end at the proxy's closed port.
func (l lab) ends(t *testing.T, q labtest.Request, want unix.Errno) {
	t.Helper()
	a, kernel := l.ask(t, q)
	if want == 0 {
		if !errors.Is(kernel.Err, labtest.ErrRefused) || a.Verdict != "redirected" || !a.NoListener || a.Wanted != document.Past {
			t.Errorf("%s: the kernel's answer is %v, inspect's %+v", q, kernel, a)
		}
		return
	}
	name := unix.ErrnoName(want)
	if !errors.Is(kernel.Err, want) || a.Verdict != "not-sent" || !strings.Contains(a.Sentence, name) || a.Wanted != document.Past || len(a.Hops) > 0 {
		t.Errorf("%s: the kernel's answer is %v, want %s, inspect's %+v", q, kernel, name, a)
	}
}

// TestWalk_RoutesThatEndTheWay: an app's connect looks up the route before any rule sees a packet.
func TestWalk_RoutesThatEndTheWay(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		setup string
		// The error of the app's connect to port 80, and of root's to port 81; 0 if it reaches the proxy's port.
		app, root unix.Errno
		// IPv6 looks up the route once, without a source address.
		app6 unix.Errno
	}{
		{"route add blackhole NET", unix.EINVAL, unix.EINVAL, unix.EINVAL},
		{"route add unreachable NET", unix.EHOSTUNREACH, unix.EHOSTUNREACH, unix.EHOSTUNREACH},
		{"route add prohibit NET", unix.EACCES, unix.EACCES, unix.EACCES},
		{"route del default", unix.ENETUNREACH, unix.ENETUNREACH, unix.ENETUNREACH},
		{"rule add to NET blackhole", unix.EINVAL, unix.EINVAL, unix.EINVAL},
		{"rule add to NET unreachable", unix.ENETUNREACH, unix.ENETUNREACH, unix.ENETUNREACH},
		{"rule add to NET prohibit", unix.EACCES, unix.EACCES, unix.EACCES},
		{"route add blackhole NET table 99; rule add lookup 99", unix.EINVAL, unix.EINVAL, unix.EINVAL},
		{"rule add iif lo to NET prohibit", unix.EACCES, unix.EACCES, unix.EACCES},
		{"rule add fwmark 0/1 to NET prohibit", unix.EACCES, unix.EACCES, unix.EACCES},
		{"rule add uidrange 1000-1000 prohibit", unix.EACCES, 0, unix.EACCES},
		{"rule add ipproto tcp dport 80 blackhole", unix.EINVAL, 0, unix.EINVAL},
		{"rule add ipproto udp prohibit", 0, 0, 0},
		{"rule add from POD to NET uidrange 1000-1000 prohibit", unix.EACCES, 0, 0},
		{"route del default; route add default via GATEWAY table 99; rule add from POD uidrange 1000-1000 lookup 99", unix.ENETUNREACH, unix.ENETUNREACH, 0},
		{"rule add fwmark 1 prohibit", 0, 0, 0},
		{"rule add iif eth0 prohibit", 0, 0, 0},
		{"route add throw NET table 99; rule add lookup 99", 0, 0, 0},
		{"route add blackhole PEER", 0, 0, 0},
	} {
		for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
			t.Run(f.String()+"/"+c.setup, func(t *testing.T) {
				t.Parallel()
				l := newLab(t, f)
				l.ip(t, c.setup)
				l.ends(t, l.far(l.App(), labtest.TCP, 80), map[ruleset.Family]unix.Errno{ruleset.IPv4: c.app, ruleset.IPv6: c.app6}[f])
				l.ends(t, l.far(l.Root(), labtest.TCP, 81), c.root)
			})
		}
	}
}

// TestWalk_RouteOfAUserOrPort: the interface belongs to the route that policy rules select for the packet.
func TestWalk_RouteOfAUserOrPort(t *testing.T) {
	t.Parallel()
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		l := newLab(t, f)
		l.ip(t, "route add default via SIDE table 99; rule add uidrange 1000-1000 ipproto udp dport 5000 lookup 99")
		for _, c := range []struct {
			request labtest.Request
			source  labtest.Place
			link    string
		}{
			{l.far(l.App(), labtest.UDP, labtest.UDPPort), labtest.PodSide, "eth1"},
			{l.far(l.Root(), labtest.UDP, labtest.UDPPort), labtest.Pod, "eth0"},
			{l.far(l.App(), labtest.UDP, 81), labtest.Pod, "eth0"},
		} {
			a, kernel := l.ask(t, c.request)
			want := fmt.Sprintf(" from %s to %s by interface %s,", c.source.Addr(f), c.request.To, c.link)
			if kernel.Own.Addr() != c.source.Addr(f) || !strings.Contains(a.Packet, want) {
				t.Errorf("%s: the kernel's source is %s; no %q in %q", c.request, kernel.Own, want, a.Packet)
			}
		}
	}
}

// TestWalk_NoHost: TCP does not connect to a broadcast or multicast address.
func TestWalk_NoHost(t *testing.T) {
	t.Parallel()
	for f, all := range map[ruleset.Family][]string{ruleset.IPv4: {"255.255.255.255", "224.0.0.1", "10.1.0.255"}, ruleset.IPv6: {"ff0e::1"}} {
		l := newLab(t, f)
		for _, to := range all {
			l.ends(t, labtest.Request{From: l.App(), Via: labtest.TCP, To: netip.AddrPortFrom(netip.MustParseAddr(to), 80)}, unix.ENETUNREACH)
		}
	}
}

// TestParse_LinkLocal: no socket connects to an IPv6 link-local address without an interface.
func TestParse_LinkLocal(t *testing.T) {
	t.Parallel()
	for to, good := range map[string]bool{"[fe80::1]:80": false, "[fe80::1%eth0]:80": true, "169.254.1.1:80": true} {
		_, err := inspect.Parse(url.Values{"to": {to}}.Get)
		check.Equal(t, err == nil, good, to, err)
	}
}

// TestWalk_NoSource: a packet by an interface without an address has no source.
func TestWalk_NoSource(t *testing.T) {
	t.Parallel()
	l := newLab(t, ruleset.IPv6)
	l.ip(t, "addr flush dev eth0;route add fe80::/64 dev eth0")
	q, err := inspect.Parse(url.Values{"to": {"[fe80::1%eth0]:80"}}.Get)
	check.OK(t, err)
	a, err := inspect.Walk(t.Context(), l.space, nil, q)
	check.OK(t, err)
	check.Equal(t, a.Packet, "the first packet of a TCP connection to [fe80::1]:80 by interface eth0, of a process with uid 0 and gid 0")
	l = newLab(t, ruleset.IPv4)
	l.ip(t, "addr flush scope global;route add NET dev eth0")
	_, err = inspect.Walk(t.Context(), l.space, nil, inspect.Question{Inbound: true, From: labtest.Far.Addr(l.family), Port: 80})
	check.Fails(t, err, "the namespace has no address of the packet's family")
}

// TestWalk_RouteByLoopback: the result is unknown for a packet that is routed into the pod but addressed to another host.
func TestWalk_RouteByLoopback(t *testing.T) {
	t.Parallel()
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		l := newLab(t, f)
		l.ip(t, "route add NET dev lo src POD")
		a, kernel := l.ask(t, l.far(l.App(), labtest.TCP, 80))
		if a.Wanted != document.Unknown || len(kernel.Hops) > 0 {
			t.Errorf("the kernel's answer is %s, inspect's %+v", kernel, a)
		}
	}
}

// TestWalk_NoWayForTheAnswer: the interface at which such a packet arrives is not known.
func TestWalk_NoWayForTheAnswer(t *testing.T) {
	t.Parallel()
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		for setup, why := range map[string]string{"route add blackhole NET": "EINVAL", "route add NET dev lo src POD": "loopback"} {
			l := newLab(t, f)
			l.ip(t, setup)
			a, err := inspect.Walk(t.Context(), l.space, nil, inspect.Question{Inbound: true, From: labtest.Far.Addr(f), Port: 80})
			if err != nil || a.Wanted != document.Unknown || a.NoListener || !strings.Contains(a.Sentence, why) ||
				!strings.Contains(a.Sentence, "redirected to port 15006") ||
				!strings.Contains(a.Packet, " to "+labtest.Pod.Port(f, 80).String()+", arriving by interface eth0") {
				t.Errorf("%s: %+v, %v", setup, a, err)
			}
		}
	}
}

// TestWalk_Listeners: nothing is known about another host's listeners, and the mesh does not want a connection that no process accepts.
func TestWalk_Listeners(t *testing.T) {
	t.Parallel()
	l := newLab(t, ruleset.IPv4)
	l.StartProxy(t, l.Proxy(redirect.Redirect), redirect.Redirect)
	for _, c := range []struct {
		port uint16
		dnat string // the destination of a foreign rule
		by   string // the listener
		want document.Wanted
	}{
		{80, "", labtest.ByOutbound, document.AsWanted},
		{443, labtest.Peer.Port(l.family, 443).String(), labtest.ByPeer, document.Past},
		{444, labtest.Pod.Port(l.family, 8080).String(), labtest.ByApp, document.Past},
		{445, labtest.Pod.Port(l.family, 444).String(), "", document.Past},
	} {
		if c.dnat != "" {
			netnstest.Run(t, l.Path(), "iptables-nft", "-t", "nat", "-I", "OUTPUT", "-p", "tcp", "--dport", fmt.Sprint(c.port), "-j", "DNAT", "--to-destination", c.dnat)
		}
		a, kernel := l.ask(t, l.far(l.App(), labtest.TCP, c.port))
		by := ""
		if len(kernel.Hops) > 0 {
			by = kernel.Hops[0].By
		}
		if by != c.by || a.NoListener != (by == "") || strings.Contains(a.Sentence, "listens") != a.NoListener || a.Wanted != c.want {
			t.Errorf("port %d: the kernel's answer is %s, inspect's %+v", c.port, kernel, a)
		}
	}
}

// TestJudge_Redirected: the proxy's ports come from the pod. The mesh does not want a redirection of packets that should pass, such as
// the proxy's own.
func TestJudge_Redirected(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		to       string
		expected walk.Verdict
		want     document.Wanted
	}{
		{"127.0.0.1:15001", walk.CannotTell, document.AsWanted},
		{"10.77.0.1:15001", walk.CannotTell, document.Past},
		{"127.0.0.1:15001", walk.Passed, document.Past},
	} {
		r := walk.Result{Verdict: walk.Redirected, To: netip.MustParseAddrPort(c.to), Expected: c.expected}
		check.Equal(t, inspect.Judge(r), c.want, "to", c.to, "expected", c.expected)
	}
}
