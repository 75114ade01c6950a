package redirection_test

import (
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// dual returns a Spec that captures both families of a dualPod.
func dual(set ...func(*redirect.Spec)) redirect.Spec {
	s := redirect.Default()
	s.DualStack = true
	for _, f := range set {
		f(&s)
	}
	return s
}

func byTPROXY(s *redirect.Spec) { s.Mode = redirect.TPROXY }

// configurations returns Specs that differ in their rules of each table.
func configurations() []named {
	networks := func(s *redirect.Spec) {
		s.Outbound = redirect.Networks{List: spectest.Prefixes("10.0.0.0/8", "fd00::/8")}
	}
	return []named{
		{"REDIRECT", dual()},
		{"TPROXY", dual(byTPROXY)},
		{"REDIRECT with interfaces and networks", dual(networks, func(s *redirect.Spec) {
			s.ExcludeInterfaces, s.RerouteInterfaces = []string{"x1", "x2"}, []string{"v1", "v2"}
		})},
		{"REDIRECT with other interfaces", dual(func(s *redirect.Spec) {
			s.ExcludeInterfaces, s.RerouteInterfaces = []string{"x2", "x3"}, []string{"v2"}
		})},
		{"TPROXY with interfaces and another mark", dual(byTPROXY, func(s *redirect.Spec) {
			s.ExcludeInterfaces, s.RerouteInterfaces = []string{"x1", "x2"}, []string{"v1"}
			s.Mark, s.Table, s.DropInvalid, s.DNS = 7, 300, true, redirect.DNSAll
			s.UIDs, s.GIDs = []uint32{0, 1337}, []uint32{5}
		})},
		{"TPROXY of IPv4 with another mark", dual(byTPROXY, func(s *redirect.Spec) { s.DualStack, s.Mark = false, 7 })},
		{"TPROXY of no port", dual(byTPROXY, func(s *redirect.Spec) { s.Inbound, s.Mark = redirect.Ports{}, 9 })},
		{"DNS servers and groups", dual(func(s *redirect.Spec) {
			s.DNS, s.DNSServers = redirect.DNSServers, []netip.Addr{netip.MustParseAddr("10.0.0.10"), netip.MustParseAddr("fd00::a")}
			s.OwnerGroups = redirect.Groups{List: []uint32{1, 2}}
			s.Inbound = redirect.Ports{List: ruleset.PortList(80)}
		})},
		{"nothing but invalid packets", dual(func(s *redirect.Spec) {
			s.Inbound, s.Outbound, s.OwnerGroups, s.DropInvalid = redirect.Ports{}, redirect.Networks{}, redirect.Groups{}, true
		})},
	}
}

// mustApply applies the Spec to the pod.
func mustApply(t *testing.T, n redirection.Namespace, s redirect.Wanted) redirection.Report {
	t.Helper()
	r, err := n.Apply(t.Context(), s, redirection.Reconcile)
	check.OK(t, err)
	return r
}

// verify returns the report of Verify.
func verify(t *testing.T, n redirection.Namespace, s redirect.Wanted) redirection.Report {
	t.Helper()
	r, err := n.Verify(t.Context(), s)
	check.OK(t, err)
	return r
}

// verified fails the test if Verify finds a difference.
func verified(t *testing.T, n redirection.Namespace, s redirect.Wanted) {
	t.Helper()
	if r := verify(t, n, s); !r.Clean() {
		t.Errorf("not clean: routing %q, rules:\n%s", r.Routing, r.Diffs)
	}
}

// A drift is a change of existing rules by another program. Its texts have one item per line.
type drift struct {
	name string
	// do has command lines of iptables, with LO for loopback. They change one family.
	do string
	// want has the findings of Verify: for a rule "TABLE CHAIN missing|extra|foreign RULE", for a chain "TABLE CHAIN absent|stale".
	want string
	// note has Verify's further notes.
	note string
}

// items returns the lines of a text.
func items(text string) []string {
	var all []string
	for line := range strings.Lines(text) {
		all = append(all, strings.TrimSpace(line))
	}
	return all
}

var drifts = []struct {
	name   string
	spec   redirect.Spec
	drifts []drift
}{
	{"REDIRECT", dual(), []drift{
		{"a rule is gone", "-t nat -D ISTIO_OUTPUT -d LO -j RETURN", "nat ISTIO_OUTPUT missing -d LO -j RETURN", ""},
		{"a rule is there twice", "-t nat -A ISTIO_OUTPUT -j ISTIO_REDIRECT", "nat ISTIO_OUTPUT extra -j ISTIO_REDIRECT", ""},
		{"a chain is emptied", "-t nat -F ISTIO_IN_REDIRECT", "nat ISTIO_IN_REDIRECT missing -p tcp -j REDIRECT --to-ports 15006", ""},
		{
			"a chain is gone", `-t nat -D PREROUTING -p tcp -j ISTIO_INBOUND
				-t nat -F ISTIO_INBOUND
				-t nat -X ISTIO_INBOUND`, `nat PREROUTING missing -p tcp -j ISTIO_INBOUND
				nat ISTIO_INBOUND absent
				nat ISTIO_INBOUND missing -p tcp -m tcp --dport 15008 -j RETURN
				nat ISTIO_INBOUND missing -p tcp -m tcp --dport 15020 -j RETURN
				nat ISTIO_INBOUND missing -p tcp -m tcp --dport 15021 -j RETURN
				nat ISTIO_INBOUND missing -p tcp -m tcp --dport 15090 -j RETURN
				nat ISTIO_INBOUND missing -p tcp -j ISTIO_IN_REDIRECT`, "",
		},
		{"a jump is gone", "-t nat -D OUTPUT -j ISTIO_OUTPUT", "nat OUTPUT missing -j ISTIO_OUTPUT", ""},
		{"a jump is there twice", "-t nat -A OUTPUT -j ISTIO_OUTPUT", "nat OUTPUT extra -j ISTIO_OUTPUT", ""},
		{
			"a foreign rule is ahead", "-t nat -I OUTPUT -p tcp --dport 22 -j ACCEPT",
			"nat OUTPUT foreign -p tcp -m tcp --dport 22 -j ACCEPT", "",
		},
		{
			"foreign rules are behind", `-t nat -A OUTPUT -p tcp --dport 22 -j ACCEPT
				-t nat -A PREROUTING -p tcp --dport 23 -j ACCEPT
				-A INPUT -p tcp --dport 24 -j ACCEPT`, "", `nat: -A OUTPUT -p tcp -m tcp --dport 22 -j ACCEPT
				nat: -A PREROUTING -p tcp -m tcp --dport 23 -j ACCEPT`,
		},
		{
			"a chain is left over", `-t nat -N ISTIO_OLD
				-t filter -N ISTIO_OLD
				-A ISTIO_OLD -j ACCEPT`, `filter ISTIO_OLD stale
				filter ISTIO_OLD extra -j ACCEPT
				nat ISTIO_OLD stale`, "",
		},
		{
			"a chain is left over and used", `-t mangle -N ISTIO_DROP
				-t mangle -A PREROUTING -m conntrack --ctstate INVALID -j ISTIO_DROP
				-t mangle -A ISTIO_DROP -j DROP`, `mangle PREROUTING extra -m conntrack --ctstate INVALID -j ISTIO_DROP
				mangle ISTIO_DROP stale
				mangle ISTIO_DROP extra -j DROP`, "",
		},
	}},
	{"TPROXY", dual(byTPROXY, func(s *redirect.Spec) { s.ExcludeInterfaces, s.DropInvalid = []string{"x1", "x2"}, true }), []drift{
		{
			"a rule in a built-in chain is gone", "-t mangle -D OUTPUT -p tcp -o lo -m mark --mark 1337 -j RETURN",
			"mangle OUTPUT missing -o lo -p tcp -m mark --mark 0x539 -j RETURN", "",
		},
		{
			"two rules in a built-in chain are swapped", `-t mangle -D PREROUTING 1
				-t mangle -I PREROUTING 2 -i x1 -j RETURN`, `mangle PREROUTING extra -i x2 -j RETURN
				mangle PREROUTING missing -i x2 -j RETURN`, "",
		},
		{"an excluded interface is gone", "-t nat -D PREROUTING -i x1 -j RETURN", "nat PREROUTING missing -i x1 -j RETURN", ""},
		{
			"a foreign rule is between ours", "-t mangle -I OUTPUT 3 -p tcp --dport 22 -j ACCEPT",
			"mangle OUTPUT foreign -p tcp -m tcp --dport 22 -j ACCEPT", "",
		},
	}},
}

func TestVerify_Drift(t *testing.T) {
	t.Parallel()
	eachVariant(t, func(t *testing.T, v iptables.Variant) {
		for _, group := range drifts {
			for _, d := range group.drifts {
				for _, f := range families {
					t.Run(fmt.Sprintf("%s/%s/%s", group.name, d.name, f), func(t *testing.T) {
						t.Parallel()
						p := dualPod(t)
						n := p.namespace(v)
						p.plant(t, v, early)
						mustApply(t, n, group.spec)
						p.plant(t, v, late)
						whole := p.rules(t, v)
						notes := verify(t, n, group.spec).Notes
						loopback := strings.NewReplacer("LO", map[ruleset.Family]string{ruleset.IPv4: "127.0.0.1/32", ruleset.IPv6: "::1/128"}[f])
						p.iptables(t, v, f, items(loopback.Replace(d.do))...)
						for _, r := range items(d.note) {
							notes = append(notes, f.String()+": foreign rule behind ours, left alone: "+r)
						}
						found := d.check(t, p, n, v, group.spec, f, loopback)
						slices.Sort(notes)
						slices.Sort(found.Notes)
						if diff := cmp.Diff(notes, found.Notes); diff != "" && d.want == "" {
							t.Errorf("not the notes (-want +got):\n%s", diff)
						}
						d.heal(t, p, n, v, group.spec, whole)
					})
				}
			}
		}
	})
}

// check compares the findings of Verify. Neither Verify nor FailOnConflict may change rules.
func (d drift) check(t *testing.T, p pod, n redirection.Namespace, v iptables.Variant, s redirect.Spec, f ruleset.Family, loopback *strings.Replacer) redirection.Report {
	t.Helper()
	before := p.rules(t, v)
	found := verify(t, n, s)
	var want []string
	for _, w := range items(loopback.Replace(d.want)) {
		want = append(want, f.String()+" "+w)
	}
	check.Diff(t, "Verify does not find that", want, findings(found.Diffs))
	check.Diff(t, "Verify finds routing", []string(nil), found.Routing)
	_, err := n.Apply(t.Context(), s, redirection.FailOnConflict)
	check.Equal(t, errors.Is(err, redirection.ErrConflict), d.want != "", "a conflict", err)
	equal(t, "Verify or FailOnConflict changed something", before, p.rules(t, v))
	return found
}

// heal checks that Reconcile restores the rules and leaves foreign ones.
func (d drift) heal(t *testing.T, p pod, n redirection.Namespace, v iptables.Variant, s redirect.Spec, whole string) {
	t.Helper()
	before := p.rules(t, v)
	check.Equal(t, len(mustApply(t, n, s).Programs) == 1, d.want != "", "one program ran")
	verified(t, n, s)
	now := p.rules(t, v)
	if d.note != "" || strings.Contains(d.want, " foreign ") { // foreign rules came with the drift and stay
		ours := []ruleset.Set{redirect.Rules(s, ruleset.IPv4), redirect.Rules(s, ruleset.IPv6)}
		equal(t, "foreign rules are not as they were", foreign(before, ours...), foreign(now, ours...))
	} else {
		equal(t, "not as before the drift", whole, now)
	}
}

// findings lists the differences of a report.
func findings(diffs []ruleset.Diff) []string {
	var out []string
	for _, d := range diffs {
		for _, c := range d.Chains {
			where := fmt.Sprintf("%s %s %s ", d.Family, c.Table, c.Chain)
			if c.Absent {
				out = append(out, where+"absent")
			}
			if c.Stale {
				out = append(out, where+"stale")
			}
			for _, l := range c.Lines {
				if l.Op != ruleset.Same {
					out = append(out, where+map[ruleset.Op]string{ruleset.Missing: "missing ", ruleset.Extra: "extra ", ruleset.Foreign: "foreign "}[l.Op]+l.Rule.String())
				}
			}
		}
	}
	return out
}

// mustClean removes the rules and routing of the mesh.
func mustClean(t *testing.T, n redirection.Namespace) redirection.Report {
	t.Helper()
	r, err := n.Clean(t.Context(), redirect.Default())
	check.OK(t, err)
	return r
}

// After each configuration of the reference, Clean leaves the rules that would exist without it, byte for byte. It does
// nothing in a namespace without the mesh.
func TestClean_ReferenceRules(t *testing.T) {
	t.Parallel()
	ways := []iptables.Variant{iptables.NFT, iptables.Legacy, byNetlink}
	never := map[iptables.Variant]string{}
	for _, v := range ways {
		control := dualPod(t)
		control.plant(t, v, early)
		control.plant(t, v, late)
		never[v] = filled(control.rules(t, v))
		hasRules(t, control.namespace(v), false)
	}
	for i, c := range slices.Concat(configurations(), many(40)) {
		v := ways[i%len(ways)]
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := dualPod(t)
			p.plant(t, v, early)
			p.reference(t, v, c.spec, families...)
			p.plant(t, v, late)
			n := p.namespace(v)
			hasRules(t, n, true)
			mustClean(t, n)
			hasRules(t, n, false)
			equal(t, "not as if the mesh had never been here", never[v], filled(p.rules(t, v)))
			check.Equal(t, len(mustClean(t, n).Programs), 0, "programs of cleaning again")
			if i >= len(configurations()) {
				return
			}
			alone := dualPod(t) // without foreign rules
			alone.reference(t, v, c.spec, families...)
			mustClean(t, alone.namespace(v))
			check.Equal(t, filled(alone.save(t, v, ruleset.IPv4)+alone.save(t, v, ruleset.IPv6)), "", "still there is")
		})
	}
}

func hasRules(t *testing.T, n redirection.Namespace, want bool) {
	t.Helper()
	if got, err := n.HasRules(t.Context()); err != nil || got != want {
		t.Errorf("the namespace has rules of the mesh: %t, %v, want %t", got, err, want)
	}
}

// older has the families of files with rules of earlier reference versions, by file extension.
var older = map[string][]ruleset.Family{".both": families, ".iptables": families[:1], ".ip6tables": families[1:]}

func TestClean_OldVersions(t *testing.T) {
	t.Parallel()
	eachVariant(t, func(t *testing.T, v iptables.Variant) {
		control := dualPod(t)
		control.plant(t, v, early)
		never := filled(control.rules(t, v))
		for name, text := range texts("older/*") {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				old := func() pod {
					p := dualPod(t)
					p.plant(t, v, early)
					for _, f := range older[path.Ext(name)] {
						p.restore(t, v, f, text)
					}
					return p
				}
				cleaned, replaced, spec := old(), old(), dual()
				mustClean(t, cleaned.namespace(v))
				equal(t, "cleaned: not as if the mesh had never been here", never, filled(cleaned.rules(t, v)))
				// Every version had chains, with other rules than today. The chains identify the mesh.
				for _, f := range families {
					replaced.restore(t, v, f, "*nat\n-N ISTIO_OLD\n-A ISTIO_OLD -p tcp -j RETURN\nCOMMIT\n")
				}
				mustApply(t, replaced.namespace(v), spec)
				verified(t, replaced.namespace(v), spec)
				mine := []ruleset.Set{redirect.Rules(spec, ruleset.IPv4), redirect.Rules(spec, ruleset.IPv6)}
				equal(t, "replaced: foreign rules are not as they were", foreign(never), foreign(replaced.rules(t, v), mine...))
			})
		}
	})
}

// TestClean_TablesOfOtherNames: Clean does not remove another table for the mesh's chain names in it.
func TestClean_TablesOfOtherNames(t *testing.T) {
	t.Parallel()
	for _, backend := range []redirect.Backend{redirect.Netlink, redirect.Native} {
		p := dualPod(t)
		p.feed(t, "table inet istio-cni-trace-1 {\nchain istio-output { }\nchain ISTIO_OUTPUT { }\nchain output { type nat hook output priority -150; tcp dport 80 redirect to :9090; jump istio-output; jump ISTIO_OUTPUT; }\n}\n",
			"nft", "-f", "-")
		before := p.feed(t, "", "nft", "list", "table", "inet", "istio-cni-trace-1")
		n := p.namespace(byNetlink)
		n.Backend = backend
		mustApply(t, n, redirect.Default())
		mustClean(t, n)
		equal(t, "another table was changed", before, p.feed(t, "", "nft", "list", "table", "inet", "istio-cni-trace-1"))
	}
}

// masked is a mode of the mesh whose policy rules compare a part of the mark.
type masked struct{ redirect.Spec }

func (m masked) Owner() redirect.Owner {
	o := redirect.Sidecar()
	o.Mark, o.Mask = 0x111, 0xfff
	return o
}

func (m masked) Routing(redirect.Families) redirect.Routing {
	return redirect.Routing{MarkFamilies: families, Mark: 0x111, Mask: 0xfff, Table: 100, Priority: 32764}
}

func TestClean_PartOfTheMark(t *testing.T) {
	t.Parallel()
	p, want := dualPod(t), masked{dual()}
	n := p.namespace(byNetlink)
	policies := func() string { return p.run(t, "ip", "rule") + p.run(t, "ip", "-6", "rule") }
	routing := func() []string {
		r, err := n.Verify(t.Context(), want)
		check.OK(t, err)
		return r.Routing
	}
	p.run(t, "ip", "rule", "add", "fwmark", "0x111", "lookup", "100", "pref", "7")
	p.run(t, "ip", "rule", "add", "fwmark", "0x111/0xff", "lookup", "101", "pref", "8")
	before := policies()
	_, err := n.Apply(t.Context(), want, redirection.Reconcile)
	check.OK(t, err)
	check.Diff(t, "after Apply", []string(nil), routing())
	p.run(t, "ip", "-6", "rule", "add", "fwmark", "0x111/0xfff", "lookup", "105")
	p.run(t, "ip", "-6", "route", "add", "local", "default", "dev", "lo", "table", "105")
	check.Diff(t, "of an earlier configuration", []string{`policy rule "fwmark 0x111/0xfff lookup 105" (IPv6) is left over`}, routing())
	for _, clean := range []func() (redirection.Report, error){
		func() (redirection.Report, error) { return n.Apply(t.Context(), want, redirection.Reconcile) },
		func() (redirection.Report, error) { return n.Clean(t.Context(), want) },
	} {
		_, err = clean()
		check.OK(t, err)
		check.Equal(t, strings.Contains(policies(), "lookup 105"), false, "left over")
	}
	check.Equal(t, policies(), before, "after Clean")
	check.Equal(t, p.run(t, "ip", "route", "show", "table", "all", "type", "local", "default"), "", "after Clean")
}
