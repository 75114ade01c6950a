// Package route sets up the addresses and routes that redirection needs beside rules: the address ::6 on lo, which is the
// source of the proxy's IPv6 connections to the app, and for TPROXY a policy rule and a route that deliver marked packets
// locally, whatever their destination.
//
//	marked packet -> rule "fwmark MARK lookup TABLE" -> route "local default dev lo" in TABLE -> the proxy's socket
//
// It promises that Apply may be repeated and leaves exactly one of each object, that Check returns no difference exactly
// when Apply would change nothing and lo is the loopback device, that Remove removes only these objects, and that Check,
// Leftovers and Addresses write nothing.
//
// It never touches a rule with another selector, a route of another form, another address, or the state of a link. It
// works in the network namespace of the calling thread: run it inside netns.Do.
//
// Start reading at [Want] and [Apply].
package route

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Want is the routing that redirection needs in one namespace. Its zero value needs nothing.
type Want struct {
	// PassthroughV6 wants ::6/128 on lo.
	PassthroughV6 bool
	// Policy has an entry for each family whose marked packets are delivered locally.
	Policy []Policy
}

// A Policy delivers the packets of one family that carry Mark locally, through Table. A namespace can have several.
type Policy struct {
	Family      ruleset.Family
	Mark, Table uint32
	// Mask selects the bits of a packet's mark that are compared, 0 means all. A rule with another mask is another program's.
	Mask uint32
	// Priority is that of a new rule, 0 means the kernel's choice. It is not used where the rule would have no effect.
	Priority uint32
}

// mask returns the mask as the kernel has it.
func (p Policy) mask() uint32 {
	if p.Mask == 0 {
		return wholeMark
	}
	return p.Mask
}

// Same reports whether two policies have the same rule and route, whatever the priority.
func (p Policy) Same(other Policy) bool {
	return p.Family == other.Family && p.Mark == other.Mark && p.mask() == other.mask() && p.Table == other.Table
}

// For returns the Want of a redirect.Routing.
func For(r redirect.Routing) Want {
	w := Want{PassthroughV6: r.PassthroughV6}
	for _, f := range r.MarkFamilies {
		w.Policy = append(w.Policy, Policy{Family: f, Mark: r.Mark, Table: r.Table, Mask: r.Mask, Priority: r.Priority})
	}
	return w
}

// Apply sets up w, one object of each kind. It keeps an existing rule of another priority if that precedes the main table,
// because a later rule has no effect, and removes duplicates.
//
// Apply adds a policy's rule after its route, so no marked packet is looked up in an empty table. It continues after a failure
// for one family or kind; the error names all failures.
func Apply(w Want) error {
	return w.each(addPassthrough, func(p Policy) error {
		if err := p.addRoute(); err != nil {
			return err
		}
		return p.addRule()
	})
}

// Remove removes the objects of w, including duplicates, in reverse order. A missing object is no error.
func Remove(w Want) error {
	return w.each(removePassthrough, func(p Policy) error {
		if err := p.removeRules(); err != nil {
			return err
		}
		return p.removeRoutes()
	})
}

// Check returns the differences of the namespace from the state that Apply sets up, one sentence each. Apply cannot correct a loopback
// device that is not named lo.
func Check(w Want) ([]string, error) {
	missing, err := checkLoopback()
	if err != nil {
		return nil, err
	}
	check := func(found []string, err error) error {
		missing = append(missing, found...)
		return err
	}
	err = w.each(func() error { return check(checkPassthrough()) }, func(p Policy) error { return check(p.check()) })
	return missing, err
}

// Leftovers finds possible leftovers of an earlier configuration, of any mark and table: policy rules that select only by a
// mark, whole or with the mask, and look up a table that has only "local default dev lo" and that no other kind of rule
// looks up; and ::6/128 on lo. It leaves the priorities out.
//
// Any other TPROXY in the namespace has the same objects (Documentation/networking/tproxy.rst of Linux proposes mark 1 and
// table 100). The caller decides whether they belong to the mesh.
func Leftovers(mask uint32) (Want, error) {
	address, err := findPassthrough()
	if err != nil {
		return Want{}, err
	}
	w := Want{PassthroughV6: address == passthrough}
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		found, err := leftoverPolicies(f, mask)
		if err != nil {
			return Want{}, err
		}
		w.Policy = append(w.Policy, found...)
	}
	return w, nil
}

func leftoverPolicies(f ruleset.Family, mask uint32) ([]Policy, error) {
	rules, err := listRules(f)
	if err != nil {
		return nil, err
	}
	var found []Policy
	foreign := map[uint32]bool{} // tables that another kind of rule looks up
	for _, r := range rules {
		p := Policy{Family: f, Mark: r.mark, Table: r.table}
		if r.mask != wholeMark {
			p.Mask = r.mask
		}
		switch {
		case !r.plain() || p.Mask != 0 && p.Mask != mask || p.validate() != nil:
			foreign[r.table] = true
		case !slices.Contains(found, p):
			found = append(found, p)
		}
	}
	if len(found) == 0 {
		return nil, nil
	}
	routes, err := listRoutes(f, allTables)
	if err != nil {
		return nil, err
	}
	ours := map[uint32]bool{}
	for _, r := range routes {
		if !r.delivers {
			foreign[r.table] = true
		}
		ours[r.table] = true
	}
	return slices.DeleteFunc(found, func(p Policy) bool { return foreign[p.Table] || !ours[p.Table] }), nil
}

// each calls address if w has the passthrough address, then policy for each policy, and joins the errors. For an invalid w it
// calls neither.
func (w Want) each(address func() error, policy func(Policy) error) error {
	var problems []error
	for _, p := range w.Policy {
		problems = append(problems, p.validate())
	}
	if err := errors.Join(problems...); err != nil {
		return err
	}
	if w.PassthroughV6 {
		problems = append(problems, address())
	}
	for _, p := range w.Policy {
		problems = append(problems, policy(p))
	}
	return errors.Join(problems...)
}

// validate refuses a policy that matches unmarked packets, or whose local route would be in one of the kernel's own tables.
func (p Policy) validate() error {
	switch {
	case p.Family != ruleset.IPv4 && p.Family != ruleset.IPv6:
		return fmt.Errorf("checking policy %s: unknown family", p)
	case p.Mark&p.mask() == 0:
		return fmt.Errorf("checking policy %s: every unmarked packet has mark 0", p)
	case p.Table == unix.RT_TABLE_UNSPEC, p.Table >= unix.RT_TABLE_DEFAULT && p.Table <= unix.RT_TABLE_LOCAL:
		return fmt.Errorf("checking policy %s: table %d is the kernel's", p, p.Table)
	}
	return nil
}

// String returns the policy's rule as ip rule prints it.
func (p Policy) String() string {
	mask := ""
	if p.mask() != wholeMark {
		mask = fmt.Sprintf("/%#x", p.Mask)
	}
	return fmt.Sprintf("%q (%s)", fmt.Sprintf("fwmark %#x%s lookup %d", p.Mark, mask, p.Table), p.Family)
}
