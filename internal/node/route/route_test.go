package route_test

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/route"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func v4(mark, table uint32) route.Policy {
	return route.Policy{Family: ruleset.IPv4, Mark: mark, Table: table}
}

func v6(mark, table uint32) route.Policy {
	return route.Policy{Family: ruleset.IPv6, Mark: mark, Table: table}
}

func wantAll() route.Want {
	return route.Want{PassthroughV6: true, Policy: []route.Policy{v4(1337, 133), v6(1337, 133)}}
}

// route133 delivers packets locally that are looked up in table 133.
const route133 = "route add local default dev lo table 133"

// newNamespace makes a namespace like a runtime before the last plugin: lo is up, and there is no other link.
func newNamespace(t *testing.T, commands ...string) string {
	t.Helper()
	path := netnstest.New(t)
	ip(t, path, "link set lo up;"+strings.Join(commands, ";"))
	return path
}

// ip runs commands of ip, separated by semicolons, and returns their output.
func ip(t *testing.T, path, commands string) (out string) {
	t.Helper()
	for command := range strings.SplitSeq(commands, ";") {
		if args := strings.Fields(command); len(args) > 0 {
			out += netnstest.Run(t, path, "ip", args...)
		}
	}
	return out
}

// state returns the output of ip for everything that this package could change.
func state(t *testing.T, path string) (now string) {
	t.Helper()
	agenttest.Eventually(t, "the kernel's routes of the addresses", func() bool {
		now = ""
		for _, args := range []string{"-d -4 rule", "-d -6 rule", "-d -4 route show table all", "-d -6 route show table all", "-d addr"} {
			now += fmt.Sprintf("# ip %s\n%s", args, ip(t, path, args))
		}
		return settled(now)
	})
	return now
}

// settled reports whether every IPv6 address has its route in the local table. The kernel
// adds the route some time after its response.
func settled(state string) bool {
	_, addresses, _ := strings.Cut(state, "# ip -d addr\n")
	for line := range strings.Lines(addresses) {
		f := strings.Fields(line)
		if f[0] != "inet6" {
			continue
		}
		address, _, _ := strings.Cut(f[1], "/")
		if !strings.Contains(state, "local "+address+" dev") {
			return false
		}
	}
	return true
}

func in(t *testing.T, path string, fn func() error) {
	t.Helper()
	check.OK(t, netns.Do(path, fn))
}

func apply(t *testing.T, path string, w route.Want) {
	t.Helper()
	in(t, path, func() error { return route.Apply(w) })
}

func remove(t *testing.T, path string, w route.Want) {
	t.Helper()
	in(t, path, func() error { return route.Remove(w) })
}

func checked(t *testing.T, path string, w route.Want) []string {
	t.Helper()
	var missing []string
	in(t, path, func() (err error) { missing, err = route.Check(w); return err })
	return missing
}

// complete fails if Check finds a difference.
func complete(t *testing.T, path string, w route.Want) {
	t.Helper()
	check.Diff(t, "Check returns", []string(nil), checked(t, path, w))
}

func leftovers(t *testing.T, path string, mask uint32) route.Want {
	t.Helper()
	var w route.Want
	in(t, path, func() (err error) { w, err = route.Leftovers(mask); return err })
	return w
}

// byHand returns the commands of ip with the effect of wantAll.
func byHand() []string {
	return []string{
		"-6 addr add ::6/128 dev lo",
		"-4 route add local default dev lo table 133",
		"-4 rule add fwmark 1337 lookup 133",
		"-6 route add local default dev lo table 133",
		"-6 rule add fwmark 1337 lookup 133",
	}
}

// foreign returns commands for other programs' objects, some similar to ours.
func foreign() []string {
	return []string{
		"link add veth0 type veth peer name veth1",
		"addr add 10.0.0.1/24 dev veth0",
		"-6 addr add fd00::1/64 dev veth0 nodad",
		"-6 addr add ::7/128 dev lo",
		"link set veth0 up",
		"rule add from 10.0.0.0/8 fwmark 0x539 lookup 133",
		"rule add fwmark 0x539 iif veth0 lookup 133 priority 90",
		"rule add fwmark 0x539/0xfff lookup 133 priority 91",
		"rule add not fwmark 0x539 lookup 133 priority 92",
		"rule add fwmark 0x539 uidrange 5-6 lookup 133 priority 93",
		"rule add fwmark 0x539 ipproto tcp dport 80 lookup 133 priority 94",
		"rule add fwmark 0x539 suppress_prefixlength 1 lookup 133 priority 95",
		"rule add fwmark 0x539 tos 0x10 lookup 133 priority 96",
		"rule add fwmark 0x539 lookup 300 priority 97",
		"rule add fwmark 0x53a lookup 133 priority 98",
		"rule add fwmark 0x539 unreachable priority 32800",
		"rule add fwmark 0x539 table 133 unreachable priority 32801",
		"-6 rule add from fd00::/8 fwmark 0x539 lookup 133",
		"-6 rule add fwmark 0x539 to fd00::/8 lookup 133 priority 90",
		"route add 10.9.0.0/16 dev veth0 table 133",
		"route add local 10.8.0.0/16 dev lo table 133",
		"route add default dev veth0 metric 7 table 133",
		"-6 route add fd09::/16 dev veth0 table 133",
		"-6 route add unreachable default metric 2000 table 133",
		"-6 route add unreachable default metric 500 table 133",
		"route add local default dev lo table 134",
	}
}

func TestRemove_AfterApply(t *testing.T) {
	t.Parallel()
	for name, setup := range map[string][]string{"that was empty": nil, "with foreign objects": foreign()} {
		t.Run(name, func(t *testing.T) {
			path := newNamespace(t, setup...)
			before := state(t, path)
			apply(t, path, wantAll())
			once := state(t, path)
			if once == before {
				t.Fatal("Apply did nothing")
			}
			complete(t, path, wantAll())
			for range 3 {
				apply(t, path, wantAll())
			}
			check.Diff(t, "applied again", once, state(t, path))
			for range 2 {
				remove(t, path, wantAll())
				check.Diff(t, "changed", before, state(t, path))
			}
		})
	}
}

// TestApply_MissingObjects compares with the objects of the ip command.
func TestApply_MissingObjects(t *testing.T) {
	t.Parallel()
	want, hand := newNamespace(t, byHand()...), byHand()
	texts := []string{
		`address ::6/128 on lo is missing`,
		`route "local default dev lo table 133" (IPv4) is missing`,
		`policy rule "fwmark 0x539 lookup 133" (IPv4) is missing`,
		`route "local default dev lo table 133" (IPv6) is missing`,
		`policy rule "fwmark 0x539 lookup 133" (IPv6) is missing`,
	}
	for bits := range 1 << len(hand) {
		var setup, missing []string
		for i, command := range hand {
			if bits&(1<<i) != 0 {
				setup = append(setup, command)
			} else {
				missing = append(missing, texts[i])
			}
		}
		path := newNamespace(t, setup...)
		before := state(t, path)
		check.Diff(t, fmt.Sprintf("with %q Check returns", setup), missing, checked(t, path, wantAll()))
		check.Diff(t, "Check changed something", before, state(t, path))
		apply(t, path, wantAll())
		check.Diff(t, fmt.Sprintf("with %q", setup), state(t, want), state(t, path))
	}
	for _, query := range []string{"route get 192.0.2.1 mark 1337", "route get 2001:db8::1 mark 1337"} {
		if got := ip(t, want, query); !strings.HasPrefix(got, "local ") || !strings.Contains(got, " dev lo table 133 ") {
			t.Errorf("ip %s prints %q", query, got)
		}
	}
}

func TestApply_LeavesOneRule(t *testing.T) {
	t.Parallel()
	const ours, add = "from all fwmark 0x539 lookup 133", "rule add fwmark 1337 lookup 133"
	const masked, toMain = "from all fwmark 0x111/0xfff lookup 100", "rule add lookup main priority 50"
	for _, tt := range []struct {
		name, setup string
		want        string // the rules without the kernel's own
		part        string
	}{
		{"of none", "", "32765: " + ours, "is missing"},
		{"of one", add, "32765: " + ours, ""},
		{"of one at another priority, which it keeps", add + " priority 100", "100: " + ours, ""},
		{"of one with the mask spelled out", "rule add fwmark 1337/0xffffffff lookup 133 priority 100", "100: " + ours, ""},
		{"of a rule by a routing daemon", add + " protocol bird priority 100", "100: " + ours + " proto bird", ""},
		{"of several, the first", add + " priority 100; " + add + " priority 7; " + add, "6: " + ours, "is there 3 times"},
		{"of one behind the main table, in front of it", add + " priority 32766", "32765: " + ours, "no effect"},
		{
			"of one behind a foreign rule for everything to main",
			"rule add lookup main priority 50; " + add + " priority 60", "49: " + ours + "\n50: from all lookup main", "no effect",
		},
		{"of one before and one behind main", add + " priority 60; " + add + " priority 40000", "60: " + ours, "is there 2 times"},
		{
			"beside a narrower rule that comes first",
			"rule add from 10.0.0.0/8 fwmark 1337 lookup 133 priority 5; " + add + " priority 60; " + add + " priority 61",
			"5: from 10.0.0.0/8 fwmark 0x539 lookup 133\n60: " + ours, "is there 2 times",
		},
		{
			"where there was none but narrower ones",
			"rule add fwmark 1337/0xffff lookup 133 priority 5; rule add fwmark 1337 ipproto udp lookup 133 priority 6",
			"4: " + ours + "\n5: from all fwmark 0x539/0xffff lookup 133\n6: from all fwmark 0x539 ipproto udp lookup 133", "is missing",
		},
		{"of a masked one at another priority, which it keeps", "rule add fwmark 0x111/0xfff lookup 100 priority 7", "7: " + masked, ""},
		{"of a masked one, in front of a foreign rule for everything to main", toMain, "49: " + masked + "\n50: from all lookup main", "is missing"},
		{
			"of a masked one behind it already", toMain + "; rule add fwmark 0x111/0xfff lookup 100 priority 32764",
			"49: " + masked + "\n50: from all lookup main", "no effect",
		},
		{
			"of a masked one in the place of a narrower rule", "rule add from 10.0.0.0/8 fwmark 0x111/0xfff lookup 100 priority 32764",
			"32763: " + masked + "\n32764: from 10.0.0.0/8 fwmark 0x111/0xfff lookup 100", "is missing",
		},
		{
			"beside a rule of the whole mark, and of another mask",
			"rule add fwmark 0x111 lookup 100 priority 5; rule add fwmark 0x111/0xff lookup 100 priority 6",
			"5: from all fwmark 0x111 lookup 100\n6: from all fwmark 0x111/0xff lookup 100\n32764: " + masked, "is missing",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			path := newNamespace(t, tt.setup, route133, "route add local default dev lo table 100")
			w, own := route.Want{Policy: []route.Policy{v4(1337, 133)}}, ours
			if strings.Contains(tt.want, masked) {
				w.Policy, own = ambient().Policy[:1], masked
			}
			missing := checked(t, path, w)
			if (len(missing) == 0) != (tt.part == "") || !strings.Contains(fmt.Sprint(missing), tt.part) {
				t.Errorf("Check returns %q, want %q", missing, tt.part)
			}
			apply(t, path, w)
			check.Diff(t, "difference", tt.want, ownRules(t, path))
			complete(t, path, w)
			remove(t, path, w)
			foreign := slices.DeleteFunc(strings.Split(tt.want, "\n"), func(line string) bool { return strings.Contains(line, ": "+own) })
			check.Diff(t, "after Remove", strings.Join(foreign, "\n"), ownRules(t, path))
		})
	}
}

// ownRules returns the IPv4 rules without the kernel's three.
func ownRules(t *testing.T, path string) string {
	t.Helper()
	var lines []string
	for line := range strings.Lines(ip(t, path, "rule")) {
		priority, text, _ := strings.Cut(strings.TrimSpace(line), ":\t")
		if priority != "0" && priority != "32766" && priority != "32767" {
			lines = append(lines, priority+": "+text)
		}
	}
	return strings.Join(lines, "\n")
}

func TestApply_RouteOfAnotherMetric(t *testing.T) {
	t.Parallel()
	path := newNamespace(t, byHand()...)
	ip(t, path, "-6 route del local default dev lo table 133; -6 route add local default dev lo metric 5 table 133")
	before := state(t, path)
	complete(t, path, wantAll())
	apply(t, path, wantAll())
	check.Diff(t, "changed", before, state(t, path))
}

func TestRemove_Repetitions(t *testing.T) {
	t.Parallel()
	path := newNamespace(t, "rule add from 10.0.0.0/8 fwmark 1337 lookup 133 priority 1")
	before := state(t, path)
	ip(t, path, strings.Join(byHand(), ";")+";-4 rule add fwmark 1337 lookup 133 priority 2;"+
		"-4 rule add fwmark 1337 lookup 133 priority 40000; -6 rule add fwmark 1337 lookup 133 priority 2;"+
		"-6 route add local default dev lo metric 5 table 133")
	remove(t, path, wantAll())
	check.Diff(t, "changed", before, state(t, path))
}

// The kernel removes the first rule that matches the request, which cannot exclude a narrower rule. It adds no rule if a
// narrower rule has the priority that it chooses.
func TestRemove_NarrowerRule(t *testing.T) {
	t.Parallel()
	const narrower = "rule add from 10.0.0.0/8 fwmark 1337 lookup 133 priority "
	const text = `policy rule "fwmark 0x539 lookup 133" (IPv4)`
	path := newNamespace(t, narrower+"9", route133)
	addRule(t, path, 9)
	before := state(t, path)
	err := netns.Do(path, func() error { return route.Remove(wantAll()) })
	if want := "removing " + text + " at priority 9: "; err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("error %v, want one that starts with %q", err, want)
	}
	check.Diff(t, "changed", before, state(t, path))
	path = newNamespace(t, narrower+"0")
	err = netns.Do(path, func() error { return route.Apply(route.Want{Policy: []route.Policy{v4(1337, 133)}}) })
	if want := "adding " + text + ": file exists: a rule that selects by more"; err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("error %v, want one that starts with %q", err, want)
	}
}

// addRule adds the IPv4 rule "fwmark 1337 lookup 133" with further attributes, also if the kernel would take it for an
// existing rule.
func addRule(t *testing.T, path string, priority uint32, more ...*nl.RtAttr) {
	t.Helper()
	in(t, path, func() error {
		request := nl.NewNetlinkRequest(unix.RTM_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_ACK)
		request.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: unix.AF_INET, Table: 133, Type: 1}})
		request.AddData(nl.NewRtAttr(nl.FRA_FWMARK, binary.NativeEndian.AppendUint32(nil, 1337)))
		request.AddData(nl.NewRtAttr(nl.FRA_PRIORITY, binary.NativeEndian.AppendUint32(nil, priority)))
		for _, a := range more {
			request.AddData(a)
		}
		_, err := request.Execute(unix.NETLINK_ROUTE, 0)
		return err
	})
}

// The netlink package does not know the selector, and the machine's ip command may not know it.
func TestRemove_UnknownSelector(t *testing.T) {
	t.Parallel()
	path := newNamespace(t, route133)
	const dscp = 25 // FRA_DSCP
	addRule(t, path, 20, nl.NewRtAttr(dscp, []byte{10}))
	before := state(t, path)
	check.Diff(t, "Leftovers gives", route.Want{}, leftovers(t, path, 0))
	w := route.Want{Policy: []route.Policy{v4(1337, 133)}}
	check.Equal(t, len(checked(t, path, w)), 1, "of Check")
	apply(t, path, w)
	complete(t, path, w)
	remove(t, path, w)
	ip(t, path, route133)
	check.Diff(t, "changed", before, state(t, path))
}

func TestApply_MarksAndTables(t *testing.T) {
	t.Parallel()
	for _, n := range []uint32{1, 252, 256, 1 << 16, 1<<31 - 1, 1 << 31, 1<<32 - 1} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			path := newNamespace(t)
			before := state(t, path)
			w := route.Want{Policy: []route.Policy{v4(n, n), v6(n, n)}}
			apply(t, path, w)
			apply(t, path, w)
			complete(t, path, w)
			want := fmt.Sprintf("32765:\tfrom all fwmark %#x lookup %d\n", n, n)
			for _, family := range []string{"-4", "-6"} {
				check.Equal(t, strings.Count(ip(t, path, family+" rule"), want), 1, family, want)
			}
			check.Diff(t, "Leftovers, difference", w, leftovers(t, path, 0))
			remove(t, path, w)
			check.Diff(t, "changed", before, state(t, path))
		})
	}
}

// TestCheck_AnotherInterfaceNamedLo: the mesh's rules do not redirect traffic on lo.
func TestCheck_AnotherInterfaceNamedLo(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ setup, loopback, shown string }{
		{"", "lo", ""},
		{"link set lo down; link set lo name lo0", "lo0", "lo0"},
		{"link set lo down; link set lo name lo0; link add lo type veth peer name veth1", "lo0", "lo0"},
		{"link set lo down; link set lo name \x1b[2J", "\x1b[2J", `\u001b[2J`},
	} {
		path := newNamespace(t, c.setup)
		var want []string
		if c.shown != "" {
			want = []string{"interface lo is not the loopback device (that is " + c.shown + ")"}
		}
		check.Diff(t, c.setup, want, checked(t, path, route.Want{}))
		in(t, path, func() error {
			name, err := route.Loopback()
			check.Diff(t, c.setup, c.loopback, name)
			return err
		})
	}
}

func TestApply_WiderPrefix(t *testing.T) {
	t.Parallel()
	for command, missing := range map[string]int{"-6 addr add ::6/64 dev lo": 0, "-6 addr add ::6/128 dev veth0 nodad": 1} {
		path := newNamespace(t, "link add veth0 type veth peer name veth1", command)
		before, w := state(t, path), route.Want{PassthroughV6: true}
		check.Equal(t, len(checked(t, path, w)), missing, command)
		if missing == 0 {
			apply(t, path, w)
		}
		check.Equal(t, leftovers(t, path, 0).PassthroughV6, false, command)
		remove(t, path, w)
		check.Diff(t, "changed", before, state(t, path))
	}
}

func TestLeftovers(t *testing.T) {
	t.Parallel()
	const rule1, link = "rule add fwmark 1 lookup 133", "link set veth0 up"
	policy := func(all ...route.Policy) route.Want { return route.Want{Policy: all} }
	for _, tt := range []struct {
		name, setup string
		want        route.Want
	}{
		{"nothing", "", route.Want{}},
		{"objects of Apply", strings.Join(byHand(), ";"), wantAll()},
		{
			"other marks and tables, late and repeated",
			"rule add fwmark 1 lookup 100; rule add fwmark 1 lookup 100 priority 40000; route add local default dev lo table 100;" +
				"-6 rule add fwmark 0x400 lookup 5000 priority 9; -6 route add local default dev lo table 5000 metric 3",
			policy(v4(1, 100), v6(0x400, 5000)),
		},
		{
			"two marks for one table",
			rule1 + " priority 1; rule add fwmark 2 lookup 133 priority 2;" + route133, policy(v4(1, 133), v4(2, 133)),
		},
		{"not a rule without its route", rule1, route.Want{}},
		{"not a rule whose route is in the other family", rule1 + "; -6 " + route133, route.Want{}},
		{"not a route without its rule", route133, route.Want{}},
		{"not a table with another route", rule1 + ";" + route133 + "; route add unreachable 10.0.0.0/8 table 133", route.Want{}},
		{"not a table with only another route", rule1 + "; route add local 10.0.0.0/8 dev lo table 133", route.Want{}},
		{"not a table used by a narrower rule as well", rule1 + "; rule add from 10.0.0.0/8 lookup 133;" + route133, route.Want{}},
		{"not a table with a route that is not local", link + ";" + rule1 + "; route add default dev lo table 133", route.Want{}},
		{"not a table with a route of another link", link + ";" + rule1 + "; route add local default dev veth0 table 133", route.Want{}},
		{"not a table whose route has a source", rule1 + "; route add local default dev lo src 127.0.0.1 table 133", route.Want{}},
		{"not a rule with a partial mask", "rule add fwmark 0x200/0xf00 lookup 133;" + route133, route.Want{}},
		{"not a rule for everything", "rule add lookup 133;" + route133, route.Want{}},
		{"not a rule that leads to the local table", "rule add fwmark 1 lookup local", route.Want{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			path := newNamespace(t, "link add veth0 type veth peer name veth1", "addr add 10.0.0.1/24 dev veth0")
			before := state(t, path)
			ip(t, path, tt.setup)
			made := state(t, path)
			got := leftovers(t, path, 0)
			check.Diff(t, "difference", tt.want, got)
			check.Diff(t, "Leftovers changed something", made, state(t, path))
			remove(t, path, got)
			want := made
			if len(got.Policy) > 0 {
				want = before
			}
			check.Diff(t, "after Remove, difference", want, state(t, path))
		})
	}
}

func TestApply_LackingNamespace(t *testing.T) {
	t.Parallel()
	const noV6 = "IPv6 is disabled on lo; set net.ipv6.conf.lo.disable_ipv6=0"
	const routeOf = `adding route "local default dev lo table 133" `
	for _, tt := range []struct {
		name, setup, off string // commands of ip, and where IPv6 is disabled
		part             []string
		rules            string // the family that has the rule afterwards
	}{
		{
			"IPv6, on lo", "", "lo",
			[]string{"adding ::6/128 to lo: permission denied: " + noV6, routeOf + `(IPv6): permission denied: ` + noV6},
			"-4",
		},
		{"IPv6, everywhere", "", "all", []string{"adding ::6/128 to lo: permission denied: " + noV6}, "-4"},
		{
			"a loopback interface that is up", "link set lo down", "",
			[]string{routeOf + `(IPv6): network is down: lo is down; bring it up first`},
			"-4",
		},
		{
			"a table of its own", "route add unreachable default table 133", "",
			[]string{routeOf + `(IPv4): file exists: the table has another default route`},
			"-6",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			path := newNamespace(t, tt.setup)
			if tt.off != "" {
				netnstest.Set(t, path, "net/ipv6/conf/"+tt.off+"/disable_ipv6", "1")
			}
			before := state(t, path)
			err := netns.Do(path, func() error { return route.Apply(wantAll()) })
			check.Contains(t, fmt.Sprint(err), tt.part...)
			for _, family := range []string{"-4", "-6"} {
				got := strings.Contains(ip(t, path, family+" rule"), "fwmark 0x539 lookup 133")
				check.Equal(t, got, tt.rules == family, "ip", family, "rule has the rule")
			}
			check.Equal(t, len(checked(t, path, wantAll())) > 0, true, "something is missing")
			remove(t, path, wantAll())
			check.Diff(t, "changed", before, state(t, path))
		})
	}
}

func TestApply_InvalidWant(t *testing.T) {
	t.Parallel()
	path := newNamespace(t)
	before := state(t, path)
	for _, bad := range []route.Policy{
		v4(0, 133), v4(1337, 0), v4(1337, 253), v6(1337, 254), v6(1337, 255),
		{Family: 5, Mark: 1337, Table: 133},
		{},
		{Family: ruleset.IPv4, Mark: 0x100, Mask: 0xff, Table: 133},
	} {
		w := route.Want{PassthroughV6: true, Policy: []route.Policy{v4(1337, 133), bad}}
		in(t, path, func() error {
			if err := route.Apply(w); err == nil || !strings.HasPrefix(err.Error(), "checking policy ") {
				t.Errorf("Apply of %s: %v", bad, err)
			}
			if err := route.Remove(w); err == nil {
				t.Errorf("Remove of %s: no error", bad)
			}
			if _, err := route.Check(w); err == nil {
				t.Errorf("Check of %s: no error", bad)
			}
			return nil
		})
	}
	check.Diff(t, "changed", before, state(t, path))
}

func TestAddresses_Read(t *testing.T) {
	t.Parallel()
	path := newNamespace(t,
		"link add eth0 type veth peer name veth1", "link add eth1 type veth peer name veth2",
		"-6 addr add fd00::1/64 dev eth0 nodad", "-6 addr add ::ffff:192.0.2.9/128 dev eth0 nodad",
		"addr add 10.0.0.2/24 dev eth1", "addr add 10.0.0.3/24 dev eth1 label eth1:x",
		"addr add 10.1.0.1 peer 10.1.0.2/32 dev eth0", "-6 addr add fd00::5 peer fd00::6/128 dev eth1 nodad",
	)
	var got []netip.Addr
	in(t, path, func() (err error) { got, err = route.Addresses(); return err })
	// Of lo, eth0 and eth1, in each family.
	check.Diff(t, "difference", "[127.0.0.1 10.1.0.1 10.0.0.2 10.0.0.3 ::1 192.0.2.9 fd00::1 fd00::5]", fmt.Sprint(got))
	in(t, netnstest.New(t), func() (err error) { got, err = route.Addresses(); return err })
	check.Diff(t, "in an empty namespace", "[]", fmt.Sprint(got))
}

// ambient has the policy rules of ambient mode: part of the mark, and a priority.
func ambient() route.Want {
	w := route.Want{}
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		w.Policy = append(w.Policy, route.Policy{Family: f, Mark: 0x111, Mask: 0xfff, Table: 100, Priority: 32764})
	}
	return w
}

func TestApply_MaskAndPriority(t *testing.T) {
	t.Parallel()
	const byHand = "rule add fwmark 0x111/0xfff pref 32764 lookup 100; route add local default dev lo table 100;" +
		"-6 rule add fwmark 0x111/0xfff pref 32764 lookup 100; -6 route add local default dev lo table 100"
	ours, theirs := newNamespace(t, beside()...), newNamespace(t, append(beside(), byHand)...)
	before := state(t, ours)
	if missing := checked(t, ours, ambient()); len(missing) != 4 ||
		missing[1] != `policy rule "fwmark 0x111/0xfff lookup 100" (IPv4) is missing` {
		t.Errorf("Check returns %q", missing)
	}
	for range 2 {
		apply(t, ours, ambient())
		check.Diff(t, "made by the ip command (-) and by Apply (+)", state(t, theirs), state(t, ours))
		complete(t, ours, ambient())
	}
	for query, delivered := range map[string]bool{"0x111": true, "0x5111": true, "0x112": false, "0": false} {
		check.Equal(t, strings.HasPrefix(ip(t, ours, "route get 10.0.0.9 mark "+query), "local "), delivered, "mark", query)
	}
	remove(t, ours, ambient())
	check.Diff(t, "after Remove", before, state(t, ours))
}

// beside returns commands for a link, so that packets have a route, and for other programs' rules of the same mark.
func beside() []string {
	return []string{
		"link add veth0 address 02:00:00:00:00:01 type veth peer name veth1 address 02:00:00:00:00:02",
		"addr add 10.0.0.1/24 dev veth0", "link set veth0 up",
		"rule add fwmark 0x111 lookup 101 priority 32764", "rule add fwmark 0x111/0xff lookup 102 priority 32764",
	}
}

func TestRemove_NarrowerRuleOfTheMask(t *testing.T) {
	t.Parallel()
	path := newNamespace(t,
		"rule add from 10.0.0.0/8 fwmark 0x111/0xfff lookup 100 priority 9", "rule add fwmark 0x111/0xff lookup 100 priority 32764",
		"rule add fwmark 0x111 lookup 100 priority 32764", "route add local default dev lo table 100",
	)
	before := state(t, path)
	ip(t, path, "rule add fwmark 0x111/0xfff lookup 100 priority 32764")
	err := netns.Do(path, func() error { return route.Remove(ambient()) })
	check.OK(t, err)
	ip(t, path, "route add local default dev lo table 100")
	check.Diff(t, "changed", before, state(t, path))
}

func TestLeftovers_Mask(t *testing.T) {
	t.Parallel()
	path := newNamespace(t)
	apply(t, path, ambient())
	apply(t, path, route.Want{Policy: []route.Policy{v4(1337, 133)}})
	ip(t, path, "rule add fwmark 0x200/0xf00 lookup 134; route add local default dev lo table 134")
	check.Diff(t, "of whole marks", route.Want{Policy: []route.Policy{v4(1337, 133)}}, leftovers(t, path, 0))
	found := leftovers(t, path, 0xfff)
	if len(found.Policy) != 3 || !found.Policy[1].Same(ambient().Policy[0]) || !found.Policy[2].Same(ambient().Policy[1]) {
		t.Errorf("with the mask: %v", found.Policy)
	}
}
