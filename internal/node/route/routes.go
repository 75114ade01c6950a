package route

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// allTables asks listRoutes for the routes of every table.
const allTables = unix.RT_TABLE_UNSPEC

func listRoutes(f ruleset.Family, table uint32) ([]netlink.Route, error) {
	routes, err := complete(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(int(nlFamily(f)), &netlink.Route{Table: int(table)}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("listing the %s routes: %w", f, err)
	}
	return routes, nil
}

// delivers reports whether r is "local default dev lo".
func (lo loopback) delivers(r netlink.Route) bool {
	if r.Dst == nil || r.Type != unix.RTN_LOCAL || r.LinkIndex != lo.index {
		return false
	}
	bits, _ := r.Dst.Mask.Size()
	return bits == 0 && r.Gw == nil && r.Src == nil && r.Via == nil && r.Encap == nil && len(r.MultiPath) == 0 && r.Tos == 0
}

// routes gives those of the policy's routes that are there; they can differ in metric and origin.
func (p Policy) routes(lo loopback) ([]netlink.Route, error) {
	all, err := listRoutes(p.Family, p.Table)
	if err != nil {
		return nil, err
	}
	var ours []netlink.Route
	for _, r := range all {
		if lo.delivers(r) {
			ours = append(ours, r)
		}
	}
	return ours, nil
}

func (p Policy) addRoute(lo loopback) error {
	there, err := p.routes(lo)
	if err != nil || len(there) > 0 {
		return err
	}
	err = netlink.RouteAdd(p.netlinkRoute(lo))
	if errors.Is(err, unix.EEXIST) {
		// Someone else was quicker, or it is another default route.
		if again, lookErr := p.routes(lo); lookErr == nil && len(again) > 0 {
			return nil
		}
		err = fmt.Errorf("%w: the table has another default route; remove it or choose another table", err)
	}
	if err != nil {
		return fmt.Errorf("adding route %s: %w", p.routeText(), explain(p.Family, err))
	}
	return nil
}

func (p Policy) removeRoutes(lo loopback) error {
	there, err := p.routes(lo)
	if err != nil {
		return err
	}
	var problems []error
	for _, found := range there {
		r := p.netlinkRoute(lo)
		r.Priority, r.Protocol, r.Scope = found.Priority, found.Protocol, found.Scope
		if err := netlink.RouteDel(r); err != nil && !errors.Is(err, unix.ESRCH) {
			problems = append(problems, fmt.Errorf("removing route %s: %w", p.routeText(), explain(p.Family, err)))
		}
	}
	return errors.Join(problems...)
}

func (p Policy) checkRoute(lo loopback) ([]string, error) {
	there, err := p.routes(lo)
	if err != nil || len(there) > 0 {
		return nil, err
	}
	return []string{"route " + p.routeText() + " is missing"}, nil
}

func (p Policy) netlinkRoute(lo loopback) *netlink.Route {
	everything := map[ruleset.Family]*net.IPNet{
		ruleset.IPv4: {IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)},
		ruleset.IPv6: {IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)},
	}
	return &netlink.Route{
		LinkIndex: lo.index,
		Dst:       everything[p.Family],
		Table:     int(p.Table),
		Type:      unix.RTN_LOCAL,
		Scope:     netlink.SCOPE_HOST,
	}
}

// routeText gives the policy's route as ip route takes it.
func (p Policy) routeText() string {
	return fmt.Sprintf("%q (%s)", fmt.Sprintf("local default dev lo table %d", p.Table), p.Family)
}
