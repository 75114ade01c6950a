package rulesettest

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// compiled is a rule of which every word is understood.
type compiled struct {
	step  Step
	conds []condition
	// owner says that the rule asks for the sending socket, which only outgoing packets have.
	owner bool
	act   action
	// jump is the chain that the rule leads to, "" if it has a target.
	jump string
}

// condition is one match. All of a rule's must hold.
type condition func(Packet) bool

// reader takes a rule apart word by word.
type reader struct {
	family ruleset.Family
	table  string
	words  []string
	proto  Proto
	// module is the last one loaded by -m: the options that follow are its.
	module string
	// negated says that the match being read stands behind a "!".
	negated bool
	rule    compiled
}

// compile reads a rule in the spelling of iptables-save.
func compile(family ruleset.Family, step Step) (compiled, error) {
	r := &reader{family: family, table: step.Table, words: strings.Fields(step.Rule.String()), rule: compiled{step: step}}
	for len(r.words) > 0 && r.words[0] != "-j" {
		if err := r.match(); err != nil {
			return compiled{}, fmt.Errorf("reading rule %q of %s/%s: %w", step.Rule.String(), step.Table, step.Chain, err)
		}
	}
	if err := r.target(); err != nil {
		return compiled{}, fmt.Errorf("reading rule %q of %s/%s: %w", step.Rule.String(), step.Table, step.Chain, err)
	}
	return r.rule, nil
}

func (r *reader) next() string {
	if len(r.words) == 0 {
		return ""
	}
	w := r.words[0]
	r.words = r.words[1:]
	return w
}

// option is one match: how its argument is read, and whether we ever negate it.
type option struct {
	read      func(r *reader, text string) (condition, error)
	negatable bool
}

// options are all matches that are understood, by module and option; those of iptables itself have no module.
func options() map[string]option {
	return map[string]option{
		"/-i": {readIn, false},
		"/-o": {readOut, false},
		"/-s": {readSource, false},
		"/-d": {readDestination, true},
		"/-p": {readProto, false},
		"/-m": {readModule, false},

		"tcp/--dport":         {readDport, true},
		"tcp/--tcp-flags":     {readFlags, false},
		"udp/--dport":         {readDport, false},
		"udp/--sport":         {readSport, false},
		"multiport/--dports":  {readDports, true},
		"owner/--uid-owner":   {readUID, true},
		"owner/--gid-owner":   {readGID, true},
		"mark/--mark":         {readMark, true},
		"connmark/--mark":     {readConnmark, false},
		"conntrack/--ctstate": {readState, false},
	}
}

func (r *reader) match() error {
	word := r.next()
	r.negated = word == "!"
	if r.negated {
		word = r.next()
	}
	module := ""
	if strings.HasPrefix(word, "--") {
		module = r.module
	}
	opt, ok := options()[module+"/"+word]
	switch {
	case !ok && module == "":
		return fmt.Errorf("match %q is not known here", word)
	case !ok:
		return fmt.Errorf("match %q of module %q is not known here", word, module)
	case r.negated && !opt.negatable:
		return fmt.Errorf("negated match %q is not known here", word)
	}
	cond, err := opt.read(r, r.next())
	if err != nil {
		return fmt.Errorf("match %q: %w", word, err)
	}
	if r.negated {
		positive := cond
		cond = func(p Packet) bool { return !positive(p) }
	}
	r.rule.conds = append(r.rule.conds, cond)
	return nil
}

func readIn(r *reader, text string) (condition, error) {
	if slices.Contains([]string{"OUTPUT", "POSTROUTING"}, r.rule.step.Chain) {
		return nil, fmt.Errorf("iptables refuses it in chain %s", r.rule.step.Chain)
	}
	return func(p Packet) bool { return p.In == text }, interfaceName(text)
}

func readOut(r *reader, text string) (condition, error) {
	if slices.Contains([]string{"INPUT", "PREROUTING"}, r.rule.step.Chain) {
		return nil, fmt.Errorf("iptables refuses it in chain %s", r.rule.step.Chain)
	}
	return func(p Packet) bool { return p.Out == text }, interfaceName(text)
}

func interfaceName(text string) error {
	if text == "" || strings.ContainsAny(text, "+/\"") || len(text) > 15 {
		return fmt.Errorf("%q is not the name of one interface", text)
	}
	return nil
}

func readSource(r *reader, text string) (condition, error) {
	network, err := r.network(text)
	return func(p Packet) bool { return network.Contains(p.Src) }, err
}

func readDestination(r *reader, text string) (condition, error) {
	network, err := r.network(text)
	return func(p Packet) bool { return network.Contains(p.Dst) }, err
}

func (r *reader) network(text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return p, err
	}
	if p.Addr().Is4() != (r.family == ruleset.IPv4) {
		return p, fmt.Errorf("%s is not %s", text, r.family)
	}
	if p != p.Masked() {
		return p, fmt.Errorf("%s has host bits, which iptables-save never prints", text)
	}
	if p.Bits() == 0 && !r.negated {
		return p, fmt.Errorf("%s is everything, which iptables-save prints behind a ! only", text)
	}
	return p, nil
}

func readProto(r *reader, text string) (condition, error) {
	r.proto = Proto(text)
	if r.proto != TCP && r.proto != UDP {
		return nil, fmt.Errorf("protocol %q is not known here", text)
	}
	return func(p Packet) bool { return p.Proto == Proto(text) }, nil
}

func readModule(r *reader, text string) (condition, error) {
	r.module = text
	switch text {
	case "tcp", "udp":
		if r.proto != Proto(text) {
			return nil, fmt.Errorf("module %q needs -p %s before it", text, text)
		}
	case "multiport":
		if r.proto == "" {
			return nil, fmt.Errorf("module %q needs -p before it", text)
		}
	case "conntrack", "connmark":
		if r.table == "raw" {
			return nil, fmt.Errorf("module %q sees nothing in table raw, which comes before conntrack", text)
		}
	case "owner", "mark":
	default:
		return nil, fmt.Errorf("module %q is not known here", text)
	}
	return func(Packet) bool { return true }, nil
}

func readDport(_ *reader, text string) (condition, error) {
	port, err := readPort(text)
	return func(p Packet) bool { return p.Dport == port }, err
}

func readSport(_ *reader, text string) (condition, error) {
	port, err := readPort(text)
	return func(p Packet) bool { return p.Sport == port }, err
}

func readDports(_ *reader, text string) (condition, error) {
	var ports []uint16
	for item := range strings.SplitSeq(text, ",") {
		port, err := readPort(item)
		if err != nil {
			return nil, err
		}
		ports = append(ports, port)
	}
	if len(ports) > 15 { // XT_MULTI_PORTS, include/uapi/linux/netfilter/xt_multiport.h
		return nil, fmt.Errorf("lists %d ports, iptables takes 15", len(ports))
	}
	return func(p Packet) bool { return slices.Contains(ports, p.Dport) }, nil
}

// readFlags knows resets only: the flag looked at, and the flag that must be set.
func readFlags(r *reader, mask string) (condition, error) {
	if set := r.next(); mask != "RST" || set != "RST" {
		return nil, fmt.Errorf("flags %q %q are not known here", mask, set)
	}
	return func(p Packet) bool { return p.RST }, nil
}

func readPort(text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || strconv.FormatUint(n, 10) != text {
		return 0, fmt.Errorf("%q is not a port as iptables-save prints it", text)
	}
	return uint16(n), nil
}

func readUID(r *reader, text string) (condition, error) {
	return r.owner(text, func(p Packet) uint32 { return p.UID })
}

func readGID(r *reader, text string) (condition, error) {
	return r.owner(text, func(p Packet) uint32 { return p.GID })
}

// owner matches nobody if there is no socket, so its negation matches then (net/netfilter/xt_owner.c).
func (r *reader) owner(text string, id func(Packet) uint32) (condition, error) {
	if slices.Contains([]string{"INPUT", "PREROUTING"}, r.rule.step.Chain) {
		return nil, fmt.Errorf("iptables refuses it in chain %s", r.rule.step.Chain)
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return nil, fmt.Errorf("%q is not an id", text)
	}
	r.rule.owner = true
	return func(p Packet) bool { return !p.NoSocket && uint64(id(p)) == n }, nil
}

func readMark(_ *reader, text string) (condition, error) {
	n, err := readHex(text)
	return func(p Packet) bool { return p.Mark == n }, err
}

func readConnmark(_ *reader, text string) (condition, error) {
	n, err := readHex(text)
	return func(p Packet) bool { return p.Connmark == n }, err
}

func readHex(text string) (uint32, error) {
	n, err := strconv.ParseUint(strings.TrimPrefix(text, "0x"), 16, 32)
	if err != nil || fmt.Sprintf("0x%x", n) != text {
		return 0, fmt.Errorf("%q is not a mark as iptables-save prints it", text)
	}
	return uint32(n), nil
}

func readState(_ *reader, text string) (condition, error) {
	states := strings.Split(text, ",")
	for _, s := range states {
		if !slices.Contains([]State{New, Established, Related, Invalid}, State(s)) {
			return nil, fmt.Errorf("state %q is not known here", s)
		}
	}
	return func(p Packet) bool { return slices.Contains(states, string(p.state())) }, nil
}

func (p Packet) state() State {
	if p.State == "" {
		return New
	}
	return p.State
}
