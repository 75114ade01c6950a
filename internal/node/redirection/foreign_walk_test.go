package redirection_test

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/node/inspect"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
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
		t.Errorf("%s\n%s\nanswer: %s%s\nwent:   %s\n%s", a.command(), why, a.answer.Sentence, errorText(a.err), a.got, metAt(a.answer))
		if wrong == 1 {
			t.Logf("by %s of %+v beside\n%+v", v, spec, planted)
		}
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return "error: " + err.Error()
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
