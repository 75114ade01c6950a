package ztunnels_test

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/ztunnels"
	"github.com/meshcni/istio-cni/internal/agent/ztunnels/ztunneltest"
	"github.com/meshcni/istio-cni/internal/core/zds"
	"github.com/meshcni/istio-cni/internal/core/zds/zdstest"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/zdsock"
	"github.com/meshcni/istio-cni/internal/test/check"
)

const timeout = 5 * time.Second

// agent is a server of ztunnels, and what it has reported.
type agent struct {
	*ztunnels.Server

	t     *testing.T
	path  string
	clock *clocktesting.FakeClock
	log   agenttest.Buffer

	mu        sync.Mutex
	connected int
	changed   map[string]int
}

// open opens a server that does not serve yet.
func open(t *testing.T, change ...func(*ztunnels.Options)) *agent {
	t.Helper()
	a := &agent{
		t: t, path: filepath.Join(agenttest.SocketDir(t), "ztunnel.sock"), clock: agenttest.NewClock(), changed: map[string]int{},
	}
	o := ztunnels.Options{
		Path: a.path, Log: slog.New(slog.NewTextHandler(&a.log, nil)), Clock: a.clock, AcceptInterval: time.Microsecond,
		Connected: func(n int) { a.locked(func() { a.connected = n }) },
		Changed: func(uid string) {
			a.State(uid) // no lock is held
			a.locked(func() { a.changed[uid]++ })
		},
	}
	for _, c := range change {
		c(&o)
	}
	var err error
	a.Server, err = ztunnels.Open(t.Context(), o)
	check.OK(t, err)
	return a
}

// start opens a server, and serves until the test ends.
func start(t *testing.T) *agent {
	t.Helper()
	a := open(t)
	agenttest.Go(t, a.Serve)
	return a
}

func (a *agent) locked(do func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	do()
}

// ztunnel connects a ztunnel, and waits for its hello to arrive.
func (a *agent) ztunnel(o ztunneltest.Options) *ztunneltest.Ztunnel {
	a.t.Helper()
	z := ztunneltest.Start(a.t, a.path, o)
	agenttest.Until(a.t, a.log.String, func() bool { return len(z.Requests()) > 0 })
	return z
}

// connects waits for a number of ztunnels.
func (a *agent) connects(n int) {
	a.t.Helper()
	agenttest.Until(a.t, a.log.String, func() (is bool) { a.locked(func() { is = a.connected == n }); return is })
}

// logs waits for a record.
func (a *agent) logs(text string) {
	a.t.Helper()
	agenttest.Until(a.t, func() string { return "no " + text + " in " + a.log.String() }, func() bool {
		return strings.Contains(a.log.String(), text)
	})
}

// acked waits for the newest ztunnel to have a pod.
func (a *agent) acked(uid string) {
	a.t.Helper()
	agenttest.Until(a.t, func() string { return fmt.Sprint(uid, a.State(uid), a.log.String()) }, func() bool { return a.State(uid).Acked })
}

// removed waits for all ztunnels to lack a pod.
func (a *agent) removed(uid string) {
	a.t.Helper()
	agenttest.Until(a.t, a.log.String, func() bool { return a.Removed(uid) })
}

// gets waits for the requests that a ztunnel gets in all.
func gets(t *testing.T, z *ztunneltest.Ztunnel, want ...string) {
	t.Helper()
	texts := func() (texts []string) {
		for _, r := range z.Requests() {
			texts = append(texts, strings.TrimSpace(r.String()))
		}
		return texts
	}
	agenttest.Until(t, func() string { return fmt.Sprintf("got %q, want %q", texts(), want) }, func() bool { return len(texts()) >= len(want) })
	check.Diff(t, "requests", want, texts())
}

const end = "end of snapshot"

// hang answers nothing.
func hang(*ztunneltest.Ztunnel, ztunneltest.Request) {}

// refuse answers with a text.
func refuse(text string) func(*ztunneltest.Ztunnel, ztunneltest.Request) {
	return func(z *ztunneltest.Ztunnel, _ ztunneltest.Request) { z.Ack(text) }
}

func pod(uid string) ztunnels.Workload {
	return ztunnels.Workload{UID: uid, Name: "pod-" + uid, Namespace: "ns", ServiceAccount: "default"}
}

func namespace(t *testing.T) *netns.Namespace {
	t.Helper()
	return netnstest.At(netnstest.New(t))
}

func TestServe_Snapshot(t *testing.T) {
	a, one, two := open(t), namespace(t), namespace(t)
	check.Equal(t, a.State("b"), ztunnels.State{Err: ztunnels.ErrNoZtunnel})
	a.Put(pod("b"), one)
	a.Keep("c")
	a.Put(pod("a"), two)
	a.Put(pod("gone"), one)
	a.Remove("gone")
	a.Put(pod("b"), one) // its age stays
	agenttest.Go(t, a.Serve)
	z := a.ztunnel(ztunneltest.Options{})
	gets(t, z, "add b", "keep c", "add a", end)
	first := z.Requests()[0]
	check.Equal(t, first.Workload, zds.Workload{Name: "pod-b", Namespace: "ns", ServiceAccount: "default"})
	check.Diff(t, "namespaces", map[string]netns.Inode{"a": two.Inode(), "b": one.Inode()}, z.Pods())
	a.acked("a")
	a.acked("b")
	check.Equal(t, a.State("c"), ztunnels.State{}, "a pod that is kept")
	a.connects(1)
	z.Close()
	a.connects(0)
	check.Equal(t, a.State("a"), ztunnels.State{Err: ztunnels.ErrNoZtunnel})
}

// The pods that a ztunnel has from an earlier agent go on, and those that are not wanted any more end.
func TestServe_Restart(t *testing.T) {
	ns := namespace(t)
	first := open(t)
	for _, uid := range []string{"told", "kept", "gone"} {
		first.Put(pod(uid), ns)
	}
	stop := agenttest.Go(t, first.Serve)
	z := first.ztunnel(ztunneltest.Options{Reconnect: true})
	gets(t, z, "add told", "add kept", "add gone", end)
	stop()
	if _, err := os.Lstat(first.path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket stays: %v", err)
	}
	second := open(t, func(o *ztunnels.Options) { o.Path = first.path })
	second.Put(pod("told"), ns)
	second.Keep("kept")
	second.Keep("never had")
	agenttest.Go(t, second.Serve)
	gets(t, z, "add told", "add kept", "add gone", end, "add told", "keep kept", "keep never had", end)
	agenttest.Eventually(t, "pods", func() bool { return len(z.Pods()) == 2 })
	check.Diff(t, "pods", map[string]netns.Inode{"told": ns.Inode(), "kept": ns.Inode()}, z.Pods())
}

// Keep is no request after the snapshot: the real ztunnel ends.
func TestKeep_AfterSnapshot(t *testing.T) {
	a, ns := start(t), namespace(t)
	a.Keep("a")
	z := a.ztunnel(ztunneltest.Options{})
	gets(t, z, "keep a", end)
	a.Keep("b")
	a.Put(pod("a"), ns)
	a.acked("a")
	a.Keep("a") // its namespace is lost
	check.Equal(t, a.State("a"), ztunnels.State{})
	a.Put(pod("b"), ns)
	a.acked("b")
	a.Remove("a")
	a.removed("a")
	a.Remove("never told")
	a.Put(pod("c"), ns)
	gets(t, z, "keep a", end, "add a", "add b", "delete a", "add c")
}

func TestPut_Namespaces(t *testing.T) {
	a, one, two := start(t), namespace(t), namespace(t)
	a.Put(pod("a"), one)
	z := a.ztunnel(ztunneltest.Options{})
	gets(t, z, "add a", end)
	a.acked("a")
	same, err := netns.Open(one.Path())
	check.OK(t, err)
	defer same.Close()
	a.Put(pod("a"), same)
	check.Equal(t, a.State("a").Acked, true, "in the same namespace")
	z.Behave(hang)
	a.Put(pod("a"), two)
	check.Equal(t, a.State("a").Acked, false, "in another namespace")
	gets(t, z, "add a", end, "add a")
	check.Equal(t, z.Requests()[2].Inode, two.Inode())
	a.Put(pod("a"), one) // while the request is under way
	z.Behave((*ztunneltest.Ztunnel).Serve)
	z.Ack("")
	a.acked("a")
	gets(t, z, "add a", end, "add a", "add a")
	z.Behave(hang)
	a.Put(pod("b"), one)
	a.Put(pod("a"), two) // waits for b
	check.Equal(t, a.State("a").Acked, false, "in another namespace that ztunnel has not been told")
	gets(t, z, "add a", end, "add a", "add a", "add b")
	z.Behave((*ztunneltest.Ztunnel).Serve)
	z.Ack("")
	a.acked("a")
	check.Equal(t, z.Pods()["a"], two.Inode())
}

// A namespace may be closed as soon as Put or Remove has returned, whatever a ztunnel does, and its number may be another file's then.
func TestPut_NumberReused(t *testing.T) {
	a, ns := start(t), namespace(t)
	z := a.ztunnel(ztunneltest.Options{Answer: hang})
	a.Put(pod("removed"), netnstest.At(netnstest.New(t)))
	moved, err := netns.New()
	check.OK(t, err)
	a.Put(pod("moved"), moved)
	a.Put(pod("moved"), ns)
	number := moved.FD()
	moved.Close()
	other, err := netns.New()
	check.OK(t, err)
	defer other.Close()
	if other.FD() != number {
		t.Logf("number %d is not used again but %d", number, other.FD())
	}
	a.Remove("removed")
	z.Behave((*ztunneltest.Ztunnel).Serve)
	z.Ack("")
	a.acked("moved")
	gets(t, z, end, "add moved")
	check.Diff(t, "namespaces", map[string]netns.Inode{"moved": ns.Inode()}, z.Pods())
}

// A pod that cannot be told is an error of that pod alone.
func TestPut_Unfit(t *testing.T) {
	a, ns := start(t), namespace(t)
	closed, err := netns.New()
	check.OK(t, err)
	closed.Close()
	a.Put(pod("closed"), closed)
	a.Put(ztunnels.Workload{UID: "long", Name: strings.Repeat("n", 1010)}, ns)
	a.Keep(strings.Repeat("u", 1020))
	a.Put(pod("a"), ns)
	z := a.ztunnel(ztunneltest.Options{})
	gets(t, z, "add a", end)
	for uid, text := range map[string]string{"closed": "its network namespace is closed", "long": "the message has 1025 bytes, 1024 is the maximum"} {
		if state := a.State(uid); state.Acked || state.Err == nil || state.Err.Error() != text {
			t.Errorf("%s: %v", uid, state)
		}
		a.Remove(uid)
		check.Equal(t, a.Removed(uid), true)
	}
	a.Put(pod("closed"), ns)
	a.acked("closed")
	a.Put(pod("a"), closed) // ztunnel has it
	check.Equal(t, fmt.Sprint(a.State("a")), "{false its network namespace is closed}")
	a.Remove("a")
	a.removed("a")
	gets(t, z, "add a", end, "add closed", "delete a")
	a.locked(func() { check.Equal(t, a.changed[""], 0, "reports of no pod") })
}

func TestRemove_WhileAddUnderWay(t *testing.T) {
	a, ns := start(t), namespace(t)
	z := a.ztunnel(ztunneltest.Options{})
	gets(t, z, end)
	z.Behave(hang)
	a.Put(pod("a"), ns)
	gets(t, z, end, "add a")
	a.Remove("a")
	check.Equal(t, a.Removed("a"), false, "before the answer")
	z.Ack("")
	gets(t, z, end, "add a", "delete a")
	check.Equal(t, a.Removed("a"), false, "before the answer to the deletion")
	a.Put(pod("a"), ns) // released and enrolled again (#54645)
	check.Equal(t, a.State("a").Acked, false, "before it is told again")
	z.Behave((*ztunneltest.Ztunnel).Serve)
	z.Ack("")
	a.acked("a")
	gets(t, z, end, "add a", "delete a", "add a")
}

// Released and enrolled again before ztunnel was told: nothing has happened.
func TestRemove_Undone(t *testing.T) {
	a, ns := start(t), namespace(t)
	a.Put(pod("a"), ns)
	z := a.ztunnel(ztunneltest.Options{})
	a.acked("a")
	gets(t, z, "add a", end)
	z.Behave(hang)
	a.Put(pod("b"), ns)
	a.Remove("a")
	a.Put(pod("a"), ns)
	check.Equal(t, a.State("a").Acked, true)
	gets(t, z, "add a", end, "add b")
	z.Behave((*ztunneltest.Ztunnel).Serve)
	z.Ack("")
	a.acked("b")
	a.Put(pod("c"), ns)
	gets(t, z, "add a", end, "add b", "add c")
}

// TestServe_NewPodInSnapshot: a new pod does not wait for the snapshot, a removed one is not in it, and its end waits for both.
func TestServe_NewPodInSnapshot(t *testing.T) {
	a, ns := start(t), namespace(t)
	for i := range 5 {
		a.Put(pod(fmt.Sprint(i)), ns)
	}
	z := a.ztunnel(ztunneltest.Options{Answer: hang})
	gets(t, z, "add 0")
	a.Put(pod("new"), ns)
	a.Keep("lost")
	a.Remove("3")
	a.Remove("0")
	z.Behave((*ztunneltest.Ztunnel).Serve)
	z.Ack("")
	gets(t, z, "add 0", "add new", "keep lost", "delete 0", "add 1", "add 2", "add 4", end)
}

func TestServe_Refusal(t *testing.T) {
	a, ns := start(t), namespace(t)
	a.Put(pod("a"), ns)
	a.Put(pod("b"), ns)
	z := a.ztunnel(ztunneltest.Options{Answer: func(z *ztunneltest.Ztunnel, r ztunneltest.Request) {
		if r.UID == "a" {
			z.Ack("failure to start proxy : \x1b[31mno" + strings.Repeat("o", 600))
			return
		}
		z.Serve(r)
	}})
	gets(t, z, "add a", "add b", end)
	a.acked("b")
	state := a.State("a")
	if state.Acked || state.Err == nil || !strings.HasPrefix(state.Err.Error(), `failure to start proxy : \u001b[31mnooo`) || len(state.Err.Error()) > 500 {
		t.Errorf("got %v", state)
	}
	a.logs("ztunnel does not serve a pod yet")
	a.Retry("b") // no refused one
	z.Behave((*ztunneltest.Ztunnel).Serve)
	a.Retry("a")
	a.acked("a")
	check.Equal(t, a.State("a").Err, nil)
	gets(t, z, "add a", "add b", end, "add a")
	z.Behave(refuse("no"))
	a.Put(pod("c"), ns)
	agenttest.Eventually(t, "it is refused", func() bool { return a.State("c").Err != nil })
	z.Behave((*ztunneltest.Ztunnel).Serve)
	a.Remove("c") // ztunnel tries by itself until it is told not to
	a.removed("c")
	gets(t, z, "add a", "add b", end, "add a", "add c", "delete c")
	a.connects(1)
}

// A refused deletion would be open for ever. The real ztunnel ends such a connection itself.
func TestServe_OtherRefusals(t *testing.T) {
	for kind, text := range map[zds.Kind]string{zds.Del: "delete", zds.Keep: "keep", zds.SnapshotSent: "end of snapshot"} {
		t.Run(text, func(t *testing.T) {
			a, ns := start(t), namespace(t)
			a.Keep("kept")
			a.Put(pod("a"), ns)
			z := ztunneltest.Start(t, a.path, ztunneltest.Options{Answer: func(z *ztunneltest.Ztunnel, r ztunneltest.Request) {
				if r.Kind == kind {
					z.Ack("no\n")
					return
				}
				z.Serve(r)
			}})
			agenttest.Eventually(t, "the first request", func() bool { return len(z.Requests()) > 0 })
			if kind == zds.Del {
				a.acked("a")
			}
			a.Remove("a")
			agenttest.Until(t, a.log.String, z.Ended)
			a.logs(fmt.Sprintf(`it refuses \"%s\" of pod`, text))
			a.removed("a")
		})
	}
}

// TestServe_RollingUpdate: the new ztunnel alone is told new pods, both are told what ends; the next is told what it lacks (defect 7.6).
func TestServe_RollingUpdate(t *testing.T) {
	a, ns := start(t), namespace(t)
	a.Put(pod("a"), ns)
	a.Put(pod("b"), ns)
	old := a.ztunnel(ztunneltest.Options{})
	gets(t, old, "add a", "add b", end)
	fresh := a.ztunnel(ztunneltest.Options{})
	gets(t, fresh, "add a", "add b", end)
	a.connects(2)
	a.Put(pod("c"), ns)
	a.acked("c")
	a.Put(pod("d"), ns)
	a.acked("d")
	a.Remove("b")
	a.Remove("c")
	a.removed("b")
	a.removed("c")
	gets(t, fresh, "add a", "add b", end, "add c", "add d", "delete b", "delete c")
	gets(t, old, "add a", "add b", end, "delete b")
	fresh.Close()
	a.acked("d")
	gets(t, old, "add a", "add b", end, "delete b", "add d")
	a.locked(func() {
		if a.changed["a"] == 0 || a.changed["b"] == 0 || a.changed["d"] < 2 {
			t.Errorf("reported as changed: %v", a.changed)
		}
	})
}

// Connections may end in any order (#54565).
func TestServe_OldestGoesFirst(t *testing.T) {
	a, ns := start(t), namespace(t)
	old, fresh := a.ztunnel(ztunneltest.Options{}), a.ztunnel(ztunneltest.Options{})
	old.Close()
	a.connects(1)
	a.Put(pod("a"), ns)
	a.acked("a")
	gets(t, fresh, end, "add a")
}

// The snapshot of a ztunnel that is not the newest any more is complete: it would end what is not named.
func TestServe_NewerWhileInSnapshot(t *testing.T) {
	a, ns := start(t), namespace(t)
	a.Put(pod("a"), ns)
	a.Put(pod("b"), ns)
	old := a.ztunnel(ztunneltest.Options{Answer: hang})
	gets(t, old, "add a")
	fresh := a.ztunnel(ztunneltest.Options{})
	gets(t, fresh, "add a", "add b", end)
	old.Behave((*ztunneltest.Ztunnel).Serve)
	old.Ack("")
	gets(t, old, "add a", "add b", end)
}

// TestServe_Hung: who does not answer holds nobody, and loses its connection, so that a late answer is nobody else's (defect 7.5).
func TestServe_Hung(t *testing.T) {
	a, ns := start(t), namespace(t)
	a.Put(pod("a"), ns)
	a.Put(pod("x"), ns)
	old := a.ztunnel(ztunneltest.Options{})
	hung := a.ztunnel(ztunneltest.Options{})
	gets(t, old, "add a", "add x", end)
	gets(t, hung, "add a", "add x", end)
	a.Remove("x")
	a.removed("x") // nothing is under way
	hung.Behave(hang)
	a.Put(pod("b"), ns)
	gets(t, hung, "add a", "add x", end, "delete x", "add b")
	a.clock.Step(timeout - time.Nanosecond)
	check.Equal(t, hung.Ended(), false, "before the time is over, ended")
	a.Put(pod("c"), ns)
	a.Remove("a")
	gets(t, old, "add a", "add x", end, "delete x", "delete a")
	check.Equal(t, a.Removed("a"), false)
	a.clock.Step(time.Nanosecond)
	agenttest.Until(t, a.log.String, hung.Ended)
	hung.Ack("") // late
	a.logs("it says nothing for 5s")
	a.acked("b")
	a.acked("c")
	a.removed("a")
	gets(t, old, "add a", "add x", end, "delete x", "delete a", "add b", "add c")
	a.clock.Step(timeout)
	a.Put(pod("d"), ns)
	a.acked("d")
}

// A ztunnel that says no hello is none.
func TestServe_Mute(t *testing.T) {
	a, ns := start(t), namespace(t)
	z := a.ztunnel(ztunneltest.Options{})
	mute, err := zdsock.Dial(a.path)
	check.OK(t, err)
	defer mute.Close()                        //nolint:errcheck // the agent has closed it
	after := a.ztunnel(ztunneltest.Options{}) // accepted after the mute one
	after.Close()
	a.connects(1)
	a.Put(pod("a"), ns)
	a.acked("a")
	gets(t, z, end, "add a")
	a.clock.Step(timeout)
	if _, _, err := mute.Receive(new([zdsock.MaxPacket]byte)); !errors.Is(err, io.EOF) {
		t.Errorf("it gets %v", err)
	}
	a.connects(1)
}

// TestChanged: what the newest ztunnel has not said yet, or an older one has said, is another State.
func TestChanged(t *testing.T) {
	a, ns := start(t), namespace(t)
	a.Put(pod("a"), ns)
	a.Put(pod("b"), ns)
	a.ztunnel(ztunneltest.Options{})
	a.acked("b")
	reported := func() {
		t.Helper()
		agenttest.Eventually(t, "b is reported", func() (is bool) { a.locked(func() { is = a.changed["b"] > 0 }); return is })
		a.locked(func() { delete(a.changed, "b") })
	}
	reported()
	fresh := a.ztunnel(ztunneltest.Options{Answer: hang})
	reported()
	check.Equal(t, a.State("b"), ztunnels.State{})
	a.connects(2)
	fresh.Close()
	reported()
	a.acked("b")
}

// TestServe_Lies: who breaks the protocol loses its connection, which the log explains, and disturbs nobody.
func TestServe_Lies(t *testing.T) {
	file, err := os.Open("/dev/null")
	check.OK(t, err)
	defer file.Close() //nolint:errcheck // nothing was written
	fd, unasked := int(file.Fd()), "it sent a message without a request"
	ack := zdstest.Ack("")
	say := func(packet []byte, descriptors ...int) func(*ztunneltest.Ztunnel, ztunneltest.Request) {
		return func(z *ztunneltest.Ztunnel, _ ztunneltest.Request) { _ = z.Say(packet, descriptors...) }
	}
	for name, c := range map[string]struct {
		mute   bool
		answer func(*ztunneltest.Ztunnel, ztunneltest.Request)
		log    string
	}{
		"hello twice": {answer: func(z *ztunneltest.Ztunnel, _ ztunneltest.Request) { z.Hello() }, log: "field 1 has wire type 0"},
		"two answers": {answer: func(z *ztunneltest.Ztunnel, r ztunneltest.Request) { _ = z.Say(ack); z.Serve(r) }},
		"answers for ever": {answer: func(z *ztunneltest.Ztunnel, _ ztunneltest.Request) {
			for range 1000 {
				_ = z.Say(ack)
			}
		}},
		"garbage":                       {answer: say([]byte("garbage")), log: "wire type 7"},
		"descriptor":                    {answer: say(ack, fd), log: "it sends a descriptor"},
		"answer without hello":          {mute: true, log: "field 1 has wire type 2, not 0"},
		"answer with nothing to answer": {log: unasked},
	} {
		t.Run(name, func(t *testing.T) {
			a, ns := start(t), namespace(t)
			a.Put(pod("a"), ns)
			honest := a.ztunnel(ztunneltest.Options{})
			gets(t, honest, "add a", end)
			before := netnstest.OpenFiles(t)
			liar := ztunneltest.New(a.path, ztunneltest.Options{Answer: c.answer, Mute: c.mute})
			if c.answer == nil {
				agenttest.Until(t, a.log.String, func() bool { return liar.Ready() || c.mute && liar.Say(ack) == nil })
				_ = liar.Say(ack)
			}
			agenttest.Until(t, a.log.String, liar.Ended)
			liar.Close()
			a.logs("the connection of a ztunnel was closed")
			a.logs(c.log)
			a.connects(1)
			a.Put(pod("b"), ns)
			a.acked("b")
			gets(t, honest, "add a", end, "add b")
			agenttest.Until(t, func() string { return "open files" }, func() bool { return netnstest.OpenFiles(t) == before })
		})
	}
}

// A ztunnel that answers what it has not read is not waited for.
func TestServe_ReadsNothing(t *testing.T) {
	a, ns := start(t), namespace(t)
	conn, err := zdsock.Dial(a.path)
	check.OK(t, err)
	defer conn.Close() //nolint:errcheck // the agent may have closed it
	_, err = conn.Write([]byte{8, 1})
	check.OK(t, err)
	a.connects(1)
	for i := 0; err == nil; i++ {
		a.Put(pod(fmt.Sprint(i)), ns)
		_, err = conn.Write([]byte{10, 0})
	}
	a.connects(0)
	a.logs("the connection of a ztunnel was closed")
}

// TestServe_Reconnecting: ztunnels that come and go at each message cost nothing that lasts.
func TestServe_Reconnecting(t *testing.T) {
	a, ns := start(t), namespace(t)
	a.Put(pod("a"), ns)
	honest := a.ztunnel(ztunneltest.Options{})
	gets(t, honest, "add a", end)
	before := netnstest.OpenFiles(t)
	for i := range 100 {
		z := ztunneltest.New(a.path, ztunneltest.Options{Mute: i%3 == 0, Answer: func(z *ztunneltest.Ztunnel, _ ztunneltest.Request) { z.Disconnect() }})
		if i%3 == 0 {
			z.Disconnect()
			z.Close()
		}
		agenttest.Until(t, a.log.String, z.Ended)
		z.Close()
	}
	a.connects(1)
	a.Put(pod("b"), ns)
	a.acked("b")
	gets(t, honest, "add a", end, "add b")
	agenttest.Until(t, func() string { return "open files" }, func() bool { return netnstest.OpenFiles(t) == before })
}

// The number of connections is bounded, and the real ztunnel still gets in.
func TestServe_ManyConnections(t *testing.T) {
	a, ns := start(t), namespace(t)
	var all []*ztunneltest.Ztunnel
	for range 40 {
		all = append(all, a.ztunnel(ztunneltest.Options{}))
	}
	a.connects(32)
	agenttest.Until(t, a.log.String, func() bool {
		return !slices.ContainsFunc(all[:8], func(z *ztunneltest.Ztunnel) bool { return !z.Ended() })
	})
	a.logs("there are too many connections")
	a.Put(pod("a"), ns)
	a.acked("a")
	gets(t, all[39], end, "add a")
}

// Connections beyond the rate wait.
func TestServe_AcceptInterval(t *testing.T) {
	a, ns := open(t, func(o *ztunnels.Options) { o.AcceptInterval = 1000 * time.Hour }), namespace(t)
	stop := agenttest.Go(t, a.Serve)
	first := a.ztunnel(ztunneltest.Options{})
	second := ztunneltest.Start(t, a.path, ztunneltest.Options{})
	a.Put(pod("a"), ns)
	a.acked("a")
	gets(t, first, end, "add a")
	gets(t, second)
	stop() // although it waits
}

// TestServe_Churn: pods and ztunnels come and go at the same time (the reference's deadlock, #60786), and in the end all is as wanted.
func TestServe_Churn(t *testing.T) {
	a, ns, other := start(t), namespace(t), namespace(t)
	var work sync.WaitGroup
	for worker := range 4 {
		work.Go(func() {
			for i := range 300 {
				uid := fmt.Sprint(worker, "-", i%7)
				a.Put(pod(uid), ns)
				a.Put(pod(uid), other)
				a.State(uid)
				a.Retry(uid)
				if i%2 == 0 {
					a.Remove(uid)
				}
				a.Removed(uid)
			}
		})
	}
	for worker := range 2 {
		work.Go(func() {
			for i := range 20 {
				z := ztunneltest.New(a.path, ztunneltest.Options{})
				for len(z.Requests()) < 1+i%5 && !z.Ended() {
					time.Sleep(time.Millisecond)
					a.Remove(fmt.Sprint(worker, "-0"))
				}
				z.Close()
			}
		})
	}
	last := a.ztunnel(ztunneltest.Options{Reconnect: true})
	work.Wait()
	want := map[string]netns.Inode{}
	for worker := range 4 {
		for i := range 7 {
			uid := fmt.Sprint(worker, "-", i)
			a.Put(pod(uid), other)
			want[uid] = other.Inode()
		}
	}
	for uid := range want {
		a.acked(uid)
	}
	check.Diff(t, "pods", want, last.Pods())
}

// The socket is bound again when its file is gone, and connections stay.
func TestRebind(t *testing.T) {
	a, ns := start(t), namespace(t)
	old := a.ztunnel(ztunneltest.Options{})
	check.OK(t, a.Rebind(t.Context()), "in place")
	check.OK(t, os.Remove(a.path))
	check.OK(t, a.Rebind(t.Context()))
	fresh := a.ztunnel(ztunneltest.Options{})
	a.connects(2)
	a.Put(pod("a"), ns)
	a.acked("a")
	gets(t, fresh, end, "add a")
	gets(t, old, end)
}
