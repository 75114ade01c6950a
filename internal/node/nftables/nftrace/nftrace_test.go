package nftrace_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/nftables/nftrace"
)

// traced dials an address in a namespace with rules while a trace with the filter runs, and returns its events.
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
		lost, err := tracer.Run(ctx, func(e nftrace.Event) { all = append(all, e) })
		if err != nil || lost > 0 {
			t.Errorf("%d lost, %v", lost, err)
		}
		return tracer.Close()
	})
	if err != nil {
		t.Fatal(err)
	}
	if tables := netnstest.Run(t, path, "nft", "list", "tables"); strings.Contains(tables, "istio-cni-trace") {
		t.Errorf("left behind:\n%s", tables)
	}
	return all
}

func TestTheRulesThatAPacketMeets(t *testing.T) {
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
		"127.0.0.1:80": "jump MESH,accept", "[::1]:80": "jump MESH,accept", "127.0.0.1:81": "jump MESH,return,policy accept",
	} {
		var steps []string
		var first nftrace.Packet
		for _, e := range traced(t, path, nftrace.Filter{}, "tcp", to) {
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
				steps = append(steps, strings.TrimSpace(e.Verdict+" "+e.Target))
			}
		}
		if got := strings.Join(steps, ","); got != want || first.Destination.String() != to || first.Out != 1 || first.Protocol != 6 {
			t.Errorf("%s: %q, %+v", to, got, first)
		}
	}
}

func TestTheFilterSelects(t *testing.T) {
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
	} {
		if got := traced(t, path, test.filter, test.network, "127.0.0.1:99"); len(got) > 0 != test.want {
			t.Errorf("%s: %+v", name, got)
		}
	}
}
