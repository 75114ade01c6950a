package nftables

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// hookedChain is a base chain of another program at a hook where the mesh decides, ahead of the mesh's translation of addresses.
type hookedChain struct {
	family            uint8
	table, name, hook string
	priority          int32
	drops             bool
}

func (c hookedChain) familyName() string {
	return map[uint8]string{unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_INET: "inet", unix.NFPROTO_NETDEV: "netdev"}[c.family]
}

func (c hookedChain) String() string {
	return fmt.Sprintf("table %s %s, chain %s (hook %s, priority %d)", c.familyName(), escaped(c.table), escaped(c.name), c.hook, c.priority)
}

// foreign names the rules in base chains of other programs, see [View.Foreign].
func (s *Session) foreign(ctx context.Context, marks bool) (found []string, err error) {
	chains, regular, err := s.hookedChains(ctx, hookedChain.ahead)
	if err != nil {
		return nil, fmt.Errorf("listing chains of other programs: %w", err)
	}
	for _, c := range chains {
		if c.drops {
			found = append(found, c.String()+": policy drop")
		}
		some, err := s.takers(ctx, c, regular, marks)
		if err != nil {
			return nil, fmt.Errorf("listing rules of %s: %w", c, err)
		}
		if found = append(found, some...); len(found) >= maxForeign {
			break
		}
	}
	return found, nil
}

// takers names the rules of a base chain, and of the chains that its table may lead to, which may take traffic.
func (s *Session) takers(ctx context.Context, c hookedChain, regular map[chainKey]bool, marks bool) (found []string, err error) {
	judged := !keyOf(c.family, c.table).known()
	narrow := func(b *nfnetlink.Buffer) { b.String(unix.NFTA_RULE_TABLE, c.table) }
	err = s.dump(ctx, unix.NFT_MSG_GETRULE, c.family, narrow, func(m nfnetlink.Message) error {
		chain := m.Attributes.Get(unix.NFTA_RULE_CHAIN).Text()
		called := regular[chainKey{c.family, c.table, chain}]
		if m.Family != c.family || m.Attributes.Get(unix.NFTA_RULE_TABLE).Text() != c.table || chain != c.name && !called {
			return nil
		}
		if what := takes(m.Attributes.Get(unix.NFTA_RULE_EXPRESSIONS).Value, marks, judged); what != "" && len(found) < maxForeign {
			handle, _ := m.Attributes.Get(unix.NFTA_RULE_HANDLE).Uint64()
			found = append(found, fmt.Sprintf("%s: rule with handle %d of chain %s (%s)", c, handle, escaped(chain), what))
		}
		return nil
	})
	return found, err
}

// maxForeign bounds the rules that are named of each chain, and ends the search.
const maxForeign = 20

// chainKey names a chain of another program's table.
type chainKey struct {
	family       uint8
	table, chain string
}

// hookedChains lists the wanted base chains, and the others of tables that are not the mesh's or iptables', to which base chains may lead.
func (s *Session) hookedChains(ctx context.Context, want func(hookedChain) bool) (chains []hookedChain, regular map[chainKey]bool, err error) {
	dormant := map[chainKey]bool{}
	err = s.dump(ctx, unix.NFT_MSG_GETTABLE, unix.AF_UNSPEC, nil, func(m nfnetlink.Message) error {
		if flags, _ := m.Attributes.Get(unix.NFTA_TABLE_FLAGS).Uint32(); flags&unix.NFT_TABLE_F_DORMANT != 0 {
			dormant[chainKey{m.Family, m.Attributes.Get(unix.NFTA_TABLE_NAME).Text(), ""}] = true
		}
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	regular = map[chainKey]bool{}
	err = s.dump(ctx, unix.NFT_MSG_GETCHAIN, unix.AF_UNSPEC, nil, func(m nfnetlink.Message) error {
		c, based := readHooked(m)
		switch {
		case dormant[chainKey{m.Family, c.table, ""}]:
		case based && want(c):
			chains = append(chains, c)
		case !based && !keyOf(m.Family, c.table).known():
			regular[chainKey{m.Family, c.table, c.name}] = true
		}
		return nil
	})
	return chains, regular, err
}

// otherFamily stands for those that View has no tables of.
const otherFamily ruleset.Family = 255

func keyOf(family uint8, table string) tableKey {
	for _, f := range families() {
		if protocolFamily(f) == family {
			return tableKey{f, table}
		}
	}
	return tableKey{otherFamily, table}
}

// readHooked reads a chain. based says that it is a base chain, and not one that View has under the name of its hook.
func readHooked(m nfnetlink.Message) (c hookedChain, based bool) {
	hook := nfnetlink.Attributes(m.Attributes.Get(unix.NFTA_CHAIN_HOOK).Value)
	number, hooked := hook.Get(unix.NFTA_HOOK_HOOKNUM).Uint32()
	priority, _ := hook.Get(unix.NFTA_HOOK_PRIORITY).Uint32()
	policy, hasPolicy := m.Attributes.Get(unix.NFTA_CHAIN_POLICY).Uint32()
	c = hookedChain{
		family: m.Family, table: m.Attributes.Get(unix.NFTA_CHAIN_TABLE).Text(), name: m.Attributes.Get(unix.NFTA_CHAIN_NAME).Text(),
		priority: int32(priority), drops: hasPolicy && policy == nfnetlink.Drop, //nolint:gosec // two's complement
	}
	for name, n := range hooks {
		if n == number {
			c.hook = name
		}
	}
	const inetIngress = 5 // NF_INET_INGRESS, linux/netfilter.h
	if m.Family == unix.NFPROTO_NETDEV || number == inetIngress {
		c.hook = "ingress or egress"
	}
	at := keyOf(m.Family, c.table)
	want, builtin := at.base(c.name)
	asWanted := at.known() && builtin && want.Type == m.Attributes.Get(unix.NFTA_CHAIN_TYPE).Text() && hooks[want.Name] == number && want.Priority == c.priority
	return c, hooked && !asWanted
}

// destinationNAT is the priority of chains that translate destinations (NF_IP_PRI_NAT_DST, linux/netfilter_ipv4.h). One of the same
// priority is traversed in the order of creation, which is not known.
const destinationNAT = -100

func (c hookedChain) ahead() bool {
	return c.passed() && (c.hook == "ingress or egress" || (c.hook == "prerouting" || c.hook == "output") && c.priority <= destinationNAT)
}

// passed reports whether packets of IP pass the chain.
func (c hookedChain) passed() bool { return c.familyName() != "" }

// matching are the expressions that load, compare, count or log.
var matching = []string{ //nolint:gochecknoglobals // a constant table
	"payload", "cmp", "bitwise", "byteorder", "range", "counter", "log", "fib", "rt", "socket", "exthdr", "limit", "quota", "connlimit", "numgen",
	"hash", "osf", "last", "xfrm", "tunnel", "match", "objref", "dynset", "dup",
}

// takes returns what a rule may do to a packet other than to let it go on, "" if it does nothing. A verdict of a base chain other
// than drop and queue leaves the packet to the chains behind it, also where they translate addresses (nf_nat_inet_fn,
// net/netfilter/nf_nat_core.c). judged says that the rules of the chains to which jumps lead are judged on their own: those of the
// mesh's and iptables' tables are not.
func takes(expressions nfnetlink.Attributes, marks, judged bool) string {
	for e := range expressions.All() {
		name, data, _ := nfnetlink.SplitExpression(e)
		set := func(register uint16) bool { return data.Raw(register) != nil }
		key := func(kind uint16) uint32 { n, _ := data.Number(kind); return n }
		harmless := slices.Contains(matching, name)
		switch name {
		case "immediate":
			const register = unix.NFTA_IMMEDIATE_DREG
			v, known := data.ReadVerdict()
			harmless = key(register) != unix.NFT_REG_VERDICT || known && v.Code != nfnetlink.Drop && (judged || v.Chain == "")
		case "target":
			harmless = ruleset.Neutral(data.Text(unix.NFTA_TARGET_NAME))
		case "payload":
			harmless = !set(unix.NFTA_PAYLOAD_SREG)
		case "meta":
			harmless = !set(unix.NFTA_META_SREG) || !marks || key(unix.NFTA_META_KEY) != unix.NFT_META_MARK
		case "ct":
			harmless = !set(unix.NFTA_CT_SREG) || key(unix.NFTA_CT_KEY) == unix.NFT_CT_MARK && !marks || key(unix.NFTA_CT_KEY) == unix.NFT_CT_LABELS
		case "lookup": // one into the verdict register is a map of verdicts
			harmless = !set(unix.NFTA_LOOKUP_DREG) || key(unix.NFTA_LOOKUP_DREG) != unix.NFT_REG_VERDICT
		}
		if !harmless {
			return strings.Join(strings.Fields(escaped(name)), "_")
		}
	}
	return ""
}

// Foreign names the rules of other programs at the moment of the View, a sentence each: those that may take traffic ahead of the
// rules of the mesh, in base chains that View does not have under the name of a hook of the mesh's. marks says that marks of packets
// decide. A chain behind the mesh's (priority above that of nat's destinations) is left out, and so are dormant tables.
func (v *View) Foreign(ctx context.Context, marks bool) ([]string, error) {
	found, err := v.session.foreign(ctx, marks)
	if err != nil {
		return nil, err
	}
	now, err := v.session.conn.Generation()
	if err == nil && now != v.generation {
		err = ErrChanged
	}
	return found, err
}
