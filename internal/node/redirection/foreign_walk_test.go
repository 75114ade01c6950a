package redirection_test

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os/exec"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/inspect"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// These tests compare the answers of "istio-cni why" with real packets in namespaces that other programs also use, with chains in
// every table, hook and priority, and with routes.

var (
	foreignSeed  = flag.Uint64("foreign.seed", 1, "seed of TestAnswers_ForeignRules")
	foreignCases = flag.Int("foreign.cases", 24, "number of namespaces there")
	foreignFirst = flag.Int("foreign.first", 0, "the first of them")
	foreignItems = flag.Int("foreign.items", 4, "largest number of foreign items in a namespace")
)

// maxUnknown is the largest share of questions, in percent, that may have the answer "cannot tell".
const maxUnknown = 5

const (
	questions = 24 // per namespace
	// shortWait is long enough for a packet to reach the witness; longWait waits for an answer in any case.
	shortWait, longWait = 250 * time.Millisecond, 15 * time.Second
)

// item is what another program left in a namespace.
type item struct {
	kind string
	// command reads text.
	command, text string
}

// install adds the item to the namespace, and reports whether the kernel and the tool accepted it.
func (i item) install(ctx context.Context, path string) error {
	return netns.Do(path, func() error {
		words := strings.Fields(i.command)
		cmd := exec.CommandContext(ctx, "env", append([]string{"XTABLES_LOCKFILE=" + path}, words...)...)
		cmd.Stdin = strings.NewReader(i.text)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s\n%s", i.command, err, out, i.text)
		}
		return nil
	})
}

// order sorts items: iptables-nft refuses tables with unknown chains, and other items use interface names that ip changes.
func order(i item) int { return slices.Index([]string{"nft", "ip"}, strings.Fields(i.command)[0]) }

// asked is a question with its answer, and the packet that was sent.
type asked struct {
	inspect.Question
	labtest.Request
	answer document.Answer
	err    error
	got    labtest.Answer
}

// command returns the command line for the question.
func (a asked) command() string {
	c := fmt.Sprintf("istio-cni why --netns /run/netns/pod --to %s --uid %d --gid %d", a.Question.To, a.UID, a.GID)
	if a.Inbound {
		c = fmt.Sprintf("istio-cni why --netns /run/netns/pod --from %s --port %d", a.Question.From, a.Port)
	}
	if a.UDP {
		c += " --udp"
	}
	return c
}

// tally counts the questions and the items of a whole test.
type tally struct {
	sync.Mutex

	asked, unknown, planted, refused int
}

// TestAnswers_ForeignRules compares each definite answer with the packet's real end.
func TestAnswers_ForeignRules(t *testing.T) {
	t.Logf("-foreign.seed=%d", *foreignSeed)
	var counts tally
	t.Run("case", func(t *testing.T) {
		for n := *foreignFirst; n < *foreignFirst+*foreignCases; n++ {
			v := []iptables.Variant{byNetlink, byTables, iptables.Legacy}[n%3]
			t.Run(fmt.Sprintf("%d/%s", n, v), func(t *testing.T) {
				t.Parallel()
				w := walked{Rand: rand.New(rand.NewPCG(*foreignSeed, uint64(n))), tb: t}
				w.answers(t, v, &counts)
			})
		}
	})
	t.Logf("%d questions, %d cannot tell; %d items, %d not taken by the kernel or the tool", counts.asked, counts.unknown, counts.planted, counts.refused)
	if counts.unknown*100 > counts.asked*maxUnknown {
		t.Errorf("more than %d %% of the questions have no answer", maxUnknown)
	}
	if counts.refused > counts.planted/10 {
		t.Errorf("%d of %d foreign items are refused", counts.refused, counts.planted)
	}
}

// answers tests one namespace.
func (w *walked) answers(t *testing.T, v iptables.Variant, counts *tally) {
	t.Helper()
	spec := w.randomSpec()
	w.fixture = newFixture(t, spec, families...)
	w.Acquaint(t)
	w.sets(t)
	mustApply(t, namespaceOf(w.Fixture, v), spec)
	var planted []item
	items := w.items()
	if v == byTables {
		items = append(items, w.ofTheMesh())
	}
	slices.SortStableFunc(items, func(a, b item) int { return order(a) - order(b) })
	for _, i := range items {
		err := i.install(t.Context(), w.Path())
		counts.Lock()
		counts.planted++
		if err != nil {
			counts.refused++
			t.Log(err)
		}
		counts.Unlock()
		if err == nil {
			planted = append(planted, i)
		}
	}
	all := w.questions()
	w.ask(t, v, spec, all)
	witness := w.Watch(t)
	sendTogether(t.Context(), all, shortWait)
	witness.Look()
	if late := unsent(all, witness); len(late) > 0 { // the machine is busy
		sendTogether(t.Context(), late, longWait)
		witness.Look()
	}
	const most = 5
	wrong := 0
	for _, a := range all {
		counts.Lock()
		counts.asked++
		if a.answer.Verdict == walk.CannotTell.String() {
			counts.unknown++
			t.Log(a.answer.Sentence)
		}
		counts.Unlock()
		why := w.disagreement(*a, witness)
		if why == "" {
			continue
		}
		if wrong++; wrong > most {
			t.Errorf("%s: %s", a.command(), why)
			continue
		}
		t.Errorf("%s\n%s\nanswer: %s %v\nwent:   %s\n%s", a.command(), why, a.answer.Sentence, a.err, a.got, metAt(a.answer))
		if wrong == 1 {
			t.Logf("by %s of %+v beside\n%+v", v, spec, planted)
		}
	}
}

// metAt lists the rules that matched or may have matched.
func metAt(a document.Answer) string {
	var b strings.Builder
	for _, h := range a.Hops {
		if h.Answer != walk.No.String() {
			fmt.Fprintf(&b, "  %s %s: %s/%s %d: %s    # %s\n", h.Answer, h.Hook, h.Table, h.Chain, h.Number, h.Rule, h.Why)
		}
	}
	return b.String()
}

// questions returns random questions.
func (w *walked) questions() []*asked {
	all := make([]*asked, questions)
	for i := range all {
		w.family = pick(w, families...)
		a := w.question()
		all[i] = &a
	}
	return all
}

func (w *walked) question() (a asked) {
	ports := []uint16{80, 80, 443, 53, 8080, 9000, 81, 15001, 15006, 15008, 15020}
	port := pick(w, ports...)
	a.SourcePort, a.Via = w.FreshPort(), tcp
	if w.IntN(4) == 0 {
		a.Via, a.UDP, port = udp, true, pick[uint16](w, 53, 53, labtest.UDPPort, 81)
	}
	if w.IntN(3) == 0 {
		from := pick(w, labtest.Peer, labtest.Far, labtest.Guest, labtest.Side)
		at := map[labtest.Place]labtest.Place{labtest.Guest: labtest.PodInside, labtest.Side: labtest.PodSide}[from]
		at = cmp.Or(at, labtest.Pod)
		a.Request.From = w.Peer()
		if from == labtest.Guest {
			a.Request.From = w.Guest()
		}
		a.Source, a.Request.To = from.Addr(w.family), at.Port(w.family, port)
		a.Inbound, a.Question.From, a.Port = true, a.Source, port
		return a
	}
	id := func(more []uint32) uint32 { return pick(w, append([]uint32{0, 1000, 1000, 1337, 3000}, more...)...) }
	a.UID, a.GID = id(w.spec.UIDs), id(w.spec.GIDs)
	a.Request.From = labtest.Actor{Name: "process", Namespace: w.Path(), UID: int(a.UID), GID: int(a.GID)}
	to := pick(w, labtest.Peer, labtest.Far, labtest.Far, labtest.Private, labtest.Resolver, labtest.OtherResolver,
		labtest.Loopback, labtest.Pod, labtest.PodSide, labtest.Side, labtest.Guest)
	a.Request.To = to.Port(w.family, port)
	a.Question.To = a.Request.To
	return a
}

// ask asks about all packets before any is sent.
func (w *walked) ask(t *testing.T, v iptables.Variant, spec redirect.Spec, all []*asked) {
	t.Helper()
	for i := range all {
		var of redirect.Wanted = spec
		if w.Rand != nil && w.IntN(3) == 0 { // like a namespace about which nothing is known
			of = nil
		}
		all[i].answer, all[i].err = inspect.Walk(t.Context(), namespaceOf(w.Fixture, v), of, all[i].Question)
	}
}

// sendTogether sends all packets at the same time, because a dropped one ends only at its deadline.
func sendTogether(ctx context.Context, all []*asked, wait time.Duration) {
	var sending sync.WaitGroup
	for _, a := range all {
		sending.Go(func() {
			limited, cancel := context.WithTimeout(ctx, wait)
			defer cancel()
			a.got = a.Send(limited)
		})
	}
	sending.Wait()
}

// unsent returns the packets whose deadline passed before they were sent.
func unsent(all []*asked, seen *labtest.Witness) []*asked {
	return slices.DeleteFunc(slices.Clone(all), func(a *asked) bool {
		return seen.Sent[a.SourcePort] || !errors.Is(a.got.Err, labtest.ErrSilent)
	})
}

// unroutable reports whether the sender's kernel refused the packet because a route forbids it, or because there is no route.
func unroutable(err error) bool {
	return slices.ContainsFunc([]error{syscall.EINVAL, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EACCES}, func(e error) bool { return errors.Is(err, e) })
}

// verdictOf returns the verdict of the walk, if there was a walk.
func verdictOf(a document.Answer) (v walk.Verdict, known bool) {
	for v = walk.CannotTell; v <= walk.Rejected; v++ {
		if a.Verdict == v.String() {
			return v, true
		}
	}
	return v, false
}

// disagreement compares the answer with the packet; "" means that they agree.
func (w *walked) disagreement(a asked, seen *labtest.Witness) string {
	w.family = families[0]
	if a.Request.To.Addr().Is6() {
		w.family = families[1]
	}
	arrived := slices.Concat(seen.Pod[a.SourcePort], seen.Peer[a.SourcePort], seen.Guest[a.SourcePort])
	sent := seen.Sent[a.SourcePort]
	verdict, known := verdictOf(a.answer)
	way := fmt.Sprintf(" to %s, arriving by interface ", a.Request.To)
	switch {
	case a.Inbound && a.err == nil && !strings.Contains(a.answer.Packet, way): // answers leave from another address
		return ""
	case a.err != nil:
		return "there is no answer"
	case known && verdict == walk.CannotTell:
		return ""
	case a.answer.Verdict == "not-sent" && !sent && unroutable(a.got.Err):
		return ""
	case !known || !sent:
		return fmt.Sprintf("the packet is sent: %t, %v", sent, a.got.Err)
	case a.answer.NoListener && len(a.got.Hops) > 0:
		return "a process listens"
	case verdict == walk.Dropped || verdict == walk.Rejected:
		unanswered := verdict == walk.Rejected || errors.Is(a.got.Err, labtest.ErrSilent) || errors.Is(a.got.Err, labtest.ErrForbidden) || unroutable(a.got.Err)
		if len(a.got.Hops) > 0 || len(arrived) > 0 || !unanswered {
			return fmt.Sprintf("the packet arrived at ports %v", arrived)
		}
		return ""
	}
	r := walk.Result{Verdict: verdict}
	r.To, _ = netip.ParseAddrPort(a.answer.To)
	want := w.listener(a.Request, r)
	to := a.Request.To
	if verdict == walk.Redirected {
		to = r.To
	}
	there := slices.Contains(w.arrivals(to, seen)[a.SourcePort], to.Port())
	got := w.answeredBy(a.Request, a.got)
	// A rule that affects only its first packet can break a connection, or hide its original destination.
	if unanswered := errors.Is(a.got.Err, labtest.ErrSilent); unanswered && (there || verdict == walk.HandedOver && len(arrived) > 0) {
		return ""
	}
	by, _, _ := strings.Cut(got, ",")
	if len(a.got.Hops) > 0 && !slices.Contains(want, got) && !slices.Contains(want, by) || len(a.got.Hops) == 0 && !there {
		return fmt.Sprintf("the kernel's answer is %q, want %q; the packet arrived at ports %v", got, want, arrived)
	}
	return ""
}

// arrivals returns the packets that arrived at the host with an address.
func (w *walked) arrivals(to netip.AddrPort, seen *labtest.Witness) map[uint16][]uint16 {
	for _, p := range []labtest.Place{labtest.Peer, labtest.Far, labtest.Private, labtest.Side, labtest.Resolver, labtest.OtherResolver} {
		if p.Addr(w.family) == to.Addr() {
			return seen.Peer
		}
	}
	if labtest.Guest.Addr(w.family) == to.Addr() {
		return seen.Guest
	}
	return seen.Pod
}

// answeredBy names the listener that answered, or the error.
func (w *walked) answeredBy(q labtest.Request, got labtest.Answer) string {
	if len(got.Hops) == 0 {
		return got.Err.Error()
	}
	by := got.Hops[0]
	proxied := slices.Contains([]string{labtest.ByOutbound, labtest.ByInbound, labtest.ByDNS}, by.By)
	if proxied && by.Dst.IsValid() && got.Err == nil && by.Dst != q.To {
		return fmt.Sprintf("%s, asked for %s", by.By, by.Dst)
	}
	return by.By
}

//go:embed testdata
var testdata embed.FS

// texts returns the matching files of testdata by name.
func texts(pattern string) map[string]string {
	files, err := fs.Glob(testdata, "testdata/"+pattern)
	all := map[string]string{}
	for _, file := range files {
		text, failed := testdata.ReadFile(file)
		all[path.Base(file)], err = string(text), errors.Join(err, failed)
	}
	if err != nil || len(all) == 0 {
		panic(fmt.Sprint(pattern, ": ", err))
	}
	return all
}

// restoring is the command that loads a file, by its extension.
var restoring = map[string]string{
	".iptables": "iptables-nft-restore --noflush", ".ip6tables": "ip6tables-nft-restore --noflush", ".nft": "nft -f -",
}

// recorded returns what known programs leave in a namespace without affecting the pod's traffic. Their rules are written by hand.
func recorded() (all []item) {
	rules := texts("programs/*")
	for _, name := range slices.Sorted(maps.Keys(rules)) {
		all = append(all, item{"program " + name, restoring[path.Ext(name)], rules[name]})
	}
	return all
}

// stateIn returns the state of a namespace as the agent judges it, without processes and listeners. The rules alone give the same state.
func stateIn(t *testing.T, n redirection.Namespace, spec redirect.Spec) (audit.State, []audit.Problem) {
	t.Helper()
	report, err := n.Audit(t.Context(), spec)
	check.OK(t, err)
	problems := audit.Assess(spec, audit.Observation{
		Mesh: report.Mesh, Rules: audit.Rules(report.Mesh, report.Diffs, report.Ways), Routing: report.Routing, Families: report.Families,
	})
	state := audit.StateOf(problems)
	alone, err := inspect.Alone(t.Context(), n)
	check.OK(t, err)
	check.Equal(t, alone.State, state, "by the rules alone the state is", alone.Problems, "of the pod's configuration it is", problems)
	return state, problems
}

// usual returns the usual packets of a pod.
func (w *walked) usual() (all []*asked) {
	add := func(q inspect.Question, from labtest.Actor, to netip.AddrPort) {
		a := &asked{Question: q, Request: labtest.Request{From: from, Via: tcp, To: to, SourcePort: w.FreshPort()}}
		if q.UDP {
			a.Via = udp
		}
		if q.Inbound {
			a.Source = q.From
		}
		all = append(all, a)
	}
	for _, f := range families {
		for _, uid := range []uint32{labtest.AppUID, redirect.DefaultID} {
			places := []netip.AddrPort{labtest.Far.Port(f, 80), labtest.Pod.Port(f, 9000), labtest.Resolver.Port(f, 53)}
			if uid == labtest.AppUID {
				places = append(places, labtest.Peer.Port(f, 443), labtest.Loopback.Port(f, 8080), labtest.Far.Port(f, 15020))
			}
			for _, to := range places {
				who := labtest.Actor{Name: "process", Namespace: w.Path(), UID: int(uid), GID: int(uid)}
				add(inspect.Question{To: to, UID: uid, GID: uid}, who, to)
				if to.Port() == 53 {
					add(inspect.Question{To: to, UID: uid, GID: uid, UDP: true}, who, to)
				}
			}
		}
		for _, port := range []uint16{80, 9000, 15020} {
			add(inspect.Question{Inbound: true, From: labtest.Far.Addr(f), Port: port}, w.Peer(), labtest.Pod.Port(f, port))
		}
	}
	return all
}

// ways sends the usual packets, and returns where each went.
func (w *walked) ways(t *testing.T) (all []*asked, ways []string) {
	t.Helper()
	all = w.usual()
	sendTogether(t.Context(), all, longWait)
	for _, a := range all {
		ways = append(ways, fmt.Sprintf("%s: %s", a.command(), w.answeredBy(a.Request, a.got)))
	}
	return all, ways
}

// captured returns a pod with the mesh's rules.
func captured(t *testing.T, mode redirect.Mode) (w *walked) {
	t.Helper()
	spec := dualStack(mode)
	spec.DNS, spec.DNSServers = redirect.DNSAll, nil
	w = &walked{fixture: newFixture(t, spec, families...), tb: t}
	w.sets(t)
	return w
}

// beside describes how the mesh's rules are added to a namespace that another program also uses.
type beside struct {
	by    iptables.Variant
	mode  redirect.Mode
	ahead bool // the program's rules came first
}

func (b beside) String() string {
	return fmt.Sprintf("%s %s %s", map[bool]string{true: "ahead of", false: "behind"}[b.ahead], b.by, b.mode)
}

// TestState_HarmlessPrograms: rules of a program that affect no packet are not a fault of the pod, in any order, and the way of
// usual packets is known.
func TestState_HarmlessPrograms(t *testing.T) {
	t.Parallel()
	without := map[beside][]string{}
	for _, by := range []iptables.Variant{byNetlink, byTables, iptables.Legacy} {
		for _, mode := range []redirect.Mode{redirect.Redirect, redirect.TPROXY} {
			w := captured(t, mode)
			w.apply(t, by, w.spec)
			_, without[beside{by: by, mode: mode}] = w.ways(t)
		}
	}
	for n, c := range recorded() {
		cells := []beside{{byNetlink, redirect.Redirect, false}, {byNetlink, redirect.Redirect, true}}
		if marks := c.text; strings.Contains(marks, "MARK ") || strings.Contains(marks, "mark set") { // TPROXY needs marks
			cells = append(cells, beside{byNetlink, redirect.TPROXY, true})
		}
		other := beside{byTables, redirect.Redirect, true}
		if n%2 == 0 && !strings.HasPrefix(c.command, "nft") {
			other.by = iptables.Legacy
		}
		for _, cell := range append(cells, other) {
			t.Run(fmt.Sprintf("%s %s", c.kind, cell), func(t *testing.T) {
				t.Parallel()
				c.harmless(t, cell, without[beside{by: cell.by, mode: cell.mode}])
			})
		}
	}
}

// installBy is install with the tools of a backend.
func (i item) installBy(t *testing.T, w *walked, by iptables.Variant) {
	t.Helper()
	if by == iptables.Legacy {
		i.command = strings.Replace(i.command, "-nft-", "-legacy-", 1)
	}
	check.OK(t, i.install(t.Context(), w.Path()))
}

// published reports whether a problem is about traffic that a program takes before the mesh, or in an unknown order: the ports that it
// publishes for containers, and the addresses of services.
func (b beside) published(program, detail string) bool {
	of := map[string]string{
		"program netavark.nft": "chain NETAVARK-HOSTPORT-DNAT", "program docker.nft": "tcp dport 18081", "program kube-proxy.nft": "table ip kube-proxy",
		"program docker.iptables": "nat/DOCKER", "program kube-proxy.iptables": "nat/KUBE-", "program cni-portmap.iptables": "nat/CNI-HOSTPORT-DNAT",
	}[program]
	return of != "" && strings.Contains(detail, of) && (b.ahead || strings.Contains(detail, "table "))
}

func (i item) harmless(t *testing.T, at beside, without []string) {
	t.Helper()
	w := captured(t, at.mode)
	if at.ahead {
		i.installBy(t, w, at.by)
	}
	w.apply(t, at.by, w.spec)
	if !at.ahead {
		i.installBy(t, w, at.by)
	}
	n := namespaceOf(w.Fixture, at.by)
	state, problems := stateIn(t, n, w.spec)
	all, ways := w.ways(t)
	check.Diff(t, "it takes a packet", without, ways)
	takes := slices.DeleteFunc(slices.Clone(problems), func(p audit.Problem) bool {
		return p.State == audit.ForeignRule && at.published(i.kind, p.Detail)
	})
	if state != audit.Captured && len(takes) > 0 {
		t.Errorf("the state is %s: %+v", state, takes)
	}
	var unknown []string
	for _, a := range all {
		answer, err := inspect.Walk(t.Context(), n, w.spec, a.Question)
		check.OK(t, err)
		if answer.Verdict == walk.CannotTell.String() {
			unknown = append(unknown, a.command()+": "+answer.Sentence)
		}
	}
	if len(unknown) > 0 {
		t.Errorf("%d of %d usual packets have no answer: %s", len(unknown), len(all), unknown[0])
	}
}

// taker takes packets of a captured pod.
type taker struct {
	name, command, text string
	// question asks about a packet that it takes; want is the packet's end: the name of the listener or the error.
	question inspect.Question
	want     string
	state    audit.State
	// only is the backend for which it is a taker, "" for every backend.
	only iptables.Variant
}

// takers returns rules that lead traffic past the proxy, or end it.
func takers() []taker {
	out := func(to string) inspect.Question {
		return inspect.Question{To: netip.MustParseAddrPort(to), UID: labtest.AppUID, GID: labtest.AppUID}
	}
	in := inspect.Question{Inbound: true, From: labtest.Far.Addr(ruleset.IPv4), Port: 9000}
	web := out("10.2.0.9:80")
	nft := func(name, text string, q inspect.Question, want string) taker {
		return taker{name, "nft -f -", text, q, want, audit.ForeignRule, ""}
	}
	proxys := inspect.Question{To: web.To, UID: redirect.DefaultID, GID: redirect.DefaultID}
	marking := func(route string) string {
		return "ip route add " + route + " table 55\nip rule add fwmark 0x55 lookup 55\niptables-nft -t mangle -A OUTPUT -p tcp -j MARK --set-mark 0x55\n"
	}
	refused, silent := labtest.ErrRefused.Error(), labtest.ErrSilent.Error()
	redirects := func(table, chain string, priority int) string {
		return fmt.Sprintf("table %s {\nchain %s { type nat hook output priority %d; tcp dport 80 redirect to :9090; }\n}\n", table, chain, priority)
	}
	return []taker{
		nft("redirect in ip nat mine at -150", redirects("ip nat", "mine", -150), web, refused),
		nft("redirect in ip nat output at -110", redirects("ip nat", "output", -110), web, refused),
		nft("redirect in ip nat output at -101", redirects("ip nat", "output", -101), web, refused),
		nft("redirect in ip nat output at -100", redirects("ip nat", "output", -100), web, ""),
		nft("redirect in inet foo at -150", redirects("inet foo", "mine", -150), web, refused),
		nft("redirect in the table of a trace", redirects("ip istio-cni-trace-1", "mine", -150), web, refused),
		nft("nat output behind, of what the mesh lets go", "table ip nat {\nchain late { type nat hook output priority 0; tcp dport 9999 dnat to 10.2.0.9:80; }\n}\n",
			out("10.1.0.2:9999"), labtest.ByPeer),
		nft("drop in ip raw prerouting", "table ip raw {\nchain prerouting { type filter hook prerouting priority -300; tcp dport 9000 drop; }\n}\n", in, silent),
		nft("drop in ip mangle x", "table ip mangle {\nchain x { type filter hook output priority -150; tcp dport 80 drop; }\n}\n", web, silent),
		nft("policy drop in ip filter in", "table ip filter {\nchain in { type filter hook input priority 0; policy drop; ct state established,related accept; }\n}\n", in, silent),
		nft("rewriting behind, outbound", "table ip x {\nchain y { type route hook output priority 0; ip daddr 127.0.0.1 tcp dport 15001 ip daddr set ct original ip daddr tcp dport set ct original proto-dst; }\n}\n",
			web, ""),
		nft("rewriting behind, outbound, in the table of a trace", "table ip istio-cni-trace-1 {\nchain y { type route hook output priority 0; ip daddr 127.0.0.1 tcp dport 15001 ip daddr set ct original ip daddr tcp dport set ct original proto-dst; }\n}\n",
			web, ""),
		nft("rewriting behind, inbound", "table ip x {\nchain y { type filter hook input priority 0; tcp dport 15006 tcp dport set ct original proto-dst; }\n}\n", in, ""),
		nft("rewriting ahead, in ip raw", "table ip raw {\nchain y { type filter hook output priority -310; tcp dport 80 tcp dport set 15020; }\n}\n", web, ""),
		nft("notrack", "table inet x {\nchain y { type filter hook output priority -300; tcp dport 80 notrack; }\n}\n", web, ""),
		nft("notrack in ip raw", "table ip raw {\nchain y { type filter hook output priority -300; tcp dport 80 notrack; }\n}\n", web, ""),
		nft("ingress drop", "table netdev x {\nchain y { type filter hook ingress device \"eth0\" priority 0; tcp dport 9000 drop; }\n}\n", in, silent),
		nft("ingress rewriting", "table netdev x {\nchain y { type filter hook ingress device \"eth0\" priority 0; tcp dport 9000 tcp dport set 15020; }\n}\n", in, ""),
		nft("ingress on lo", "table netdev x {\nchain y { type filter hook ingress device \"lo\" priority 0; tcp dport 15001 drop; }\n}\n", web, silent),
		nft("ingress on lo, in a table of the mesh's name", "table netdev istio-proxy-raw {\nchain prerouting { type filter hook ingress device \"lo\" priority -300; policy drop; }\n}\n", web, silent),
		nft("policy of a second chain", "table ip x {\nchain y { type filter hook input priority 0; }\nchain z { type filter hook output priority 0; policy drop; }\n}\n", web, silent),
		nft("set of addresses with ports", "table ip x {\nset s { type ipv4_addr . inet_service; elements = { 10.2.0.9 . 80 }; }\nchain y { type filter hook output priority -150; ip daddr . tcp dport @s drop; }\n}\n", web, silent),
		nft("verdict map", "table inet x {\nchain y { type filter hook output priority -200; tcp dport vmap { 80 : drop, 443 : accept }; }\n}\n", web, silent),
		nft("verdict map for all other addresses", "table ip x {\nchain y { type filter hook output priority -150; ip daddr vmap { 10.1.0.9 : accept, * : drop }; }\n}\n", web, silent),
		nft("set with the address", "table ip x {\nset s { type ipv4_addr; elements = { 10.2.0.9 }; }\nchain y { type filter hook output priority -150; ip daddr @s drop; }\n}\n", web, silent),
		nft("chain behind two jumps", "table ip x {\nchain a { jump b; }\nchain b { tcp dport 80 drop; }\nchain y { type filter hook output priority -150; jump a; }\n}\n", web, silent),
		nft("redirect of inbound ahead", "table ip nat {\nchain in { type nat hook prerouting priority -110; tcp dport 9000 redirect to :15020; }\n}\n", in, labtest.ByStatus),
		{"iptables notrack, behind the mesh's", "iptables-nft-restore --noflush", "*raw\n-A OUTPUT -p tcp -m tcp --dport 80 -j CT --notrack\nCOMMIT\n", web, "", audit.ForeignRule, ""},
		{"iptables RETURN ahead", "iptables-nft-restore --noflush", "*nat\n-I OUTPUT -p tcp -m tcp --dport 80 -j RETURN\nCOMMIT\n", web, labtest.ByPeer, audit.ForeignRule, byNetlink},
		{"iptables-legacy REDIRECT beside", "iptables-legacy-restore --noflush", "*nat\n-A OUTPUT -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 15020\nCOMMIT\n", web, "", audit.ForeignRule, ""},
		{"iptables-legacy DNAT of the port beside, and a drop", "iptables-legacy-restore --noflush", "*nat\n-A OUTPUT -p tcp -m tcp --dport 80 -j DNAT --to-destination :15020\nCOMMIT\n*filter\n-A OUTPUT -d 10.2.0.9 -p tcp -m tcp --dport 15020 -j DROP\nCOMMIT\n", web, silent, audit.ForeignRule, ""},
		{"iptables DROP in raw, behind the mesh's", "iptables-nft-restore --noflush", "*raw\n-A PREROUTING -p tcp -m multiport --dports 1:9999 -m comment --comment x -j DROP\nCOMMIT\n", in, silent, audit.ForeignRule, ""},
		{"iptables queue behind", "iptables-nft-restore --noflush", "*filter\n-A OUTPUT -p tcp -m tcp --dport 15001 -j NFQUEUE --queue-num 5\nCOMMIT\n", web, silent, audit.ForeignRule, ""},
		{"copies by TEE and a drop", "iptables-nft-restore --noflush", "*mangle\n-A OUTPUT -d 10.2.0.9 -p tcp -j TEE --gateway 10.1.0.1\nCOMMIT\n*filter\n-A OUTPUT -p tcp -m tcp --dport 15001 -j DROP\nCOMMIT\n", web, "", audit.ForeignRule, ""},
		{"copies and a drop", "nft -f -", "table ip x {\nchain y { type filter hook output priority -300; tcp dport 80 dup to 10.1.0.1; }\nchain z { type filter hook output priority 0; tcp dport 15001 drop; }\n}\n", web, "", audit.ForeignRule, ""},
		nft("answers dropped", "table inet x {\nchain y { type filter hook output priority 0; ct state established drop; }\n}\n", web, silent),
		nft("answers dropped by a policy", "table inet x {\nchain y { type filter hook input priority 10; policy drop; ct state new accept; }\n}\n", web, silent),
		nft("answers to inbound dropped", "table ip x {\nchain y { type filter hook output priority 0; oifname \"eth0\" tcp sport 9000 reject; tcp sport 15006 drop; }\n}\n", in, silent),
		nft("what follows dropped", "table ip x {\nchain y { type filter hook output priority 0; oifname \"eth0\" ct state established drop; }\n}\n", proxys, ""),
		{"a zone", "iptables-nft-restore --noflush", "*raw\n-A OUTPUT -p tcp -j CT --zone 9\nCOMMIT\n", web, labtest.ByOutbound + ", asked for 127.0.0.1:15001", audit.ForeignRule, ""},
		{"a mark whose route ends", "sh", marking("blackhole default"), web, silent, audit.ForeignRule, ""},
		{"a mark whose route leads to the pod", "sh", marking("local default dev lo"), proxys, silent, audit.ForeignRule, ""},
		{"eth0 named lo", "ip -batch -", "link set lo name lo0\nlink set eth0 name lo\n", out("10.2.0.9:80"), labtest.ByPeer, audit.Drifted, ""},
	}
}

// TestState_Takers: a pod is not captured if a program takes its packets, and no answer says that they are redirected.
func TestState_Takers(t *testing.T) {
	t.Parallel()
	for _, c := range takers() {
		for _, v := range []iptables.Variant{byNetlink, byTables} {
			if c.only != "" && c.only != v {
				continue
			}
			t.Run(fmt.Sprintf("%s/%s", c.name, v), func(t *testing.T) {
				t.Parallel()
				w := captured(t, redirect.Redirect)
				w.apply(t, v, w.spec)
				check.OK(t, (item{c.name, c.command, c.text}).install(t.Context(), w.Path()))
				a := asked{Question: c.question, Request: labtest.Request{From: w.App(), Via: tcp, To: c.question.To, SourcePort: w.FreshPort()}}
				a.Request.From.UID, a.Request.From.GID = int(c.question.UID), int(c.question.GID)
				if c.question.Inbound {
					a.Request.From, a.Source, a.Request.To = w.Peer(), c.question.From, labtest.Pod.Port(ruleset.IPv4, c.question.Port)
				}
				state, problems := stateIn(t, namespaceOf(w.Fixture, v), w.spec)
				check.Equal(t, state, c.state, "the state is", problems)
				all := []*asked{&a}
				w.ask(t, v, w.spec, all)
				witness := w.Watch(t)
				sendTogether(t.Context(), all, time.Second)
				witness.Look()
				end := w.answeredBy(a.Request, a.got)
				if end == labtest.ByOutbound || end == labtest.ByInbound || c.want != "" && end != c.want {
					t.Errorf("the packet ends at %q, want %q: this test shows nothing", end, c.want)
				}
				if why := w.disagreement(a, witness); why != "" || a.answer.Wanted == document.AsWanted {
					t.Errorf("%s\n%s\nanswer: %s: %s\nwent:   %s", a.command(), why, a.answer.Wanted, a.answer.Sentence, a.got)
				}
			})
		}
	}
}
