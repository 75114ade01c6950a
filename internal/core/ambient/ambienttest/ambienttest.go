// Package ambienttest writes the rules of an ambient pod as the reference implementation does, as text for iptables-restore or
// for nft.
//
// It promises to share nothing with the code under test: the texts are those of the reference's protocol, with the few words that
// differ by setting. It is for tests only. Start at Restore and Script.
package ambienttest

import (
	"fmt"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Specs returns a Spec for each combination of settings that changes rules, by its name.
func Specs() map[string]ambient.Spec {
	all := map[string]ambient.Spec{}
	for i := range 16 {
		s := ambient.Spec{Config: ambient.DefaultConfig(), Ingress: i&1 != 0}
		name := map[bool]string{false: "default", true: "ingress"}[s.Ingress]
		if i&2 != 0 {
			s.Interfaces, name = []string{"v1", "tap.2-b"}, name+", virtual interfaces"
		}
		if s.DNSCapture = i&4 != 0; s.DNSCapture {
			name += ", DNS"
		}
		if s.IPv6 = i&8 != 0; s.IPv6 {
			name += ", IPv6"
		}
		all[name] = s
	}
	return all
}

// Families returns the families of a pod with addresses of the captured ones.
func Families(s ambient.Spec) redirect.Families {
	f := redirect.Families{HasIPv4: true, HasIPv6: s.IPv6}
	if s.IPv6 {
		f.IPv6 = redirect.Captured
	}
	return f
}

// Lines begin with the table and the conditions of a rule: D for DNS capture, I for not in ingress mode, V for each virtual interface,
// with two rules, 4 and 6 for a family that is captured.
const iptables = `mangle - -A PREROUTING -j ISTIO_PRERT
mangle - -A OUTPUT -j ISTIO_OUTPUT
mangle - -A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff
mangle - -A ISTIO_OUTPUT -m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff
nat - -A OUTPUT -j ISTIO_OUTPUT
nat - -A PREROUTING -j ISTIO_PRERT
nat V -A ISTIO_PRERT -i IFACE -p tcp -j REDIRECT --to-ports 15001 / -A ISTIO_PRERT -i IFACE -p tcp -j RETURN
nat I -A ISTIO_PRERT -s PROBE -p tcp -m tcp -j ACCEPT
nat I -A ISTIO_PRERT ! -d LO -p tcp -m tcp ! --dport 15008 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006
nat - -A ISTIO_OUTPUT -d PROBE -p tcp -m tcp -j ACCEPT
nat D -A ISTIO_OUTPUT ! -o lo -p udp -m mark ! --mark 0x539/0xfff -m udp --dport 53 -j REDIRECT --to-ports 15053
nat D -A ISTIO_OUTPUT ! -d LO -p tcp -m tcp --dport 53 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15053
nat - -A ISTIO_OUTPUT -p tcp -m mark --mark 0x111/0xfff -j ACCEPT
nat - -A ISTIO_OUTPUT ! -d LO -o lo -j ACCEPT
nat - -A ISTIO_OUTPUT ! -d LO -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001
raw D -A PREROUTING -j ISTIO_PRERT
raw D -A OUTPUT -j ISTIO_OUTPUT
raw D -A ISTIO_OUTPUT -p udp -m mark --mark 0x539/0xfff -m udp --dport 53 -j CT --zone 1
raw D -A ISTIO_PRERT -p udp -m mark ! --mark 0x539/0xfff -m udp --sport 53 -j CT --zone 1`

const nft = `nat - output jump istio-output
nat - prerouting jump istio-prerouting
nat V istio-prerouting iifname IFACE meta l4proto tcp counter redirect to :15001 / istio-prerouting iifname IFACE meta l4proto tcp counter return
nat I4 istio-prerouting meta l4proto tcp ip saddr 169.254.7.127 counter accept
nat I6 istio-prerouting meta l4proto tcp ip6 saddr fd16:9254:7127:1337:ffff:ffff:ffff:ffff counter accept
nat I4 istio-prerouting ip daddr != 127.0.0.1/32 tcp dport != 15008 mark and 0xfff != 0x539 counter redirect to :15006
nat I6 istio-prerouting ip6 daddr != ::1/128 tcp dport != 15008 mark and 0xfff != 0x539 counter redirect to :15006
nat 4 istio-output meta l4proto tcp ip daddr 169.254.7.127 counter accept
nat 6 istio-output meta l4proto tcp ip6 daddr fd16:9254:7127:1337:ffff:ffff:ffff:ffff counter accept
nat D istio-output oifname != lo mark and 0xfff != 0x539 udp dport 53 counter redirect to :15053
nat D4 istio-output ip daddr != 127.0.0.1/32 tcp dport 53 mark and 0xfff != 0x539 counter redirect to :15053
nat D6 istio-output ip6 daddr != ::1/128 tcp dport 53 mark and 0xfff != 0x539 counter redirect to :15053
nat - istio-output meta l4proto tcp mark and 0xfff == 0x111 counter accept
nat 4 istio-output oifname lo ip daddr != 127.0.0.1/32 counter accept
nat 6 istio-output oifname lo ip6 daddr != ::1/128 counter accept
nat 4 istio-output meta l4proto tcp ip daddr != 127.0.0.1/32 mark and 0xfff != 0x539 counter redirect to :15001
nat 6 istio-output meta l4proto tcp ip6 daddr != ::1/128 mark and 0xfff != 0x539 counter redirect to :15001
mangle - prerouting jump istio-prerouting
mangle - output jump istio-output
mangle - istio-prerouting meta mark & 0xfff == 0x539 counter ct mark set ct mark & 0xfffff000 | 0x111
mangle - istio-output ct mark and 0xfff == 0x111 counter meta mark set ct mark
raw D prerouting jump istio-prerouting
raw D output jump istio-output
raw D istio-output udp dport 53 meta mark and 0xfff == 0x539 counter ct zone set 1
raw D istio-prerouting udp sport 53 meta mark and 0xfff != 0x539 counter ct zone set 1`

// lines returns the lines of a table whose conditions hold.
func lines(s ambient.Spec, text, table string) (all []string) {
	for line := range strings.Lines(text) {
		words := strings.SplitN(strings.TrimSpace(line), " ", 3)
		switch on := words[1]; {
		case words[0] != table || strings.Contains(on, "D") && !s.DNSCapture || strings.Contains(on, "I") && s.Ingress || strings.Contains(on, "6") && !s.IPv6:
		case on == "V":
			for _, name := range s.Interfaces {
				all = append(all, strings.Split(strings.ReplaceAll(words[2], "IFACE", name), " / ")...)
			}
		default:
			all = append(all, words[2])
		}
	}
	return all
}

// Restore returns the input for "iptables-restore --noflush" for a captured family. Its rules are spelled as iptables-save prints them.
func Restore(s ambient.Spec, f ruleset.Family) string {
	values := strings.NewReplacer("PROBE", "169.254.7.127/32", "LO", "127.0.0.1/32")
	if f == ruleset.IPv6 {
		values = strings.NewReplacer("PROBE", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128", "LO", "::1/128")
	}
	var b strings.Builder
	for _, table := range []string{"mangle", "nat", "raw"} {
		if all := lines(s, iptables, table); len(all) > 0 {
			fmt.Fprintf(&b, "*%s\n:ISTIO_PRERT - [0:0]\n:ISTIO_OUTPUT - [0:0]\n%s\nCOMMIT\n", table, values.Replace(strings.Join(all, "\n")))
		}
	}
	return b.String()
}

// Script returns the input for "nft -f".
func Script(s ambient.Spec) string {
	bases := map[string]string{
		"nat": "nat %s -100 nat %s -100", "mangle": "filter %s -150 route %s -150", "raw": "filter %s -300 filter %s -300",
	}
	var b strings.Builder
	for _, table := range []string{"nat", "mangle", "raw"} {
		all := lines(s, nft, table)
		if len(all) == 0 {
			continue
		}
		base := strings.Fields(bases[table])
		name := "inet istio-ambient-" + table
		fmt.Fprintf(&b, "add table %s\nflush table %s\n", name, name)
		for i, hook := range []string{"prerouting", "output"} {
			fmt.Fprintf(&b, "add chain %s %s { type %s hook %s priority %s; }\n", name, hook, base[3*i], hook, base[3*i+2])
		}
		fmt.Fprintf(&b, "add chain %s istio-prerouting\nadd chain %s istio-output\n", name, name)
		for _, line := range all {
			fmt.Fprintf(&b, "add rule %s %s\n", name, line)
		}
	}
	return b.String()
}
