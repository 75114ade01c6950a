package sidecar_test

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// specs compares Specs: an empty list equals nil.
var specs = cmp.Options{cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}), cmpopts.EquateEmpty(), cmpopts.IgnoreFields(redirect.Spec{}, "Annotations")}

// runAs sets the securityContext of every istio-proxy.
func runAs(user, group *int64) change {
	return proxies(func(c *sidecar.Container) { c.RunAsUser, c.RunAsGroup = user, group })
}

func podRunAs(user, group *int64) change {
	return func(f *sidecar.Facts, _ *sidecar.Policy) { f.RunAsUser, f.RunAsGroup = user, group }
}

// TestDecide_Settings has the Spec for each annotation, environment variable and identity. TestParse_GoodValues of package
// redirect shows how values may be written.
func TestDecide_Settings(t *testing.T) {
	type spec = func(*redirect.Spec)
	excluding := func(ports ...uint16) spec {
		return func(s *redirect.Spec) { s.InboundExclude = ruleset.PortList(ports...) }
	}
	ids := func(user, group uint32) spec {
		return func(s *redirect.Spec) { s.UIDs, s.GIDs = []uint32{user}, []uint32{group} }
	}
	reroute := func(names ...string) spec { return func(s *redirect.Spec) { s.RerouteInterfaces = names } }
	same := func(*redirect.Spec) {}
	for _, test := range []struct {
		name    string
		changes []change
		want    spec
	}{
		{"no settings", nil, same},

		{
			"each annotation",
			[]change{
				annotation(sidecar.ModeKey, "TPROXY"), annotation(sidecar.OutboundKey, "10.0.0.0/8,fd00::/8"), annotation(sidecar.InboundPortsKey, "8080, 9090"),
				annotation(sidecar.OutboundExcludeKey, "169.254.169.254/32,10.0.0.0/8"), annotation(sidecar.OutboundPortsKey, "80,443"),
				annotation(sidecar.MoreInboundPortsKey, "8000-8100"), annotation(sidecar.MoreOutboundPortsKey, "8000-8000,9000-9001"),
				annotation(sidecar.MoreOutboundPortsExcludeKey, "1-65535"), annotation(sidecar.ExcludeInterfacesKey, "eth1, net1"),
			},
			func(s *redirect.Spec) {
				s.Mode, s.Outbound = redirect.TPROXY, redirect.Networks{List: spectest.Prefixes("10.0.0.0/8", "fd00::/8")}
				s.Inbound = redirect.Ports{List: append(ruleset.PortList(8080, 9090), ruleset.PortRange{First: 8000, Last: 8100})}
				s.OutboundExclude = spectest.Prefixes("169.254.169.254/32", "10.0.0.0/8")
				s.OutboundPorts = append(ruleset.PortList(80, 443, 8000), ruleset.PortRange{First: 9000, Last: 9001})
				s.OutboundPortsExclude = append(ruleset.PortList(15020), ruleset.PortRange{First: 1, Last: 65535})
				s.ExcludeInterfaces = []string{"eth1", "net1"}
			},
		},
		{"no excluded outbound port: 15020 goes, too", []change{annotation(sidecar.OutboundPortsExcludeKey, "")}, func(s *redirect.Spec) { s.OutboundPortsExclude = nil }},
		{"excluded outbound ports replace 15020", []change{annotation(sidecar.OutboundPortsExcludeKey, "3306,6379")}, func(s *redirect.Spec) {
			s.OutboundPortsExclude = ruleset.PortList(3306, 6379)
		}},

		{"no excluded inbound port: the sidecar's own stay", []change{annotation(sidecar.InboundPortsExcludeKey, "")}, same},
		{"an excluded inbound port", []change{annotation(sidecar.InboundPortsExcludeKey, "3306")}, excluding(3306, 15020, 15021, 15090)},
		{"an excluded inbound port of the sidecar's own", []change{annotation(sidecar.InboundPortsExcludeKey, "15020")}, excluding(15020, 15021, 15090)},
		{"the sidecar's own in another order", []change{annotation(sidecar.InboundPortsExcludeKey, "15090,22,15020,22")}, excluding(15090, 22, 15020, 15021)},
		{
			"every inbound port excluded where a list is captured",
			[]change{annotation(sidecar.InboundPortsExcludeKey, "*"), annotation(sidecar.InboundPortsKey, "80")},
			func(s *redirect.Spec) { s.Inbound = redirect.Ports{List: ruleset.PortList(80)} },
		},
		{"ranges of excluded inbound ports", []change{annotation(sidecar.MoreInboundPortsExcludeKey, "8000-8100, 22"), annotation(sidecar.InboundPortsExcludeKey, "80")}, func(s *redirect.Spec) {
			s.InboundExclude = slices.Concat(ruleset.PortList(80), []ruleset.PortRange{{First: 8000, Last: 8100}}, ruleset.PortList(22, 15020, 15021, 15090))
		}},
		{"a status port of its own is not read", []change{annotation("status.sidecar.istio.io/port", "15099")}, same},

		{"virtual machines by the old key", []change{annotation(sidecar.KubevirtInterfacesKey, "vm0")}, reroute("vm0")},
		{"the new key wins over the old one", []change{annotation(sidecar.KubevirtInterfacesKey, "vm0"), annotation(sidecar.RerouteInterfacesKey, "vm9")}, reroute("vm9")},
		{"the new key wins over the old one, empty as well", []change{annotation(sidecar.KubevirtInterfacesKey, "vm0"), annotation(sidecar.RerouteInterfacesKey, "")}, same},
		{"the new key hides a bad value of the old one", []change{annotation(sidecar.KubevirtInterfacesKey, "0!"), annotation(sidecar.RerouteInterfacesKey, "vm9")}, reroute("vm9")},

		{"DNS", []change{env("ISTIO_META_DNS_CAPTURE", "true")}, func(s *redirect.Spec) { s.DNS = redirect.DNSAll }},
		{"DNS by a number", []change{env("ISTIO_META_DNS_CAPTURE", "1")}, func(s *redirect.Spec) { s.DNS = redirect.DNSAll }},
		{"DNS off", []change{env("ISTIO_META_DNS_CAPTURE", "false")}, same},
		{"DNS by valueFrom", []change{env("ISTIO_META_DNS_CAPTURE", "")}, same},
		{"DNS twice: the last one counts", []change{env("ISTIO_META_DNS_CAPTURE", "true"), env("ISTIO_META_DNS_CAPTURE", "false")}, same},
		{"dual stack", []change{env("ISTIO_DUAL_STACK", "TRUE")}, func(s *redirect.Spec) { s.DualStack = true }},
		{"dropping invalid packets", []change{env("INVALID_DROP", "t")}, func(s *redirect.Spec) { s.DropInvalid = true }},
		{
			"other environment is not read",
			[]change{env("ENVOY_PORT", "1"), env("PROXY_UID", "2"), env("CAPTURE_ALL_DNS", "true"), env("ISTIO_OUTBOUND_OWNER_GROUPS", "3"), env("ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR", "127.0.0.0/8")},
			same,
		},
		{"the environment of other containers is not read", []change{also(sidecar.Container{Name: "x", Env: []sidecar.EnvVar{{Name: "INVALID_DROP", Value: "true"}}})}, same},

		{"the proxy's ids", []change{runAs(new(int64(2000)), new(int64(3000)))}, ids(2000, 3000)},
		{"the proxy's user alone", []change{runAs(new(int64(2000)), nil)}, ids(2000, 1337)},
		{"the proxy's group alone", []change{runAs(nil, new(int64(3000)))}, ids(1337, 3000)},
		{"root is not exempt", []change{runAs(new(int64(0)), new(int64(1337)))}, same},
		{"root's group is not exempt", []change{runAs(new(int64(1337)), new(int64(0)))}, same},
		{"the pod's ids where the proxy has none", []change{podRunAs(new(int64(2000)), new(int64(3000)))}, ids(2000, 3000)},
		{"the pod's group where the proxy has a user only", []change{podRunAs(new(int64(2000)), new(int64(3000))), runAs(new(int64(4000)), nil)}, ids(4000, 3000)},
		{"the proxy's ids win over the pod's", []change{podRunAs(new(int64(2000)), new(int64(3000))), runAs(new(int64(4000)), new(int64(5000)))}, ids(4000, 5000)},
		{"root in the proxy wins over the pod's", []change{podRunAs(new(int64(2000)), new(int64(3000))), runAs(new(int64(0)), new(int64(0)))}, same},
		{"root in the pod is not exempt", []change{podRunAs(new(int64(0)), new(int64(0)))}, same},
		{"the last id there is", []change{runAs(new(int64(math.MaxUint32-1)), nil)}, ids(math.MaxUint32-1, 1337)},
		{"the ids of other containers are not read", []change{also(sidecar.Container{Name: "x", RunAsUser: new(int64(5))})}, same},
		{
			"a native sidecar's ids and environment",
			[]change{
				proxyCalled("x"),
				nativeProxy(sidecar.Container{RunAsUser: new(int64(2000)), Env: []sidecar.EnvVar{{Name: "ISTIO_DUAL_STACK", Value: "true"}}}),
			},
			func(s *redirect.Spec) { s.UIDs, s.DualStack = []uint32{2000}, true },
		},
		{
			"two proxies: value by value the container wins",
			[]change{
				runAs(new(int64(4000)), nil), env("INVALID_DROP", "false"),
				nativeProxy(sidecar.Container{RunAsUser: new(int64(2000)), RunAsGroup: new(int64(3000)), Env: []sidecar.EnvVar{
					{Name: "ISTIO_DUAL_STACK", Value: "true"}, {Name: "INVALID_DROP", Value: "true"},
				}}),
			},
			func(s *redirect.Spec) { s.UIDs, s.GIDs, s.DualStack = []uint32{4000}, []uint32{3000}, true },
		},

		{"the annotations of the injector", []change{
			annotation(sidecar.ModeKey, "REDIRECT"), annotation(sidecar.InboundPortsKey, "*"), annotation(sidecar.InboundPortsExcludeKey, "15020"), annotation(sidecar.OutboundKey, "*"),
		}, same},
		{
			"the node's second family",
			[]change{func(_ *sidecar.Facts, p *sidecar.Policy) { p.SecondFamily = redirect.Reject }},
			func(s *redirect.Spec) { s.SecondFamily = redirect.Reject },
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := sidecar.Decide(pod(test.changes...))
			if d.Reason != sidecar.Captured || d.Err != nil || len(d.Warnings) > 0 {
				t.Fatalf("the pod is %s, error %v, warnings %q", d.Reason, d.Err, d.Warnings)
			}
			want := redirect.Default()
			test.want(&want)
			check.Diff(t, "Spec", want, d.Spec, specs)
		})
	}
}

// TestDecide_BadSettings: TestParse_BadValues and TestParse_Lists of package redirect have the bad values of each field.
func TestDecide_BadSettings(t *testing.T) {
	d := sidecar.Decide(pod(
		annotation(sidecar.ModeKey, "x"), annotation(sidecar.InboundPortsKey, "y"), annotation(sidecar.OutboundExcludeKey, "10.0.0.0/8,"), annotation(sidecar.KubevirtInterfacesKey, "0"),
		runAs(new(int64(-1)), new(int64(math.MaxUint32))), env("INVALID_DROP", "maybe"),
	))
	want := []string{
		`annotation "sidecar.istio.io/interceptionMode": value "x": want REDIRECT or TPROXY, in capitals`,
		`annotation "traffic.sidecar.istio.io/excludeOutboundIPRanges": value "10.0.0.0/8,": item 2 of the list is empty`,
		`annotation "traffic.sidecar.istio.io/includeInboundPorts": value "y": "y" is not a port: want a decimal number from 0 to 65535`,
		`annotation "traffic.sidecar.istio.io/kubevirtInterfaces": value "0": "0" is not an interface name: want a letter, then letters, digits, '_', '.', '-'`,
		`securityContext.runAsUser of container "istio-proxy" or its pod: value -1 is not a user or group id`,
		`securityContext.runAsGroup of container "istio-proxy" or its pod: value 4294967295 is not a user or group id`,
	}
	check.Diff(t, "problems", want, strings.Split(fmt.Sprint(d.Err), "\n"))
	check.Equal(t, len(d.Warnings), 1, "warnings", d.Warnings)
	wellFormed(t, d)
}

// TestDecide_IgnoredSettings: ports that have no effect, and switches that cannot be read. Of these, DISABLE_ENVOY causes no warning.
func TestDecide_IgnoredSettings(t *testing.T) {
	changes := []change{env("DISABLE_ENVOY", "maybe"), annotation(sidecar.MoreInboundPortsKey, "8000-8100"), annotation(sidecar.InboundPortsKey, "*")}
	want := []string{`ignoring annotation "cni.istio.io/includeInboundPorts": all inbound ports are captured; ` +
		`set annotation "traffic.sidecar.istio.io/includeInboundPorts" to the ports, or to nothing`}
	for _, name := range []string{"ISTIO_META_DNS_CAPTURE", "ISTIO_DUAL_STACK", "INVALID_DROP"} {
		changes = append(changes, env(name, "se cret"))
		want = append(want, fmt.Sprintf(`ignoring environment variable %s of container "istio-proxy": it is not a boolean`, name))
	}
	d := sidecar.Decide(pod(changes...))
	check.Diff(t, "Spec", redirect.Default(), d.Spec, specs)
	check.Diff(t, "warnings", want, d.Warnings)
}

func TestDecide_OwnAnnotations(t *testing.T) {
	const istio, own = "traffic.sidecar.istio.io/excludeOutboundPorts", "cni.istio.io/excludeOutboundPorts"
	for _, test := range []struct {
		changes []change
		want    string
	}{
		{nil, istio},
		{[]change{annotation(istio, "80")}, istio},
		{[]change{annotation(own, "")}, istio},
		{[]change{annotation(own, "80")}, own},
		{[]change{annotation(own, "80"), annotation(istio, "")}, own},
		{[]change{annotation(own, "80"), annotation(istio, "81")}, istio + " and " + own},
	} {
		d := sidecar.Decide(pod(test.changes...))
		if got := sidecar.KeysOf(d.Spec)(redirect.FieldOutboundPortsExclude); got != test.want || d.Err != nil {
			t.Errorf("got %q, want %q; %v", got, test.want, d.Err)
		}
	}
}
