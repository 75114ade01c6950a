package route

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Constants of linux/fib_rules.h.
const (
	actionLookup = 1          // FR_ACT_TO_TBL
	unset        = ^uint32(0) // the value of a suppressor that is not set
	wholeMark    = ^uint32(0) // the mask of a mark that is compared whole
)

// A rule is a policy rule with its priority, its table, its mark and the mask of the mark.
type rule struct {
	priority, mark, mask, table uint32
	lookup                      bool // the action is a table lookup
	narrower                    bool // it has another selector than the mark
}

// plain reports whether r is "fwmark MARK lookup TABLE", with any mask, or "lookup TABLE".
func (r rule) plain() bool { return r.lookup && !r.narrower }

// looksUp reports whether r has the mark, the mask, the table and the action of p, whatever else it selects by.
func (r rule) looksUp(p Policy) bool {
	return r.lookup && r.mark == p.Mark && r.mask == p.mask() && r.table == p.Table
}

// is reports whether r is the rule of p, at any priority.
func (r rule) is(p Policy) bool { return r.plain() && r.looksUp(p) }

// main reports whether r leads every packet to the main table.
func (r rule) main() bool { return r.plain() && r.mask == 0 && r.table == unix.RT_TABLE_MAIN }

// listRules returns the rules of a family in the kernel's evaluation order. If the kernel lacks the family, the result is
// empty.
//
// It does not use package netlink's rule list, which ignores unknown selectors (DSCP, flow label, port masks, and future
// ones): a rule with such a selector would look like ours.
func listRules(f ruleset.Family) ([]rule, error) {
	rules, err := list(f, unix.RTM_GETRULE, "policy rules", func(head *nl.RtMsg, attributes []syscall.NetlinkRouteAttr) (rule, bool) {
		return parseRule(head, attributes), true
	})
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return nil, nil
	}
	return rules, err
}

func parseRule(head *nl.RtMsg, attributes []syscall.NetlinkRouteAttr) rule {
	// rtm_type is the action; rtm_flags has inversion and detached interfaces. The prefixes are also attributes.
	const permanent = 1 // FIB_RULE_PERMANENT: the kernel made it
	r := rule{
		table:    uint32(head.Table),
		lookup:   head.Type == actionLookup,
		narrower: head.Flags&^permanent != 0 || head.Tos != 0,
	}
	for _, a := range attributes {
		r.read(a.Attr.Type, a.Value)
	}
	return r
}

// read applies one attribute. It treats an unknown attribute as a selector.
func (r *rule) read(kind uint16, value []byte) {
	if kind == nl.FRA_PROTOCOL { // the program that made the rule
		return
	}
	if len(value) != 4 {
		r.narrower = true
		return
	}
	switch number := binary.NativeEndian.Uint32(value); kind {
	case nl.FRA_TABLE:
		r.table = number
	case nl.FRA_PRIORITY:
		r.priority = number
	case nl.FRA_FWMARK:
		r.mark = number
	case nl.FRA_FWMASK:
		r.mask = number
	case nl.FRA_SUPPRESS_PREFIXLEN, nl.FRA_SUPPRESS_IFGROUP:
		r.narrower = r.narrower || number != unset
	default:
		r.narrower = true
	}
}

// MarkSelectors returns the marks and masks that a family's policy rules compare.
func MarkSelectors(f ruleset.Family) (all []ruleset.Mark, err error) {
	rules, err := listRules(f)
	for _, r := range rules {
		if s := (ruleset.Mark{Value: r.mark, Mask: r.mask}); r.mask != 0 && !slices.Contains(all, s) {
			all = append(all, s)
		}
	}
	return all, err
}

// presence has the rules of a family, and those among them that are a policy's, in the kernel's evaluation order.
type presence struct {
	// effective reports that the first of ours precedes the main table, after which a default route has matched the
	// packet. Later rules of ours have no effect.
	effective bool
	ours, all []rule
}

func (p Policy) presence() (found presence, err error) {
	found.all, err = listRules(p.Family)
	mainSeen := false
	for _, r := range found.all {
		mainSeen = mainSeen || r.main()
		if r.is(p) {
			found.effective = found.effective || !mainSeen
			found.ours = append(found.ours, r)
		}
	}
	return found, err
}

// addRule leaves exactly one rule of p. A new rule has the policy's priority or, without one, that of "ip rule add".
func (p Policy) addRule() error {
	found, err := p.presence()
	if err != nil {
		return err
	}
	if found.effective {
		return p.removeEach(found.ours[1:], found.all)
	}
	if slices.ContainsFunc(found.all, func(r rule) bool { return r.main() && r.priority <= p.Priority }) {
		p.Priority = 0 // the rule would have no effect there
	}
	if err := p.makeRule(); err != nil {
		return fmt.Errorf("adding policy rule %s: %w", p, explain(p.Family, err))
	}
	return p.removeEach(found.ours, found.all)
}

func (p Policy) makeRule() error {
	err := netlink.RuleAdd(p.netlinkRule())
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	// Another process added the rule first, or a narrower rule has the priority that the kernel chose: the kernel ignores the
	// further selectors here as well (rule_exists).
	if found, unread := p.presence(); unread == nil && found.effective {
		return nil
	}
	if p.Priority != 0 {
		p.Priority = 0
		return p.makeRule()
	}
	return fmt.Errorf("%w: a rule that selects by more than the mark takes its place; give that one a higher priority number", err)
}

func (p Policy) removeRules() error {
	found, err := p.presence()
	if err != nil {
		return err
	}
	return p.removeEach(found.ours, found.all)
}

// removeEach removes rules of p. The kernel removes the first rule that matches every selector in the request and ignores
// further selectors of the rule (net/core/fib_rules.c, rule_find). A request without a priority could remove a narrower
// rule. So could a request with a priority if a narrower rule of that priority comes first.
func (p Policy) removeEach(doomed, all []rule) error {
	var problems []error
	for _, r := range doomed {
		first := slices.IndexFunc(all, func(other rule) bool {
			return other.priority == r.priority && other.looksUp(p)
		})
		err := errors.New("the kernel would remove a rule of the same priority that selects by more than the mark")
		if !all[first].narrower {
			request := p.netlinkRule()
			request.Priority, request.Type, request.Mask = int(r.priority), actionLookup, new(p.mask())
			err = explain(p.Family, netlink.RuleDel(request))
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			problems = append(problems, fmt.Errorf("removing policy rule %s at priority %d: %w", p, r.priority, err))
		}
	}
	return errors.Join(problems...)
}

func (p Policy) netlinkRule() *netlink.Rule {
	r := netlink.NewRule()
	r.Family = int(nlFamily(p.Family))
	r.Mark = p.Mark
	r.Table = int(p.Table)
	if p.Mask != 0 {
		r.Mask = &p.Mask
	}
	if p.Priority != 0 {
		r.Priority = int(p.Priority)
	}
	return r
}

// check returns the differences from what Apply sets up.
func (p Policy) check() (all []string, err error) {
	there, err := p.routes()
	if err == nil && len(there) == 0 {
		all = append(all, "route "+p.routeText()+" is missing")
	}
	found, failed := p.presence()
	text := "policy rule " + p.String()
	switch {
	case failed != nil:
	case len(found.ours) == 0:
		all = append(all, text+" is missing")
	case !found.effective:
		all = append(all, text+" is missing before the main table, behind which it has no effect")
	case len(found.ours) > 1:
		all = append(all, fmt.Sprintf("%s is there %d times", text, len(found.ours)))
	}
	return all, errors.Join(err, failed)
}

func nlFamily(f ruleset.Family) uint8 {
	if f == ruleset.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// allTables selects the routes of every table in listRoutes.
const allTables = unix.RT_TABLE_UNSPEC

// A route has the fields that this package uses.
type route struct {
	table, priority, link uint32
	protocol, scope, kind uint8
	source                netip.Addr
	delivers              bool // whether it is "local default dev lo"
}

// listRoutes returns the routes of a family in one table or in all.
func listRoutes(f ruleset.Family, table uint32) ([]route, error) {
	return list(f, unix.RTM_GETROUTE, "routes", func(head *nl.RtMsg, attributes []syscall.NetlinkRouteAttr) (route, bool) {
		r := parseRoute(head, attributes)
		cloned := head.Flags&unix.RTM_F_CLONED != 0 // the kernel cloned it for a destination
		return r, head.Family == nlFamily(f) && !cloned && (table == allTables || r.table == table)
	})
}

func parseRoute(head *nl.RtMsg, attributes []syscall.NetlinkRouteAttr) route {
	r := route{table: uint32(head.Table), protocol: head.Protocol, scope: head.Scope, kind: head.Type}
	everything := head.Dst_len == 0 && head.Tos == 0 && head.Src_len == 0
	for _, a := range attributes {
		number := uint32(0)
		if len(a.Value) == 4 {
			number = binary.NativeEndian.Uint32(a.Value)
		}
		switch a.Attr.Type {
		case unix.RTA_TABLE:
			r.table = number
		case unix.RTA_PRIORITY:
			r.priority = number
		case unix.RTA_OIF:
			r.link = number
		case unix.RTA_PREFSRC:
			r.source, _ = netip.AddrFromSlice(a.Value)
			everything = false
		case unix.RTA_GATEWAY, unix.RTA_VIA, unix.RTA_ENCAP, unix.RTA_MULTIPATH:
			everything = false
		}
	}
	r.delivers = r.kind == unix.RTN_LOCAL && r.link == loopback && everything
	return r
}

// routes returns the existing routes of the policy, which can differ in metric and origin.
func (p Policy) routes() ([]route, error) {
	all, err := listRoutes(p.Family, p.Table)
	return slices.DeleteFunc(all, func(r route) bool { return !r.delivers }), err
}

func (p Policy) addRoute() error {
	there, err := p.routes()
	if err != nil || len(there) > 0 {
		return err
	}
	err = netlink.RouteAdd(p.netlinkRoute())
	if errors.Is(err, unix.EEXIST) {
		// Another process added the route first, or the table has another default route.
		if again, lookErr := p.routes(); lookErr == nil && len(again) > 0 {
			return nil
		}
		err = fmt.Errorf("%w: the table has another default route; remove it or choose another table", err)
	}
	if err != nil {
		return fmt.Errorf("adding route %s: %w", p.routeText(), explain(p.Family, err))
	}
	return nil
}

func (p Policy) removeRoutes() error {
	there, err := p.routes()
	if err != nil {
		return err
	}
	var problems []error
	for _, found := range there {
		r := p.netlinkRoute()
		r.Priority, r.Protocol, r.Scope = int(found.priority), netlink.RouteProtocol(found.protocol), netlink.Scope(found.scope)
		if err := netlink.RouteDel(r); err != nil && !errors.Is(err, unix.ESRCH) {
			problems = append(problems, fmt.Errorf("removing route %s: %w", p.routeText(), explain(p.Family, err)))
		}
	}
	return errors.Join(problems...)
}

func (p Policy) netlinkRoute() *netlink.Route {
	everything := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
	if p.Family == ruleset.IPv6 {
		everything = &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	}
	return &netlink.Route{LinkIndex: loopback, Dst: everything, Table: int(p.Table), Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST}
}

// routeText returns the policy's route as arguments of "ip route".
func (p Policy) routeText() string {
	return fmt.Sprintf("%q (%s)", fmt.Sprintf("local default dev lo table %d", p.Table), p.Family)
}
