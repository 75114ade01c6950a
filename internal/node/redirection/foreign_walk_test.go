package redirection_test

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/inspect"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
)

// The answers that a person gets ("istio-cni why") are compared with real packets in namespaces that other programs use as well: their
// chains are in every table, hook and priority, and there are routes besides.

var (
	foreignSeed  = flag.Uint64("foreign.seed", 1, "seed of TestAnswers_ForeignRules")
	foreignCases = flag.Int("foreign.cases", 24, "number of namespaces there")
	foreignFirst = flag.Int("foreign.first", 0, "the first of them")
	foreignItems = flag.Int("foreign.items", 4, "largest number of foreign items in a namespace")
)

// maxUnknown is the largest share of questions, in percent, to which the answer may be that it cannot be told.
const maxUnknown = 5

const (
	questions = 24 // of each namespace
	// impatient is enough for a packet to arrive, which the witness sees; patient waits for an answer in any case.
	impatient, patient = 250 * time.Millisecond, 15 * time.Second
)

// item is what another program left in a namespace.
type item struct {
	kind string
	// command reads text.
	command, text string
}

// install puts the item into the namespace, and reports whether the kernel and the tool took it.
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

// script is the item as commands of a shell.
func (i item) script() string { return fmt.Sprintf("%s <<'END'\n%sEND\n", i.command, i.text) }

// turn orders items: iptables-nft takes no table with chains that it does not know, and others name the interfaces that ip renames.
func turn(i item) int { return slices.Index([]string{"nft", "ip"}, strings.Fields(i.command)[0]) }

// asked is a question with its answer, and the packet that was really sent.
type asked struct {
	inspect.Question
	labtest.Request
	answer inspect.Answer
	err    error
	got    labtest.Answer
}

// command is the question as a person asks it.
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

// tally counts questions of a kind of item.
type tally struct{ asked, unknown, wrong int }

// tallies are those of a whole test.
type tallies struct {
	sync.Mutex
	kinds            map[string]*tally
	verdicts         map[string]int
	reasons          map[string]int
	all              tally
	refused, planted int
	refusals         map[string]int
}

func newTallies() *tallies {
	return &tallies{kinds: map[string]*tally{}, verdicts: map[string]int{}, reasons: map[string]int{}, refusals: map[string]int{}}
}

var digest = regexp.MustCompile(`[0-9a-f]{8,}|\b\d+ of `)

func (t *tallies) add(items []item, a asked, wrong bool) {
	t.Lock()
	defer t.Unlock()
	unknown := a.answer.Verdict == walk.CannotTell.String()
	count := func(c *tally) {
		c.asked++
		if unknown {
			c.unknown++
		}
		if wrong {
			c.wrong++
		}
	}
	count(&t.all)
	named := map[string]bool{}
	for _, i := range items {
		if !named[i.kind] {
			named[i.kind] = true
			t.kinds[i.kind] = cmp.Or(t.kinds[i.kind], &tally{})
			count(t.kinds[i.kind])
		}
	}
	t.verdicts[a.answer.Verdict]++
	if unknown {
		reason, _, _ := strings.Cut(a.answer.Sentence, "; by the tables")
		t.reasons[digest.ReplaceAllString(reason, "…")]++
	}
}

func (t *tallies) log(tb testing.TB) {
	tb.Helper()
	tb.Logf("%d questions, %d cannot tell (%.1f %%), %d wrong; %d items, %d not taken by the kernel or the tool",
		t.all.asked, t.all.unknown, percent(t.all), t.all.wrong, t.planted, t.refused)
	for _, v := range slices.Sorted(maps.Keys(t.verdicts)) {
		tb.Logf("%6d %s", t.verdicts[v], v)
	}
	for _, k := range slices.Sorted(maps.Keys(t.kinds)) {
		c := t.kinds[k]
		tb.Logf("%-28s %5d questions, cannot tell %5.1f %%, wrong %d", k, c.asked, percent(*c), c.wrong)
	}
	for _, of := range []map[string]int{t.reasons, t.refusals} {
		texts := slices.SortedFunc(maps.Keys(of), func(a, b string) int { return cmp.Or(of[b]-of[a], strings.Compare(a, b)) })
		for _, text := range texts[:min(20, len(texts))] {
			tb.Logf("%6d × %s", of[text], text)
		}
	}
}

func percent(t tally) float64 { return 100 * float64(t.unknown) / float64(max(1, t.asked)) }

// TestAnswers_ForeignRules holds each definite answer to what became of the packet.
func TestAnswers_ForeignRules(t *testing.T) {
	t.Logf("-foreign.seed=%d", *foreignSeed)
	counts := newTallies()
	t.Run("case", func(t *testing.T) {
		for n := *foreignFirst; n < *foreignFirst+*foreignCases; n++ {
			v := []iptables.Variant{byNetlink, byTables, iptables.Legacy}[n%3]
			t.Run(fmt.Sprintf("%d/%s", n, v), func(t *testing.T) {
				t.Parallel()
				w := walked{Rand: rand.New(rand.NewPCG(*foreignSeed, uint64(n))), tb: t}
				w.answers(t, v, counts)
			})
		}
	})
	counts.log(t)
	if share := percent(counts.all); share > maxUnknown {
		t.Errorf("%.1f %% of the questions have no answer, want at most %d %%", share, maxUnknown)
	}
	if counts.refused > counts.planted/10 {
		t.Errorf("%d of %d foreign items are refused", counts.refused, counts.planted)
	}
}

// answers is one namespace.
func (w *walked) answers(t *testing.T, v iptables.Variant, counts *tallies) {
	t.Helper()
	spec := w.randomSpec()
	w.fixture = newFixture(t, spec, families...)
	w.Acquaint(t)
	w.sets(t)
	programs := mustApply(t, namespaceOf(w.Fixture, v), spec).Programs
	var planted []item
	items := w.items()
	slices.SortStableFunc(items, func(a, b item) int { return turn(a) - turn(b) })
	for _, i := range items {
		err := i.install(t.Context(), w.Path())
		counts.Lock()
		counts.planted++
		if err != nil {
			counts.refused++
			counts.refusals[err.Error()]++
		}
		counts.Unlock()
		if err == nil {
			planted = append(planted, i)
		}
	}
	all := w.questions()
	w.ask(t, v, spec, all)
	witness := w.Watch(t)
	sendTogether(t.Context(), all, impatient)
	witness.Look()
	if late := unsent(all, witness); len(late) > 0 { // the machine is busy
		sendTogether(t.Context(), late, patient)
		witness.Look()
	}
	const most = 5
	wrong := 0
	for _, a := range all {
		why := w.disagreement(*a, witness)
		counts.add(planted, *a, why != "")
		if why == "" {
			continue
		}
		if wrong++; wrong > most {
			t.Errorf("%s: %s", a.command(), why)
			continue
		}
		t.Errorf("%s\n%s\nanswer: %s%s\nwent:   %s\n%s", a.command(), why, a.answer.Sentence, errorText(a.err), a.got, metAt(a.answer))
		if wrong == 1 {
			t.Logf("to reproduce:\n%s%s\nof %+v", w.script(v, programs, planted), a.command(), spec)
		}
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return "error: " + err.Error()
}

// metAt lists the rules that matched or may have.
func metAt(a inspect.Answer) string {
	var b strings.Builder
	for _, h := range a.Hops {
		if h.Answer != walk.No.String() {
			fmt.Fprintf(&b, "  %s %s: %s/%s %d: %s    # %s\n", h.Answer, h.Hook, h.Table, h.Chain, h.Number, h.Rule, h.Why)
		}
	}
	return b.String()
}

// script makes a namespace with the same rules.
func (w *walked) script(v iptables.Variant, programs []redirection.Program, planted []item) string {
	var b strings.Builder
	b.WriteString("# The pod is 10.1.0.2 and fd00:1::2 on eth0, 10.4.0.2 and fd00:4::2 on eth1, 10.5.0.1 and fd00:5::1 on vm0 (labtest.Fixture).\n" +
		"ip netns add pod; ip netns exec pod bash # and in it:\nip link set lo up\n")
	for i, link := range []string{"eth0", "eth1", "vm0"} {
		at := []string{"1", "4", "5"}[i]
		host := []string{"2", "2", "1"}[i]
		fmt.Fprintf(&b, "ip link add %s type veth peer name p%d; ip link set %s up; ip link set p%d up; ip addr add 10.%s.0.%s/24 dev %s; ip addr add fd00:%s::%s/64 dev %s nodad\n",
			link, i, link, i, at, host, link, at, host, link)
	}
	b.WriteString("ip route add default via 10.1.0.1; ip -6 route add default via fd00:1::1\n")
	for _, p := range programs {
		command := "nft -f -"
		if p.By != string(redirect.Native) {
			command = map[bool]string{true: "iptables", false: "ip6tables"}[p.Of == ruleset.IPv4.String()] + "-" +
				map[bool]string{true: "legacy", false: "nft"}[v == iptables.Legacy] + "-restore --noflush"
		}
		b.WriteString(item{command: command, text: p.Text}.script())
	}
	if w.spec.Mode == redirect.TPROXY {
		for _, ip := range []string{"ip -4", "ip -6"} {
			fmt.Fprintf(&b, "%s rule add fwmark %d lookup %d; %s route add local default dev lo table %d\n", ip, w.spec.Mark, w.spec.Table, ip, w.spec.Table)
		}
	}
	for _, f := range families {
		for _, name := range []string{"have", "lack", "fill"} {
			fmt.Fprintf(&b, "ipset create %s%s hash:ip family %s\n", name, ends(f), map[ruleset.Family]string{ruleset.IPv4: "inet", ruleset.IPv6: "inet6"}[f])
		}
		for _, p := range []labtest.Place{labtest.Far, labtest.Peer, labtest.Pod} {
			fmt.Fprintf(&b, "ipset add have%s %s\n", ends(f), p.Addr(f))
		}
	}
	for _, i := range planted {
		fmt.Fprintf(&b, "# %s\n%s", i.kind, i.script())
	}
	return b.String()
}

// questions are random.
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

// ask asks about all packets before one is sent.
func (w *walked) ask(t *testing.T, v iptables.Variant, spec redirect.Spec, all []*asked) {
	t.Helper()
	for i := range all {
		var of redirect.Wanted = spec
		if w.Rand != nil && w.IntN(3) == 0 { // as of a namespace of which nothing is known
			of = nil
		}
		all[i].answer, all[i].err = inspect.Walk(t.Context(), namespaceOf(w.Fixture, v), of, all[i].Question)
	}
}

// sendTogether sends all packets at the same time: one that is dropped ends by its deadline.
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

// unsent are the packets whose time was over before they were sent.
func unsent(all []*asked, seen *labtest.Witness) []*asked {
	return slices.DeleteFunc(slices.Clone(all), func(a *asked) bool {
		return seen.Sent[a.SourcePort] || !errors.Is(a.got.Err, labtest.ErrSilent)
	})
}

// unroutable are the errors of the sender's kernel where a route forbids the packet, or there is none.
func unroutable(err error) bool {
	return slices.ContainsFunc([]error{syscall.EINVAL, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EACCES}, func(e error) bool { return errors.Is(err, e) })
}

// verdictOf is the verdict of the walk, if there was one.
func verdictOf(a inspect.Answer) (v walk.Verdict, known bool) {
	for v = walk.CannotTell; v <= walk.Rejected; v++ {
		if a.Verdict == v.String() {
			return v, true
		}
	}
	return v, false
}

// disagreement compares the answer with the packet; "" is none.
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
	case a.Inbound && a.err == nil && !strings.Contains(a.answer.Packet, way): // answers leave by another address
		return ""
	case a.err != nil:
		return "there is no answer"
	case known && verdict == walk.CannotTell:
		return ""
	case a.answer.Verdict == "not-sent" && !sent && unroutable(a.got.Err):
		return ""
	case !known || !sent:
		return fmt.Sprintf("the packet is sent: %t, %v", sent, a.got.Err)
	case a.answer.Deaf && len(a.got.Hops) > 0:
		return "a process listens"
	case verdict == walk.Dropped || verdict == walk.Rejected:
		silent := verdict == walk.Rejected || errors.Is(a.got.Err, labtest.ErrSilent) || errors.Is(a.got.Err, labtest.ErrForbidden) || unroutable(a.got.Err)
		if len(a.got.Hops) > 0 || len(arrived) > 0 || !silent {
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
	got := w.went(a.Request, a.got)
	// A rule for its first packet alone can cut a connection off, or take its original destination.
	if silent := errors.Is(a.got.Err, labtest.ErrSilent); silent && (there || verdict == walk.HandedOver && len(arrived) > 0) {
		return ""
	}
	by, _, _ := strings.Cut(got, ",")
	if len(a.got.Hops) > 0 && !slices.Contains(want, got) && !slices.Contains(want, by) || len(a.got.Hops) == 0 && !there {
		return fmt.Sprintf("the kernel's answer is %q, want %q; the packet arrived at ports %v", got, want, arrived)
	}
	return ""
}

// arrivals are the packets that arrived where an address is.
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

// went names the listener that answered, or the error.
func (w *walked) went(q labtest.Request, got labtest.Answer) string {
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
