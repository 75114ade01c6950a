package route

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// allTables selects the routes of every table in listRoutes.
const allTables = unix.RT_TABLE_UNSPEC

// A route has the fields that recognising and removing one need.
type route struct {
	table, priority uint32
	protocol, scope uint8
	delivers        bool // it is "local default dev lo"
}

// listRoutes returns the routes of a family in one table or in all.
func listRoutes(f ruleset.Family, table uint32) ([]route, error) {
	return listFamily(f, unix.RTM_NEWROUTE, "routes", func(head *nl.RtMsg, attributes []syscall.NetlinkRouteAttr) (route, bool) {
		r := parseRoute(head, attributes)
		cloned := head.Flags&unix.RTM_F_CLONED != 0 // the kernel made it of another one, for a destination
		return r, head.Family == nlFamily(f) && !cloned && (table == allTables || r.table == table)
	})
}

func parseRoute(head *nl.RtMsg, attributes []syscall.NetlinkRouteAttr) route {
	r := route{table: uint32(head.Table), protocol: head.Protocol, scope: head.Scope}
	everything := head.Dst_len == 0 && head.Tos == 0 && head.Src_len == 0
	link := uint32(0)
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
			link = number
		case unix.RTA_GATEWAY, unix.RTA_PREFSRC, unix.RTA_VIA, unix.RTA_ENCAP, unix.RTA_MULTIPATH:
			everything = false
		}
	}
	r.delivers = head.Type == unix.RTN_LOCAL && link == loopback && everything
	return r
}

// routes returns the present routes of the policy; they can differ in metric and origin.
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
		// Another process added it first, or it is another default route.
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

func (p Policy) checkRoute() ([]string, error) {
	there, err := p.routes()
	if err != nil || len(there) > 0 {
		return nil, err
	}
	return []string{"route " + p.routeText() + " is missing"}, nil
}

func (p Policy) netlinkRoute() *netlink.Route {
	everything := map[ruleset.Family]*net.IPNet{
		ruleset.IPv4: {IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)},
		ruleset.IPv6: {IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)},
	}
	return &netlink.Route{
		LinkIndex: loopback,
		Dst:       everything[p.Family],
		Table:     int(p.Table),
		Type:      unix.RTN_LOCAL,
		Scope:     netlink.SCOPE_HOST,
	}
}

// routeText returns the policy's route as arguments of "ip route".
func (p Policy) routeText() string {
	return fmt.Sprintf("%q (%s)", fmt.Sprintf("local default dev lo table %d", p.Table), p.Family)
}
