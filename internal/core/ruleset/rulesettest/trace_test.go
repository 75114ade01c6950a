package rulesettest_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/ruleset/rulesettest"
)

func parse(t *testing.T, f ruleset.Family, text string) ruleset.Set {
	t.Helper()
	set, err := ruleset.Parse(f, text)
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// out is a packet of uid and gid 1000 from 10.0.0.5:40000 to 10.0.0.7:80 by eth0, changed as the test needs it.
func out(change ...func(*rulesettest.Packet)) rulesettest.Packet {
	p := rulesettest.Packet{
		Hook: rulesettest.Outgoing, Out: "eth0", Proto: rulesettest.TCP, UID: 1000, GID: 1000,
		Src: netip.MustParseAddr("10.0.0.5"), Sport: 40000, Dst: netip.MustParseAddr("10.0.0.7"), Dport: 80,
	}
	for _, c := range change {
		c(&p)
	}
	return p
}

// in is the same packet arriving.
func in(change ...func(*rulesettest.Packet)) rulesettest.Packet {
	p := out()
	p.Hook, p.In, p.Out, p.UID, p.GID = rulesettest.Incoming, "eth0", "", 0, 0
	for _, c := range change {
		c(&p)
	}
	return p
}

type packet = rulesettest.Packet

// nat wraps rules and declarations of chains into that table.
func nat(lines ...string) string { return table("nat", lines...) }

// table does so for any table. Built-in chains need no declaration here.
func table(name string, lines ...string) string {
	declared := map[string]bool{}
	chains, rules := "", ""
	for _, l := range lines {
		first, _, _ := strings.Cut(strings.TrimPrefix(l, ":"), " ")
		switch {
		case strings.HasPrefix(l, ":"):
			chains += l + "\n"
			declared[first] = true
			continue
		case ruleset.Builtin(name, first) && !declared[first]:
			chains += ":" + first + " ACCEPT [0:0]\n"
			declared[first] = true
		}
		rules += "-A " + l + "\n"
	}
	return "*" + name + "\n" + chains + rules + "COMMIT\n"
}

func TestTrace(t *testing.T) {
	toPort := nat("OUTPUT -p tcp -j REDIRECT --to-ports 15001")
	for _, test := range []struct {
		name  string
		rules string
		p     packet
		want  string
	}{
		{"no rules accept", "", out(), "accepted"},
		{"a redirect in nat rewrites the port", toPort, out(), "redirected to 15001"},
		{"a redirect of TCP leaves UDP alone", toPort, out(func(p *packet) { p.Proto = rulesettest.UDP }), "accepted"},
		{"an empty state is a new connection", toPort, out(func(p *packet) { p.State = rulesettest.New }), "redirected to 15001"},
		{"nat is asked about a related connection", toPort, out(func(p *packet) { p.State = rulesettest.Related }), "redirected to 15001"},
		{"nat is not asked about a known connection", toPort, out(func(p *packet) { p.State = rulesettest.Established }), "accepted"},
		{"nat is not asked about an invalid packet", toPort, out(func(p *packet) { p.State = rulesettest.Invalid }), "accepted"},
		{
			"nat is not asked again about what comes in by lo",
			nat("PREROUTING -p tcp -j REDIRECT --to-ports 15006"), in(func(p *packet) { p.In = "lo" }), "accepted",
		},
		{"what comes in does not meet OUTPUT", toPort, in(), "accepted"},

		{"-o holds for its interface", nat("OUTPUT -o eth0 -j DROP"), out(), "dropped"},
		{"-o fails for another", nat("OUTPUT -o eth1 -j DROP"), out(), "accepted"},
		{"-i holds for its interface", nat("PREROUTING -i eth0 -j DROP"), in(), "dropped"},
		{"-i fails for another", nat("PREROUTING -i eth -j DROP"), in(), "accepted"},
		{"-s holds inside its network", nat("OUTPUT -s 10.0.0.4/30 -j DROP"), out(), "dropped"},
		{"-s fails outside its network", nat("OUTPUT -s 10.0.0.8/29 -j DROP"), out(), "accepted"},
		{"-d holds inside its network", nat("OUTPUT -d 10.0.0.0/29 -j DROP"), out(), "dropped"},
		{"-d fails outside its network", nat("OUTPUT -d 10.0.0.8/29 -j DROP"), out(), "accepted"},
		{"! -d fails inside its network", nat("OUTPUT ! -d 10.0.0.0/29 -j DROP"), out(), "accepted"},
		{"! -d holds outside its network", nat("OUTPUT ! -d 10.0.0.8/29 -j DROP"), out(), "dropped"},
		{"-p holds for its protocol", nat("OUTPUT -p tcp -j DROP"), out(), "dropped"},
		{"-p fails for another", nat("OUTPUT -p udp -j DROP"), out(), "accepted"},
		{"--dport holds for its port", nat("OUTPUT -p tcp -m tcp --dport 80 -j DROP"), out(), "dropped"},
		{"--tcp-flags holds for a reset", nat("OUTPUT -p tcp -m tcp --tcp-flags RST RST -j DROP"), out(func(p *rulesettest.Packet) { p.RST = true }), "dropped"},
		{"--tcp-flags fails for other packets", nat("OUTPUT -p tcp -m tcp --tcp-flags RST RST -j DROP"), out(), "accepted"},
		{"--dport fails for another", nat("OUTPUT -p tcp -m tcp --dport 8080 -j DROP"), out(), "accepted"},
		{"--dport of udp fails for tcp", nat("OUTPUT -p udp -m udp --dport 80 -j DROP"), out(), "accepted"},
		{"! --dport fails for its port", nat("OUTPUT -p tcp -m tcp ! --dport 80 -j DROP"), out(), "accepted"},
		{"! --dport holds for another", nat("OUTPUT -p tcp -m tcp ! --dport 81 -j DROP"), out(), "dropped"},
		{
			"--sport holds for its port", nat("OUTPUT -p udp -m udp --sport 40000 -j DROP"),
			out(func(p *packet) { p.Proto = rulesettest.UDP }), "dropped",
		},
		{
			"--sport fails for another", nat("OUTPUT -p udp -m udp --sport 80 -j DROP"),
			out(func(p *packet) { p.Proto = rulesettest.UDP }), "accepted",
		},
		{"--dports holds for each of its ports", nat("OUTPUT -p tcp -m multiport --dports 53,80 -j DROP"), out(), "dropped"},
		{"! --dports fails for each of its ports", nat("OUTPUT -p tcp -m multiport ! --dports 53,80 -j DROP"), out(), "accepted"},
		{"! --dports holds for others", nat("OUTPUT -p tcp -m multiport ! --dports 53,15008 -j DROP"), out(), "dropped"},
		{"--uid-owner holds for its user", nat("OUTPUT -m owner --uid-owner 1000 -j DROP"), out(), "dropped"},
		{"--uid-owner fails for another", nat("OUTPUT -m owner --uid-owner 1337 -j DROP"), out(), "accepted"},
		{"! --uid-owner fails for its user", nat("OUTPUT -m owner ! --uid-owner 1000 -j DROP"), out(), "accepted"},
		{
			"--gid-owner looks at the group", nat("OUTPUT -m owner --gid-owner 7 -j DROP"),
			out(func(p *packet) { p.GID = 7 }), "dropped",
		},
		{
			"several negated groups must all hold", nat("OUTPUT -m owner ! --gid-owner 7 -m owner ! --gid-owner 1000 -j DROP"),
			out(), "accepted",
		},
		{
			"a packet without a socket has no owner", nat("OUTPUT -m owner --uid-owner 0 -j DROP"),
			out(func(p *packet) { p.NoSocket, p.UID = true, 0 }), "accepted",
		},
		{
			"a packet without a socket is not of any owner", nat("OUTPUT -m owner ! --uid-owner 0 -j DROP"),
			out(func(p *packet) { p.NoSocket, p.UID = true, 0 }), "dropped",
		},
		{
			"--mark looks at the packet", table("mangle", "OUTPUT -m mark --mark 0x539 -j DROP"),
			out(func(p *packet) { p.Mark = 1337 }), "dropped, mark 1337",
		},
		{
			"! --mark holds for unmarked packets", table("mangle", "OUTPUT -m mark ! --mark 0x53a -j DROP"),
			out(), "dropped",
		},
		{
			"connmark looks at the connection", table("mangle", "OUTPUT -m connmark --mark 0x539 -j DROP"),
			out(func(p *packet) { p.Connmark = 1337 }), "dropped",
		},
		{
			"connmark does not look at the packet", table("mangle", "OUTPUT -m connmark --mark 0x539 -j DROP"),
			out(func(p *packet) { p.Mark = 1337 }), "accepted, mark 1337",
		},
		{
			"--ctstate holds for each of its states", table("mangle", "OUTPUT -m conntrack --ctstate RELATED,ESTABLISHED -j DROP"),
			out(func(p *packet) { p.State = rulesettest.Established }), "dropped",
		},
		{
			"--ctstate fails for others", table("mangle", "OUTPUT -m conntrack --ctstate RELATED,ESTABLISHED -j DROP"),
			out(), "accepted",
		},

		{"the first match decides", nat("OUTPUT -p tcp -j RETURN", "OUTPUT -j DROP"), out(), "accepted"},
		{
			"RETURN goes back to the calling chain", nat(":A - [0:0]", "OUTPUT -j A", "OUTPUT -j DROP", "A -j RETURN", "A -j ACCEPT"),
			out(), "dropped",
		},
		{
			"the end of a chain goes back as well", nat(":A - [0:0]", "OUTPUT -j A", "OUTPUT -j DROP", "A -p udp -j ACCEPT"),
			out(), "dropped",
		},
		{
			"ACCEPT ends the table from any depth",
			nat(":A - [0:0]", ":B - [0:0]", "OUTPUT -j A", "OUTPUT -j DROP", "A -j B", "A -j DROP", "B -j ACCEPT"), out(), "accepted",
		},
		{
			"ACCEPT ends its table only", table("mangle", "OUTPUT -j ACCEPT") + toPort, out(), "redirected to 15001",
		},
		{"a policy decides at the end", table("filter", ":OUTPUT DROP [0:0]"), out(), "dropped"},
		{"a policy decides after RETURN", table("filter", ":OUTPUT DROP [0:0]", "OUTPUT -j RETURN"), out(), "dropped"},
		{"ACCEPT overrules a policy", table("filter", ":OUTPUT DROP [0:0]", "OUTPUT -j ACCEPT"), out(), "accepted"},
		{
			"a redirected packet may still be dropped, by its new port",
			toPort + table("filter", "OUTPUT -p tcp -m tcp --dport 15001 -j DROP"), out(), "dropped",
		},
		{
			"what is dropped in raw never reaches nat", table("raw", "OUTPUT -j DROP") + toPort, out(), "dropped",
		},
		{
			"filter sees incoming packets in INPUT", table("filter", "INPUT -p tcp -j REJECT --reject-with tcp-reset"), in(),
			"rejected with tcp-reset",
		},
		{
			"UDP is rejected by ICMP", table("filter", "OUTPUT -p udp -j REJECT --reject-with icmp-port-unreachable"),
			out(func(p *packet) { p.Proto = rulesettest.UDP }), "rejected with icmp-port-unreachable",
		},

		{"MARK goes on", table("mangle", "OUTPUT -j MARK --set-xmark 0x53a/0xffffffff") + toPort, out(), "redirected to 15001, mark 1338"},
		{
			"a saved mark can be restored", table("mangle",
				"OUTPUT -j MARK --set-xmark 0x539/0xffffffff",
				"OUTPUT -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff",
				"OUTPUT -j MARK --set-xmark 0x1/0xffffffff",
				"OUTPUT -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff"), out(), "accepted, mark 1337",
		},
		{
			"TPROXY hands over and marks", table("mangle",
				"PREROUTING -p tcp -j TPROXY --on-port 15006 --on-ip 0.0.0.0 --tproxy-mark 0x539/0xffffffff", "PREROUTING -j DROP"),
			in(), "handed to 15006, mark 1337",
		},
		{
			"the first zone stays", table("raw", "OUTPUT -j CT --zone 2", "OUTPUT -j CT --zone 1"), out(), "accepted, zone 2",
		},
		{
			"what comes in by lo keeps its zone", table("raw", "PREROUTING -j CT --zone 2"),
			in(func(p *packet) { p.In = "lo" }), "accepted",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			v, err := rulesettest.Trace(parse(t, ruleset.IPv4, test.rules), test.p)
			if err != nil {
				t.Fatal(err)
			}
			if got := v.String(); got != test.want {
				t.Errorf("the packet was %s, want %s, by\n%s", got, test.want, v.Explain())
			}
		})
	}
}

func TestTraceShowsTheRulesThatMatched(t *testing.T) {
	set := parse(t, ruleset.IPv4, nat(":A - [0:0]", "OUTPUT -p udp -j DROP", "OUTPUT -j A", "A -p tcp -j REDIRECT --to-ports 15001"))
	nats := set.Tables[0].Chains
	nats[len(nats)-1].Rules[0].Why = "to the proxy"
	v, err := rulesettest.Trace(set, out())
	if err != nil {
		t.Fatal(err)
	}
	want := "  nat/OUTPUT: -j A\n  nat/A: -p tcp -j REDIRECT --to-ports 15001    # to the proxy\n"
	if diff := cmp.Diff(want, v.Explain()); diff != "" {
		t.Errorf("path (-want +got):\n%s", diff)
	}
	if v.Action != rulesettest.Redirect || v.Port != 15001 || len(v.Path) != 2 {
		t.Errorf("verdict is %+v", v)
	}
}

func TestARedirectOfWhatThePodSendsGoesToLoopback(t *testing.T) {
	set := parse(t, ruleset.IPv4, nat("OUTPUT -p tcp -j REDIRECT --to-ports 15006"))
	v, err := rulesettest.Trace(set, out(func(p *packet) { p.Mark, p.Connmark = 3, 4 }))
	if err != nil {
		t.Fatal(err)
	}
	want := packet{
		Hook: rulesettest.Incoming, In: "lo", Proto: rulesettest.TCP, Mark: 3, Connmark: 4,
		Src: netip.MustParseAddr("10.0.0.5"), Sport: 40000, Dst: netip.MustParseAddr("127.0.0.1"), Dport: 15006,
	}
	if got := v.Packet.Loop(); got != want {
		t.Errorf("it arrives as\n%+v, want\n%+v", got, want)
	}
	v6 := parse(t, ruleset.IPv6, nat("OUTPUT -p tcp -j REDIRECT --to-ports 15006"))
	v, err = rulesettest.Trace(v6, out(func(p *packet) { p.Src, p.Dst = netip.MustParseAddr("fd00::5"), netip.MustParseAddr("fd00::7") }))
	if err != nil {
		t.Fatal(err)
	}
	if v.Packet.Dst != netip.IPv6Loopback() {
		t.Errorf("IPv6 is redirected to %s", v.Packet.Dst)
	}
}

// TestTraceRefusesWhatItDoesNotKnow is what makes the answers worth anything.
func TestTraceRefusesWhatItDoesNotKnow(t *testing.T) {
	for _, test := range []struct {
		name   string
		family ruleset.Family
		rules  string
		want   string
	}{
		{"an unknown module", 4, nat("OUTPUT -m addrtype --dst-type LOCAL -j DROP"), `module "addrtype" is not known here`},
		{"an unknown option", 4, nat("OUTPUT -p tcp -m tcp --tcp-flags SYN SYN -j DROP"), `flags "SYN" "SYN" are not known here`},
		{"an unknown match", 4, nat("OUTPUT -f -j DROP"), `match "-f" is not known here`},
		{"an option of another module", 4, nat("OUTPUT -p tcp -m mark --dport 80 -j DROP"), `match "--dport" of module "mark" is not known here`},
		{"an option without its module", 4, nat("OUTPUT -p tcp --dport 80 -j DROP"), `match "--dport" is not known here`},
		{"a negation we never write", 4, nat("OUTPUT ! -o lo -j DROP"), `negated match "-o" is not known here`},
		{"a comment", 4, nat(`OUTPUT -m comment --comment "a b" -j DROP`), `module "comment" is not known here`},
		{"an unknown protocol", 4, nat("OUTPUT -p icmp -j DROP"), `protocol "icmp" is not known here`},
		{"a range of ports", 4, nat("OUTPUT -p tcp -m tcp --dport 1:2 -j DROP"), `"1:2" is not a port as iptables-save prints it`},
		{"a port in another spelling", 4, nat("OUTPUT -p tcp -m tcp --dport 080 -j DROP"), `"080" is not a port as iptables-save prints it`},
		{"a port that is none", 4, nat("OUTPUT -p tcp -m multiport --dports 80,65536 -j DROP"), `"65536" is not a port`},
		{"too many ports", 4, nat("OUTPUT -p tcp -m multiport --dports 1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16 -j DROP"), `lists 16 ports, iptables takes 15`},
		{"a module before its protocol", 4, nat("OUTPUT -m tcp --dport 80 -p tcp -j DROP"), `module "tcp" needs -p tcp before it`},
		{"multiport without protocol", 4, nat("OUTPUT -m multiport --dports 80 -j DROP"), `module "multiport" needs -p before it`},
		{"a name of a user", 4, nat("OUTPUT -m owner --uid-owner root -j DROP"), `"root" is not an id`},
		{"the owner of what comes in", 4, nat("PREROUTING -m owner --uid-owner 0 -j DROP"), `iptables refuses it in chain PREROUTING`},
		{"-o of what comes in", 4, nat("PREROUTING -o lo -j DROP"), `iptables refuses it in chain PREROUTING`},
		{"-i of what goes out", 4, nat("OUTPUT -i lo -j DROP"), `iptables refuses it in chain OUTPUT`},
		{"a pattern of interfaces", 4, nat("OUTPUT -o eth+ -j DROP"), `"eth+" is not the name of one interface`},
		{"a network of the other family", 4, nat("OUTPUT -d fd00::/8 -j DROP"), `fd00::/8 is not IPv4`},
		{"an IPv4 network in IPv6", 6, nat("OUTPUT -d 10.0.0.0/8 -j DROP"), `10.0.0.0/8 is not IPv6`},
		{"a network with host bits", 4, nat("OUTPUT -d 10.0.0.1/8 -j DROP"), `10.0.0.1/8 has host bits`},
		{"a network that is everything", 4, nat("OUTPUT -d 0.0.0.0/0 -j DROP"), `0.0.0.0/0 is everything`},
		{"an address without prefix length", 4, nat("OUTPUT -d 10.0.0.1 -j DROP"), `no '/'`},
		{"a mark with a mask", 4, table("mangle", "OUTPUT -m mark --mark 0x1/0xff -j DROP"), `"0x1/0xff" is not a mark as iptables-save prints it`},
		{"a decimal mark", 4, table("mangle", "OUTPUT -m mark --mark 1337 -j DROP"), `"1337" is not a mark as iptables-save prints it`},
		{"an unknown state", 4, table("mangle", "OUTPUT -m conntrack --ctstate SNAT -j DROP"), `state "SNAT" is not known here`},
		{"conntrack before conntrack", 4, table("raw", "OUTPUT -m conntrack --ctstate NEW -j DROP"), `module "conntrack" sees nothing in table raw`},

		{"no target", 4, nat("OUTPUT -p tcp"), `has no target`},
		{"an empty rule", 4, nat("OUTPUT"), `has no target`},
		{"nothing behind -j", 4, nat("OUTPUT -p tcp -j"), `has no target behind -j`},
		{"a goto", 4, nat(":A - [0:0]", "OUTPUT -g A"), `match "-g" is not known here`},
		{"an unknown target", 4, nat("OUTPUT -j DNAT --to-destination 1.2.3.4"), `target "DNAT" is not known here`},
		{"a chain that is not there", 4, nat("OUTPUT -j NOWHERE"), `target "NOWHERE" is no chain of the table`},
		{"a chain of another table", 4, nat(":A - [0:0]") + table("raw", "OUTPUT -j A"), `target "A" is no chain of the table`},
		{"a jump to a built-in chain", 4, nat("OUTPUT -j PREROUTING"), `target "PREROUTING" is no chain of the table`},
		{"an option too many", 4, nat("OUTPUT -p tcp -j REDIRECT --to-ports 1 --random"), `option "--random" is not known here`},
		{"a redirect outside nat", 4, table("mangle", "OUTPUT -p tcp -j REDIRECT --to-ports 1"), `iptables takes it in table nat only`},
		{"a redirect without protocol", 4, nat("OUTPUT -j REDIRECT --to-ports 1"), `iptables takes it with protocol ["tcp" "udp"] only`},
		{"the option's other spelling", 4, nat("OUTPUT -p tcp -j REDIRECT --to-port 1"), `option "--to-port" stands where "--to-ports" is wanted`},
		{"an option without argument", 4, nat("OUTPUT -p tcp -j REDIRECT --to-ports"), `option "--to-ports" has no argument`},
		{"TPROXY outside mangle", 4, nat("PREROUTING -p tcp -j TPROXY --on-port 1 --on-ip 0.0.0.0 --tproxy-mark 0x1/0xffffffff"), `iptables takes it in table mangle only`},
		{"TPROXY to one address", 4, table("mangle", "PREROUTING -p tcp -j TPROXY --on-port 1 --on-ip 10.0.0.1 --tproxy-mark 0x1/0xffffffff"), `address "10.0.0.1" is not known here`},
		{"a partial mask", 4, table("mangle", "OUTPUT -j MARK --set-xmark 0x1/0xff"), `mask of "0x1/0xff" is not known here`},
		{"partial masks of the connection", 4, table("mangle", "OUTPUT -j CONNMARK --save-mark --nfmask 0xff --ctmask 0xff"), `are not known here`},
		{"setting the connection's mark", 4, table("mangle", "OUTPUT -j CONNMARK --set-xmark 0x1/0xffffffff"), `option "0x1/0xffffffff" stands where`},
		{"a zone outside raw", 4, nat("OUTPUT -j CT --zone 1"), `iptables takes it in table raw only`},
		{"no tracking", 4, table("raw", "OUTPUT -j CT --notrack"), `option "--notrack" stands where "--zone" is wanted`},
		{"a rejection outside filter", 4, nat("OUTPUT -p tcp -j REJECT --reject-with tcp-reset"), `iptables takes it in table filter only`},
		{"a reset of UDP", 4, table("filter", "OUTPUT -p udp -j REJECT --reject-with tcp-reset"), `iptables takes it with protocol ["tcp"] only`},
		{"an answer of the other family", 4, table("filter", "OUTPUT -j REJECT --reject-with icmp6-port-unreachable"), `answer "icmp6-port-unreachable" is not known here`},
		{"a chain that is not walked", 4, nat("POSTROUTING -j ACCEPT"), `reading chain nat/POSTROUTING: rules here are not known to Trace`},
		{"a policy where nothing is walked", 4, table("filter", ":FORWARD DROP [0:0]"), `reading chain filter/FORWARD`},
		{"a chain nobody jumps to", 4, nat(":A - [0:0]", "A -m physdev -j DROP"), `module "physdev" is not known here`},
	} {
		t.Run(test.name, func(t *testing.T) {
			set := parse(t, test.family, test.rules)
			_, err := rulesettest.Compile(set)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %v, want %q in it", err, test.want)
			}
			p := out()
			if test.family == ruleset.IPv6 {
				p.Src, p.Dst = netip.MustParseAddr("fd00::5"), netip.MustParseAddr("fd00::7")
			}
			if v, err := rulesettest.Trace(set, p); err == nil {
				t.Errorf("Trace answers %s", v)
			}
		})
	}
}

func TestTraceRefusesWaysItDoesNotKnow(t *testing.T) {
	for _, test := range []struct {
		name  string
		rules string
		p     packet
		want  string
	}{
		{
			"an owner asked of an incoming packet in an own chain",
			nat(":A - [0:0]", "PREROUTING -j A", "A -m owner --uid-owner 0 -j RETURN"), in(), "asks an incoming packet for its sender",
		},
		{
			"TPROXY of an outgoing packet in an own chain",
			table("mangle", ":A - [0:0]", "OUTPUT -j A", "A -p tcp -j TPROXY --on-port 1 --on-ip 0.0.0.0 --tproxy-mark 0x1/0xffffffff"),
			out(), "was reached by an outgoing packet",
		},
		{
			"TPROXY and REDIRECT of one packet",
			table("mangle", "PREROUTING -p tcp -j TPROXY --on-port 1 --on-ip 0.0.0.0 --tproxy-mark 0x1/0xffffffff") +
				nat("PREROUTING -p tcp -j REDIRECT --to-ports 15001"), in(), "handed over by TPROXY and is redirected as well",
		},
		{"chains in a circle", nat(":A - [0:0]", ":B - [0:0]", "OUTPUT -j A", "A -j B", "B -j A"), out(), "chains lead in a circle"},
		{"a packet of the other family", "", out(func(p *packet) { p.Dst = netip.MustParseAddr("fd00::1") }), "is not IPv4"},
		{"a packet without addresses", "", out(func(p *packet) { p.Dst = netip.Addr{} }), "no destination"},
		{"a packet out without interface", "", out(func(p *packet) { p.Out = "" }), "want exactly the one of its hook"},
		{"a packet out with two interfaces", "", out(func(p *packet) { p.In = "eth0" }), "want exactly the one of its hook"},
		{"a packet in without interface", "", in(func(p *packet) { p.In = "" }), "want exactly the one of its hook"},
		{"a packet without protocol", "", out(func(p *packet) { p.Proto = "" }), `packet has protocol ""`},
		{"ICMP with ports", "", out(func(p *packet) { p.Proto = rulesettest.ICMP }), "packet of protocol icmp has ports"},
	} {
		t.Run(test.name, func(t *testing.T) {
			v, err := rulesettest.Trace(parse(t, ruleset.IPv4, test.rules), test.p)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %v (verdict %s), want %q in it", err, v, test.want)
			}
		})
	}
}
