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
