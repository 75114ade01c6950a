package route

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// allTables asks listRoutes for the routes of every table.
const allTables = unix.RT_TABLE_UNSPEC

// A route has the fields that recognising and removing one need.
type route struct {
	family          uint8 // AF_…
	cloned          bool  // the kernel made it of another one, for a destination
	table, priority uint32
	protocol, scope uint8
	kind            uint8 // RTN_…
	link            int
	everything      bool // it is for every destination
	narrower        bool // it selects by TOS or source, or has a gateway, encapsulation or preferred source
}

// listRoutes returns the routes of a family in one table or in all.
func listRoutes(f ruleset.Family, table uint32) ([]route, error) {
	head := &nl.RtMsg{RtMsg: unix.RtMsg{Family: nlFamily(f)}}
	routes, err := list(unix.RTM_NEWROUTE, head, func(message []byte) (route, bool, error) {
		r, err := parseRoute(message)
		return r, r.family == nlFamily(f) && !r.cloned && (table == allTables || r.table == table), err
	})
	if err != nil {
		return nil, fmt.Errorf("listing the %s routes: %w", f, err)
	}
	return routes, nil
}

// parseRoute reads a struct rtmsg and its attributes (linux/rtnetlink.h).
func parseRoute(message []byte) (route, error) {
	if len(message) < unix.SizeofRtMsg {
		return route{}, errors.New("the kernel's message is too short")
	}
	header := nl.DeserializeRtMsg(message)
	attributes, err := nl.ParseRouteAttr(message[unix.SizeofRtMsg:])
	if err != nil {
		return route{}, err
	}
	r := route{
		family: header.Family, cloned: header.Flags&unix.RTM_F_CLONED != 0,
		table: uint32(header.Table), protocol: header.Protocol, scope: header.Scope, kind: header.Type,
		everything: header.Dst_len == 0, narrower: header.Tos != 0 || header.Src_len != 0,
	}
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
			r.link = int(number)
		case unix.RTA_GATEWAY, unix.RTA_PREFSRC, unix.RTA_VIA, unix.RTA_ENCAP, unix.RTA_MULTIPATH:
			r.narrower = true
		}
	}
	return r, nil
}

// delivers reports whether r is "local default dev lo".
func (r route) delivers() bool {
	return r.kind == unix.RTN_LOCAL && r.link == loopback && r.everything && !r.narrower
}

// routes returns the present routes of the policy; they can differ in metric and origin.
func (p Policy) routes() ([]route, error) {
	all, err := listRoutes(p.Family, p.Table)
	if err != nil {
		return nil, err
	}
	var ours []route
	for _, r := range all {
		if r.delivers() {
			ours = append(ours, r)
		}
	}
	return ours, nil
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
