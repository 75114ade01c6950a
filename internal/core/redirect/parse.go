package redirect

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// Field is one setting of a Spec that a user can write.
type Field uint8

// The fields, in the order of checks and reports.
const (
	FieldMode Field = iota
	FieldOutbound
	FieldOutboundExclude
	FieldInboundExclude
	FieldInbound
	FieldOutboundPortsExclude
	FieldOutboundPorts
	// Each of the following adds ports and port ranges to the list of the field in its name.
	FieldMoreInboundExclude
	FieldMoreInbound
	FieldMoreOutboundPortsExclude
	FieldMoreOutboundPorts
	FieldExcludeInterfaces
	FieldRerouteInterfaces
	FieldOutboundPort
	FieldInboundPort
	FieldTunnelPort
	FieldUIDs
	FieldGIDs
	FieldMark
	FieldTable
	FieldOwnerGroups
	FieldOwnerGroupsExclude
	FieldLoopback
	FieldSecondFamily
)

// Value is the text of a field and where it was written, for messages: `annotation "…"`, `flag "--…"`.
type Value struct{ Source, Text string }

// Values holds the fields that the user wrote. An absent field keeps its default and is not checked.
type Values map[Field]Value

// FieldError is one bad value.
type FieldError struct {
	Field
	Value
	// Problem describes the error and the accepted form.
	Problem string
}

// Error names the source of the value, the value and the problem. It truncates a long value.
func (e *FieldError) Error() string {
	return fmt.Sprintf("%s: value %s: %s", e.Source, printable.Quote(e.Text, maxShown), e.Problem)
}

var errUnknownField = errors.New("is not a known field")

// Bounds of an untrusted text in an error: bytes of the value, bytes of one entry, and the number of bad entries.
const (
	maxShown      = 128
	maxShownEntry = 64
	maxProblems   = 5
)

// Dialect is the syntax of lists.
type Dialect struct {
	// Strict is the dialect of Istio's annotations: an empty item in a list is an error, and so is a port range. Flags
	// and environment variables ignore empty items and accept ranges.
	Strict bool
	// GroupID resolves a group name to its number. If GroupID is nil, names are errors.
	GroupID func(name string) (uint32, error)
}

// Bounds of the number of entries in a list. An entry makes up to four rules in each family, a virtual interface one for
// each captured network. The bounds are far above normal use, and low enough to program a pod at all bounds within a
// second and 100 MB (docs/parity.md); the reference has no such bounds.
const (
	maxEntries  = 1000 // of ports, networks, groups and identities
	maxExcluded = 100  // interfaces
	maxRerouted = 8    // interfaces of virtual machines
)

// OwnPrefix begins the annotations that Istio lacks: each adds ports and port ranges to Istio's annotation of the same name.
const OwnPrefix = "cni.istio.io/"

// Limits of the kernel and of the reference.
const (
	maxGroups        = 49        // five words each in one rule; iptables-restore reads 255 (xshared.h, MAX_ARGC; the reference allows 64, and fails)
	maxInterfaceName = 15        // IFNAMSIZ - 1, include/uapi/linux/if.h
	lastID           = 1<<32 - 2 // -1 is "no id" to the kernel, include/linux/uidgid.h
	statusPort       = 15020     // the sidecar agent's merged status and metrics
	lastTable        = 1<<31 - 1 // iproute2 and the reference read it as a signed number
	mainTables       = 253       // 253 default, 254 main, 255 local, include/uapi/linux/rtnetlink.h
	wildcard         = "*"       // all ports, all networks, all groups
)

var defaultLoopback = netip.MustParsePrefix("127.0.0.1/32") //nolint:gochecknoglobals // a constant

// AlwaysExcluded returns the inbound ports of the sidecar itself: agent status, health, Prometheus. They are added to
// every list of excluded inbound ports of a pod.
func AlwaysExcluded() []ruleset.PortRange { return ruleset.PortList(statusPort, 15021, 15090) }

// Parse reads the fields over base, which provides the values of absent fields. Parse reports all problems
// together, each as a *FieldError, and then returns base.
func Parse(base Spec, values Values, d Dialect) (Spec, error) {
	s := base
	readers := s.readers(d)
	var errs []error
	for _, field := range slices.Sorted(maps.Keys(values)) {
		v, err := values[field], errUnknownField
		if read, known := readers[field]; known {
			err = read(v.Text)
		}
		if err != nil {
			errs = append(errs, &FieldError{Field: field, Value: v, Problem: err.Error()})
		}
	}
	if s.Inbound.All { // the ports that FieldMoreInbound adds have no effect
		s.Inbound.List = nil
	}
	errs = append(errs, s.conflicts(values)...)
	if len(errs) > 0 {
		return base, errors.Join(errs...)
	}
	return s, nil
}

// readers returns the functions that read the fields.
func (s *Spec) readers(d Dialect) map[Field]func(text string) error {
	return map[Field]func(string) error{
		FieldMode:                     into(&s.Mode, oneOf("want REDIRECT or TPROXY, in capitals", Redirect, TPROXY)),
		FieldOutbound:                 into(&s.Outbound, selection(d.networkList)),
		FieldOutboundExclude:          into(&s.OutboundExclude, d.networkList),
		FieldInboundExclude:           into(&s.InboundExclude, d.excludedPorts),
		FieldInbound:                  into(&s.Inbound, trimmed(selection(d.portList))),
		FieldOutboundPortsExclude:     into(&s.OutboundPortsExclude, d.portList),
		FieldOutboundPorts:            into(&s.OutboundPorts, d.portList),
		FieldMoreInboundExclude:       d.morePorts(&s.InboundExclude),
		FieldMoreInbound:              d.morePorts(&s.Inbound.List),
		FieldMoreOutboundPortsExclude: d.morePorts(&s.OutboundPortsExclude),
		FieldMoreOutboundPorts:        d.morePorts(&s.OutboundPorts),
		FieldExcludeInterfaces:        into(&s.ExcludeInterfaces, d.interfaces(maxExcluded)),
		FieldRerouteInterfaces:        into(&s.RerouteInterfaces, d.interfaces(maxRerouted)),
		FieldOutboundPort:             into(&s.OutboundPort, listener),
		FieldInboundPort:              into(&s.InboundPort, listener),
		FieldTunnelPort:               into(&s.TunnelPort, listener),
		FieldUIDs:                     into(&s.UIDs, d.ids),
		FieldGIDs:                     into(&s.GIDs, d.ids),
		FieldMark:                     into(&s.Mark, parseMark),
		FieldTable:                    into(&s.Table, parseTable),
		FieldOwnerGroups:              into(&s.OwnerGroups, trimmed(selection(d.groups(maxGroups)))),
		FieldOwnerGroupsExclude:       into(&s.OwnerGroupsExclude, d.groups(maxEntries)),
		FieldLoopback:                 into(&s.Loopback, parseLoopback),
		FieldSecondFamily:             into(&s.SecondFamily, ParseSecondFamily),
	}
}

// into returns a function that reads a part of a Spec.
func into[T any](part *T, read func(string) (T, error)) func(string) error {
	return func(text string) (err error) {
		*part, err = read(text)
		return err
	}
}

// conflicts finds values that are valid alone but not together.
func (s *Spec) conflicts(values Values) []error {
	var errs []error
	bad := func(f Field, format string, args ...any) {
		errs = append(errs, &FieldError{Field: f, Value: values[f], Problem: fmt.Sprintf(format, args...)})
	}
	if s.InboundPort == s.OutboundPort && s.InboundPort != 0 {
		const problem = "is the %s port as well; the proxy needs one listener for each direction"
		if _, set := values[FieldInboundPort]; set {
			bad(FieldInboundPort, problem, "outbound")
		} else if _, set := values[FieldOutboundPort]; set {
			bad(FieldOutboundPort, problem, "inbound")
		}
	}
	// The reference accepts a wildcard among the excluded ports if it does not use the list.
	if v, set := values[FieldInboundExclude]; set && strings.TrimSpace(v.Text) == wildcard && s.Inbound.All {
		bad(FieldInboundExclude, `excludes every port while "*" is captured; to capture no inbound port leave the included ports empty`)
	}
	return errs
}

// oneOf returns a function that reads one of the values.
func oneOf[T fmt.Stringer](problem string, all ...T) func(string) (T, error) {
	return func(text string) (v T, err error) {
		i := slices.IndexFunc(all, func(one T) bool { return one.String() == text })
		if i < 0 {
			return v, errors.New(problem)
		}
		return all[i], nil
	}
}

// ParseSecondFamily reads bypass, capture or reject.
func ParseSecondFamily(text string) (SecondFamily, error) {
	return oneOf("want bypass, capture or reject", Bypass, Capture, Reject)(text)
}

// list reads at most that many entries with a function, and reports the bad ones. Blank text is the empty list.
// list only counts the entries beyond the bound.
func list[T any](d Dialect, text string, most int, entry func(string) (T, error)) ([]T, error) {
	if strings.TrimSpace(text) == "" {
		return nil, nil
	}
	var out []T
	var problems []string
	place, entries := 0, 0
	for item := range strings.SplitSeq(text, ",") {
		place++
		item = strings.TrimSpace(item)
		switch {
		case item == "" && d.Strict:
			return nil, fmt.Errorf("item %d of the list is empty", place)
		case item == "":
			continue
		}
		if entries++; entries > most {
			continue
		}
		v, err := entry(item)
		if err != nil {
			problems = append(problems, printable.Quote(item, maxShownEntry)+" "+err.Error())
		}
		out = append(out, v)
	}
	if entries > most {
		return nil, fmt.Errorf("lists %d entries, more than %d", entries, most)
	}
	if n := len(problems) - maxProblems; n > 0 {
		problems = append(problems[:maxProblems], fmt.Sprintf("and %d more", n))
	}
	if len(problems) > 0 {
		return nil, errors.New(strings.Join(problems, "; "))
	}
	return out, nil
}

func parsePort(text string) (uint16, error) {
	if text == wildcard {
		return 0, fmt.Errorf("is not allowed here: want a list of ports")
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return 0, fmt.Errorf("is not a port: want a decimal number from 0 to 65535")
	}
	return uint16(n), nil
}

// listener parses a port for a listener.
func listener(text string) (uint16, error) {
	n, err := parsePort(text)
	if err == nil && n == 0 {
		err = fmt.Errorf("is not a port that can be listened on")
	}
	return n, err
}

// parsePorts reads a port or a range FIRST-LAST.
func parsePorts(text string) (ruleset.PortRange, error) {
	from, to, ranged := strings.Cut(text, "-")
	if !ranged || from == "" {
		n, err := parsePort(text)
		return ruleset.OnePort(n), err
	}
	first, err := strconv.ParseUint(from, 10, 16)
	last, err2 := strconv.ParseUint(to, 10, 16)
	if err != nil || err2 != nil || first == 0 || last < first {
		return ruleset.PortRange{}, fmt.Errorf("is not a range of ports: want FIRST-LAST, like 8000-8100, from 1 to 65535")
	}
	return ruleset.PortRange{First: uint16(first), Last: uint16(last)}, nil
}

func (d Dialect) portList(text string) ([]ruleset.PortRange, error) {
	return list(d, text, maxEntries, func(item string) (ruleset.PortRange, error) {
		ports, err := parsePorts(item)
		if err == nil && d.Strict && strings.Contains(item, "-") {
			err = fmt.Errorf("is a range of ports, which Istio's annotations do not take: put it into the annotation %sNAME of the same NAME", OwnPrefix)
		}
		return ports, err
	})
}

// morePorts returns a function that adds a list to ports. The list can have ranges in both dialects.
func (d Dialect) morePorts(ports *[]ruleset.PortRange) func(string) error {
	return func(text string) error {
		more, err := list(d, text, maxEntries, parsePorts)
		if *ports = slices.Concat(*ports, more); err == nil && len(*ports) > maxEntries {
			err = fmt.Errorf("extends a list to %d entries, more than %d", len(*ports), maxEntries)
		}
		return err
	}
}

// selection returns a function that reads a lone wildcard, or a list.
func selection[T any](read func(string) ([]T, error)) func(string) (Selection[T], error) {
	return func(text string) (s Selection[T], err error) {
		if s.All = text == wildcard; !s.All {
			s.List, err = read(text)
		}
		return s, err
	}
}

// trimmed returns a function that ignores blanks around the text.
func trimmed[T any](read func(string) (T, error)) func(string) (T, error) {
	return func(text string) (T, error) { return read(strings.TrimSpace(text)) }
}

// excludedPorts also accepts a lone wildcard, as the reference does; conflicts decides later whether it is valid.
func (d Dialect) excludedPorts(text string) ([]ruleset.PortRange, error) {
	if strings.TrimSpace(text) == wildcard {
		return nil, nil
	}
	return d.portList(text)
}

// networkList reads address/prefix items. The reference does not trim annotations here, so a blank makes an item invalid.
func (d Dialect) networkList(text string) ([]netip.Prefix, error) {
	if text == "" {
		return nil, nil
	}
	if d.Strict && strings.ContainsAny(text, " \t\r\n") {
		return nil, fmt.Errorf("contains white space: want address/prefix items separated by commas only")
	}
	return list(d, text, maxEntries, func(item string) (netip.Prefix, error) {
		if item == wildcard {
			return netip.Prefix{}, fmt.Errorf("is not allowed here: want a list of networks")
		}
		p, err := netip.ParsePrefix(item)
		if err != nil {
			return netip.Prefix{}, fmt.Errorf("is not a network: want address/prefix, like 10.0.0.0/8 or 10.1.2.3/32")
		}
		return p, nil
	})
}

// Interfaces reads the names of virtual machines' interfaces, separated by commas. It ignores empty items.
func Interfaces(text string) ([]string, error) { return Dialect{}.interfaces(maxRerouted)(text) }

// interfaces reads names that both the kernel and the reference accept.
func (d Dialect) interfaces(most int) func(string) ([]string, error) {
	return func(text string) ([]string, error) { return list(d, text, most, interfaceName) }
}

func interfaceName(name string) (string, error) {
	if len(name) > maxInterfaceName {
		return "", fmt.Errorf("is longer than %d characters", maxInterfaceName)
	}
	for i, r := range name {
		letter := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z'
		if !letter && (i == 0 || !strings.ContainsRune("0123456789_.-", r)) {
			return "", fmt.Errorf("is not an interface name: want a letter, then letters, digits, '_', '.', '-'")
		}
	}
	return name, nil
}

func parseID(text string) (uint32, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil || n > lastID {
		return 0, fmt.Errorf("is not a user or group id: want a decimal number from 0 to %d", uint32(lastID))
	}
	return uint32(n), nil
}

// ids reads the identities of the proxy, at least one: without it the proxy would capture itself.
func (d Dialect) ids(text string) ([]uint32, error) {
	ids, err := list(d, text, maxEntries, parseID)
	if err == nil && len(ids) == 0 {
		err = fmt.Errorf("names no id: the proxy needs at least one, or its own traffic would loop")
	}
	return ids, err
}

func (d Dialect) group(text string) (uint32, error) {
	if id, err := parseID(text); err == nil {
		return id, nil
	}
	number := strings.Trim(text, "0123456789") == "" // right or wrong
	if d.GroupID == nil || text == wildcard || number {
		return 0, fmt.Errorf("is not a group: want a number, or a name known here")
	}
	id, err := d.GroupID(text)
	if err != nil {
		return 0, fmt.Errorf("is not a group known here (%s)", printable.Text(err.Error(), maxShown))
	}
	return id, nil
}

func (d Dialect) groups(most int) func(string) ([]uint32, error) {
	return func(text string) ([]uint32, error) { return list(d, text, most, d.group) }
}

func parseMark(text string) (uint32, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	switch {
	case err != nil:
		return 0, fmt.Errorf("is not a mark: want a decimal number from 1 to 4294967295")
	case n == 0:
		return 0, fmt.Errorf("is the mark of every unmarked packet")
	case n == SelfMark:
		return 0, fmt.Errorf("is the mark of the proxy's calls to its own pod; take another one")
	}
	return uint32(n), nil
}

func parseTable(text string) (uint32, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	switch {
	case err != nil || n == 0 || n > lastTable:
		return 0, fmt.Errorf("is not a routing table: want a decimal number from 1 to %d", lastTable)
	case n >= mainTables && n <= mainTables+2:
		return 0, fmt.Errorf("is one of the kernel's own routing tables (%d to %d)", mainTables, mainTables+2)
	}
	return uint32(n), nil
}

func parseLoopback(text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	if err != nil || !p.Addr().Is4() || !p.Addr().IsLoopback() || p.Bits() < 8 {
		return netip.Prefix{}, fmt.Errorf("want an IPv4 loopback network, like 127.0.0.1/32, of prefix length 8 to 32")
	}
	return p, nil
}
