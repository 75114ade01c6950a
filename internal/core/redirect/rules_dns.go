package redirect

import (
	"net/netip"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// DNS capture: redirection in the nat table, and conntrack zones in the raw table. Zones are for UDP: one for the agent's
// own queries to the real resolver, one for the app's queries to the agent. Without zones both flows could share a
// conntrack entry and race.
const (
	zoneAgent ruleset.Zone = 1
	zoneApp   ruleset.Zone = 2

	dnsPort = 53
)

// capturesDNS reports whether DNS is captured in any family. The rules for the proxy's own traffic depend on it.
func (b builder) capturesDNS() bool {
	return b.DNS == DNSAll || b.DNS == DNSServers && len(b.DNSServers) > 0
}

// dnsServers returns the matches that select captured queries, one element per rule: for all servers an element without
// a match, otherwise a match on each server of the families.
func (b builder) dnsServers(side func(netip.Prefix) ruleset.Network) [][]ruleset.Match {
	switch b.DNS {
	case DNSAll:
		return [][]ruleset.Match{nil}
	case DNSOff:
		return nil
	case DNSServers:
	}
	var hosts []netip.Prefix
	for _, a := range b.DNSServers {
		hosts = append(hosts, single(a))
	}
	var servers [][]ruleset.Match
	for _, p := range b.networks(hosts...) {
		servers = append(servers, []ruleset.Match{side(p)})
	}
	return servers
}

// natOutputDNS sends queries to the agent: TCP first, then UDP.
func (b builder) natOutputDNS() []ruleset.Rule {
	var rules []ruleset.Rule
	for _, p := range []struct {
		number uint8
		name   string
	}{{ruleset.TCP, "TCP"}, {ruleset.UDP, "UDP"}} {
		for _, server := range b.dnsServers(to) {
			rules = append(rules, b.rule("DNS over "+p.name+" goes to the sidecar agent",
				ruleset.RedirectTo(DNSPort), append(server, dport(p.number, ruleset.OnePort(dnsPort)))...))
		}
	}
	return rules
}

func (b builder) rawOutput() []ruleset.Rule {
	return when(b.capturesDNS(), b.rule("DNS gets conntrack zones", b.jump(outputDNS)))
}

func (b builder) rawPrerouting() []ruleset.Rule {
	return when(len(b.dnsServers(from)) > 0, b.rule("answers of the real resolver get their zone", b.jump(inbound)))
}

// rawOutputDNS puts the agent's own queries and its answers to the app into zones, then the app's queries.
func (b builder) rawOutputDNS() []ruleset.Rule {
	if !b.capturesDNS() {
		return nil
	}
	query := dport(ruleset.UDP, ruleset.OnePort(dnsPort))
	var rules []ruleset.Rule
	for _, o := range b.Identities() {
		rules = append(rules,
			b.rule("the agent queries the real resolver", zoneAgent, query, o),
			b.rule("the agent answers the app", zoneApp, ruleset.Port{Protocol: ruleset.UDP, Range: ruleset.OnePort(DNSPort), Source: true}, o))
	}
	return append(rules, each(b.dnsServers(to), func(server []ruleset.Match) ruleset.Rule {
		return b.rule("the app queries a resolver", zoneApp, append([]ruleset.Match{query}, server...)...)
	})...)
}

func (b builder) rawInbound() []ruleset.Rule {
	answer := ruleset.Port{Protocol: ruleset.UDP, Range: ruleset.OnePort(dnsPort), Source: true}
	return each(b.dnsServers(from), func(server []ruleset.Match) ruleset.Rule {
		return b.rule("the real resolver answers the agent", zoneAgent, append([]ruleset.Match{answer}, server...)...)
	})
}
