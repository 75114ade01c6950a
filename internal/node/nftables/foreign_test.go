package nftables_test

import (
	_ "embed" // files of testdata
	"encoding/binary"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/node/nftables/nftablestest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

var (
	//go:embed testdata/foreign.iptables
	foreign4 string
	//go:embed testdata/foreign.ip6tables
	foreign6 string
	// foreign has rules of other programs, in the text that iptables-restore reads and iptables-save prints.
	foreign = map[ruleset.Family]string{ruleset.IPv4: foreign4, ruleset.IPv6: foreign6}
	// others has rules of other programs: each differs from all rules of the mesh and from all other rules. Some are not decoded.
	//
	//go:embed testdata/others.iptables
	others string
)

func TestRead_ForeignRulesAsIptablesPrints(t *testing.T) {
	for _, f := range families {
		p := newPod(t)
		p.restore(t, f, foreign[f])
		want := p.save(t, f)
		equal(t, f.String(), want.String(), p.read(t, f).String())
		// iptables prints the rules as they were written, so the comparison is not vacuous.
		check.Diff(t, fmt.Sprintf("%s: iptables prints other rules than it was given", f), appends(foreign[f]), appends(want.String()))
	}
}

// appends returns the rules of a text, in order.
func appends(text string) []string {
	return slices.DeleteFunc(strings.Split(text, "\n"), func(l string) bool { return !strings.HasPrefix(l, "-A ") })
}

func TestView_RulesOfOthersDiffer(t *testing.T) {
	p := newPod(t)
	p.restore(t, ruleset.IPv4, others)
	seen := map[string]bool{}
	for _, table := range p.read(t, ruleset.IPv4).Tables {
		for _, c := range table.Chains {
			for _, r := range c.Rules {
				if seen[r.String()] {
					t.Errorf("table %s, chain %s: %q is like another", table.Name, c.Name, r.String())
				}
				seen[r.String()] = true
			}
		}
	}
	check.Equal(t, len(seen), strings.Count(others, "-A "), "rules")
	again := p.read(t, ruleset.IPv4)
	check.Equal(t, p.read(t, ruleset.IPv4).String(), again.String())
}

func TestLive_ChainsOfOtherTablesInOneOrder(t *testing.T) {
	p := newPod(t)
	names := strings.Split("a b c d e f g h i j k l m n o p q r s t u v w x y z", " ")
	p.run(t, "table ip other {\nchain "+strings.Join(names, " {\n}\nchain ")+" {\n}\n}\n", "nft", "-f", "-")
	p.do(t, func() (err error) {
		s, err := nftables.Open()
		check.OK(t, err)
		v, err := s.Read(t.Context(), redirect.Sidecar())
		check.OK(t, err)
		live, err := v.Live(t.Context())
		check.OK(t, err)
		var got []string
		for _, c := range live[0].Table("other").Chains {
			got = append(got, c.Name)
		}
		check.Diff(t, "chains", names, got)
		return s.Close()
	})
}

// ofNft has rules that nft adds to the chains of iptables, each with the text that is read.
var ofNft = []struct{ rule, want string }{
	{"tcp dport 80 counter return", "-p tcp -m tcp --dport 80 -j RETURN"},
	{"tcp dport 80 counter return comment \"why not\"", `-p tcp -m tcp --dport 80 -m comment --comment "why not" -j RETURN`},
	{"ip daddr 10.0.0.0/9 udp sport 53 accept", "-d 10.0.0.0/9 -p udp -m udp --sport 53 -j ACCEPT"},
	{"ip protocol tcp drop", "-p tcp -j DROP"},
	{"oifname \"eth*\" accept", "-o eth+ -j ACCEPT"},
	{"meta mark 5 accept", "-m mark --mark 0x5 -j ACCEPT"},
	{"tcp dport { 80, 443 } return", "meta l4proto tcp [a look-up in the set __set0, see rule handle HANDLE] return"},
	{"tcp dport > 80 return", "-p tcp -m tcp ! --dport 0:80 -j RETURN"},
	{"ip daddr 10.0.0.1-10.0.0.5 return", "-m iprange --dst-range 10.0.0.1-10.0.0.5 -j RETURN"},
	{"meta skuid 1337 return", "meta skuid 1337 return"},
	{"ct state established accept", "ct state established accept"},
	{"tcp dport 80 redirect to :15001", "meta l4proto tcp tcp dport 80 redirect to :15001"},
	{"meta mark set 5", "meta mark set 0x00000005"},
	{"meta mark set meta mark or 5", "meta mark set meta mark | 0x00000005"},
	{"meta mark set meta mark and 0xf0", "meta mark set meta mark & 0x000000f0"},
	{"ct mark set ct mark and 0xf0 or 0x11", "ct mark set ct mark & 0x000000f1 | 0x00000011"},
	{"ip ttl 5 accept", "[a match of the network header, see rule handle HANDLE] accept"},
	{"meta l4proto { tcp, udp } accept", "[a look-up in the set __set1, see rule handle HANDLE] accept"},
	{"th dport 80 return", "th dport 80 return"},
}

func TestRead_RulesOfNft(t *testing.T) {
	p := newPod(t)
	p.restore(t, ruleset.IPv4, "*nat\n-A OUTPUT -j ACCEPT\nCOMMIT\n")
	for _, n := range ofNft {
		p.run(t, "", "nft", "add rule ip nat OUTPUT "+n.rule)
	}
	rules := p.chain(t, "OUTPUT")
	if len(rules) != len(ofNft)+1 {
		t.Fatalf("%d rules were read, want %d", len(rules), len(ofNft)+1)
	}
	for i, n := range ofNft {
		got := regexp.MustCompile(`handle [0-9]+`).ReplaceAllString(rules[i+1], "handle HANDLE")
		check.Equal(t, got, n.want, n.rule, "read as")
	}
}

// TestApply_ForeignRulesStay applies and removes rules among foreign ones, before and after ours, and in foreign chains.
// The kernel must hold the same bytes as before.
func TestApply_ForeignRulesStay(t *testing.T) {
	p := newPod(t)
	for _, f := range families {
		p.restore(t, f, foreign[f])
	}
	p.restore(t, ruleset.IPv4, others)
	for _, n := range ofNft {
		p.run(t, "", "nft", "add rule ip nat OUTPUT "+n.rule)
	}
	p.run(t, "", "nft", "add table ip kube; add chain ip kube x { type nat hook output priority -100; }; add rule ip kube x accept")
	before := [][]string{p.kernel(t, ruleset.IPv4), p.kernel(t, ruleset.IPv6)}

	spec := everything()
	want4, want6 := redirect.Rules(spec, ruleset.IPv4), redirect.Rules(spec, ruleset.IPv6)
	p.apply(t, reconcile(want4, want6))
	for _, want := range []ruleset.Set{want4, want6} {
		have := p.read(t, want.Family)
		check.Equal(t, ruleset.Compare(want, have, redirect.Sidecar().Owned(want, have)).String(), "", want.Family)
	}
	// Foreign rules come between ours, and before them.
	p.run(t, "", "iptables-nft", strings.Fields("-t nat -I OUTPUT 1 -p tcp -m limit --limit 7/min -j ACCEPT")...)
	p.apply(t, reconcile(want4))
	wantOut, _ := want4.Table("nat").Chain("OUTPUT")
	check.Diff(t, "head of nat OUTPUT", specs(wantOut.Rules), p.chain(t, "OUTPUT")[:len(wantOut.Rules)])
	p.run(t, "", "iptables-nft", strings.Fields("-t nat -D OUTPUT -p tcp -m limit --limit 7/min -j ACCEPT")...)

	p.apply(t, func(v *nftables.View) (out nftables.Plan) {
		for _, f := range families {
			out.Programs = append(out.Programs, ruleset.Reconcile(ruleset.Set{Family: f}, v.Set(f), redirect.Sidecar().AllOwned(v.Set(f))))
		}
		return out
	})
	for i, f := range families {
		left := slices.DeleteFunc(p.kernel(t, f), func(line string) bool { return !slices.Contains(before[i], line) })
		check.Diff(t, fmt.Sprintf("%s: rules that were there", f), before[i], left)
		if strings.Contains(p.save(t, f).String()+p.read(t, f).String(), "ISTIO") {
			t.Errorf("%s: rules of ours are left", f)
		}
	}
}

// TestApply_ForeignJumpToOurChain has a foreign rule that jumps to a chain of ours. It must be
// removed first because the kernel would keep the chain.
func TestApply_ForeignJumpToOurChain(t *testing.T) {
	p := newPod(t)
	p.apply(t, reconcile(redirect.Rules(redirect.Default(), ruleset.IPv4)))
	p.run(t, "", "nft", "add rule ip nat OUTPUT tcp dport { 1, 2 } jump ISTIO_OUTPUT")
	p.apply(t, reconcile(ruleset.Set{Family: ruleset.IPv4}))
	check.Equal(t, p.read(t, ruleset.IPv4).Empty(), true, "nothing is left")
}

func TestRead_ChainOfAnotherHook(t *testing.T) {
	p := newPod(t)
	p.run(t, "", "nft", "add table ip nat; add chain ip nat OUTPUT { type filter hook output priority 5; }; add rule ip nat OUTPUT accept")
	if rules := p.chain(t, "OUTPUT(filter,hook:output,priority:5)"); !slices.Equal(rules, []string{"-j ACCEPT"}) {
		t.Errorf("read %q", rules)
	}
	before := p.kernel(t, ruleset.IPv4)
	err := p.update(t, reconcile(redirect.Rules(redirect.Default(), ruleset.IPv4)), nil)
	check.Fails(t, err, `chain "OUTPUT" is not the built-in one`)
	check.Diff(t, "a refused change left something", before, p.kernel(t, ruleset.IPv4))
}

func TestRead_DormantTable(t *testing.T) {
	want := redirect.Rules(redirect.Default(), ruleset.IPv4)
	for _, before := range []ruleset.Set{{Family: ruleset.IPv4}, want} {
		p := newPod(t)
		p.apply(t, reconcile(before))
		p.run(t, "", "nft", "add table ip nat { flags dormant; }")
		check.Fails(t, p.update(t, reconcile(want), nil), "dormant")
	}
}

// TestRead_ChainNames: the kernel accepts blanks and control characters in a chain's name. No such chain is
// mistaken for one of ours, none hides another one, and all with our prefix are removed.
func TestRead_ChainNames(t *testing.T) {
	names := []string{
		"ISTIO_OUTPUT", "ISTIO_OUTPUT ", "ISTIO OUTPUT", "ISTIO\tOUTPUT", "ISTIO_\x1b[31m", "ISTIO_OUTPUT\nCOMMIT", `ISTIO_OUTPUT\x20`, `ISTIO_"`, "ISTIO_é", "ISTIO_\xff", " ",
	}
	p := newPod(t)
	for _, name := range names {
		nftablestest.Fill(t, string(p), unix.NFPROTO_IPV4, "nat", name, 1, 1)
	}
	var seen []string
	for _, c := range p.read(t, ruleset.IPv4).Table("nat").Chains {
		if ruleset.Builtin("nat", c.Name) {
			continue
		}
		seen = append(seen, c.Name)
		if len(c.Rules) != 1 || strings.ContainsFunc(c.Name, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
			t.Errorf("chain %q has %d rules", c.Name, len(c.Rules))
		}
	}
	slices.Sort(seen)
	check.Equal(t, len(slices.Compact(seen)), len(names), seen)
	want := redirect.Rules(redirect.Default(), ruleset.IPv4)
	p.apply(t, reconcile(want))
	for _, c := range p.read(t, ruleset.IPv4).Table("nat").Chains {
		if _, wanted := want.Table("nat").Chain(c.Name); strings.HasPrefix(c.Name, "ISTIO_") && !wanted {
			t.Errorf("chain %q is left", c.Name)
		}
	}
}

// TestRead_SetOfManyPorts bounds the memory of rules that look up the same large set.
func TestRead_SetOfManyPorts(t *testing.T) {
	var ports []string
	for i := range 60000 {
		ports = append(ports, fmt.Sprint(i+1))
	}
	p := newPod(t)
	p.run(t, "add table inet istio-proxy-nat\nadd chain inet istio-proxy-nat istio-output\n"+
		"add set inet istio-proxy-nat many { type inet_service; }\nadd element inet istio-proxy-nat many { "+strings.Join(ports, ", ")+" }\n"+
		strings.Repeat("add rule inet istio-proxy-nat istio-output tcp dport @many accept\n", 100), "nft", "-f", "-")
	chain, _ := p.read(t, 0).Table("istio-proxy-nat").Chain("istio-output")
	size := 0
	for _, r := range chain.Rules {
		size += len(r.String())
	}
	if len(chain.Rules) != 100 || size > 100<<10 {
		t.Errorf("%d rules take %d bytes", len(chain.Rules), size)
	}
}

// TestApply_ManyRulesRemoved: each rule is found, even among equal ones, and foreign rules stay.
func TestApply_ManyRulesRemoved(t *testing.T) {
	const n = 2000
	text := "*nat\n:ISTIO_A - [0:0]\n:ISTIO_B - [0:0]\n"
	for i := range n {
		text += fmt.Sprintf("-A OUTPUT -j ISTIO_%c\n-A OUTPUT -p tcp -m tcp --dport %d -j ACCEPT\n", "AB"[i%2], i+1)
	}
	p := newPod(t)
	p.restore(t, ruleset.IPv4, text+"COMMIT\n")
	want := redirect.Rules(redirect.Default(), ruleset.IPv4)
	p.apply(t, reconcile(want))
	rules := p.chain(t, "OUTPUT")
	first, _ := want.Table("nat").Chain("OUTPUT")
	if len(rules) != len(first.Rules)+n || rules[0] != first.Rules[0].String() || rules[n] != fmt.Sprintf("-p tcp -m tcp --dport %d -j ACCEPT", n) {
		t.Errorf("%d rules, the first is %q, the last %q", len(rules), rules[0], rules[len(rules)-1])
	}
}

// structOf returns a struct of 16-bit or 32-bit numbers and then bytes, padded to 16 bytes.
func structOf[T uint16 | uint32](numbers []T, bytes ...byte) []byte {
	out, _ := binary.Append(nil, binary.NativeEndian, numbers)
	out = append(out, bytes...)
	return append(out, make([]byte, 16-len(out))...)
}

// older has rules of iptables-nft before 1.8.8, which compared ports and marks by x_tables, the protocol of IPv4 in
// its header, and networks always with a mask.
func older() map[string]func(*nfnetlink.Buffer) {
	match := func(b *nfnetlink.Buffer, name string, revision uint32, info []byte) {
		b.Expression("match", func() {
			b.String(unix.NFTA_MATCH_NAME, name)
			b.Uint32(unix.NFTA_MATCH_REV, revision)
			b.Attribute(unix.NFTA_MATCH_INFO, info)
		})
	}
	tcpStruct := func(numbers []uint16, bytes ...byte) func(*nfnetlink.Buffer) {
		return func(b *nfnetlink.Buffer) {
			b.Payload(unix.NFT_PAYLOAD_NETWORK_HEADER, 9, 1)
			b.Compare(false, []byte{ruleset.TCP})
			match(b, "tcp", 0, structOf(numbers, bytes...))
		}
	}
	return map[string]func(*nfnetlink.Buffer){
		"-p tcp -m tcp --dport 80 -j ACCEPT":          tcpStruct([]uint16{0, 65535, 80, 80}),
		"-p tcp -m tcp ! --sport 3 -j ACCEPT":         tcpStruct([]uint16{3, 3, 0, 65535}, 0, 0, 0, 1),
		"-p tcp -m tcp --tcp-flags RST RST -j ACCEPT": tcpStruct([]uint16{0, 65535, 0, 65535}, 0, 4, 4, 0),
		"-p udp -m udp --dport 53 -j ACCEPT": func(b *nfnetlink.Buffer) {
			b.Meta(unix.NFT_META_L4PROTO)
			b.Compare(false, []byte{ruleset.UDP})
			match(b, "udp", 0, structOf([]uint16{0, 65535, 53, 53}))
		},
		"-m mark --mark 0x539 -j ACCEPT": func(b *nfnetlink.Buffer) { match(b, "mark", 1, structOf([]uint32{0x539, 0xffffffff})) },
		"-m mark ! --mark 0x1 -j ACCEPT": func(b *nfnetlink.Buffer) { match(b, "mark", 1, structOf([]uint32{1, 0xffffffff}, 1)) },
		"-d 10.0.0.0/8 -j ACCEPT": func(b *nfnetlink.Buffer) {
			b.Payload(unix.NFT_PAYLOAD_NETWORK_HEADER, 16, 4)
			b.And([]byte{255, 0, 0, 0})
			b.Compare(false, []byte{10, 0, 0, 0})
		},
		"-i eth0 -j ACCEPT": func(b *nfnetlink.Buffer) {
			b.Meta(unix.NFT_META_IIFNAME)
			b.Compare(false, append([]byte("eth0"), make([]byte, 12)...))
		},
	}
}

// TestRead_RulesOfOlderVersions writes such rules and reads them with iptables and the code under test.
func TestRead_RulesOfOlderVersions(t *testing.T) {
	for want, fill := range older() {
		p := newPod(t)
		p.restore(t, ruleset.IPv4, "*mangle\n-A PREROUTING -j RETURN\nCOMMIT\n")
		protocol := uint32(ruleset.TCP)
		if strings.Contains(want, "udp") {
			protocol = uint32(ruleset.UDP)
		}
		p.do(t, func() error { return writeRaw(protocol, fill) })
		for who, set := range map[string]ruleset.Set{"iptables": p.save(t, ruleset.IPv4), "this package": p.read(t, ruleset.IPv4)} {
			chain, _ := set.Table("mangle").Chain("PREROUTING")
			if len(chain.Rules) != 2 || chain.Rules[1].String() != want {
				t.Errorf("%s reads %q, want %q", who, specs(chain.Rules), want)
			}
		}
	}
}

// writeRaw appends a rule that accepts packets of a protocol to mangle PREROUTING.
func writeRaw(protocol uint32, fill func(*nfnetlink.Buffer)) error {
	conn, err := nfnetlink.Open()
	if err != nil {
		return err
	}
	return errors.Join(conn.Transact(func(batch *nfnetlink.Batch) error {
		batch.Add(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, unix.NFPROTO_IPV4, func(b *nfnetlink.Buffer) {
			b.In("mangle", "PREROUTING")
			b.Nested(unix.NFTA_RULE_EXPRESSIONS, func() {
				fill(b)
				b.Verdict(nfnetlink.Verdict{Code: nfnetlink.Accept})
			})
			b.Nested(unix.NFTA_RULE_COMPAT, func() {
				b.Uint32(unix.NFTA_RULE_COMPAT_PROTO, protocol)
				b.Uint32(unix.NFTA_RULE_COMPAT_FLAGS, 0)
			})
		})
		return nil
	}), conn.Close())
}
