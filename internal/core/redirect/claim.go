package redirect

import (
	"regexp"
	"strings"
	"sync"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Claim says which rules of a namespace are the mesh's: those wanted now, and what any earlier configuration of this
// program or of the reference left, whatever its ports, identities, marks and interfaces were.
//
// Chains are known by their prefix and jumps by their target. What the reference puts into built-in chains without a
// jump is known by its whole shape; shapes that somebody else might well use (a plain RETURN for an interface) count
// only where chains of ours show that the mesh was here, and only in pairs or at the head of the chain, where the
// reference puts them.
func Claim(want, have ruleset.Set) ruleset.Claim {
	c := claimer{have: have, claim: ruleset.Claim{Chains: map[string]map[string]bool{}, Rules: map[string]map[string][]bool{}}}
	c.chains()
	for _, t := range have.Tables {
		for _, chain := range t.Chains {
			if !c.claim.OwnsChain(t.Name, chain.Name) {
				c.rules(want.Table(t.Name), t.Name, chain)
			}
		}
	}
	c.interfaces("nat")
	c.interfaces("mangle")
	c.guardrails()
	return c.claim
}

type claimer struct {
	have    ruleset.Set
	claim   ruleset.Claim
	residue bool // some chain of ours is there
}

func (c *claimer) chains() {
	for _, t := range c.have.Tables {
		own := map[string]bool{}
		for _, chain := range t.Chains {
			if strings.HasPrefix(chain.Name, chainPrefix) {
				own[chain.Name] = true
				c.residue = true
			}
		}
		c.claim.Chains[t.Name] = own
		c.claim.Rules[t.Name] = map[string][]bool{}
	}
}

// ourJump reports whether the rule leads to a chain of ours.
func ourJump(spec string) bool {
	spec = " " + spec
	return strings.Contains(spec, " -j "+chainPrefix) || strings.Contains(spec, " -g "+chainPrefix)
}

// shapes are the rules that the reference writes, or wrote in some version, straight into built-in chains. The DNS rules
// are those of versions before ISTIO_OUTPUT_DNS existed. They are compiled when a namespace turns out not to be empty,
// which a new pod's never is.
var shapes = sync.OnceValue(func() map[string][]*regexp.Regexp { //nolint:gochecknoglobals // compiled patterns
	return map[string][]*regexp.Regexp{
		"mangle/PREROUTING": compile(
			`-p tcp -m mark --mark HEX -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff`),
		"mangle/OUTPUT": compile(
			`-o lo -p tcp -m mark --mark HEX -j RETURN`,
			`! -d (127\.\S+|::1/128) -o lo -p tcp -m owner --[ug]id-owner NUM -j MARK --set-xmark 0x53a/0xffffffff`,
			`-p tcp -m connmark --mark HEX -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff`,
			`-s 127\.0\.0\.1/32 ! -d 127\.0\.0\.1/32 -p tcp -j MARK --set-xmark 0x539/0xffffffff`),
		"nat/OUTPUT": compile(
			`-p udp -m udp --dport 53 -m owner --[ug]id-owner NUM -j RETURN`,
			`(-d \S+ )?-p udp -m udp --dport 53 -j REDIRECT --to-ports 150[15]3`,
			`(-d \S+ )?-p udp -m udp --dport 53 -j DNAT --to-destination 127\.0\.0\.1:15053`),
		"nat/POSTROUTING": compile(
			`(-d \S+ )?-p udp -m udp --dport 15053 -j SNAT --to-source 127\.0\.0\.1`),
		"raw/OUTPUT": compile(
			`-p udp -m udp --dport 53 -m owner --[ug]id-owner NUM -j CT --zone 1`,
			`-p udp -m udp --sport 15053 -m owner --[ug]id-owner NUM -j CT --zone 2`,
			`(-d \S+ )?-p udp -m udp --dport 53 -j CT --zone 2`),
		"raw/PREROUTING": compile(
			`(-s \S+ )?-p udp -m udp --sport 53 -j CT --zone 1`),
	}
})

func compile(patterns ...string) []*regexp.Regexp {
	out := make([]*regexp.Regexp, 0, len(patterns))
	spell := strings.NewReplacer("HEX", "0x[0-9a-f]+", "NUM", "[0-9]+")
	for _, p := range patterns {
		out = append(out, regexp.MustCompile("^"+spell.Replace(p)+"$"))
	}
	return out
}

// rules claims single rules of a chain that is not ours.
func (c *claimer) rules(want ruleset.Table, table string, chain ruleset.Chain) {
	wanted := map[string]bool{}
	wc, _ := want.Chain(chain.Name)
	for _, r := range wc.Rules {
		wanted[r.Spec] = true
	}
	marks := make([]bool, len(chain.Rules))
	for i, r := range chain.Rules {
		marks[i] = wanted[r.Spec] || ourJump(r.Spec) || matches(shapes()[table+"/"+chain.Name], r.Spec)
	}
	c.claim.Rules[table][chain.Name] = marks
}

func matches(patterns []*regexp.Regexp, spec string) bool {
	for _, p := range patterns {
		if p.MatchString(spec) {
			return true
		}
	}
	return false
}

// returnOf gives the interface of a rule that is nothing but a RETURN for one.
func returnOf(spec string) (string, bool) {
	f := strings.Fields(spec)
	if len(f) != 4 || f[0] != "-i" && f[0] != "-o" || f[2] != "-j" || f[3] != "RETURN" {
		return "", false
	}
	return f[1], true
}

// interfaces claims the RETURN rules of excluded and of virtual machines' interfaces: excluded ones come as a pair in
// PREROUTING and OUTPUT, and in PREROUTING both kinds stand at the head, with nothing foreign before them.
func (c *claimer) interfaces(table string) {
	if !c.residue {
		return
	}
	t := c.have.Table(table)
	in, _ := t.Chain(prerouting)
	out, _ := t.Chain(outHook)
	pairs := map[string]int{}
	for bit, chain := range []ruleset.Chain{in, out} {
		for _, r := range chain.Rules {
			if name, ok := returnOf(r.Spec); ok {
				pairs[name] |= 1 << bit
			}
		}
	}
	for _, chain := range []ruleset.Chain{in, out} {
		head := chain.Name == prerouting
		for i, r := range chain.Rules {
			name, plain := returnOf(r.Spec)
			switch {
			case plain && (head || pairs[name] == 3):
				c.claim.Rules[table][chain.Name][i] = true
			case !c.claim.OwnsRule(table, chain.Name, i):
				head = false
			}
		}
	}
}

// guardrails claims what the reference puts up while it replaces rules and leaves behind when it is killed then: all TCP
// and UDP dropped at the head of all three chains of filter. Nothing less than all six is taken for it.
func (c *claimer) guardrails() {
	t := c.have.Table("filter")
	chains := []string{"INPUT", "FORWARD", outHook}
	for _, name := range chains {
		chain, _ := t.Chain(name)
		if len(chain.Rules) < 2 || chain.Rules[0].Spec != "-p udp -j DROP" || chain.Rules[1].Spec != "-p tcp -j DROP" {
			return
		}
	}
	for _, name := range chains {
		copy(c.claim.Rules["filter"][name], []bool{true, true})
	}
}
