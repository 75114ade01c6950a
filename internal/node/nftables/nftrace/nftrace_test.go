package nftrace_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/nftables/nftrace"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// traced dials an address in a namespace with rules during a trace with the filter, and returns the trace's events.
func traced(t *testing.T, path string, f nftrace.Filter, network, to string) (all []nftrace.Event) {
	t.Helper()
	err := netnstest.Open(t, path).Do(func() error {
		tracer, err := nftrace.Open(f)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		c, err := (&net.Dialer{Timeout: 100 * time.Millisecond}).DialContext(t.Context(), network, to)
		if err == nil {
			_, _ = c.Write([]byte("x"))
			_ = c.Close()
		}
		if tables := netnstest.Run(t, path, "nft", "list", "tables"); !strings.Contains(tables, fmt.Sprintf("istio-cni-trace-%d", os.Getpid())) {
			t.Errorf("the tables are\n%s", tables)
		}
		lost := func() { t.Error("messages are lost") }
		if err := tracer.Run(ctx, func(e nftrace.Event) { all = append(all, e) }, lost); err != nil {
			t.Error(err)
		}
		return tracer.Close()
	})
	check.OK(t, err)
	if tables := netnstest.Run(t, path, "nft", "list", "tables"); strings.Contains(tables, fmt.Sprintf("istio-cni-trace-%d", os.Getpid())) {
		t.Errorf("left behind:\n%s", tables)
	}
	return all
}

func TestTrace_RulesOfAPacket(t *testing.T) {
	t.Parallel()
	path := netnstest.New(t)
	netnstest.Run(t, path, "ip", "link", "set", "lo", "up")
	for _, family := range []string{"iptables-nft", "ip6tables-nft"} {
		netnstest.Run(t, path, family, "-t", "nat", "-N", "MESH")
		netnstest.Run(t, path, family, "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "-j", "MESH")
		netnstest.Run(t, path, family, "-t", "nat", "-A", "MESH", "-p", "tcp", "--dport", "81", "-j", "RETURN")
		netnstest.Run(t, path, family, "-t", "nat", "-A", "MESH", "-p", "tcp", "-j", "REDIRECT", "--to-ports", "15001")
	}
	for to, want := range map[string]string{
		"127.0.0.1:80": "jump,accept", "[::1]:80": "jump,accept", "127.0.0.1:81": "jump,return,policy accept",
	} {
		var steps []string
		var first, last nftrace.Packet
		for _, e := range traced(t, path, nftrace.Filter{}, "tcp", to) {
			if e.Own && e.Chain == "input" && e.Packet.Present() {
				last = e.Packet
			}
			if e.Table != "nat" {
				continue
			}
			if e.Packet.Present() && !first.Present() {
				first = e.Packet
			}
			switch {
			case e.Kind == nftrace.Policy:
				steps = append(steps, "policy "+e.Verdict)
			case e.Handle != 0:
				steps = append(steps, e.Verdict)
			}
		}
		if got := strings.Join(steps, ","); got != want || first.Destination.String() != to || first.Out != 1 || first.Protocol != 6 {
			t.Errorf("%s: %q, %+v", to, got, first)
		}
		if redirected := last.Destination.Port() == 15001; redirected != (want == "jump,accept") || last.In != 1 || last.Source != first.Source {
			t.Errorf("%s: it ends as %+v", to, last)
		}
	}
}

func TestTrace_Filter(t *testing.T) {
	t.Parallel()
	path := netnstest.New(t)
	netnstest.Run(t, path, "ip", "link", "set", "lo", "up")
	netnstest.Run(t, path, "iptables-nft", "-A", "OUTPUT", "-j", "ACCEPT")
	for name, test := range map[string]struct {
		filter  nftrace.Filter
		network string
		want    bool
	}{
		"all TCP":       {nftrace.Filter{}, "tcp", true},
		"all UDP":       {nftrace.Filter{}, "udp", true},
		"the address":   {nftrace.Filter{Destination: netip.MustParsePrefix("127.0.0.0/8"), Port: 99}, "udp", true},
		"another":       {nftrace.Filter{Destination: netip.MustParsePrefix("10.0.0.0/8")}, "tcp", false},
		"a family":      {nftrace.Filter{Destination: netip.MustParsePrefix("::/0")}, "tcp", false},
		"another port":  {nftrace.Filter{Port: 98}, "tcp", false},
		"the only port": {nftrace.Filter{Port: 99}, "tcp", true},
		"the source":    {nftrace.Filter{Source: netip.MustParsePrefix("127.0.0.1/32")}, "tcp", true},
		"other source":  {nftrace.Filter{Source: netip.MustParsePrefix("127.0.0.2/32")}, "tcp", false},
	} {
		if got := traced(t, path, test.filter, test.network, "127.0.0.1:99"); len(got) > 0 != test.want {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// traceTable returns the script of a table that differs from a trace's table only in a policy and the last rule.
func traceTable(name, policy, last string) string {
	script := "table inet " + name + " {\n"
	for chain, priority := range map[string]int{"prerouting": -400, "output": -400, "input": 400, "postrouting": 400} {
		script += fmt.Sprintf("chain %s { type filter hook %s priority %d; policy %s; }\n", chain, chain, priority, policy)
	}
	return script + "}\n" + strings.Repeat("add rule inet "+name+" output meta nftrace set 1\n", 3) + "add " + strings.ReplaceAll(last, "NAME", name) + "\n"
}

// foreignTables makes tables with the names of traces.
func foreignTables(t *testing.T, path string) (names []string) {
	t.Helper()
	add := func(name, policy, last string) {
		file := filepath.Join(t.TempDir(), "rules")
		check.OK(t, os.WriteFile(file, []byte(traceTable(name, policy, last)), 0o600))
		netnstest.Run(t, path, "nft", "-f", file)
		names = append(names, name)
	}
	const mark = "rule inet NAME output meta nftrace set 1"
	for _, process := range []int{os.Getpid(), 4194999} { // this process, and one that is gone
		name := fmt.Sprintf("istio-cni-trace-%d", process)
		netnstest.Run(t, path, "nft", "add", "table", "inet", name)
		names = append(names, name)
		add(name+"-policy", "drop", mark)
		for i, last := range []string{
			"rule inet NAME output tcp dport 9999 drop", "rule inet NAME output meta nftrace set 1 drop", "rule inet NAME output meta mark set 1",
			"rule inet NAME output tcp dport set 9998", "chain inet NAME other", "rule inet NAME input tcp dport 9999 meta nftrace set 1 counter",
		} {
			add(fmt.Sprintf("%s-%d", name, i), "accept", last)
		}
	}
	add("istio-cni-trace-x", "accept", mark)
	add("istio-cni-trace-1", "accept", mark) // a process that runs
	return names
}

// TestStale_OnlyOwnTables: tables of dead traces are removed on a kernel without table owners. Other tables stay, whatever their names.
func TestStale_OnlyOwnTables(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(nftrace.Filter) (*nftrace.Tracer, error){"owned": nftrace.Open, "before Linux 5.12": nftrace.OpenUnowned} {
		path := netnstest.New(t)
		want := foreignTables(t, path)
		err := netnstest.Open(t, path).Do(func() error {
			filter := nftrace.Filter{Source: netip.MustParsePrefix("10.0.0.0/8"), Destination: netip.MustParsePrefix("10.1.0.0/12"), Port: 80}
			left, err := nftrace.OpenUnowned(filter)
			if err != nil {
				return err
			}
			if err = left.Abandon(); err != nil {
				return err
			}
			if tables := netnstest.Run(t, path, "nft", "list", "tables"); strings.Count(tables, "table") != len(want)+1 {
				t.Errorf("%s: nothing was left behind:\n%s", name, tables)
			}
			tracer, err := nftrace.OpenUnowned(nftrace.Filter{})
			if err == nil {
				err = tracer.Close()
			}
			if err != nil {
				return err
			}
			if tracer, err = open(nftrace.Filter{}); err == nil {
				err = tracer.Close()
			}
			return err
		})
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		got := strings.Fields(strings.ReplaceAll(netnstest.Run(t, path, "nft", "list", "tables"), "table inet", ""))
		check.Diff(t, name, want, got, cmpopts.SortSlices(strings.Compare))
	}
}

// TestTrace_Killed: the kernel removes the table with the process.
func TestTrace_Killed(t *testing.T) {
	if path := os.Getenv("NFTRACE_NAMESPACE"); path != "" { // the process to kill
		err := netnstest.Open(t, path).Do(func() error {
			tracer, err := nftrace.Open(nftrace.Filter{})
			if err != nil {
				return err
			}
			fmt.Println("tracing")
			return tracer.Run(t.Context(), func(nftrace.Event) {}, func() {})
		})
		t.Fatal(err)
	}
	t.Parallel()
	path := netnstest.New(t)
	tracer := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run", "^"+t.Name()+"$")
	tracer.Env = append(os.Environ(), "NFTRACE_NAMESPACE="+path)
	out, err := tracer.StdoutPipe()
	if err == nil {
		err = tracer.Start()
	}
	check.OK(t, err)
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "tracing\n" {
		t.Fatalf("%q, %v", line, err)
	}
	name := fmt.Sprintf("istio-cni-trace-%d", tracer.Process.Pid)
	check.Contains(t, netnstest.Run(t, path, "nft", "list", "tables"), name)
	check.OK(t, tracer.Process.Kill())
	_ = tracer.Wait()
	check.Equal(t, netnstest.Run(t, path, "nft", "list", "tables"), "", "left behind")
}
