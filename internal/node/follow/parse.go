package follow

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"github.com/meshcni/istio-cni/internal/node/nftables/nftrace"
)

// MaxFor bounds the time of a trace, DefaultFor is the usual one.
const (
	MaxFor     = 10 * time.Minute
	DefaultFor = 30 * time.Second
)

// Parse reads the selected packets and the time from texts by name: from, to, port, for. An empty text is the default.
func Parse(get func(name string) string) (f nftrace.Filter, duration time.Duration, err error) {
	var errs []error
	bad := func(name, want string) {
		errs = append(errs, fmt.Errorf("%s: value %q: want %s", name, get(name), want))
	}
	if text := get("from"); text != "" {
		if f.Source, err = network(text); err != nil {
			bad("from", "an IP address or a network such as 10.0.0.0/8")
		}
	}
	if text := get("to"); text != "" {
		if at, err := netip.ParseAddrPort(text); err == nil && at.Port() != 0 {
			text, f.Port = at.Addr().String(), at.Port()
		}
		if f.Destination, err = network(text); err != nil {
			bad("to", "ADDRESS, ADDRESS:PORT or a network such as 10.0.0.0/8")
		}
	}
	if text := get("port"); text != "" {
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil || n == 0 || f.Port != 0 && f.Port != uint16(n) {
			bad("port", "one port from 1 to 65535")
		}
		f.Port = uint16(n) //nolint:gosec // parsed with 16 bits
	}
	duration = DefaultFor
	if text := get("for"); text != "" {
		if duration, err = time.ParseDuration(text); err != nil || duration < time.Second || duration > MaxFor {
			bad("for", fmt.Sprintf("a duration from 1s to %s", MaxFor))
		}
	}
	if f.Source.IsValid() && f.Destination.IsValid() && f.Source.Addr().Is4() != f.Destination.Addr().Is4() {
		bad("from", "an address of the family of to")
	}
	return f, duration, errors.Join(errs...)
}

// network reads an address or a network. An IPv4 address in one of IPv6 is IPv4 in packets.
func network(text string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	return netip.ParsePrefix(text)
}
