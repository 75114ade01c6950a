package redirect_test

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// specs compares Specs: an empty list is the same as none.
var specs = cmp.Options{cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}), cmpopts.EquateEmpty()}

var prefixes = spectest.Prefixes

// dialect is the set of dialects that a row applies to.
type dialect uint8

const (
	strict dialect = 1 << iota
	lenient
	both = strict | lenient
)

func (d dialect) each(t *testing.T, test func(*testing.T, redirect.Dialect)) {
	t.Helper()
	if d&strict != 0 {
		t.Run("annotation", func(t *testing.T) { test(t, redirect.Dialect{Strict: true, GroupID: groupID}) })
	}
	if d&lenient != 0 {
		t.Run("flag", func(t *testing.T) { test(t, redirect.Dialect{GroupID: groupID}) })
	}
}

func groupID(name string) (uint32, error) {
	if name == "istio" {
		return 4000, nil
	}
	return 0, fmt.Errorf("unknown group %s", name)
}

func TestParse_GoodValues(t *testing.T) {
	type change = func(*redirect.Spec)
	none := func(*redirect.Spec) {}
	outbound := func(texts ...string) change {
		return func(s *redirect.Spec) { s.Outbound = redirect.Networks{List: prefixes(texts...)} }
	}
	inbound := func(list ...uint16) change {
		return func(s *redirect.Spec) { s.Inbound = redirect.Ports{List: ruleset.PortList(list...)} }
	}
	interfaces := func(list ...string) change { return func(s *redirect.Spec) { s.ExcludeInterfaces = list } }
	groups := func(list ...uint32) change {
		return func(s *redirect.Spec) { s.OwnerGroups = redirect.Groups{List: list} }
	}
	for _, test := range []struct {
		field redirect.Field
		text  string
		in    dialect
		want  change
	}{
		{redirect.FieldMode, "REDIRECT", both, none},
		{redirect.FieldMode, "TPROXY", both, func(s *redirect.Spec) { s.Mode = redirect.TPROXY }},

		{redirect.FieldInbound, "8000-8100,1-65535,80-80", lenient, func(s *redirect.Spec) {
			s.Inbound = redirect.Ports{List: []ruleset.PortRange{{First: 8000, Last: 8100}, {First: 1, Last: 65535}, {First: 80, Last: 80}}}
		}},

		{redirect.FieldOutbound, "*", both, none},
		{redirect.FieldOutbound, "", both, outbound()},
		{redirect.FieldOutbound, "10.0.0.0/8", both, outbound("10.0.0.0/8")},
		{redirect.FieldOutbound, "10.1.2.3/8,fd00::1/64,10.1.2.3/32,0.0.0.0/0,::/0", both, outbound("10.1.2.3/8", "fd00::1/64", "10.1.2.3/32", "0.0.0.0/0", "::/0")},
		{redirect.FieldOutbound, "10.0.0.0/8, 10.1.0.0/16", lenient, outbound("10.0.0.0/8", "10.1.0.0/16")},
		{redirect.FieldOutboundExclude, "", both, none},
		{redirect.FieldOutboundExclude, "10.0.0.0/8,fd00::/8", both, func(s *redirect.Spec) { s.OutboundExclude = prefixes("10.0.0.0/8", "fd00::/8") }},

		{redirect.FieldInbound, "*", both, none},
		{redirect.FieldInbound, " * ", both, none},
		{redirect.FieldInbound, "", both, inbound()},
		{redirect.FieldInbound, " \t", both, inbound()},
		{redirect.FieldInbound, "8080", both, inbound(8080)},
		{redirect.FieldInbound, " 8080 ,0, 65535,8080", both, inbound(8080, 0, 65535, 8080)},
		{redirect.FieldInbound, "080", both, inbound(80)},
		{redirect.FieldInboundExclude, "", both, func(s *redirect.Spec) { s.InboundExclude = nil }},
		{redirect.FieldInboundExclude, "3306,4444", both, func(s *redirect.Spec) { s.InboundExclude = ruleset.PortList(3306, 4444) }},
		{redirect.FieldOutboundPorts, "", both, none},
		{redirect.FieldOutboundPorts, "80,443", both, func(s *redirect.Spec) { s.OutboundPorts = ruleset.PortList(80, 443) }},
		{redirect.FieldOutboundPortsExclude, "", both, func(s *redirect.Spec) { s.OutboundPortsExclude = nil }},
		{redirect.FieldOutboundPortsExclude, "53", both, func(s *redirect.Spec) { s.OutboundPortsExclude = ruleset.PortList(53) }},

		{redirect.FieldExcludeInterfaces, "", both, none},
		{redirect.FieldExcludeInterfaces, "eth1, net1 ,Veth-0_a.b,abcdefghijklmno", both, interfaces("eth1", "net1", "Veth-0_a.b", "abcdefghijklmno")},
		{redirect.FieldRerouteInterfaces, "vm0,vm1", both, func(s *redirect.Spec) { s.RerouteInterfaces = []string{"vm0", "vm1"} }},

		{redirect.FieldOutboundPort, "15101", both, func(s *redirect.Spec) { s.OutboundPort = 15101 }},
		{redirect.FieldInboundPort, "65535", both, func(s *redirect.Spec) { s.InboundPort = 65535 }},
		{redirect.FieldTunnelPort, "1", both, func(s *redirect.Spec) { s.TunnelPort = 1 }},
		{redirect.FieldUIDs, "2000", both, func(s *redirect.Spec) { s.UIDs = []uint32{2000} }},
		{redirect.FieldUIDs, "0, 1337,4294967294", both, func(s *redirect.Spec) { s.UIDs = []uint32{0, 1337, 4294967294} }},
		{redirect.FieldGIDs, "3000,3001", both, func(s *redirect.Spec) { s.GIDs = []uint32{3000, 3001} }},
		{redirect.FieldMark, "1", both, func(s *redirect.Spec) { s.Mark = 1 }},
		{redirect.FieldMark, "4294967295", both, func(s *redirect.Spec) { s.Mark = 4294967295 }},
		{redirect.FieldTable, "1", both, func(s *redirect.Spec) { s.Table = 1 }},
		{redirect.FieldTable, "2147483647", both, func(s *redirect.Spec) { s.Table = 2147483647 }},
		{redirect.FieldTable, "256", both, func(s *redirect.Spec) { s.Table = 256 }},
		{redirect.FieldOwnerGroups, "*", both, none},
		{redirect.FieldOwnerGroups, "", both, groups()},
		{redirect.FieldOwnerGroups, "2000,istio", both, groups(2000, 4000)},
		{redirect.FieldOwnerGroupsExclude, "", both, none},
		{redirect.FieldOwnerGroupsExclude, "istio,0", both, func(s *redirect.Spec) { s.OwnerGroupsExclude = []uint32{4000, 0} }},
		{redirect.FieldLoopback, "127.0.0.1/32", both, none},
		{redirect.FieldLoopback, "127.1.2.3/8", both, func(s *redirect.Spec) { s.Loopback = netip.MustParsePrefix("127.1.2.3/8") }},
		{redirect.FieldSecondFamily, "bypass", both, none},
		{redirect.FieldSecondFamily, "capture", both, func(s *redirect.Spec) { s.SecondFamily = redirect.Capture }},
		{redirect.FieldSecondFamily, "reject", both, func(s *redirect.Spec) { s.SecondFamily = redirect.Reject }},
	} {
		t.Run(fmt.Sprintf("%d %.40q", test.field, test.text), func(t *testing.T) {
			test.in.each(t, func(t *testing.T, d redirect.Dialect) {
				got, err := redirect.Parse(redirect.Default(), written{test.field: test.text}.values(), d)
				check.OK(t, err)
				want := redirect.Default()
				test.want(&want)
				check.Diff(t, "Spec", want, got, specs)
			})
		})
	}
}

// TestParse_BadValues: each error names the source, the value and the problem.
func TestParse_BadValues(t *testing.T) {
	const (
		notPort      = "is not a port: want a decimal number from 0 to 65535"
		notRange     = "is not a range of ports: want FIRST-LAST, like 8000-8100, from 1 to 65535"
		notListener  = "is not a port that can be listened on"
		notNetwork   = "is not a network: want address/prefix, like 10.0.0.0/8 or 10.1.2.3/32"
		notInterface = "is not an interface name: want a letter, then letters, digits, '_', '.', '-'"
		notID        = "is not a user or group id: want a decimal number from 0 to 4294967294"
		notMark      = "is not a mark: want a decimal number from 1 to 4294967295"
		notTable     = "is not a routing table: want a decimal number from 1 to 2147483647"
		notLoopback  = "want an IPv4 loopback network, like 127.0.0.1/32, of prefix length 8 to 32"
		whiteSpace   = "contains white space: want address/prefix items separated by commas only"
		noID         = "names no id: the proxy needs at least one, or its own traffic would loop"
	)
	for _, test := range []struct {
		field redirect.Field
		in    dialect
		// bad maps values to the problem.
		bad map[string]string
	}{
		{redirect.FieldMode, both, map[string]string{
			"": "want REDIRECT or TPROXY, in capitals", "NONE": "want REDIRECT or TPROXY", "redirect": "in capitals", "TPROXY ": "want REDIRECT", "tproxy": "in capitals",
		}},
		{redirect.FieldOutbound, both, map[string]string{
			"10.0.0.1": `"10.0.0.1" ` + notNetwork, "10.0.0.0/33": notNetwork, "10.0.0.0/-1": notNetwork, "10.0.0/8": notNetwork, "fd00::/129": notNetwork,
			"fe80::1%eth0/64": notNetwork, "10.0.0.0/08": notNetwork, "x": notNetwork, "10.0.0.0/8;10.1.0.0/16": notNetwork, "/8": notNetwork,
			"*,10.0.0.0/8": `"*" is not allowed here: want a list of networks`, "10.0.0.0/8,*": `"*" is not allowed here`,
			"10.0.0.1,x,10.0.0.0/8": `"10.0.0.1" ` + notNetwork + `; "x" ` + notNetwork,
		}},
		{redirect.FieldOutbound, strict, map[string]string{
			"10.0.0.0/8,": "item 2 of the list is empty", ",10.0.0.0/8": "item 1 of the list is empty", ",": "item 1 of the list is empty",
			" 10.0.0.0/8": whiteSpace, "10.0.0.0/8, 10.1.0.0/16": whiteSpace, " ": whiteSpace, " *": whiteSpace, "10.0.0.0/8\n": whiteSpace,
		}},
		{redirect.FieldOutboundExclude, both, map[string]string{
			"*": `"*" is not allowed here: want a list of networks`, "10.0.0.1": notNetwork,
		}},
		{redirect.FieldInbound, both, map[string]string{
			"65536": `"65536" ` + notPort, "-1": notPort, "+80": notPort, "http": notPort, "0x50": notPort, "8 0": notPort, "8_0": notPort, "80;90": notPort,
			"٨٠": notPort, "99999999999999999999": notPort,
			"80,*": `"*" is not allowed here: want a list of ports`, "*,*": `"*" is not allowed here`, "80,a,b": `"a" ` + notPort + `; "b" ` + notPort,
		}},
		{redirect.FieldInbound, strict, map[string]string{
			"80,": "item 2 of the list is empty", ",80": "item 1 of the list is empty", "80,,90": "item 2 of the list is empty", "80, ,90": "item 2 of the list is empty", ",": "item 1",
		}},
		{redirect.FieldInboundExclude, both, map[string]string{
			"x": notPort, "80,*": `"*" is not allowed here`,
			"*": `excludes every port while "*" is captured; to capture no inbound port leave the included ports empty`, " * ": "excludes every port",
		}},
		{redirect.FieldOutboundPorts, both, map[string]string{"*": `"*" is not allowed here: want a list of ports`, "x": notPort}},
		{redirect.FieldOutboundPortsExclude, both, map[string]string{"*": `"*" is not allowed here: want a list of ports`, "65536": notPort}},
		{redirect.FieldExcludeInterfaces, both, map[string]string{
			"0eth": `"0eth" ` + notInterface, "eth 0": notInterface, "eth+": notInterface, "eth/0": notInterface, "-eth": notInterface, "éth": notInterface, "eth0!": notInterface, "*": notInterface,
			"abcdefghijklmnop": `"abcdefghijklmnop" is longer than 15 characters`, "eth0,_a,b:c": `"_a" ` + notInterface + `; "b:c" ` + notInterface,
		}},
		{redirect.FieldRerouteInterfaces, both, map[string]string{"vm0,1": notInterface}},
		{redirect.FieldOutboundPort, both, map[string]string{"0": notListener, "": notPort, "x": notPort, "65536": notPort, "*": "is not allowed here", " 15001": notPort}},
		{redirect.FieldInboundPort, both, map[string]string{
			"0": notListener, "": notPort, "-1": notPort, "15001": "is the outbound port as well; the proxy needs one listener for each direction",
		}},
		{redirect.FieldTunnelPort, both, map[string]string{"0": notListener, "": notPort}},
		{redirect.FieldUIDs, both, map[string]string{
			"": noID, " ": noID, "root": `"root" ` + notID, "-1": notID, "+1": notID, "4294967295": notID, "4294967296": notID, "1337,x": notID, "*": notID,
		}},
		{redirect.FieldUIDs, lenient, map[string]string{",": noID}},
		{redirect.FieldGIDs, both, map[string]string{"": noID, "istio": notID}},
		{redirect.FieldMark, both, map[string]string{
			"": notMark, "0": "is the mark of every unmarked packet", "1338": "is the mark of the proxy's calls to its own pod; take another one",
			"0x539": notMark, "4294967296": notMark, "-1": notMark, "+1337": notMark, "1337/0xff": notMark,
		}},
		{redirect.FieldTable, both, map[string]string{
			"": notTable, "0": notTable, "main": notTable, "2147483648": notTable, "+133": notTable,
			"253": "is one of the kernel's own routing tables (253 to 255)", "254": "kernel's own", "255": "kernel's own",
		}},
		{redirect.FieldOwnerGroups, both, map[string]string{
			"nobody": `"nobody" is not a group known here (unknown group nobody)`, "4294967295": `"4294967295" is not a group: want a number, or a name known here`,
			"*,1": `"*" is not a group`, "-1": "is not a group known here", strings.Repeat("1,", 49) + "1": "lists 50 entries, more than 49",
		}},
		{redirect.FieldOutboundPorts, strict, map[string]string{"80-90": `"80-90" is a range of ports, which Istio's annotations do not take: put it into the annotation cni.istio.io/NAME of the same NAME`}},
		{redirect.FieldOutboundPorts, both, map[string]string{"90-80": notRange, "0-5": notRange, "5-": notRange, "1-2-3": notRange, "1 - 2": notRange, "5-65536": notRange}},
		{redirect.FieldMoreOutboundPortsExclude, both, map[string]string{
			"8100-8000": notRange, "0-5": notRange, "5-65536": notRange, "1-2-3": notRange, "8000 - 8100": notRange, "-5": notPort, "5-": notRange,
			"*": "is not allowed here", "http": notPort, "8000:8100": notPort,
		}},
		{redirect.FieldOwnerGroupsExclude, both, map[string]string{"*": `"*" is not a group`, "nobody": "is not a group known here"}},
		{redirect.FieldLoopback, both, map[string]string{
			"": notLoopback, "127.0.0.1": notLoopback, "10.0.0.0/8": notLoopback, "127.0.0.0/7": notLoopback, "127.0.0.1/33": notLoopback, "::1/128": notLoopback,
			"::ffff:127.0.0.1/128": notLoopback,
		}},
		{redirect.FieldSecondFamily, both, map[string]string{"": "want bypass, capture or reject", "Reject": "want bypass", "drop": "want bypass"}},
		{redirect.FieldSecondFamily + 1, both, map[string]string{"x": "is not a known field"}},
	} {
		for text, want := range test.bad {
			t.Run(fmt.Sprintf("%d %.40q", test.field, text), func(t *testing.T) {
				test.in.each(t, func(t *testing.T, d redirect.Dialect) {
					values := redirect.Values{test.field: {Source: `annotation "some/key"`, Text: text}}
					got, err := redirect.Parse(redirect.Default(), values, d)
					var bad *redirect.FieldError
					if !errors.As(err, &bad) {
						t.Fatalf("error is %v (%T), want a FieldError", err, err)
					}
					if bad.Field != test.field || bad.Source != `annotation "some/key"` || bad.Text != text {
						t.Errorf("error names field %d, source %s and value %q", bad.Field, bad.Source, bad.Text)
					}
					if prefix := fmt.Sprintf(`annotation "some/key": value %q: `, text); !strings.HasPrefix(bad.Error(), prefix) || !strings.Contains(bad.Error(), want) {
						t.Errorf("error is\n%s, want\n%s…%s", bad, prefix, want)
					}
					check.Diff(t, "the Spec was changed all the same", redirect.Default(), got, specs)
				})
			})
		}
	}
}

// TestParse_Conflicts has further values whose validity depends on other fields.
func TestParse_Conflicts(t *testing.T) {
	for _, test := range []struct {
		name string
		w    written
		want string
	}{
		{name: "every inbound port excluded from a list", w: written{redirect.FieldInbound: "80", redirect.FieldInboundExclude: "*"}},
		{name: "every inbound port excluded from none", w: written{redirect.FieldInbound: "", redirect.FieldInboundExclude: "*"}},
		{name: "listeners swapped", w: written{redirect.FieldOutboundPort: "15006", redirect.FieldInboundPort: "15001"}},
		{
			name: "one listener for both, reported for the outbound one", w: written{redirect.FieldOutboundPort: "15006"},
			want: `test: value "15006": is the inbound port as well`,
		},
		{
			name: "one listener for both, both written", w: written{redirect.FieldInboundPort: "16000", redirect.FieldOutboundPort: "16000"},
			want: `test: value "16000": is the outbound port as well`,
		},
		{
			name: "a list and more ports", w: written{redirect.FieldOutboundPorts: listOf(600, "7"), redirect.FieldMoreOutboundPorts: "1-2," + listOf(600, "7")},
			want: "extends a list to 1201 entries, more than 1000",
		},
		{
			name: "a bad port is not compared with the other one", w: written{redirect.FieldInboundPort: "0", redirect.FieldOutboundPort: "x"},
			want: "test: value \"x\": is not a port: want a decimal number from 0 to 65535\n" +
				"test: value \"0\": is not a port that can be listened on",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := redirect.Parse(redirect.Default(), test.w.values(), redirect.Dialect{})
			switch {
			case test.want == "" && err != nil:
				t.Errorf("error is %v", err)
			case test.want != "" && !strings.Contains(fmt.Sprint(err), test.want):
				t.Errorf("error is %v, want %s", err, test.want)
			}
			if n := strings.Count(fmt.Sprint(err), "listener for each"); n > 1 {
				t.Errorf("the same problem is reported %d times: %v", n, err)
			}
		})
	}
}

func TestParse_FieldsWithoutValue(t *testing.T) {
	for _, base := range spectest.Many(20) {
		base.DualStack, base.SecondFamily, base.Annotations = true, redirect.Reject, map[redirect.Field]string{redirect.FieldMode: "x"}
		got, err := redirect.Parse(base, written{redirect.FieldMark: "60"}.values(), redirect.Dialect{Strict: true})
		check.OK(t, err)
		base.Mark = 60
		check.Diff(t, "Spec", base, got, specs)
	}
}

func TestParse_GroupNamesInAnnotations(t *testing.T) {
	_, err := redirect.Parse(redirect.Default(), written{redirect.FieldOwnerGroups: "istio"}.values(), redirect.Dialect{Strict: true})
	check.Fails(t, err, `test: value "istio": "istio" is not a group: want a number, or a name known here`)
}

// listOf returns a list of equal entries.
func listOf(n int, entry string) string { return strings.TrimSuffix(strings.Repeat(entry+",", n), ",") }

// TestParse_Lists accepts each list up to its bound in docs/parity.md, and refuses a longer one. Repeated entries count. An empty entry is
// an error only in annotations.
func TestParse_Lists(t *testing.T) {
	for field, l := range map[redirect.Field]struct {
		most  int
		entry string
	}{
		redirect.FieldOutbound: {1000, "10.0.0.0/24"}, redirect.FieldOutboundExclude: {1000, "10.0.0.0/24"}, redirect.FieldInbound: {1000, "80"},
		redirect.FieldInboundExclude: {1000, "80"}, redirect.FieldOutboundPorts: {1000, "80"}, redirect.FieldMoreOutboundPorts: {1000, "80"},
		redirect.FieldOutboundPortsExclude: {1000, "80"}, redirect.FieldExcludeInterfaces: {100, "eth0"}, redirect.FieldRerouteInterfaces: {8, "eth0"},
		redirect.FieldUIDs: {1000, "80"}, redirect.FieldGIDs: {1000, "80"}, redirect.FieldOwnerGroups: {49, "80"}, redirect.FieldOwnerGroupsExclude: {1000, "80"},
	} {
		both.each(t, func(t *testing.T, d redirect.Dialect) {
			_, err := redirect.Parse(redirect.Default(), written{field: l.entry + ",,"}.values(), d)
			check.Equal(t, strings.HasSuffix(fmt.Sprint(err), ": item 2 of the list is empty"), d.Strict, "field", field, "error is", err)
			for _, n := range []int{l.most, l.most + 1, 45000} {
				_, err := redirect.Parse(redirect.Default(), written{field: listOf(n, l.entry)}.values(), d)
				want := fmt.Sprintf("lists %d entries, more than %d", n, l.most)
				if n == l.most {
					want = "<nil>"
				}
				if text := fmt.Sprint(err); !strings.HasSuffix(text, want) {
					t.Errorf("field %d, %d entries: error is %.300s, want … %s", field, n, text, want)
				}
			}
		})
	}
}

// TestParse_ErrorLength writes texts of the largest size of a pod's annotations into every field: the error is short, and
// memory grows at most in proportion to the text.
func TestParse_ErrorLength(t *testing.T) {
	const size = 256 << 10
	for field := redirect.FieldMode; field <= redirect.FieldSecondFamily; field++ {
		for what, text := range map[string]string{
			"letters": strings.Repeat("x", size), "commas": strings.Repeat(",", size), "blanks": strings.Repeat(" ", size) + "x", "zeros": strings.Repeat("0", size),
			"bad entries": listOf(size/2, "x"), "some bad entries": listOf(900, strings.Repeat("-", 290)), "networks": listOf(size/16, "10.0.0.0/24"),
			"few bad entries": listOf(5, strings.Repeat("\x1b", size/5)), "ports": listOf(size/6, "60000"), "nulls": strings.Repeat("\x00", size), "quotes": strings.Repeat(`"`, size), "bytes": strings.Repeat("\xff", size), "a star": "*" + strings.Repeat(" ", size),
		} {
			for _, isStrict := range []bool{true, false} {
				values := redirect.Values{field: {Source: `annotation "some/key"`, Text: text}}
				unknown := func(name string) (uint32, error) { return 0, errors.New("unknown group " + name) }
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				_, err := redirect.Parse(redirect.Default(), values, redirect.Dialect{Strict: isStrict, GroupID: unknown})
				message := fmt.Sprint(err)
				runtime.ReadMemStats(&after)
				if len(message) > 2<<10 {
					t.Errorf("field %d, %s: an error of %d bytes: %.200s", field, what, len(message), message)
				}
				if got := after.TotalAlloc - before.TotalAlloc; got > 8*size {
					t.Errorf("field %d, %s: reading %d bytes allocates %d", field, what, len(text), got)
				}
			}
		}
	}
}
