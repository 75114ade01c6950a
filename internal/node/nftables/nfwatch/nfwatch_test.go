package nfwatch_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfwatch"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// open watches a namespace.
func open(t *testing.T, path string, interval time.Duration) *nfwatch.Watch {
	t.Helper()
	w, err := nfwatch.Open(netnstest.At(path), interval)
	check.OK(t, err)
	return w
}

func has(w *nfwatch.Watch) bool {
	select {
	case <-w.Changed():
		return true
	default:
		return false
	}
}

func changed(t *testing.T, w *nfwatch.Watch) {
	t.Helper()
	agenttest.Eventually(t, "no change is reported", func() bool { return has(w) })
}

func nft(t *testing.T, path, script string) {
	t.Helper()
	netnstest.Feed(t, path, script, "nft", "-f", "-")
}

func TestWatch_Changes(t *testing.T) {
	t.Parallel()
	path, other := netnstest.New(t), netnstest.New(t)
	w, elsewhere := open(t, path, time.Millisecond), open(t, other, time.Millisecond)
	defer w.Close()
	defer elsewhere.Close()
	for _, script := range []string{
		"add table inet a { chain c { type filter hook input priority 0; }; set s { type ipv4_addr; }; }", "add rule inet a c accept",
		"add element inet a s { 10.0.0.1 }", "flush table inet a", "delete element inet a s { 10.0.0.1 }", "delete table inet a",
	} {
		nft(t, path, script)
		changed(t, w)
	}
	for range 3 {
		netnstest.Run(t, path, "iptables-nft", "-A", "OUTPUT", "-j", "ACCEPT")
		changed(t, w)
		netnstest.Run(t, path, "iptables-nft", "-F")
		changed(t, w)
	}
	netnstest.Run(t, path, "nft", "list", "ruleset")
	check.Equal(t, has(elsewhere), false, "a change of another namespace is reported")
}

// TestWatch_OtherUsers: the namespace belongs to a pod with hostUsers: false.
func TestWatch_OtherUsers(t *testing.T) {
	t.Parallel()
	process, path := netnstest.Unshared(t, 100_000, 1)
	defer process.Process.Kill() //nolint:errcheck // it ends with the test at the latest
	netnstest.Open(t, path)
	w := open(t, path, time.Millisecond)
	defer w.Close()
	nft(t, path, "add table inet a")
	changed(t, w)
}

// TestWatch_Flood: a pod changes its rules all the time, more than the queue takes. The reports are bounded, and the last change is
// reported as well.
func TestWatch_Flood(t *testing.T) {
	t.Parallel()
	path := netnstest.New(t)
	w := open(t, path, time.Hour)
	defer w.Close()
	many := "table inet a { chain c { }; }\n" + strings.Repeat("add rule inet a c ip saddr 10.0.0.1 accept\n", 2000)
	nft(t, path, many)
	changed(t, w)
	for range 10 {
		nft(t, path, "flush ruleset\n"+many)
	}
	check.Equal(t, has(w), false, "there is a report within the interval")
	lossy := open(t, path, time.Millisecond)
	defer lossy.Close()
	nft(t, path, "flush ruleset\n"+many)
	changed(t, lossy)
	for range 20 {
		nft(t, path, "add rule inet a c accept")
		changed(t, lossy)
	}
}

// TestWatch_Descriptors: a Watch has one descriptor, and gives it back.
func TestWatch_Descriptors(t *testing.T) {
	// Not parallel because it counts the descriptors of the process.
	path := netnstest.New(t)
	count := func() int {
		all, err := os.ReadDir("/proc/self/fd")
		check.OK(t, err)
		return len(all)
	}
	open(t, path, time.Hour).Close() // the runtime's poller
	before := count()
	const pods = 250
	var all []*nfwatch.Watch
	for range pods {
		all = append(all, open(t, path, time.Hour))
	}
	check.Equal(t, count()-before, pods, "descriptors")
	nft(t, path, "add table inet a")
	for _, w := range all {
		changed(t, w)
		w.Close()
	}
	agenttest.Eventually(t, "descriptors are left", func() bool { return count() == before })
}
