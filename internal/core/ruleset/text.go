package ruleset

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Read returns the rule of a line of iptables-save, without the name of its chain. It keeps the text byte for byte. An unknown match
// or target becomes an Other, so that a Rule never means less than its text.
func Read(text string) Rule {
	r := reader{rule: Rule{text: text}}
	r.words, _ = words(text)
	for len(r.words) > 0 && r.rule.Target == nil {
		r.option()
	}
	return r.rule
}

// words splits a line, and reports whether it ends within quotes. A text in quotes is one word, without its quotes; the text
// after "--comment" is always a word.
func words(text string) (all []string, inside bool) {
	if !strings.ContainsAny(text, `"\`) {
		return strings.Fields(text), false
	}
	for text = strings.TrimLeft(text, " "); text != ""; text = strings.TrimLeft(text, " ") {
		var b strings.Builder
		i := 0
		for ; i < len(text) && (inside || text[i] != ' '); i++ {
			switch {
			case text[i] == '\\' && inside && i+1 < len(text):
				i++
				b.WriteByte(text[i])
			case text[i] == '"':
				inside = !inside
			default:
				b.WriteByte(text[i])
			}
		}
		all = append(all, b.String())
		text = text[i:]
	}
	return all, inside
}

// reader reads the words of a rule.
type reader struct {
	words []string
	rule  Rule
	// module is the match whose options follow, "" if unknown.
	module   string
	protocol uint8
}

// option reads one option with its values.
func (r *reader) option() {
	not := r.words[0] == "!"
	if not && len(r.words) > 1 {
		r.words = r.words[1:]
	}
	name, values := r.words[0], r.values()
	value := strings.Join(r.words[1:1+values], " ")
	if (name == "-j" || name == "-g") && values > 0 {
		r.rule.Target = target(name == "-g", r.words[1], r.words[2:])
		return
	}
	r.words = r.words[1+values:]
	if name == "-m" && (slices.Contains(withPorts, value) || slices.Contains(modules, value) || slices.Contains(AbsentModules(), value)) {
		r.module = value
		return
	}
	m := r.match(name, value, not)
	if m == nil {
		m = Other{sign("! ", not) + strings.TrimSpace(name+" "+value)}
	}
	if _, always := m.(Comment); always && not {
		m = Other{"! --comment"}
	}
	r.rule.Matches = append(r.rule.Matches, m)
	if name == "-m" { // its options may have the names of another match's options
		r.module = ""
	}
}

// values returns the number of words after the first one that belong to it.
func (r *reader) values() int {
	if r.words[0] == "--comment" && len(r.words) > 1 { // its value may look like anything
		return 1
	}
	n := 0
	for n+1 < len(r.words) && r.words[n+1] != "!" && !strings.HasPrefix(r.words[n+1], "-") {
		n++
	}
	return n
}

// withPorts are the protocols whose matches have ports.
var withPorts = []string{"tcp", "udp", "sctp", "dccp", "udplite"} //nolint:gochecknoglobals // a constant table

// modules are the other matches that match only by their options.
var modules = []string{ //nolint:gochecknoglobals // a constant table
	"multiport", "owner", "mark", "connmark", "conntrack", "state", "addrtype", "iprange", "comment",
}

// AbsentModules returns the iptables matches on parts that the packets of a walk never have, see [Absent].
func AbsentModules() []string {
	return []string{"rt", "frag", "hbh", "dst", "mh", "icmp", "icmp6", "ah", "esp"}
}

// match reads an option; nil if unknown.
func (r *reader) match(name, value string, not bool) Match {
	switch name {
	case "-i", "-o":
		return Interface{value, name == "-o", not}
	case "-s", "-d":
		if p, err := netip.ParsePrefix(value); err == nil {
			return Network{p, name == "-s", not}
		}
		return nil
	case "-p":
		return r.ofProtocol(value, not)
	}
	if slices.Contains(AbsentModules(), r.module) || name == "-f" {
		text := strings.TrimSpace("-m " + r.module + " " + name + " " + value)
		if not {
			return Other{"! " + text}
		}
		return Absent{text}
	}
	return r.extension(name, value, not)
}

func (r *reader) ofProtocol(name string, not bool) Match {
	number, known := protocolNumber(name)
	if !known {
		return nil
	}
	if !not {
		r.protocol = number
	}
	return Protocol{number, not}
}

// extension reads an option of a match; nil if unknown.
func (r *reader) extension(name, value string, not bool) (m Match) {
	switch r.module + " " + name {
	case "mark --mark", "connmark --mark":
		if v, m, ok := masked(value); ok {
			return Mark{v, m, r.module == "connmark", not}
		}
	case "multiport --sports", "multiport --dports", "multiport --ports":
		if list, ok := portRanges(value); ok {
			side := map[string]Side{"--dports": DestinationPort, "--sports": SourcePort, "--ports": EitherPort}[name]
			return AnyPort{r.protocol, list, side, not}
		}
	case "tcp --tcp-flags":
		return tcpFlags(value, not)
	case "owner --uid-owner", "owner --gid-owner":
		if first, last, ok := idRange(value); ok {
			return Owner{first, last, name == "--gid-owner", not}
		}
	case "iprange --src-range", "iprange --dst-range":
		if first, last, _, ok := bounds(value, netip.ParseAddr); ok {
			return Addresses{first, last, name == "--src-range", not}
		}
	case "addrtype --src-type", "addrtype --dst-type":
		if types, ok := bitsOf(addressTypes, value); ok {
			return AddressType{types, name == "--src-type", not}
		}
	case "comment --comment":
		return Comment{value}
	case "owner --socket-exists":
		m = SocketExists{}
	case "conntrack --ctstate", "state --state":
		if bits, ok := bitsOf(stateNames, value); ok {
			m = States(bits) //nolint:gosec // seven names
		}
	default:
		return r.port(name, value, not)
	}
	if m != nil && not {
		return Not{m}
	}
	return m
}

func (r *reader) port(name, value string, not bool) Match {
	if p, ok := portRange(value); ok && slices.Contains(withPorts, r.module) && (name == "--sport" || name == "--dport") {
		return Port{r.protocol, p, name == "--sport", not}
	}
	return nil
}

// protocolNumber is the reverse of protocolName. "all" is 0.
func protocolNumber(name string) (uint8, bool) {
	for number, n := range protocolNames {
		if n == name {
			return number, true
		}
	}
	n, err := strconv.ParseUint(name, 10, 8)
	return uint8(n), err == nil
}

// bounds reads "FIRST-LAST" or one value.
func bounds[T any](text string, parse func(string) (T, error)) (first, last T, ranged, ok bool) {
	from, to, ranged := strings.Cut(text, "-")
	if !ranged {
		to = from
	}
	first, err := parse(from)
	last, err2 := parse(to)
	return first, last, ranged, err == nil && err2 == nil
}

// decimal returns a parser of numbers with the given bits.
func decimal(bits int) func(string) (uint64, error) {
	return func(text string) (uint64, error) { return strconv.ParseUint(text, 10, bits) }
}

// portRange reads a port, or a range of ports of either dialect.
func portRange(text string) (PortRange, bool) {
	first, last, _, ok := bounds(strings.Replace(text, ":", "-", 1), decimal(16))
	return PortRange{uint16(first), uint16(last)}, ok //nolint:gosec // 16 bits
}

func portRanges(text string) (list []PortRange, ok bool) {
	for one := range strings.SplitSeq(text, ",") {
		p, ok := portRange(one)
		if !ok {
			return nil, false
		}
		list = append(list, p)
	}
	return list, true
}

func idRange(text string) (first, last uint32, ok bool) {
	a, b, ranged, ok := bounds(text, decimal(32))
	if !ranged {
		b = 0
	}
	return uint32(a), uint32(b), ok //nolint:gosec // 32 bits
}

func tcpFlags(text string, not bool) Match {
	mask, set, _ := strings.Cut(text, " ")
	m, ok := flagBits(mask)
	s, ok2 := flagBits(set)
	if !ok || !ok2 {
		return nil
	}
	return TCPFlags{m, s, not}
}

func flagBits(text string) (uint8, bool) {
	if text == "NONE" {
		return 0, true
	}
	bits, ok := bitsOf(tcpFlagNames, text)
	return uint8(bits), ok //nolint:gosec // eight names
}

// masked reads a value with a mask, "V/M" or "V". A mask of all bits is 0.
func masked(text string) (value, bits uint32, ok bool) {
	v, m, has := strings.Cut(text, "/")
	if bits, ok = 0, true; has {
		bits, ok = mask(m)
	}
	n, err := strconv.ParseUint(v, 0, 32)
	return uint32(n), bits, ok && err == nil
}

// target reads the target behind -j, or behind -g.
func target(goes bool, name string, options []string) Target {
	text := pick("-g ", "-j ", goes) + strings.Join(append([]string{name}, options...), " ")
	value := func(option string) string {
		if i := slices.Index(options, option); i >= 0 && i+1 < len(options) {
			return options[i+1]
		}
		return ""
	}
	switch {
	case goes:
		return Jump{name, true}
	case NeutralTarget(name):
		return Neutral{text, name == "TEE"}
	}
	if t := knownTarget(text, name, options, value); t != nil {
		return t
	}
	if len(options) == 0 && !slices.Contains(otherTargets, name) {
		return Jump{name, false}
	}
	return Other{text}
}

// otherTargets are targets with an unknown effect. Any other name without options is a chain.
var otherTargets = []string{ //nolint:gochecknoglobals // a constant table
	"NFQUEUE", "QUEUE", "SYNPROXY", "NETMAP", "BALANCE", "CLUSTERIP", "DNPT", "SNPT", "RAWDNAT", "RAWSNAT", "MARK", "CONNMARK", "CT", "TPROXY",
}

// knownTarget returns a target with a known meaning, or nil.
func knownTarget(text, name string, options []string, value func(string) string) Target {
	switch name {
	case string(Accept), string(Drop), string(Return):
		return Verdict(name)
	case "REDIRECT":
		return redirectTo(text, value("--to-ports"), len(options) <= 2)
	case "DNAT":
		return translation(text, value("--to-destination"))
	case "SNAT", "MASQUERADE":
		return NAT{Source: true, Text: text, Range: true}
	case "MARK":
		if v, m, ok := masked(value("--set-xmark")); ok {
			return SetMark{v, m, false}
		}
	case "CONNMARK":
		return connMark(options, value)
	case "NOTRACK":
		return NoTrack{}
	case "CT":
		return track(text, options, value("--zone"))
	case "TPROXY":
		return handOver(value)
	case "REJECT":
		return Reject(value("--reject-with"))
	}
	return nil
}

// handOver reads the options of TPROXY.
func handOver(value func(string) string) Target {
	port, ok := portRange(value("--on-port"))
	mark, mask, ok2 := masked(value("--tproxy-mark"))
	on, _ := netip.ParseAddr(value("--on-ip"))
	if ok && ok2 && (!on.IsValid() || on.IsUnspecified()) {
		return TProxy{Family: FamilyOf(on), Port: port.First, Mark: mark, Mask: mask}
	}
	return nil
}

func redirectTo(text, ports string, plain bool) Target {
	p, ok := portRange(ports)
	switch {
	case ok && plain && p.First == p.Last:
		return RedirectTo(p.First)
	case ports != "" && !ok:
		return Other{text}
	}
	return NAT{Text: text, Local: true, Port: p.First, Range: p.First != p.Last}
}

// translation reads ADDRESS, ADDRESS:PORT, :PORT, and ranges of these.
func translation(text, to string) Target {
	n := NAT{Text: text}
	if a, err := netip.ParseAddr(strings.Trim(to, "[]")); err == nil {
		n.To = a
		return n
	}
	if p, err := netip.ParseAddrPort(to); err == nil {
		n.To, n.Port = p.Addr(), p.Port()
		return n
	}
	if ports, ok := portRange(strings.TrimPrefix(to, ":")); ok && strings.HasPrefix(to, ":") {
		n.Port, n.Range = ports.First, ports.First != ports.Last
		return n
	}
	n.Range = true
	return n
}

func connMark(options []string, value func(string) string) Target {
	optional := func(text string) (uint32, bool) {
		if text == "" {
			return 0, true
		}
		return mask(text)
	}
	packet, ok := optional(value("--nfmask"))
	connection, ok2 := optional(value("--ctmask"))
	v, m, sets := masked(value("--set-xmark"))
	switch restore := slices.Contains(options, "--restore-mark"); {
	case !ok || !ok2:
	case restore || slices.Contains(options, "--save-mark"):
		return CopyMark{restore, packet, connection}
	case sets:
		return SetMark{v, m, true}
	}
	return Other{"-j CONNMARK " + strings.Join(options, " ")}
}

// mask reads a mask; it returns 0 for all bits.
func mask(text string) (uint32, bool) {
	n, err := strconv.ParseUint(text, 0, 32)
	switch n {
	case 1<<32 - 1:
		n = 0
	case 0:
		return 0, false // an empty mask compares and sets nothing
	}
	return uint32(n), err == nil
}

func track(text string, options []string, zone string) Target {
	switch number, err := strconv.ParseUint(zone, 0, 16); {
	case slices.Contains(options, "--notrack"):
		return NoTrack{}
	case zone == "":
		return Neutral{Text: text} // a helper, a timeout, events
	case err == nil && len(options) == 2 && number != 0:
		return Zone(number)
	}
	return Other{text}
}
