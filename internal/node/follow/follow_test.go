package follow_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/follow"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/nftables/nftrace"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// The matrix: the backends that wrote the rules, and the modes.
const legacy = "legacy"

func backends() []string {
	return []string{string(redirect.Netlink), string(redirect.Native), string(redirect.Tools), legacy}
}

func spaceOf(l *labtest.Fixture, backend string) redirection.Namespace {
	space := redirection.Namespace{NetNS: l.NetNS(), Backend: redirect.Backend(backend), Log: slog.New(slog.DiscardHandler)}
	if backend == legacy {
		space.Backend, space.Tools = redirect.Tools, iptables.Host{Force: iptables.Legacy}
	}
	return space
}

// lab is a redirected pod.
type lab struct {
	*labtest.Fixture
	*testing.T

	space redirection.Namespace
	spec  redirect.Spec
}

func newLab(t *testing.T, backend string, mode redirect.Mode) lab {
	t.Helper()
	spec := redirect.Default()
	spec.Mode, spec.DualStack, spec.DNS, spec.OutboundPortsExclude = mode, true, redirect.DNSAll, ruleset.PortList(443)
	l := lab{Fixture: labtest.New(t, ruleset.IPv4, ruleset.IPv6), T: t, spec: spec}
	l.StartProxy(t, l.Proxy(mode), mode)
	l.space = spaceOf(l.Fixture, backend)
	check.OK(t, check.Err(l.space.Apply(t.Context(), spec, redirection.Reconcile)))
	return l
}

// trace runs a trace during do, and returns its records.
func (l lab) trace(f nftrace.Filter, do func()) (all []document.TraceEvent) {
	l.Helper()
	ctx, cancel := context.WithCancel(l.Context())
	defer cancel()
	records, failed := make(chan document.TraceEvent, 2*follow.MaxPackets), make(chan error, 1)
	o := follow.Options{Subject: "pod shop/web", Filter: f, For: time.Minute, Now: time.Now}
	go func() {
		failed <- follow.Run(ctx, l.space, l.spec, o, func(r document.TraceEvent) error { records <- r; return nil })
	}()
	select {
	case r := <-records:
		all = append(all, r)
	case err := <-failed:
		l.Fatal(err)
	}
	do()
	time.Sleep(200 * time.Millisecond) // for the kernel's last events
	cancel()
	check.OK(l, <-failed)
	close(records)
	for r := range records {
		all = append(all, r)
	}
	if first, last := all[0].Begin, all[len(all)-1].End; first == nil || last == nil || last.Lost > 0 {
		l.Errorf("the trace is %+v ... %+v", first, last)
	}
	if tables := netnstest.Run(l, l.Path(), "nft", "list", "tables"); strings.Contains(tables, "trace") {
		l.Errorf("left behind:\n%s", tables)
	}
	return all
}

// sent is a request with its packet for a walk and the expected result.
type sent struct {
	name string
	labtest.Request
	outgoing bool
	verdict  walk.Verdict
	to       uint16
	wanted   document.Wanted
	text     string
}

func (l lab) requests(f ruleset.Family) []sent {
	inbound, to := walk.Redirected, uint16(15006)
	if l.spec.Mode == redirect.TPROXY {
		inbound = walk.HandedOver
	}
	proxy := l.Proxy(l.spec.Mode)
	return []sent{
		{"the app's", labtest.Request{From: l.App(), To: labtest.Far.Port(f, 80)}, true, walk.Redirected, 15001, document.AsWanted, "is redirected to "},
		{"an excluded port", labtest.Request{From: l.App(), To: labtest.Far.Port(f, 443)}, true, walk.Passed, 0, document.Past, "excludeOutboundPorts"},
		{"the proxy's", labtest.Request{From: proxy, To: labtest.Far.Port(f, 80)}, true, walk.Passed, 0, document.AsWanted, "goes out unredirected, as in every pod: "},
		{"a query", labtest.Request{From: l.App(), Via: labtest.UDP, To: labtest.Resolver.Port(f, 53)}, true, walk.Redirected, 15053, document.AsWanted, "15053"},
		{"the pod's other UDP", labtest.Request{From: l.App(), Via: labtest.UDP, To: labtest.Far.Port(f, labtest.UDPPort)}, true, walk.Passed, 0, document.AsWanted, ""},
		{"what arrives", labtest.Request{From: l.Peer(), To: labtest.Pod.Port(f, 80)}, false, inbound, to, document.AsWanted, "15006"},
		{"a status port", labtest.Request{From: l.Peer(), To: labtest.Pod.Port(f, 15020)}, false, walk.Passed, 0, "", "comes in unredirected, as in every pod: "},
	}
}

// TestFollow_PacketsAreExplained compares a trace with the sent packets, their results without a trace, and the walk of each.
func TestFollow_PacketsAreExplained(t *testing.T) {
	for _, backend := range backends() {
		for _, mode := range []redirect.Mode{redirect.Redirect, redirect.TPROXY} {
			t.Run(backend+"/"+mode.String(), func(t *testing.T) {
				t.Parallel()
				l := newLab(t, backend, mode)
				for _, f := range l.Families {
					for _, s := range l.requests(f) {
						if s.Via == "" {
							s.Via = labtest.TCP
						}
						without := s.Send(t.Context())
						s.SourcePort = l.FreshPort()
						var with labtest.Answer
						all := l.trace(nftrace.Filter{}, func() { with = s.Send(t.Context()) })
						if len(with.Hops) == 0 || len(without.Hops) == 0 || with.Hops[0].By != without.Hops[0].By || with.Hops[0].Dst != without.Hops[0].Dst {
							t.Errorf("%s: the answer is %v, without a trace %v", s.name, with, without)
						}
						l.check(s, backend == legacy, all)
					}
				}
			})
		}
	}
}

// check finds the packet in the records.
func (l lab) check(s sent, legacy bool, all []document.TraceEvent) {
	l.Helper()
	port := fmt.Sprintf(":%d", s.SourcePort)
	i := slices.IndexFunc(all, func(r document.TraceEvent) bool { return r.Packet != nil && strings.HasSuffix(r.Packet.Source, port) })
	if i < 0 {
		l.Errorf("%s: no packet from port %d in %d records", s.name, s.SourcePort, len(all))
		return
	}
	if seen := all[len(all)-1].End.Packets; seen != 1 { // answers are not shown
		l.Errorf("%s: %d packets: %+v", s.name, seen, all)
	}
	got := *all[i].Packet
	if i := slices.IndexFunc(got.Hops, func(h document.Hop) bool { return strings.Contains(h.Why, "TCP is captured") }); i >= 0 && s.Via == labtest.UDP &&
		got.Hops[i].Why != "only TCP is captured here" {
		l.Errorf("%s: %+v", s.name, got.Hops[i])
	}
	unseen := legacy && s.verdict == walk.HandedOver
	if got.NoListener {
		l.Errorf("%s: %s", s.name, got.Sentence)
	}
	if got.Destination != s.To.String() || got.Outgoing != s.outgoing || got.Verdict != s.verdict.String() && !unseen {
		l.Errorf("%s: %+v", s.name, got)
	}
	if legacy {
		return
	}
	if s.wanted != "" && got.Wanted != s.wanted || !strings.Contains(got.Sentence, s.text) || s.to != 0 && !strings.Contains(got.Sentence, fmt.Sprint(s.to)) {
		l.Errorf("%s: %s: %s", s.name, got.Wanted, got.Sentence)
	}
	l.agree(s, got)
}

// agree compares a traced packet with its walk through the live rules.
func (l lab) agree(s sent, got document.TracePacket) {
	l.Helper()
	live, err := l.space.Live(l.Context(), l.spec)
	check.OK(l, err)
	p := walk.Packet{
		Outgoing: s.outgoing, Out: "eth0", Protocol: ruleset.TCP, Src: netip.MustParseAddrPort(got.Source), Dst: s.To,
		UID: uint32(s.From.UID), GID: uint32(s.From.GID),
	}
	if s.Via == labtest.UDP {
		p.Protocol = ruleset.UDP
	}
	if !s.outgoing {
		p.In, p.Out = "eth0", ""
	}
	r := live.Walk(p)
	var walked, traced []string
	for _, h := range r.Hops {
		if h.Answer == walk.Yes {
			walked = append(walked, fmt.Sprint(h.Hook, h.Table, h.Chain, h.Number, h.Rule, h.Why))
		}
	}
	for _, h := range got.Hops {
		traced = append(traced, fmt.Sprint(h.Hook, h.Table, h.Chain, h.Number, h.Rule, h.Why))
	}
	if diff := cmp.Diff(walked, traced); diff != "" || r.Verdict.String() != got.Verdict {
		l.Errorf("%s: %s, %s (-walk +trace):\n%s", s.name, r.Verdict, got.Verdict, diff)
	}
	_, one, _ := strings.Cut(r.Summary, ", because")
	_, other, _ := strings.Cut(got.Sentence, ", because")
	if one != other {
		l.Errorf("%s: the walk's sentence is\n%s\nthe trace's\n%s", s.name, r.Summary, got.Sentence)
	}
}

// one traces the first packet of the app's connection to an address.
func (l lab) one(to string, change func()) document.TracePacket {
	l.Helper()
	f, _, err := follow.Parse(func(name string) string { return map[string]string{"to": to}[name] })
	check.OK(l, err)
	all := l.trace(f, func() {
		if change != nil {
			change()
		}
		netnstest.Run(l, l.Path(), "bash", "-c", "timeout 0.2 bash -c 'echo > /dev/tcp/"+strings.ReplaceAll(to, ":", "/")+"' 2>/dev/null; true")
	})
	for _, r := range all {
		if r.Packet != nil {
			return *r.Packet
		}
	}
	l.Fatalf("no packet: %+v", all)
	return document.TracePacket{}
}

// send sends requests. Each must get an answer.
func (l lab) send(all ...labtest.Request) {
	l.Helper()
	for _, r := range all {
		if a := r.Send(l.Context()); len(a.Hops) == 0 {
			l.Error(a)
		}
	}
}

// TestFollow_ForeignRules: rules drop, reject, redirect or exclude what the mesh captures. The trace knows rules added during it.
func TestFollow_ForeignRules(t *testing.T) {
	t.Parallel()
	const to = "10.2.0.9:80"
	for name, test := range map[string]struct {
		rule     string
		verdict  string
		wanted   document.Wanted
		sentence string
	}{
		"DROP":   {"iptables-nft -t raw -I OUTPUT -p tcp --dport 80 -j DROP", "dropped", document.Past, "rule 1 of raw OUTPUT"},
		"REJECT": {"iptables-nft -I OUTPUT -p tcp --dport 15001 -j REJECT", "rejected", document.Past, "rule 1 of filter OUTPUT"},
		"RETURN": {"iptables-nft -t nat -I OUTPUT -p tcp --dport 80 -j RETURN", "passed", document.Past, "rule 1 of nat OUTPUT"},
		"DNAT":   {"iptables-nft -t nat -I OUTPUT -p tcp -j DNAT --to-destination 10.1.0.9:8080", "redirected", document.Past, "is redirected to 10.1.0.9:8080"},
		"a policy": {
			"nft add chain ip nat OUTPUT2 { type filter hook output priority 50 \\; policy drop \\; }", "dropped", document.Past, ", because of policy DROP of chain OUTPUT2 of table nat",
		},
		"another's table": {
			"nft add table inet x; nft add chain inet x c { type filter hook output priority -50 \\; }; nft add rule inet x c tcp dport 15001 drop",
			"dropped", document.Past, ", because of rule 1 of table inet x c",
		},
		"an address of others": {
			"nft add table inet x; nft add chain inet x c { type nat hook output priority -150 \\; }; nft add rule inet x c tcp dport 80 redirect to :9000",
			"redirected", document.Past, "is redirected to 127.0.0.1:9000",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, string(redirect.Netlink), redirect.Redirect)
			for _, during := range []bool{false, true} {
				add := func() {
					netnstest.Run(t, l.Path(), "sh", "-c", test.rule)
					time.Sleep(1200 * time.Millisecond) // until the rules may be read again
				}
				if !during {
					add()
					add = nil
				}
				got := l.one(to, add)
				if got.Verdict != test.verdict || got.Wanted != test.wanted || !strings.Contains(got.Sentence, test.sentence) {
					t.Errorf("%v: %s, %s: %s\n%+v", during, got.Verdict, got.Wanted, got.Sentence, got.Hops)
				}
				netnstest.Run(t, l.Path(), "sh", "-c", "nft flush ruleset")
				check.OK(t, check.Err(l.space.Apply(t.Context(), l.spec, 0)))
			}
		})
	}
}

// TestFollow_WithoutRules: captured traffic goes out, also DNS.
func TestFollow_WithoutRules(t *testing.T) {
	t.Parallel()
	l := newLab(t, string(redirect.Netlink), redirect.Redirect)
	netnstest.Run(t, l.Path(), "nft", "flush", "ruleset")
	all := l.trace(nftrace.Filter{}, func() {
		l.send(labtest.Request{From: l.App(), Via: labtest.TCP, To: labtest.Far.Port(ruleset.IPv4, 80)},
			labtest.Request{From: l.App(), Via: labtest.UDP, To: labtest.Resolver.Port(ruleset.IPv4, 53)})
	})
	if text, err := json.Marshal(all[1]); err != nil || !strings.Contains(string(text), `"hops":[]`) {
		t.Errorf("got %s, %v", text, err)
	}
	if len(all) != 4 || all[3].End.Past != 2 || all[1].Packet.Sentence != "goes out unredirected: no rule takes it" {
		t.Errorf("got %+v, %+v", all[1].Packet, all[len(all)-1].End)
	}
}

// TestFollow_LegacyRulesAreCounted counts with a trace of the packets, and without one.
func TestFollow_LegacyRulesAreCounted(t *testing.T) {
	t.Parallel()
	for _, mode := range []redirect.Mode{redirect.Redirect, redirect.TPROXY} {
		l := newLab(t, legacy, mode)
		send := func() {
			l.send(labtest.Request{From: l.App(), Via: labtest.TCP, To: labtest.Far.Port(ruleset.IPv6, 80)},
				labtest.Request{From: l.App(), Via: labtest.TCP, To: labtest.Far.Port(ruleset.IPv4, 443)},
				labtest.Request{From: l.Peer(), Via: labtest.TCP, To: labtest.Pod.Port(ruleset.IPv4, 80)})
		}
		seen := l.trace(nftrace.Filter{}, send)
		var blind []document.TraceEvent
		o := follow.Options{Subject: "x", For: time.Second, Now: time.Now}
		unsupported := func(nftrace.Filter) (*nftrace.Tracer, error) {
			return nil, fmt.Errorf("opening: %w", nftrace.ErrUnsupported)
		}
		err := follow.RunWith(t.Context(), l.space, l.spec, o, unsupported, func(r document.TraceEvent) error {
			if blind = append(blind, r); r.Begin != nil {
				send()
			}
			return nil
		})
		check.OK(t, err)
		for name, all := range map[string][]document.TraceEvent{"legacy tables": seen, "the kernel has no nf_tables": blind} {
			check.Contains(t, all[0].Begin.Note, name)
			found := map[string]bool{}
			for _, r := range all {
				if c := r.Count; c != nil && c.Why != "" && c.Packets > 0 && c.Table != "" {
					found[fmt.Sprintf("%s %s %s", c.Family, c.Chain, c.Wanted)] = true
				}
				if r.Packet != nil && name != "legacy tables" {
					t.Errorf("%s: got %+v", name, r.Packet)
				}
			}
			want := []string{"IPv6 ISTIO_REDIRECT as-wanted", "IPv4 ISTIO_OUTPUT past-the-mesh", "IPv4 ISTIO_IN_REDIRECT as-wanted", "IPv4 OUTPUT "}
			if mode == redirect.TPROXY {
				want[2] = "IPv4 ISTIO_TPROXY as-wanted"
			}
			for _, one := range want {
				check.Equal(t, found[one], true, mode, name, one, found)
			}
			if end := all[len(all)-1].End; end.CountedPast == 0 || end.CountedWanted == 0 || end.Counted < end.CountedPast+end.CountedWanted || end.Hint != "" {
				t.Errorf("%s: %+v", name, end)
			}
		}
	}
}

// TestFollow_Flood: a pod that sends very many packets uses no more memory, and is not slowed down.
func TestFollow_Flood(t *testing.T) {
	t.Parallel()
	l := newLab(t, string(redirect.Netlink), redirect.Redirect)
	sent := 0
	flood := func() error {
		socket, err := net.ListenUDP("udp4", nil)
		if err != nil {
			return err
		}
		defer socket.Close() //nolint:errcheck // nothing is lost
		for i := range 100_000 {
			to := netip.AddrPortFrom(labtest.Far.Port(ruleset.IPv4, 0).Addr(), uint16(1+i%60_000))
			if n, _ := socket.WriteToUDPAddrPort([]byte("x"), to); n > 0 { // a full queue is not an error
				sent++
			}
		}
		return nil
	}
	all := l.trace(nftrace.Filter{}, func() {
		check.OK(t, l.NetNS().Do(flood))
	})
	packets := 0
	for _, r := range all {
		if r.Packet != nil {
			packets++
		}
	}
	t.Logf("%d packets of %d", packets, sent)
	if sent < 10_000 || packets < 50 || packets > follow.MaxPackets {
		t.Errorf("%d packets are shown", packets)
	}
}

// slowTools returns the host's legacy tools. The ones that read run a command first.
func slowTools(t *testing.T, command string) iptables.Host {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"iptables-legacy", "ip6tables-legacy"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			path, err := exec.LookPath(name + suffix)
			check.OK(t, err)
			script := "#!/bin/sh\n"
			if suffix == "-save" {
				script += command + "\n"
			}
			check.OK(t, os.WriteFile(filepath.Join(dir, name+suffix), []byte(script+"exec "+path+" \"$@\"\n"), 0o700))
		}
	}
	return iptables.Host{Force: iptables.Legacy, Path: dir}
}

// TestCounters_LastReading: the last reading has its own timeout, and its error hides no other result.
func TestCounters_LastReading(t *testing.T) {
	t.Parallel()
	broken := filepath.Join(t.TempDir(), "broken")
	for name, test := range map[string]struct {
		command string
		fails   string
	}{
		"the time ends during a reading": {command: "sleep 0.5"}, // the second tick of the counters is at 2 s, the end 200 ms later
		"the tool fails": {
			command: "if [ -e " + broken + " ]; then echo no memory >&2; exit 1; fi", fails: "reading the counters of IPv4 rules: ",
		},
	} {
		l := newLab(t, legacy, redirect.Redirect)
		l.space.Tools = slowTools(t, test.command)
		var all []document.TraceEvent
		o := follow.Options{Subject: "x", For: 2200 * time.Millisecond, Now: time.Now}
		err := follow.Run(t.Context(), l.space, l.spec, o, func(r document.TraceEvent) error {
			if all = append(all, r); r.Begin == nil {
				return nil
			}
			l.send(labtest.Request{From: l.App(), Via: labtest.TCP, To: labtest.Far.Port(ruleset.IPv4, 80)},
				labtest.Request{From: l.App(), Via: labtest.TCP, To: labtest.Far.Port(ruleset.IPv4, 443)})
			if test.fails != "" {
				return os.WriteFile(broken, nil, 0o600)
			}
			return nil
		})
		if (err == nil) != (test.fails == "") || err != nil && !strings.Contains(err.Error(), test.fails) {
			t.Errorf("%s: %v", name, err)
		}
		end := all[len(all)-1].End
		if end == nil {
			t.Errorf("%s: no result: %+v", name, all)
			continue
		}
		got := *end
		got.Counted = 0 // several rules count each packet
		want := document.TraceEnd{Reason: "the time is over", Packets: 2, Wanted: 1, ByLegacy: 1}
		if test.fails == "" {
			want.CountedWanted, want.CountedPast = 1, 1
		}
		if diff := cmp.Diff(want, got); diff != "" || (end.Counted == 0) != (test.fails != "") {
			t.Errorf("%s: %d (-want +got):\n%s", name, end.Counted, diff)
		}
	}
}

// TestSettings_PacketsOfEveryPod: a setting is not named as the reason for packets that the mesh never captures.
func TestSettings_PacketsOfEveryPod(t *testing.T) {
	t.Parallel()
	for _, backend := range backends() {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, backend, redirect.Redirect)
			for _, test := range []struct {
				dns    redirect.DNSCapture
				via    labtest.Protocol
				to     netip.AddrPort
				wanted document.Wanted
				text   string
			}{
				{redirect.DNSOff, labtest.UDP, labtest.Resolver.Port(ruleset.IPv4, 53), document.AsWanted, "as in every pod: the mesh captures TCP, and of UDP only DNS"},
				{redirect.DNSAll, labtest.UDP, labtest.Resolver.Port(ruleset.IPv4, 53), document.Past, "excludeOutboundPorts=53"},
				{redirect.DNSOff, labtest.TCP, labtest.Loopback.Port(ruleset.IPv4, 443), document.AsWanted, "as in every pod: the app calls its own pod"},
			} {
				l.spec.DNS, l.spec.OutboundPortsExclude = test.dns, ruleset.PortList(53, 443)
				check.OK(t, check.Err(l.space.Apply(t.Context(), l.spec, redirection.Reconcile)))
				all := l.trace(nftrace.Filter{}, func() { labtest.Request{From: l.App(), Via: test.via, To: test.to}.Send(t.Context()) })
				end := *all[len(all)-1].End
				var got document.TracePacket
				for _, r := range all {
					if r.Packet != nil {
						got = *r.Packet
					}
				}
				name := fmt.Sprintf("%s to %s", test.via, test.to)
				if past := end.Past > 0 || end.CountedPast > 0; end.Packets != 1 || past != (test.wanted == document.Past) && (backend != legacy || test.via == labtest.UDP) {
					t.Errorf("%s: %+v", name, end)
				}
				if backend != legacy && (got.Wanted != test.wanted || !strings.Contains(got.Sentence, test.text)) {
					t.Errorf("%s: %s, %s", name, got.Wanted, got.Sentence)
				}
			}
		})
	}
}
