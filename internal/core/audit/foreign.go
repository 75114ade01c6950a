package audit

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// onlyLooks are the expressions of nf_tables that do nothing but match, count or log.
var onlyLooks = []string{ //nolint:gochecknoglobals // a constant table
	"meta", "payload", "cmp", "bitwise", "range", "log", "limit", "quota", "ct", "fib", "match", "last", "counter",
}

// takes reports whether a foreign rule may take a packet that the mesh redirects: end its walk, change it, or send it to a chain that
// may. The rules of a chain that has no rule of the mesh (alone) may accept a packet or return: the mesh's chains are separate.
func takes(rule string, spec redirect.Spec, alone bool, chain func(string) bool) bool {
	if _, opaque, is := strings.Cut(rule, ": "); is && (strings.HasPrefix(rule, "[not understood: ") || strings.HasPrefix(rule, "[nf_tables: ")) {
		names := strings.Fields(opaque)
		names = names[:max(0, len(names)-1)] // the last one is a digest
		return slices.ContainsFunc(names, func(n string) bool {
			target, is := strings.CutPrefix(n, "target:")
			return !slices.Contains(onlyLooks, n) && (!is || !ruleset.Neutral(target))
		})
	}
	if !strings.HasPrefix(rule, "-") && !strings.HasPrefix(rule, "! -") {
		return rule != "" && rule != "counter"
	}
	words := strings.Fields(unquoted(rule))
	if otherProtocol(words, spec) {
		return false
	}
	target := "" // the last one: a comment of one word has no quotes
	for i, w := range words[1:] {
		if words[i] == "-j" || words[i] == "-g" {
			target = w
		}
	}
	switch target {
	case "ACCEPT", "RETURN":
		return !alone
	case "MARK", "CONNMARK":
		return spec.Mode == redirect.TPROXY
	default:
		return !ruleset.Neutral(target) && chain(target)
	}
}

// unquoted replaces each text in quotes, such as a comment, by an empty one: it may look like options.
func unquoted(rule string) string {
	var b strings.Builder
	inside, escape := false, false
	for _, r := range rule {
		switch {
		case escape:
			escape = false
		case inside && r == '\\':
			escape = true
		case r == '"':
			inside = !inside
			b.WriteRune(r)
		case !inside:
			b.WriteRune(r)
		}
	}
	return b.String()
}

// otherProtocol reports whether a rule is for a protocol or a port that the mesh never redirects: it redirects TCP, and UDP to port
// 53 where DNS is captured. A text that may be part of a comment proves nothing.
func otherProtocol(words []string, spec redirect.Spec) bool {
	if slices.Contains(words, "--comment") {
		return false
	}
	value := func(option string) string {
		i := slices.Index(words, option)
		if i < 0 || i+1 >= len(words) || i > 0 && words[i-1] == "!" {
			return ""
		}
		return words[i+1]
	}
	switch value("-p") {
	case "", "tcp", "all":
		return false
	case "udp":
		port, err := strconv.ParseUint(value("--dport"), 10, 16)
		return spec.DNS == redirect.DNSOff || err == nil && port != dnsPort
	}
	return true
}

// dnsPort is the port of DNS queries, which the mesh may redirect.
const dnsPort = 53

// Foreign returns the foreign rules of iptables that may take traffic ahead of the mesh's nat rules, in chains that hold no rule of
// the mesh, and policies that drop, a sentence each. A Diff has those in the other chains. dialect names the variant of iptables.
func Foreign(spec redirect.Spec, have ruleset.Set, owned ruleset.Ownership, dialect string) []string {
	var found []string
	for _, name := range []string{"raw", "mangle", "nat"} {
		t := have.Table(name)
		v := visitor{spec, t, map[string]bool{}}
		for _, c := range t.Chains {
			if c.Name == "PREROUTING" || c.Name == "OUTPUT" {
				at := fmt.Sprintf("%s (%s) %s/%s: ", have.Family, dialect, name, c.Name)
				found = append(found, v.base(c, owned.Rules[name][c.Name], at)...)
			}
		}
	}
	return found
}

// visitor judges the chains of a table, each once.
type visitor struct {
	spec redirect.Spec
	ruleset.Table

	known map[string]bool
}

// base returns what may take traffic in a base chain, at most maxProblems rules.
func (v visitor) base(c ruleset.Chain, own []bool, at string) (found []string) {
	if c.Policy == string(ruleset.Drop) {
		found = append(found, at+"policy DROP")
	}
	if slices.Contains(own, true) {
		return found
	}
	for _, r := range c.Rules {
		if takes(r.String(), v.spec, true, v.chain) && len(found) < maxProblems {
			found = append(found, fmt.Sprintf("%sforeign rule %q", at, "-A "+c.Name+" "+r.String()))
		}
	}
	return found
}

// chain reports whether a chain, or a target of that name, may take a packet.
func (v visitor) chain(name string) bool {
	if result, judged := v.known[name]; judged {
		return result
	}
	v.known[name] = false // a loop of chains, which the kernel refuses
	c, there := v.Chain(name)
	v.known[name] = !there || slices.ContainsFunc(c.Rules, func(r ruleset.Rule) bool { return takes(r.String(), v.spec, true, v.chain) })
	return v.known[name]
}
