package redirect

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// dnsView is DNS capture seen from one family.
type dnsView struct {
	effective bool
	// jump says that this family has queries to capture.
	jump bool
	// targets are the matches that select them: one without an address for all, else one per server.
	targets []netip.Prefix
	all     bool
}

// on reports whether DNS is captured in any family: the rules for the proxy's own traffic change with that.
func (d dnsView) on() bool { return d.effective }

func (s Spec) dnsFor(f ruleset.Family) dnsView {
	d := dnsView{effective: s.DNS == DNSAll || s.DNS == DNSServers && len(s.DNSServers) > 0, all: s.DNS == DNSAll}
	if s.DNS == DNSServers {
		for _, a := range s.DNSServers {
			if a.Is4() == (f == ruleset.IPv4) {
				d.targets = append(d.targets, netip.PrefixFrom(a, a.BitLen()))
			}
		}
	}
	d.jump = d.all || len(d.targets) > 0
	return d
}

// each calls back once per match: with "" for all servers, else with "-d SERVER " (or -s).
func (d dnsView) each(option string, do func(server string)) {
	if d.all {
		do("")
	}
	for _, t := range d.targets {
		do(match(option, t))
	}
}

// natOutputDNS sends queries to the agent: TCP first, then UDP.
func (b builder) natOutputDNS() []ruleset.Rule {
	var rules []ruleset.Rule
	for _, proto := range []string{"tcp", "udp"} {
		b.dns.each("-d", func(server string) {
			rules = append(rules, rule("DNS over "+strings.ToUpper(proto)+" goes to the sidecar agent",
				"%s-p %s -m %s --dport 53 -j REDIRECT --to-ports %d", server, proto, proto, DNSPort))
		})
	}
	return rules
}

func (b builder) rawOutput() []ruleset.Rule {
	if !b.dns.on() {
		return nil
	}
	return []ruleset.Rule{rule("DNS gets conntrack zones", "-j %s", outputDNS)}
}

func (b builder) rawPrerouting() []ruleset.Rule {
	if !b.dns.jump {
		return nil
	}
	return []ruleset.Rule{rule("answers of the real resolver get their zone", "-j %s", inbound)}
}

// rawOutputDNS puts the agent's own queries and its answers to the app into zones, then the app's queries.
func (b builder) rawOutputDNS() []ruleset.Rule {
	if !b.dns.on() {
		return nil
	}
	var rules []ruleset.Rule
	owner := func(kind string, id uint32) {
		who := fmt.Sprintf("-m owner --%s-owner %d", kind, id)
		rules = append(rules,
			rule("the agent asks the real resolver", "-p udp -m udp --dport 53 %s -j CT --zone %d", who, zoneAgent),
			rule("the agent answers the app", "-p udp -m udp --sport %d %s -j CT --zone %d", DNSPort, who, zoneApp))
	}
	for _, u := range b.UIDs {
		owner("uid", u)
	}
	for _, g := range b.GIDs {
		owner("gid", g)
	}
	b.dns.each("-d", func(server string) {
		rules = append(rules, rule("the app asks", "%s-p udp -m udp --dport 53 -j CT --zone %d", server, zoneApp))
	})
	return rules
}

func (b builder) rawInbound() []ruleset.Rule {
	var rules []ruleset.Rule
	b.dns.each("-s", func(server string) {
		rules = append(rules, rule("the real resolver answers the agent",
			"%s-p udp -m udp --sport 53 -j CT --zone %d", server, zoneAgent))
	})
	return rules
}
