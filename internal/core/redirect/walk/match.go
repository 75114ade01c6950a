package walk

import (
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// rule is the meaning of a live rule.
type rule struct {
	// family is the only one that it matches, or Inet.
	family     ruleset.Family
	conditions []condition
	// target is the name behind -j or -g, which goes is set for, and options are the words behind it.
	target       string
	options      []string
	goes, opaque bool
}

// condition is one option of a match. The zero condition is one that is not known.
type condition struct {
	module, option, value string
	not                   bool
}

// unknown stands for an interface that is not known.
const unknown = "?"

// plain are the modules that match whatever has their options; others match by themselves, in ways not known here.
var plain = []string{ //nolint:gochecknoglobals // a constant table
	"tcp", "udp", "multiport", "owner", "mark", "connmark", "conntrack", "state", "addrtype", "comment",
}

// word is one of a rule's text. A comment in quotes is one, and begins like no option.
var word = sync.OnceValue(func() *regexp.Regexp { //nolint:gochecknoglobals // a compiled pattern
	return regexp.MustCompile(`"(\\.|[^"\\])*"?|\S+`)
})

// jump is a rule of which only the expressions are known: those of matches and, at the end, a verdict.
var jump = sync.OnceValue(func() *regexp.Regexp { //nolint:gochecknoglobals // a compiled pattern
	return regexp.MustCompile(`^\[not understood:( (meta|payload|ct|socket|fib|rt|exthdr)( bitwise)*( cmp| range)+| match| limit)* immediate [0-9a-f]+\]`)
})

// parse reads the text of a rule as iptables-save prints it.
func parse(text string) rule {
	var r rule
	if strings.HasPrefix(text, "[") {
		return parseOpaque(text)
	}
	words := strings.Fields(text)
	if strings.Contains(text, `"`) {
		words = word().FindAllString(text, -1)
	}
	module, not := "", false
	for len(words) > 0 {
		name, args := words[0], 0
		for args+1 < len(words) && words[args+1] != "!" && !strings.HasPrefix(words[args+1], "-") {
			args++
		}
		if name == "--comment" && len(words) > 1 { // which may look like anything
			args = 1
		}
		c := condition{module, name, strings.Join(words[1:1+args], " "), not}
		switch {
		case (name == "-j" || name == "-g") && args > 0:
			r.target, r.options, r.goes = words[1], words[2:], name == "-g"
			return r
		case name == "-m" && slices.Contains(plain, c.value):
			module = c.value
		case name != "!":
			r.conditions = append(r.conditions, c)
		}
		not, words = name == "!", words[1+args:]
	}
	return r
}

// parseOpaque reads the text of a rule of which only the expressions are known, and where it jumps to.
func parseOpaque(text string) (r rule) {
	if known := jump().FindString(text); known != "" {
		r = parse(text[len(known):])
	}
	r.opaque, r.conditions = true, []condition{{}}
	return r
}

// number returns an option of the target, "V" or "V/M", and whether it is right; value and mask are 0 without the option.
func (r rule) number(name string) (value, mask uint32, ok bool) {
	i := slices.Index(r.options, name)
	if i < 0 || i+1 >= len(r.options) {
		return 0, 0, i < 0
	}
	return masked(r.options[i+1])
}

// masked reads a value with a mask, "V/M" or "V".
func masked(text string) (value, mask uint32, ok bool) {
	v, m, has := strings.Cut(text, "/")
	if !has {
		m = "0xffffffff"
	}
	a, err := strconv.ParseUint(v, 0, 32)
	b, err2 := strconv.ParseUint(m, 0, 32)
	return uint32(a), uint32(b), err == nil && err2 == nil
}

// judge reports whether the rule matches a packet.
func (r rule) judge(p Packet, f ruleset.Family, hook string) Answer {
	answer := sure(r.family == ruleset.Inet || r.family == f)
	for _, c := range r.conditions {
		a := Unknown
		switch ask, known := options[c.option]; {
		case strings.HasSuffix(c.option, "id-owner") && hook != "output" && hook != "postrouting":
			a = sure(c.not) // no sender: what is negated does not hold either
		case c.option == "--mark" && c.module == "connmark" && !p.connected():
			a = sure(c.not) // no connection: what is negated does not hold either (net/netfilter/xt_connmark.c)
		case c.option == "--mark" && c.module == "connmark":
			a = marked(p.ConnMark, c.value)
		case known:
			a = ask(p, c.value)
		}
		if c.not {
			a = Yes - a
		}
		answer = min(answer, a)
	}
	return answer
}

// options are those of matches that are understood.
var options = map[string]func(p Packet, value string) Answer{ //nolint:gochecknoglobals // a constant table
	"-p": func(p Packet, v string) Answer {
		return sure(ruleset.IPTables("", nil, ruleset.Protocol{Number: p.Protocol}).String() == "-p "+v)
	},
	"-s":              func(p Packet, v string) Answer { return within(p.Src.Addr(), v) },
	"-d":              func(p Packet, v string) Answer { return within(p.Dst.Addr(), v) },
	"-i":              func(p Packet, v string) Answer { return link(p.In, v) },
	"-o":              func(p Packet, v string) Answer { return link(p.Out, v) },
	"--sport":         func(p Packet, v string) Answer { return port(p.Src, v) },
	"--dport":         func(p Packet, v string) Answer { return port(p.Dst, v) },
	"--sports":        func(p Packet, v string) Answer { return port(p.Src, v) },
	"--dports":        func(p Packet, v string) Answer { return port(p.Dst, v) },
	"--ports":         func(p Packet, v string) Answer { return max(port(p.Src, v), port(p.Dst, v)) },
	"--uid-owner":     func(p Packet, v string) Answer { return inRange(p.UID, v) },
	"--gid-owner":     func(p Packet, v string) Answer { return inRange(p.GID, v) },
	"--socket-exists": func(p Packet, _ string) Answer { return sure(p.Outgoing) },
	"--mark":          func(p Packet, v string) Answer { return marked(p.Mark, v) },
	"--ctstate":       state,
	"--state":         state,
	"--tcp-flags":     flags,
	"--dst-type": func(p Packet, v string) Answer {
		if p.Type == "" {
			return Unknown
		}
		return sure(slices.Contains(strings.Split(v, ","), p.Type))
	},
	"--comment": func(Packet, string) Answer { return Yes },
}

func sure(b bool) Answer {
	if b {
		return Yes
	}
	return No
}

// anyOf asks about each item of a list.
func anyOf(list string, is func(string) Answer) Answer {
	answer := No
	for item := range strings.SplitSeq(list, ",") {
		answer = max(answer, is(item))
	}
	return answer
}

func within(a netip.Addr, network string) Answer {
	p, err := netip.ParsePrefix(network)
	if !a.IsValid() || err != nil {
		return Unknown
	}
	return sure(p.Contains(a))
}

func link(name, value string) Answer {
	begin, open := strings.CutSuffix(value, "+")
	if name == unknown {
		return Unknown
	}
	return sure(name == value || open && strings.HasPrefix(name, begin))
}

func port(at netip.AddrPort, list string) Answer {
	if at.Port() == 0 {
		return Unknown
	}
	return anyOf(list, func(item string) Answer { return inRange(uint32(at.Port()), item) })
}

// inRange compares a number with another one, or with the ends of a range.
func inRange(number uint32, text string) Answer {
	first, last, ranged := strings.Cut(strings.Replace(text, "-", ":", 1), ":")
	if !ranged {
		last = first
	}
	low, err := strconv.ParseUint(first, 10, 32)
	high, err2 := strconv.ParseUint(last, 10, 32)
	if err != nil || err2 != nil {
		return Unknown
	}
	return sure(low <= uint64(number) && uint64(number) <= high)
}

func marked(mark uint32, value string) Answer {
	v, m, ok := masked(value)
	if !ok {
		return Unknown
	}
	return sure(mark&m == v)
}

// states are those of conntrack by name.
var states = map[string]ruleset.States{ //nolint:gochecknoglobals // a constant table
	"INVALID": ruleset.StateInvalid, "ESTABLISHED": ruleset.StateEstablished, "RELATED": ruleset.StateRelated,
	"NEW": ruleset.StateNew, "UNTRACKED": Untracked,
}

func state(p Packet, list string) Answer {
	return anyOf(list, func(name string) Answer {
		if bit, known := states[name]; known {
			return sure(p.State&bit != 0)
		}
		return Unknown
	})
}

// flags compares those of TCP. The first packet of a connection has SYN only.
func flags(p Packet, value string) Answer {
	if p.State != ruleset.StateNew {
		return Unknown
	}
	looked, set, _ := strings.Cut(value, " ")
	if slices.Contains(strings.Split(looked, ","), "SYN") {
		return sure(set == "SYN")
	}
	return sure(set == "NONE")
}
