package redirect

import (
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Owned finds the mesh's rules in a namespace: the wanted rules, and leftovers of any earlier configuration of
// this program or of the reference, whatever its ports, identities, marks and interfaces were.
//
// Owned recognises chains by their prefix and jumps by their target. It recognises the other rules that the reference puts
// into built-in chains by their whole shape, and only if one of our chains differs from the wanted chain: then another
// configuration was applied. Any program may use a plain RETURN for an interface, so such a rule is ours only ahead of the
// rules that the reference appends, and only in pairs or at the head of the chain.
func (o Owner) Owned(want, have ruleset.Set) ruleset.Ownership {
	return o.find(want, have, o.otherChain(want, have))
}

// AllOwned is Owned for the removal of all rules of the mesh. Rules of the mesh's shapes are owned even if the
// namespace has no chain of ours, for example after an incomplete removal.
func (o Owner) AllOwned(have ruleset.Set) ruleset.Ownership {
	return o.find(ruleset.Set{Family: have.Family}, have, true)
}

// otherChain reports whether one of our chains differs from the wanted chain. Any two configurations differ in at least
// one chain, so otherwise the namespace has no rules of another configuration.
func (o Owner) otherChain(want, have ruleset.Set) bool {
	return slices.ContainsFunc(have.Tables, func(t ruleset.Table) bool {
		return slices.ContainsFunc(t.Chains, func(c ruleset.Chain) bool {
			wanted, there := want.Table(t.Name).Chain(c.Name)
			return strings.HasPrefix(c.Name, o.ChainPrefix) && (!there || !slices.EqualFunc(wanted.Rules, c.Rules, ruleset.Rule.Equal))
		})
	})
}

func (o Owner) find(want, have ruleset.Set, leftovers bool) ruleset.Ownership {
	c := finder{owner: o, want: want, have: have, leftovers: leftovers, owned: ruleset.Ownership{Chains: map[string]map[string]bool{}, Rules: map[string]map[string][]bool{}}}
	for _, t := range have.Tables {
		c.owned.Chains[t.Name], c.owned.Rules[t.Name] = map[string]bool{}, map[string][]bool{}
		for _, chain := range t.Chains {
			if strings.HasPrefix(chain.Name, o.ChainPrefix) {
				c.owned.Chains[t.Name][chain.Name] = true
			} else {
				c.owned.Rules[t.Name][chain.Name] = c.rules(t.Name, chain)
			}
		}
	}
	c.interfaces()
	c.guardrails()
	return c.owned
}

type finder struct {
	owner      Owner
	want, have ruleset.Set
	owned      ruleset.Ownership
	// leftovers is set if rules of the mesh's shapes are owned.
	leftovers bool
}

// ourJump reports whether a target leads to one of our chains.
func (o Owner) ourJump(target ruleset.Target) bool {
	switch t := target.(type) {
	case ruleset.Jump:
		return strings.HasPrefix(t.Chain, o.ChainPrefix)
	case ruleset.Then:
		return slices.ContainsFunc(t, o.ourJump)
	case ruleset.VerdictMap:
		return slices.ContainsFunc(t.List, func(v ruleset.VerdictOf) bool { return o.ourJump(v.Target) })
	}
	return false
}

// shapes are the rules that any version of the reference writes straight into built-in chains. The DNS rules
// are from versions before ISTIO_OUTPUT_DNS existed. The patterns are compiled for the first namespace that is not
// empty; a new pod's namespace is empty.
var shapes = sync.OnceValue(func() map[string]*regexp.Regexp { //nolint:gochecknoglobals // compiled patterns
	return map[string]*regexp.Regexp{
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

// compile returns a pattern that matches any of the shapes.
func compile(shapes ...string) *regexp.Regexp {
	shape := strings.NewReplacer("HEX", "0x[0-9a-f]+", "NUM", "[0-9]+").Replace(strings.Join(shapes, "|"))
	return regexp.MustCompile("^(" + shape + ")$")
}

// rules marks our rules in a foreign chain.
func (c *finder) rules(table string, chain ruleset.Chain) []bool {
	wanted := map[string]bool{}
	want, _ := c.want.Table(table).Chain(chain.Name)
	for _, r := range want.Rules {
		wanted[r.String()] = true
	}
	marks := make([]bool, len(chain.Rules))
	for i, r := range chain.Rules {
		marks[i] = wanted[r.String()] || c.owner.ourJump(r.Target) || c.leftovers && shaped(table+"/"+chain.Name, r.String())
	}
	return marks
}

// shaped reports whether a rule of a built-in chain has one of the shapes.
func shaped(chain, spec string) bool {
	pattern, known := shapes()[chain]
	return known && pattern.MatchString(spec)
}

// returnOf returns the interface of a rule that has only an interface match and RETURN.
func returnOf(r ruleset.Rule) (string, bool) {
	if len(r.Matches) != 1 || r.Target != ruleset.Target(ruleset.Return) {
		return "", false
	}
	i, is := r.Matches[0].(ruleset.Interface)
	return i.Name, is && !i.Not
}

// interfaces marks the RETURN rules of excluded interfaces, in nat and, with TPROXY, in mangle, and of virtual machines'
// interfaces, in nat only.
func (c *finder) interfaces() {
	if len(c.owned.Chains["nat"]) > 0 {
		c.excluded("nat")
		c.rerouted()
	}
	if c.owned.Chains["mangle"][inbound] {
		c.excluded("mangle")
	}
}

// excluded marks pairs of RETURN rules in PREROUTING and OUTPUT, ahead of all other rules that were appended for the mesh.
func (c *finder) excluded(table string) {
	in, out := c.returns(table, prerouting), c.returns(table, outHook)
	for name, places := range in {
		if len(out[name]) > 0 {
			c.mark(table, prerouting, places)
			c.mark(table, outHook, out[name])
		}
	}
}

func (c *finder) mark(table, chain string, places []int) {
	for _, i := range places {
		c.owned.Rules[table][chain][i] = true
	}
}

// returns returns the places of a chain's RETURN rules by interface, up to the first rule that was appended for the mesh.
func (c *finder) returns(table, name string) map[string][]int {
	places := map[string][]int{}
	chain, _ := c.have.Table(table).Chain(name)
	for i, r := range chain.Rules {
		if x, plain := returnOf(r); plain {
			places[x] = append(places[x], i)
		} else if c.owned.OwnsRule(table, name, i) && !reroutes(r) {
			break
		}
	}
	return places
}

// rerouted marks the rules that were inserted at the head of nat PREROUTING, up to the first foreign rule. A RETURN counts if
// another rule sends traffic of the same interface to the proxy. If no network is captured such rules are missing; only
// then every RETURN there counts.
func (c *finder) rerouted() {
	chain, _ := c.have.Table("nat").Chain(prerouting)
	named := map[string]bool{}
	for _, r := range chain.Rules {
		if reroutes(r) {
			named[entering(r)] = true
		}
	}
	delete(named, "")
	if len(named) == 0 && (c.capturesNetworks() || c.asWanted(chain)) {
		return
	}
	for i, r := range chain.Rules {
		v, plain := returnOf(r)
		if !reroutes(r) && (!plain || len(named) > 0 && !named[v]) {
			return
		}
		c.owned.Rules["nat"][prerouting][i] = true
	}
}

// entering returns the input interface that a rule matches, "" for any.
func entering(r ruleset.Rule) string {
	for _, m := range r.Matches {
		if i, is := m.(ruleset.Interface); is && !i.Out {
			return i.Name
		}
	}
	return ""
}

// asWanted reports whether the chain begins with all its wanted rules, at least one: then no rule behind them is a
// leftover of an earlier configuration.
func (c *finder) asWanted(have ruleset.Chain) bool {
	want, _ := c.want.Table("nat").Chain(have.Name)
	n := len(want.Rules)
	return n > 0 && n <= len(have.Rules) && slices.EqualFunc(want.Rules, have.Rules[:n], ruleset.Rule.Equal)
}

// capturesNetworks reports whether the present rules capture outgoing traffic by its address.
func (c *finder) capturesNetworks() bool {
	chain, _ := c.have.Table("nat").Chain(output)
	return slices.ContainsFunc(chain.Rules, func(r ruleset.Rule) bool {
		return reroutes(r) && !slices.ContainsFunc(r.Matches, func(m ruleset.Match) bool { _, is := m.(ruleset.Port); return is })
	})
}

// reroutes reports whether the rule sends traffic to the proxy's outbound listener.
func reroutes(r ruleset.Rule) bool { return r.Target == ruleset.Target(ruleset.Jump{Chain: toProxy}) }

// guardrails marks the rules that the reference adds while it replaces others, and leaves behind when it is killed: drops
// of all TCP and UDP at the head of all three chains of filter. Only all six rules together are ours.
func (c *finder) guardrails() {
	if !c.leftovers {
		return
	}
	t := c.have.Table("filter")
	chains := []string{"INPUT", "FORWARD", outHook}
	for _, name := range chains {
		chain, _ := t.Chain(name)
		if len(chain.Rules) < 2 || chain.Rules[0].String() != "-p udp -j DROP" || chain.Rules[1].String() != "-p tcp -j DROP" {
			return
		}
	}
	for _, name := range chains {
		c.mark("filter", name, []int{0, 1})
	}
}

// Marks lists the marks that our rules in the mangle table use: policy routing for such a mark is ours too.
func Marks(have ruleset.Set, owned ruleset.Ownership) []uint32 {
	var marks []uint32
	for _, chain := range have.Table("mangle").Chains {
		for i, r := range chain.Rules {
			if owned.OwnsRule("mangle", chain.Name, i) {
				marks = append(marks, marksOf(r)...)
			}
		}
	}
	slices.Sort(marks)
	return slices.Compact(marks)
}

func marksOf(r ruleset.Rule) []uint32 {
	var marks []uint32
	for _, m := range r.Matches {
		if mark, is := m.(ruleset.Mark); is {
			marks = append(marks, mark.Value)
		}
	}
	switch t := r.Target.(type) {
	case ruleset.SetMark:
		marks = append(marks, t.Value)
	case ruleset.TProxy:
		marks = append(marks, t.Mark)
	}
	return slices.DeleteFunc(marks, func(m uint32) bool { return m == SelfMark })
}
