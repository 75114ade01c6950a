package nftables_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// foreign are rules of other programs, as iptables-restore takes them and iptables-save prints them.
var foreign = map[ruleset.Family]string{
	ruleset.IPv4: `*filter
:DOCKER-USER - [0:0]
:DOCKER-USER2 - [0:0]
-A INPUT -p icmp -j ACCEPT
-A INPUT ! -p tcp -j DROP
-A INPUT -p gre -j ACCEPT
-A INPUT -p tcp -m multiport ! --dports 1,2 -j ACCEPT
-A INPUT -m conntrack --ctstate INVALID,NEW,RELATED,ESTABLISHED -j ACCEPT
-A INPUT -p tcp -m tcp --tcp-flags RST RST -j ACCEPT
-A INPUT -m mark ! --mark 0x1 -j ACCEPT
-A INPUT -m connmark ! --mark 0x1 -j ACCEPT
-A INPUT -i abcdefghijklmno -j ACCEPT
-A INPUT ! -i abcdefghijklmn+ -j ACCEPT
-A INPUT -p tcp -m tcp ! --sport 5 -j REJECT --reject-with tcp-reset
-A INPUT
-A FORWARD -j DOCKER-USER
-A OUTPUT -m owner ! --gid-owner 3 -j ACCEPT
-A DOCKER-USER -g DOCKER-USER2
COMMIT
*mangle
-A FORWARD -p tcp -j MARK --set-xmark 0x0/0xffffffff
COMMIT
*nat
:DOCKER - [0:0]
-A POSTROUTING -p udp -m udp --dport 53 -j SNAT --to-source 127.0.0.1
-A POSTROUTING -p udp -m udp --dport 1:2 -j SNAT --to-source 127.0.0.1
-A POSTROUTING -p tcp -m tcp ! --sport 1:65535 -j SNAT --to-source 127.0.0.1
-A DOCKER -i docker0 -j RETURN
-A DOCKER ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80
-A DOCKER -d 10.0.0.10/32 -p udp -m udp --dport 53 -j DNAT --to-destination 127.0.0.1:15053
COMMIT
`,
	ruleset.IPv6: `*filter
-A INPUT -s ::/1 -j ACCEPT
-A INPUT -d fd00::/64 -p ipv6-icmp -j ACCEPT
-A INPUT ! -d ::1.2.3.0/127 -j ACCEPT
COMMIT
`,
}

// others are rules of other programs: no rule of the mesh is like them, and no two of them are alike. Not all of them are decoded.
const others = `*filter
-A INPUT -m limit --limit 5/min -j ACCEPT
-A INPUT -p icmp -m icmp --icmp-type 8 -j ACCEPT
-A INPUT -f -j ACCEPT
-A INPUT -d 10.0.0.0/255.0.255.0 -j ACCEPT
-A INPUT -m recent --set --name x --mask 255.255.255.255 --rsource
-A OUTPUT -m owner --socket-exists -j ACCEPT
-A OUTPUT -m owner --uid-owner 1-5 -j ACCEPT
-A OUTPUT -m owner --uid-owner 1 --gid-owner 2 -j ACCEPT
-A OUTPUT -p tcp -m tcp --tcp-option 7 -j ACCEPT
-A INPUT -p tcp -m tcp -j ACCEPT
-A INPUT -p tcp -m tcp --sport 1 --dport 2 -j ACCEPT
-A INPUT -p tcp -m tcp --dport 0:2 -j ACCEPT
-A INPUT -p tcp -m tcp --tcp-flags SYN,ACK SYN -j ACCEPT
-A OUTPUT -p tcp -m owner --uid-owner 5 -m tcp --dport 80 -j ACCEPT
-A INPUT -p tcp -m multiport --sports 1,2 -j ACCEPT
-A INPUT -p tcp -m multiport --dports 1,2,3 -j ACCEPT
-A INPUT -p sctp -m multiport --dports 1,2 -j ACCEPT
-A INPUT -m state --state NEW -j ACCEPT
-A INPUT -m conntrack --ctstate NEW --ctproto 6 -j ACCEPT
-A INPUT -m conntrack ! --ctstate NEW -j ACCEPT
-A INPUT -m conntrack --ctstate UNTRACKED -j ACCEPT
-A INPUT -m mark --mark 0x1/0xff -j ACCEPT
-A INPUT -m connmark --mark 0x1/0xff -j ACCEPT
-A INPUT -m socket --transparent --nowildcard -j ACCEPT
-A INPUT -m comment --comment "it\'s \"quoted\" \\ twice" -j ACCEPT
-A INPUT -m addrtype --dst-type LOCAL -j ACCEPT
-A INPUT -j NFLOG --nflog-group 3
-A INPUT -j LOG --log-prefix "a \"b\" c"
-A INPUT -j REJECT --reject-with icmp-admin-prohibited
COMMIT
*mangle
-A FORWARD -p tcp -j MARK --set-xmark 0x0/0x1
-A FORWARD -j CONNMARK --set-xmark 0x1/0xff
-A FORWARD -j CONNMARK --save-mark --nfmask 0xff --ctmask 0xff00
COMMIT
*nat
-A OUTPUT -p tcp -j REDIRECT --to-ports 5 --random
-A OUTPUT -p tcp -j REDIRECT --to-ports 5-6
-A OUTPUT -p tcp -j DNAT --to-destination 172.17.0.2
-A POSTROUTING -j MASQUERADE --random
-A POSTROUTING -p tcp -j MASQUERADE --to-ports 5-6
COMMIT
*raw
-A OUTPUT -j CT --notrack
-A OUTPUT -p udp -j CT --zone-orig 5
COMMIT
`

func TestRead_ForeignRulesAsIptablesPrints(t *testing.T) {
	for _, f := range families {
		p := newPod(t)
		p.restore(t, f, foreign[f])
		want := p.save(t, f)
		equal(t, f.String(), want.String(), p.read(t, f).String())
		// iptables prints the rules as they were written, so the comparison is not vacuous.
		if diff := cmp.Diff(appends(foreign[f]), appends(want.String())); diff != "" {
			t.Errorf("%s: iptables prints other rules than it was given:\n%s", f, diff)
		}
	}
}

// appends are the rules of a text, in order.
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
	if want := strings.Count(others, "-A "); len(seen) != want {
		t.Errorf("%d rules were read, want %d", len(seen), want)
	}
	again := p.read(t, ruleset.IPv4)
	if !again.Equal(p.read(t, ruleset.IPv4)) {
		t.Error("the same rules read differently a second time")
	}
}

// ofNft are rules that nft puts into the chains of iptables, each with the text that is read.
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

// TestApply_ForeignRulesStay applies and removes rules among those of others, ahead of and behind ours, and in chains of
// theirs. The kernel must hold the same bytes as before.
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
		if d := ruleset.Compare(want, have, redirect.Sidecar().Owned(want, have)); !d.Empty() {
			t.Errorf("%s is not as wanted:\n%s", want.Family, d)
		}
	}
	// Foreign rules come between ours, and ahead of them.
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
		if diff := cmp.Diff(before[i], left); diff != "" {
			t.Errorf("%s: rules that were there (-before +after):\n%s", f, diff)
		}
		if strings.Contains(p.save(t, f).String()+p.read(t, f).String(), "ISTIO") {
			t.Errorf("%s: rules of ours are left", f)
		}
	}
}

// TestApply_ForeignJumpToOurChain has an others rule lead to a chain of ours: it must go first, or
// the kernel would keep the chain.
func TestApply_ForeignJumpToOurChain(t *testing.T) {
	p := newPod(t)
	p.apply(t, reconcile(redirect.Rules(redirect.Default(), ruleset.IPv4)))
	p.run(t, "", "nft", "add rule ip nat OUTPUT tcp dport { 1, 2 } jump ISTIO_OUTPUT")
	p.apply(t, reconcile(ruleset.Set{Family: ruleset.IPv4}))
	if got := p.read(t, ruleset.IPv4); !got.Empty() {
		t.Errorf("left:\n%s", got)
	}
}

func TestRead_ChainOfAnotherHook(t *testing.T) {
	p := newPod(t)
	p.run(t, "", "nft", "add table ip nat; add chain ip nat OUTPUT { type filter hook output priority 5; }; add rule ip nat OUTPUT accept")
	if rules := p.chain(t, "OUTPUT(filter,hook:output,priority:5)"); !slices.Equal(rules, []string{"-j ACCEPT"}) {
		t.Errorf("read %q", rules)
	}
	before := p.kernel(t, ruleset.IPv4)
	err := p.try(t, reconcile(redirect.Rules(redirect.Default(), ruleset.IPv4)))
	if err == nil || !strings.Contains(err.Error(), `chain "OUTPUT" is not the built-in one`) {
		t.Errorf("got error %v", err)
	}
	if diff := cmp.Diff(before, p.kernel(t, ruleset.IPv4)); diff != "" {
		t.Errorf("a refused change left something (-before +after):\n%s", diff)
	}
}

func TestRead_DormantTable(t *testing.T) {
	want := redirect.Rules(redirect.Default(), ruleset.IPv4)
	for name, before := range map[string]ruleset.Set{"new": {Family: ruleset.IPv4}, "with the wanted rules": want} {
		p := newPod(t)
		p.apply(t, reconcile(before))
		p.run(t, "", "nft", "add table ip nat { flags dormant; }")
		err := p.try(t, reconcile(want))
		if err == nil || !strings.Contains(err.Error(), "dormant") {
			t.Errorf("%s: got error %v", name, err)
		}
	}
}
