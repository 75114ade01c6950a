package probes

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfwatch"
	"github.com/meshcni/istio-cni/internal/node/probeset"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// fixture is a Keeper of a namespace, and the number of calls of Changed for each pod.
type fixture struct {
	*Keeper

	path string
	log  agenttest.Buffer

	mu      sync.Mutex
	changed map[string]int
}

// fixed returns a Keeper that does not run. change may change it.
func fixed(t *testing.T, path string, change func(*Keeper)) *fixture {
	t.Helper()
	f := &fixture{path: path, changed: map[string]int{}}
	f.Keeper = New(Options{
		Host: netnstest.At(path), IPv6: true, Log: slog.New(slog.NewTextHandler(&f.log, nil)),
		V4: netip.MustParseAddr("169.254.7.127"), V6: netip.MustParseAddr("fd16:9254:7127:1337:ffff:ffff:ffff:ffff"),
		Changed: func(uid string) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.changed[uid]++
		},
	})
	if change != nil {
		change(f.Keeper)
	}
	return f
}

// started returns a Keeper that runs until the test ends.
func started(t *testing.T, path string, change func(*Keeper)) *fixture {
	t.Helper()
	f := fixed(t, path, change)
	agenttest.Go(t, f.Run)
	return f
}

// calls returns the number of calls of Changed for a pod.
func (f *fixture) calls(uid string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changed[uid]
}

// put is Put with addresses separated by spaces.
func (f *fixture) put(uid, addresses string) { f.Put(uid, parse(addresses)) }

func parse(addresses string) (all []netip.Addr) {
	for a := range strings.FieldsSeq(addresses) {
		all = append(all, netip.MustParseAddr(a))
	}
	return all
}

// has waits until the kernel's set has exactly the entries "ADDRESS=UID …".
func (f *fixture) has(t *testing.T, entries string) {
	t.Helper()
	want := map[netip.Addr]string{}
	for e := range strings.FieldsSeq(entries) {
		address, uid, _ := strings.Cut(e, "=")
		want[netip.MustParseAddr(address)] = uid
	}
	var have map[netip.Addr]string
	agenttest.Until(t, func() string { return fmt.Sprintf("the entries are %v, want %v\n%s", have, want, &f.log) }, func() bool {
		var err error
		have, err = probeset.Read(netnstest.At(f.path))
		check.OK(t, err)
		return maps.Equal(have, want)
	})
}

// in waits until State says that the pod's addresses are in the set.
func (f *fixture) in(t *testing.T, uid string) {
	t.Helper()
	agenttest.Until(t, func() string { _, err := f.State(uid); return fmt.Sprint(err) }, func() bool {
		in, err := f.State(uid)
		return in && err == nil
	})
}

func nft(t *testing.T, path, script string) {
	t.Helper()
	netnstest.Feed(t, path, script, "nft", "-f", "-")
}

func TestKeeper_PutAndRemove(t *testing.T) {
	t.Parallel()
	f := started(t, netnstest.New(t), nil)
	f.Complete()
	f.put("a", "10.0.0.2 fd00::2")
	f.put("b", "10.0.0.3")
	f.has(t, "10.0.0.2=a fd00::2=a 10.0.0.3=b")
	f.in(t, "a")
	agenttest.Eventually(t, "Changed is called", func() bool { return f.calls("a") == 1 && f.calls("b") == 1 })
	f.put("a", "fd00::2 ::ffff:10.0.0.2 10.0.0.2") // the same
	f.put("b", "10.0.0.4")
	f.has(t, "10.0.0.2=a fd00::2=a 10.0.0.4=b")
	agenttest.Eventually(t, "Changed is called again", func() bool { return f.calls("b") == 2 })
	check.Equal(t, f.calls("a"), 1, "calls for an unchanged pod")
	f.Remove("a")
	f.Remove("x")
	f.has(t, "10.0.0.4=b")
	in, err := f.State("a")
	check.Equal(t, in || err != nil, false, "State of a removed pod")
}

// TestState_BetweenAttempts: whoever asks between two attempts learns of what differs afterwards.
func TestState_BetweenAttempts(t *testing.T) {
	t.Parallel()
	f := fixed(t, netnstest.New(t), nil)
	w := worker{Keeper: f.Keeper}
	defer w.close()
	f.put("a", "10.0.0.2")
	check.OK(t, w.apply(t.Context()))
	f.put("b", "10.0.0.2")
	seen, _ := f.State("a")
	calls := f.calls("a")
	f.Remove("b")
	check.OK(t, w.apply(t.Context()))
	if now, err := f.State("a"); !now || err != nil || now != seen && f.calls("a") == calls {
		t.Errorf("State was %v and is %v, %v, after %d calls of Changed", seen, now, err, f.calls("a")-calls)
	}
}

// TestRemoved_AfterAnAttempt: a release waits until the set no longer has the pod.
func TestRemoved_AfterAnAttempt(t *testing.T) {
	t.Parallel()
	f := fixed(t, netnstest.New(t), nil)
	f.Complete()
	w := worker{Keeper: f.Keeper}
	defer w.close()
	f.put("a", "10.0.0.2")
	check.OK(t, w.apply(t.Context()))
	calls := f.calls("a")
	f.Remove("a")
	check.Equal(t, f.Removed("a"), false, "Removed before an attempt")
	check.OK(t, w.apply(t.Context()))
	check.Equal(t, f.Removed("a"), true, "Removed afterwards")
	check.Equal(t, f.calls("a"), calls+1, "calls of Changed")
	f.has(t, "")
	check.Equal(t, f.Removed("x"), true, "Removed of another pod")
}

// TestKeeper_AddressReuse: a new pod has the address of one whose end is not known yet (defect 7.7).
func TestKeeper_AddressReuse(t *testing.T) {
	t.Parallel()
	f := started(t, netnstest.New(t), nil)
	f.Complete()
	f.put("old", "10.0.0.2 10.0.0.3")
	f.in(t, "old")
	f.put("new", "10.0.0.2")
	f.put("old", "10.0.0.3 10.0.0.2") // an update of the old pod
	f.has(t, "10.0.0.2=new 10.0.0.3=old")
	f.in(t, "new")
	if in, err := f.State("old"); in || err == nil || !strings.Contains(err.Error(), "10.0.0.2 is pod new's") {
		t.Errorf("the old pod: %v, %v", in, err)
	}
	agenttest.Eventually(t, "Changed is called for the old pod", func() bool { return f.calls("old") == 2 })
	f.Remove("old")
	f.has(t, "10.0.0.2=new")
	f.put("old", "10.0.0.2")
	f.has(t, "10.0.0.2=old")
	f.Remove("old")
	f.has(t, "10.0.0.2=new")
}

// TestKeeper_Restart: probes pass while the agent restarts (defect 7.8), and while a pod's address is not known.
func TestKeeper_Restart(t *testing.T) {
	t.Parallel()
	path := netnstest.New(t)
	earlier := fixed(t, path, nil)
	stop := agenttest.Go(t, earlier.Run)
	for i, uid := range []string{"a", "b", "c", "d"} {
		earlier.put(uid, fmt.Sprintf("10.0.0.%d fd00::%d", i+2, i+2))
		earlier.in(t, uid)
	}
	stop()
	f := started(t, path, nil)
	f.put("a", "10.0.0.2 fd00::2")
	f.put("b", "10.0.0.9")
	f.put("c", "")
	f.put("e", "10.0.0.5 fd00::5") // has d's addresses
	f.in(t, "e")
	f.has(t, "10.0.0.2=a fd00::2=a 10.0.0.3=b fd00::3=b 10.0.0.9=b 10.0.0.4=c fd00::4=c 10.0.0.5=e fd00::5=e")
	f.Complete()
	f.has(t, "10.0.0.2=a fd00::2=a 10.0.0.9=b 10.0.0.4=c fd00::4=c 10.0.0.5=e fd00::5=e")
	f.put("c", "10.0.0.4")
	f.has(t, "10.0.0.2=a fd00::2=a 10.0.0.9=b 10.0.0.4=c 10.0.0.5=e fd00::5=e")
	in, err := f.State("a")
	check.Equal(t, in && err == nil, true, "State of a pod that was there")
}

// TestKeeper_OtherPrograms: firewalld, iptables-restore and the like remove rules that they do not know (issue 60607).
func TestKeeper_OtherPrograms(t *testing.T) {
	t.Parallel()
	path := netnstest.New(t)
	f := started(t, path, func(k *Keeper) { k.Clock = agenttest.NewClock() }) // by notifications alone
	f.put("a", "10.0.0.2 fd00::2")
	f.in(t, "a")
	list := func() string { return netnstest.Run(t, path, "nft", "list", "table", "inet", "istio-ambient-nat") }
	before := list()
	for _, script := range []string{
		"delete table inet istio-ambient-nat", "flush ruleset", "flush table inet istio-ambient-nat",
		"flush set inet istio-ambient-nat istio-inpod-probes-v4",
		"add rule inet istio-ambient-nat istio-probes accept; delete element inet istio-ambient-nat istio-inpod-probes-v4 { 10.0.0.2 }",
	} {
		nft(t, path, script)
		f.has(t, "10.0.0.2=a fd00::2=a")
		agenttest.Until(t, list, func() bool { return list() == before })
	}
	for _, command := range []string{"iptables-nft -t nat -F", "iptables-nft -t nat -A POSTROUTING -j MASQUERADE", "iptables-nft -t nat -F"} {
		netnstest.Run(t, path, "env", strings.Fields(command)...)
		check.Equal(t, list(), before, command)
	}
	f.in(t, "a")
	check.Equal(t, f.calls("a"), 1, "calls of Changed")
}

// TestKeeper_LostNotifications: without them, the set is compared from time to time.
func TestKeeper_LostNotifications(t *testing.T) {
	t.Parallel()
	path, clock := netnstest.New(t), agenttest.NewClock()
	f := started(t, path, func(k *Keeper) {
		k.Clock = clock
		k.open = func(*netns.Namespace, time.Duration) (*nfwatch.Watch, error) {
			return nil, errors.New("no descriptor is left")
		}
	})
	f.put("a", "10.0.0.2")
	f.in(t, "a")
	agenttest.Eventually(t, "it is logged", func() bool { return strings.Contains(f.log.String(), "no descriptor is left") })
	nft(t, path, "flush ruleset")
	agenttest.Run(t, clock)
	f.has(t, "10.0.0.2=a")
	check.Equal(t, strings.Count(f.log.String(), "no descriptor is left"), 1, "log lines")
}

// TestKeeper_Error: another process owns the table, so that the kernel refuses changes.
func TestKeeper_Error(t *testing.T) {
	t.Parallel()
	path := netnstest.New(t)
	end := occupy(t, path)
	f := started(t, path, nil)
	f.Complete()
	f.put("a", "10.0.0.2")
	agenttest.Eventually(t, "State has an error, of which Changed tells", func() bool {
		in, err := f.State("a")
		return !in && err != nil && f.calls("a") == 1
	})
	f.put("b", "10.0.0.3") // during the pause
	end()
	f.in(t, "a")
	f.in(t, "b")
	f.has(t, "10.0.0.2=a 10.0.0.3=b")
	agenttest.Eventually(t, "Changed tells of the success", func() bool { return f.calls("a") == 2 })
	check.Equal(t, strings.Count(f.log.String(), "level=WARN"), 1, f.log.String())
}

// occupy makes the table as one with an owner (Linux 5.12), which ends with the returned function.
func occupy(t *testing.T, path string) (end func()) {
	t.Helper()
	conn, err := netns.In(netnstest.At(path), nfnetlink.Open)
	check.OK(t, err)
	generation, err := conn.Generation()
	check.OK(t, err)
	batch := conn.Batch(generation)
	batch.Add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, unix.NFPROTO_INET, func(b *nfnetlink.Buffer) {
		b.String(unix.NFTA_TABLE_NAME, "istio-ambient-nat")
		b.Uint32(unix.NFTA_TABLE_FLAGS, 2) // NFT_TABLE_F_OWNER
	})
	check.OK(t, batch.Commit())
	return sync.OnceFunc(func() { check.OK(t, conn.Close()) })
}

// TestKeeper_IPv6Off: a dual-stack pod is served by IPv4 (defect 7.21).
func TestKeeper_IPv6Off(t *testing.T) {
	t.Parallel()
	f := started(t, netnstest.New(t), func(k *Keeper) { k.IPv6 = false })
	f.put("a", "10.0.0.2 fd00::2")
	f.put("b", "fd00::3")
	f.put("c", "")
	f.in(t, "a")
	f.in(t, "b")
	f.has(t, "10.0.0.2=a")
	in, err := f.State("c")
	check.Equal(t, in || err != nil, false, "State of a pod without addresses")
}

// TestKeeper_Reference: the rules of the reference's iptables mode serve until all pods are known.
func TestKeeper_Reference(t *testing.T) {
	t.Parallel()
	path := netnstest.New(t)
	for _, rule := range []string{"-N ISTIO_POSTRT", "-A POSTROUTING -j ISTIO_POSTRT"} {
		netnstest.Run(t, path, "iptables-nft", append([]string{"-t", "nat"}, strings.Fields(rule)...)...)
	}
	there := func() bool { return strings.Contains(netnstest.Run(t, path, "nft", "list", "ruleset"), "ISTIO_POSTRT") }
	f := started(t, path, nil)
	f.put("a", "10.0.0.2")
	f.in(t, "a")
	check.Equal(t, there(), true, "the reference's rules are there")
	f.Complete()
	agenttest.Eventually(t, "they are removed", func() bool { return !there() })
}

// TestKeeper_Concurrency ends in the state of the last calls.
func TestKeeper_Concurrency(t *testing.T) {
	t.Parallel()
	path := netnstest.New(t)
	f := started(t, path, nil)
	var callers sync.WaitGroup
	want := ""
	for i := range 8 {
		uid, address := fmt.Sprintf("pod-%d", i), fmt.Sprintf("10.0.0.%d", i+2)
		want += address + "=" + uid + " "
		callers.Go(func() {
			for n := range 50 {
				f.put(uid, fmt.Sprintf("10.0.1.%d", n))
				_, _ = f.State(uid)
				f.Remove(uid)
			}
			f.put(uid, address)
			f.Complete()
		})
	}
	callers.Go(func() {
		for range 20 {
			netnstest.Run(t, path, "nft", "flush", "ruleset")
		}
	})
	callers.Wait()
	f.has(t, want)
	for i := range 8 {
		f.in(t, fmt.Sprintf("pod-%d", i))
	}
}
