package redirect_test

import (
	"fmt"
	"math/rand"
	"net/netip"
	"reflect"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

var families = []ruleset.Family{ruleset.IPv4, ruleset.IPv6}

// written are fields as a person writes them.
type written map[redirect.Field]string

func (w written) values() redirect.Values {
	values := redirect.Values{}
	for field, text := range w {
		values[field] = redirect.Value{Source: "test", Text: text}
	}
	return values
}

// spec gives the default Spec with some fields written over it, in the strict dialect of annotations.
func (w written) spec(tb testing.TB) redirect.Spec {
	tb.Helper()
	s, err := redirect.Parse(redirect.Default(), w.values(), redirect.Dialect{Strict: true})
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// anySpec is a random Spec for testing/quick, of values that Parse takes.
type anySpec struct {
	redirect.Spec
	w written
}

// menus hold what a random Spec chooses from. Every class of every field is there, and values that collide.
var menus = map[redirect.Field][]string{
	redirect.FieldMode:                 {"REDIRECT", "TPROXY"},
	redirect.FieldOutbound:             {"*", "", "10.0.0.0/8", "10.0.0.7/29,fd00::/64,172.16.0.0/12", "127.0.0.0/8,10.0.0.0/8", "::1/128,fd00::/8", "0.0.0.0/0", "::/0", "::ffff:10.0.0.0/104", "::1.2.3.4/120"},
	redirect.FieldOutboundExclude:      {"", "10.0.0.7/32", "fd00::7/128,10.1.0.0/16,10.0.0.0/29", "0.0.0.0/0,::/0"},
	redirect.FieldInbound:              {"*", "", "8080", "8080,15008,8443,8080"},
	redirect.FieldInboundExclude:       {"", "15020,15021,15090", "8080,15020", "22,22"},
	redirect.FieldOutboundPorts:        {"", "80", "443,3306,53,443"},
	redirect.FieldOutboundPortsExclude: {"", "15020", "53,3306", "80,80"},
	redirect.FieldExcludeInterfaces:    {"", "eth1", "eth1,net-1,eth1", "vm0"},
	redirect.FieldRerouteInterfaces:    {"", "vm0", "vm0,vm1", "eth1"},
	redirect.FieldOutboundPort:         {"15001", "15101"},
	redirect.FieldInboundPort:          {"15006", "15106"},
	redirect.FieldTunnelPort:           {"15008", "15108"},
	redirect.FieldUIDs:                 {"1337", "2000", "1337,2000"},
	redirect.FieldGIDs:                 {"1337", "0", "3000,1337"},
	redirect.FieldMark:                 {"1337", "4294967295", "1"},
	redirect.FieldTable:                {"133", "7"},
	redirect.FieldOwnerGroups:          {"*", "", "1000", "1000,2000"},
	redirect.FieldOwnerGroupsExclude:   {"", "2000", "1000,2000"},
	redirect.FieldLoopback:             {"127.0.0.1/32", "127.0.0.0/8", "127.0.0.9/30"},
	redirect.FieldSecondFamily:         {"bypass", "capture", "reject"},
}

var servers = [][]netip.Addr{
	nil,
	{netip.MustParseAddr("10.0.0.53")},
	{netip.MustParseAddr("fd00::53")},
	{netip.MustParseAddr("10.0.0.53"), netip.MustParseAddr("fd00::53"), netip.MustParseAddr("10.0.0.54")},
}

// Generate leaves about half of the fields as they are.
func (anySpec) Generate(r *rand.Rand, _ int) reflect.Value {
	w := written{}
	for f := redirect.FieldMode; f <= redirect.FieldSecondFamily; f++ {
		if r.Intn(2) == 0 {
			w[f] = menus[f][r.Intn(len(menus[f]))]
		}
	}
	s, err := redirect.Parse(redirect.Default(), w.values(), redirect.Dialect{})
	if err != nil {
		panic(err) // a menu is wrong
	}
	s.DNS = redirect.DNSCapture(r.Intn(3))
	s.DNSServers = servers[r.Intn(len(servers))]
	s.DropInvalid, s.DualStack = r.Intn(3) == 0, r.Intn(2) == 0
	return reflect.ValueOf(anySpec{s, w})
}

// GoString is how testing/quick shows one.
func (s anySpec) GoString() string {
	return fmt.Sprintf("written %q, DNS %d of %v, drop invalid %t", s.w, s.DNS, s.DNSServers, s.DropInvalid)
}

// TestMenusCoverEveryField keeps the random Specs random in every field that there is.
func TestMenusCoverEveryField(t *testing.T) {
	for f := redirect.FieldMode; f <= redirect.FieldSecondFamily; f++ {
		if len(menus[f]) < 2 {
			t.Errorf("field %d has %d choices", f, len(menus[f]))
		}
	}
	_, err := redirect.Parse(redirect.Default(), redirect.Values{redirect.FieldSecondFamily + 1: {Source: "test", Text: "1"}}, redirect.Dialect{})
	if err == nil {
		t.Error("there is a field behind FieldSecondFamily; random Specs must reach it")
	}
}
