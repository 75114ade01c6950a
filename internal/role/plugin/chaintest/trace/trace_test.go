package trace_test

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest/trace"
)

// run traces a command in a network namespace of its own.
func run(t *testing.T, ns, name string, args ...string) *trace.Record {
	t.Helper()
	var record *trace.Record
	if err := netns.Do(ns, func() (err error) {
		record, err = trace.Run(exec.CommandContext(t.Context(), name, args...))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return record
}

func TestProcessesAndProgramsAreSeen(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	r := run(t, ns, "sh", "-c", "env true; (exit 0); env false")
	if r.Status.ExitStatus() != 1 {
		t.Errorf("ended with %v", r.Status)
	}
	if r.Processes < 2 || !slices.ContainsFunc(r.Programs, func(p string) bool { return strings.HasSuffix(p, "/env") }) {
		t.Errorf("%d processes, programs %q", r.Processes, r.Programs)
	}
	if r := run(t, ns, "true"); r.Processes != 0 || len(r.Programs) != 1 || r.Status.ExitStatus() != 0 {
		t.Errorf("true starts %d processes, programs %q, status %v", r.Processes, r.Programs, r.Status)
	}
}

// The program that is traced can be this test itself: it then does what its environment says, each in a new thread.
const deed = "TRACE_TEST_DEED"

func TestMain(m *testing.M) {
	do, name, _ := strings.Cut(os.Getenv(deed), " ")
	if do == "" {
		os.Exit(m.Run())
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if do == "mkdir" {
			done <- os.Mkdir(name, 0o755)
			return
		}
		done <- talk(name)
	}()
	if err := <-done; err != nil {
		panic(err)
	}
}

// talk connects to a socket, and tries another one.
func talk(name string) error {
	var dialer net.Dialer
	_, err := dialer.Dial("unix", name)
	_, _ = dialer.Dial("tcp4", "127.0.0.1:1")
	return err
}

// myself is this test as a program that does something.
func myself(t *testing.T, what string) *trace.Record {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var record *trace.Record
	if err := netns.Do(netnstest.New(t), func() (err error) {
		cmd := exec.CommandContext(t.Context(), self)
		cmd.Env = append(os.Environ(), deed+"="+what)
		record, err = trace.Run(cmd)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return record
}

func TestThreadsAreNoProcessesAndAreSeenAsWell(t *testing.T) {
	t.Parallel()
	name := filepath.Join(t.TempDir(), "made")
	r := myself(t, "mkdir "+name)
	if r.Processes != 0 {
		t.Errorf("%d processes", r.Processes)
	}
	if got := r.Under(name); len(got) != 1 || got[0] != name {
		t.Errorf("saw %q", got)
	}
	if _, err := os.Stat(name); err != nil {
		t.Error(err)
	}
}

func TestSocketsAreSeen(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "s")
	var config net.ListenConfig
	listener, err := config.Listen(t.Context(), "unix", file)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close() //nolint:errcheck // the test's own
	r := myself(t, "talk "+file)
	if got := r.Connections(); len(got) < 2 || got[0] != file || got[len(got)-1] != "family 2" {
		t.Errorf("connections %q", got)
	}
	if r.Sockets(unix.AF_UNIX) != 1 || r.Sockets(unix.AF_INET) == 0 || r.Sockets(unix.AF_NETLINK) != 0 {
		t.Errorf("sockets: %d, %d, %d", r.Sockets(unix.AF_UNIX), r.Sockets(unix.AF_INET), r.Sockets(unix.AF_NETLINK))
	}
}

// Each kind of message is made by the program that is known for it.
func TestNetlinkMessagesAreSeen(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	for _, test := range []struct {
		command                 string
		protocol                int
		writes, batch, removing bool
	}{
		{"nft list ruleset", unix.NETLINK_NETFILTER, false, false, false},
		{"nft add table ip t", unix.NETLINK_NETFILTER, true, true, false},
		{"nft delete table ip t", unix.NETLINK_NETFILTER, true, true, true},
		{"iptables-nft -A INPUT -j ACCEPT", unix.NETLINK_NETFILTER, true, true, false},
		{"iptables-nft -D INPUT -j ACCEPT", unix.NETLINK_NETFILTER, true, true, true},
		{"ip address show", unix.NETLINK_ROUTE, false, false, false},
		{"ip address add ::6/128 dev lo", unix.NETLINK_ROUTE, true, false, false},
		{"ip address del ::6/128 dev lo", unix.NETLINK_ROUTE, true, false, true},
		{"ip rule add fwmark 1 table 2", unix.NETLINK_ROUTE, true, false, false},
		{"ip rule del fwmark 1 table 2", unix.NETLINK_ROUTE, true, false, true},
	} {
		words := strings.Fields(test.command)
		r := run(t, ns, words[0], words[1:]...)
		if r.Status.ExitStatus() != 0 {
			t.Errorf("%s: %v", test.command, r.Status)
		}
		all := slices.Concat(r.Messages(test.protocol)...)
		for what, got := range map[string]struct{ got, want bool }{
			"any":     {len(all) > 0, true},
			"writes":  {slices.ContainsFunc(all, trace.Message.Writes), test.writes},
			"batch":   {slices.ContainsFunc(all, trace.Message.BeginsBatch), test.batch},
			"removes": {slices.ContainsFunc(all, trace.Message.Removes), test.removing},
		} {
			if got.got != got.want {
				t.Errorf("%s: %s is %t; messages %+v", test.command, what, got.got, all)
			}
		}
	}
}

func TestAProgramThatIsNotThere(t *testing.T) {
	t.Parallel()
	if _, err := trace.Run(exec.CommandContext(t.Context(), filepath.Join(t.TempDir(), "none"))); err == nil {
		t.Error("no error")
	}
}
