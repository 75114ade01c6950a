package rulesettest

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// action does what a target does and says how the packet goes on.
type action func(w *walk) onward

// onward is how a packet goes on after a rule.
type onward uint8

// The next rule; back to the calling chain; out of the table with the verdict that was set.
const (
	nextRule onward = iota
	goBack
	leaveTable
)

// everything is the mask under which we set marks.
const everything = "0xffffffff"

func (r *reader) target() error {
	if len(r.words) == 0 {
		return fmt.Errorf("has no target")
	}
	r.next() // -j
	name := r.next()
	read, ok := targets()[name]
	switch {
	case name == "":
		return fmt.Errorf("has no target behind -j")
	case !ok && strings.ToUpper(name) == name && len(r.words) == 0:
		r.rule.jump = name
		return nil
	case !ok:
		return fmt.Errorf("target %q is not known here", name)
	}
	act, err := read(r)
	if err != nil {
		return fmt.Errorf("target %q: %w", name, err)
	}
	if len(r.words) > 0 {
		return fmt.Errorf("target %q: option %q is not known here", name, r.words[0])
	}
	r.rule.act = act
	return nil
}

// targets are all targets that are understood. Anything else is taken for a chain, which must exist.
func targets() map[string]func(*reader) (action, error) {
	return map[string]func(*reader) (action, error){
		"ACCEPT":   func(*reader) (action, error) { return final(Accept), nil },
		"DROP":     func(*reader) (action, error) { return final(Drop), nil },
		"RETURN":   func(*reader) (action, error) { return func(*walk) onward { return goBack }, nil },
		"REJECT":   targetReject,
		"REDIRECT": targetRedirect,
		"TPROXY":   targetTPROXY,
		"MARK":     targetMark,
		"CONNMARK": targetConnmark,
		"CT":       targetCT,
	}
}

func final(a Action) action {
	return func(w *walk) onward {
		w.act = a
		return leaveTable
	}
}

// argument takes the next option, which must be the one named, and gives its argument.
func (r *reader) argument(name string) (string, error) {
	if got := r.next(); got != name {
		return "", fmt.Errorf("option %q stands where %q is wanted", got, name)
	}
	if len(r.words) == 0 {
		return "", fmt.Errorf("option %q has no argument", name)
	}
	return r.next(), nil
}

// arguments takes several options in the order in which iptables-save prints them.
func (r *reader) arguments(names ...string) ([]string, error) {
	var out []string
	for _, name := range names {
		text, err := r.argument(name)
		if err != nil {
			return nil, err
		}
		out = append(out, text)
	}
	return out, nil
}

func (r *reader) only(table string, protos ...Proto) error {
	if r.table != table {
		return fmt.Errorf("iptables takes it in table %s only", table)
	}
	if len(protos) > 0 && !slices.Contains(protos, r.proto) {
		return fmt.Errorf("iptables takes it with protocol %q only", protos)
	}
	return nil
}

func targetReject(r *reader) (action, error) {
	with, err := r.argument("--reject-with")
	if err != nil {
		return nil, err
	}
	unreachable := map[ruleset.Family]string{ruleset.IPv4: "icmp-port-unreachable", ruleset.IPv6: "icmp6-port-unreachable"}
	switch with {
	case "tcp-reset":
		err = r.only("filter", TCP)
	case unreachable[r.family]:
		err = r.only("filter")
	default:
		err = fmt.Errorf("answer %q is not known here", with)
	}
	return func(w *walk) onward {
		w.act, w.verdict.With = Reject, with
		return leaveTable
	}, err
}

func targetRedirect(r *reader) (action, error) {
	if err := r.only("nat", TCP, UDP); err != nil {
		return nil, err
	}
	text, err := r.argument("--to-ports")
	if err != nil {
		return nil, err
	}
	port, err := readPort(text)
	return func(w *walk) onward {
		w.act, w.verdict.Port = Redirect, port
		return leaveTable
	}, err
}

func targetTPROXY(r *reader) (action, error) {
	if err := r.only("mangle", TCP, UDP); err != nil {
		return nil, err
	}
	args, err := r.arguments("--on-port", "--on-ip", "--tproxy-mark")
	if err != nil {
		return nil, err
	}
	port, err := readPort(args[0])
	if err != nil {
		return nil, err
	}
	anyone := map[ruleset.Family]netip.Addr{ruleset.IPv4: netip.IPv4Unspecified(), ruleset.IPv6: netip.IPv6Unspecified()}
	if args[1] != anyone[r.family].String() {
		return nil, fmt.Errorf("address %q is not known here, want the unspecified one", args[1])
	}
	mark, err := readMarkUnder(args[2])
	return func(w *walk) onward {
		if w.packet.Hook != Incoming {
			w.fail("target TPROXY was reached by an outgoing packet; the kernel takes it in PREROUTING only")
		}
		w.act, w.verdict.Port, w.packet.Mark = TPROXY, port, mark
		return leaveTable
	}, err
}

func targetMark(r *reader) (action, error) {
	if err := r.only("mangle"); err != nil {
		return nil, err
	}
	text, err := r.argument("--set-xmark")
	if err != nil {
		return nil, err
	}
	mark, err := readMarkUnder(text)
	return func(w *walk) onward {
		w.packet.Mark = mark
		return nextRule
	}, err
}

// readMarkUnder reads VALUE/MASK with the mask that makes it simply a new value.
func readMarkUnder(text string) (uint32, error) {
	value, mask, _ := strings.Cut(text, "/")
	if mask != everything {
		return 0, fmt.Errorf("mask of %q is not known here, want %s", text, everything)
	}
	return readHex(value)
}

func targetConnmark(r *reader) (action, error) {
	if err := r.only("mangle"); err != nil {
		return nil, err
	}
	what := r.next()
	masks, err := r.arguments("--nfmask", "--ctmask")
	if err != nil {
		return nil, err
	}
	if masks[0] != everything || masks[1] != everything {
		return nil, fmt.Errorf("masks %q are not known here, want %s", masks, everything)
	}
	switch what {
	case "--save-mark":
		return func(w *walk) onward {
			w.packet.Connmark = w.packet.Mark
			return nextRule
		}, nil
	case "--restore-mark":
		return func(w *walk) onward {
			w.packet.Mark = w.packet.Connmark
			return nextRule
		}, nil
	}
	return nil, fmt.Errorf("option %q is not known here", what)
}

// targetCT does nothing to a packet that comes in by lo: it has its conntrack entry from the way out
// (net/netfilter/xt_CT.c, xt_ct_target).
func targetCT(r *reader) (action, error) {
	if err := r.only("raw"); err != nil {
		return nil, err
	}
	text, err := r.argument("--zone")
	if err != nil {
		return nil, err
	}
	zone, err := strconv.ParseUint(text, 10, 16)
	return func(w *walk) onward {
		if w.packet.In != "lo" && w.verdict.Zone == 0 {
			w.verdict.Zone = uint16(zone) //nolint:gosec // it was read as one of 16 bits
		}
		return nextRule
	}, err
}
