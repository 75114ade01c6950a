package decode

import (
	"bytes"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Set is a set or a map of nf_tables.
type Set struct {
	// Name is "" for an anonymous set.
	Name string
	// Unknown reports whether the elements were not read.
	Unknown  bool
	elements []element
	// rest is the catch-all element, nil without one.
	rest     *element
	interval bool
	// dynamic reports whether packets add elements, or whether elements expire.
	dynamic bool
}

// element is a range of keys and, in a verdict map, the verdict.
type element struct {
	first, last []byte
	verdict     *nfnetlink.Verdict
}

// maxElements bounds the elements read from a set. A larger set is unknown.
const maxElements = 2048

// maxExpanded bounds the elements in all rules of a table: each rule contains the elements of its sets.
const maxExpanded = 50_000

// NewSet returns a set without elements from the attributes of NFT_MSG_NEWSET.
func NewSet(attributes nfnetlink.Attributes) *Set {
	flags, _ := attributes.Get(unix.NFTA_SET_FLAGS).Uint32()
	s := Set{Name: Name(attributes.Get(unix.NFTA_SET_NAME).Text()), interval: flags&unix.NFT_SET_INTERVAL != 0, dynamic: flags&(unix.NFT_SET_EVAL|unix.NFT_SET_TIMEOUT) != 0}
	if flags&unix.NFT_SET_ANONYMOUS != 0 {
		s.Name = ""
	}
	return &s
}

// Kinds of element attributes that golang.org/x/sys/unix lacks (enum nft_set_elem_attributes), and the flag for the end of an
// interval.
const (
	elementKeyEnd = 10

	elementExpressions = 11
	elementEnds        = 1
	elementAny         = 2
)

// Add adds the elements of NFTA_SET_ELEM_LIST_ELEMENTS.
func (s *Set) Add(elements nfnetlink.Attributes) {
	for e := range elements.All() {
		f, ok := nfnetlink.ReadFields(e.Value)
		flags, _ := f.Number(unix.NFTA_SET_ELEM_FLAGS)
		if !ok || len(s.elements) >= maxElements || conditional(f) {
			s.Unknown = true
			return
		}
		var one element
		verdict, _ := nfnetlink.ReadFields(f.Raw(unix.NFTA_SET_ELEM_DATA))
		if v, is := nfnetlink.ReadData(verdict); is {
			one.verdict = &v
		}
		if flags&elementAny != 0 {
			s.rest = &one
			continue
		}
		key, _ := f.Value(unix.NFTA_SET_ELEM_KEY)
		end, ranged := f.Value(elementKeyEnd)
		key, end = slices.Clone(key), slices.Clone(end) // the buffer is reused
		one.first, one.last = key, key
		switch {
		case ranged:
			one.last = end
		case flags&elementEnds != 0:
			one.first = nil // the key after the last key of an interval
			one.last = key
		}
		s.elements = append(s.elements, one)
	}
	s.Unknown = s.Unknown || elements.Check() != nil
}

// conditional reports whether an element matches only under the condition of its own expressions, such as a limit.
func conditional(f nfnetlink.Fields) bool {
	counts := func(e nfnetlink.Attributes) bool {
		name := e.Get(unix.NFTA_EXPR_NAME).Text()
		return name == "counter" || name == "last"
	}
	if one := f.Raw(unix.NFTA_SET_ELEM_EXPR); one != nil && !counts(one) {
		return true
	}
	for e := range nfnetlink.Attributes(f.Raw(elementExpressions)).All() {
		if !counts(e.Value) {
			return true
		}
	}
	return false
}

// ranges returns the elements with both ends. The kernel lists an interval as two elements: its first key, and the key after its last.
func (s *Set) ranges() []element {
	if !s.interval || slices.ContainsFunc(s.elements, func(e element) bool { return e.first != nil && !bytes.Equal(e.first, e.last) }) {
		return s.elements
	}
	sorted := slices.SortedStableFunc(slices.Values(s.elements), func(a, b element) int {
		if order := bytes.Compare(a.last, b.last); order != 0 {
			return order
		}
		return len(a.first) - len(b.first) // an end sorts first
	})
	var all []element
	for i, e := range sorted {
		if e.first == nil {
			continue
		}
		if e.last = bytes.Repeat([]byte{0xff}, len(e.first)); i+1 < len(sorted) {
			e.last = previousKey(sorted[i+1].last)
		}
		all = append(all, e)
	}
	return all
}

// previousKey returns the key before a key.
func previousKey(key []byte) []byte {
	key = slices.Clone(key)
	for i := range slices.Backward(key) {
		if key[i]--; key[i] != 0xff {
			break
		}
	}
	return key
}

// lookup reads a look-up: in a set, in a map of verdicts, or in a map of values.
func (d *decoder) lookup(f nfnetlink.Fields) {
	d.nft = true
	source, _ := f.Number(unix.NFTA_LOOKUP_SREG)
	flags, _ := f.Number(unix.NFTA_LOOKUP_FLAGS)
	into, maps := f.Number(unix.NFTA_LOOKUP_DREG)
	name := f.Text(unix.NFTA_LOOKUP_SET)
	set := d.table.Sets[name]
	if set == nil && d.table.Sets != nil {
		d.table.Sets[name] = nil // records that the set is missing
	}
	list, of, known := d.alternatives(set, word(source))
	switch value := maps && into != unix.NFT_REG_VERDICT; {
	case value && known: // a packet without an element does not match
		d.put(into, load{}, false)
		d.inSet(list, of, set, false)
	case value:
		d.put(into, load{}, false)
		d.match(d.other("a look-up in the map " + Name(name)))
	case maps && set != nil && !set.Unknown: // its elements may match, even if the looked-up value is unknown
		d.target(ruleset.VerdictMap{Of: of, Name: set.Name, List: list})
	case maps:
		d.target(d.other("a map of verdicts " + Name(name)))
	case !known || flags&^unix.NFT_LOOKUP_F_INV != 0:
		d.match(d.other("a look-up in the set " + Name(name)))
	default:
		d.inSet(list, of, set, flags&unix.NFT_LOOKUP_F_INV != 0)
	}
}

// inSet adds the match of a set. A set of single ports becomes the mesh's port match.
func (d *decoder) inSet(list []ruleset.VerdictOf, of string, set *Set, not bool) {
	var ports []uint16
	m := ruleset.AnyOf{Of: of, Name: set.Name, Not: not, Changes: set.dynamic}
	for _, one := range list {
		m.List = append(m.List, one.Matches)
		if len(one.Matches) != 1 {
			continue
		}
		if p, is := one.Matches[0].(ruleset.Port); is && p.Range.First == p.Range.Last && !p.Source && p.Protocol != 0 {
			ports = append(ports, p.Range.First)
		}
	}
	if len(ports) == 2 && len(list) == 2 && set.Name == "" {
		p := ruleset.AnyPort{Protocol: d.protocol, List: ruleset.PortList(ports...), Not: not}
		d.dropImplied(p)
		d.match(p)
		return
	}
	d.match(m)
}

// alternatives returns the matches of the elements of a set for the keys loaded from a register on, and the name of the looked-up
// value. known is false if the set or the value is unknown.
func (d *decoder) alternatives(set *Set, register uint32) (list []ruleset.VerdictOf, of string, known bool) {
	if set == nil || set.Unknown {
		return nil, "", false
	}
	if d.table.Expanded != nil {
		if *d.table.Expanded += len(set.elements); *d.table.Expanded > maxExpanded {
			return nil, "", false
		}
	}
	known = true
	family, protocol := d.family, d.protocol
	for _, e := range set.ranges() {
		matches := d.element(e, register)
		if known = known && matches != nil; matches == nil {
			matches = []ruleset.Match{ruleset.Other{Text: "an element"}}
		}
		d.family, d.protocol = family, protocol // each element sets its own
		list = append(list, ruleset.VerdictOf{Matches: matches, Target: verdict(e.verdict)})
	}
	if set.rest != nil {
		list = append(list, ruleset.VerdictOf{Target: verdict(set.rest.verdict)})
	}
	if l := d.registers[register]; l != nil {
		of = l.nftName()
	}
	return list, of, known
}

// element returns the matches of an element, nil if they are not known.
func (d *decoder) element(e element, register uint32) (all []ruleset.Match) {
	for first, last := e.first, e.last; len(first) > 0; {
		l := d.registers[register]
		if l == nil || l.length == 0 || len(first) < int(l.length) || len(last) != len(first) {
			return nil
		}
		m := d.condition(*l, false, first[:l.length], last[:l.length])
		if m == nil {
			return nil
		}
		all = append(all, m)
		words := (l.length + 3) / 4
		register += words
		first, last = first[min(len(first), int(words)*4):], last[min(len(last), int(words)*4):]
	}
	return all
}

// nftName returns nft's name of the loaded value.
func (l load) nftName() string {
	switch {
	case l.from == "payload" && l.base == unix.NFT_PAYLOAD_TRANSPORT_HEADER && l.length == 2:
		return map[uint32]string{nfnetlink.SourcePortOffset: "th sport", nfnetlink.DestinationPortOffset: "th dport"}[l.offset]
	case l.from == "payload" && l.base == unix.NFT_PAYLOAD_NETWORK_HEADER:
		return map[uint32]string{12: "ip saddr", 16: "ip daddr", 8: "ip6 saddr", 24: "ip6 daddr"}[l.offset]
	case l.from == "meta":
		return map[uint32]string{
			unix.NFT_META_IIFNAME: "iifname", unix.NFT_META_OIFNAME: "oifname", unix.NFT_META_L4PROTO: "meta l4proto", unix.NFT_META_MARK: "meta mark",
			unix.NFT_META_SKUID: "meta skuid", unix.NFT_META_SKGID: "meta skgid",
		}[l.key]
	case l.from == "ct":
		return "ct"
	}
	return l.name()
}
