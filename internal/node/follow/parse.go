package follow

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"github.com/meshcni/istio-cni/internal/node/nftables/nftrace"
)

// MaxFor bounds the time of a trace, DefaultFor is the default.
const (
	MaxFor     = 10 * time.Minute
	DefaultFor = 30 * time.Second
)

// Parse reads the packet filter and the duration from the parameters from, to, port and for. An empty text means the default.
func Parse(get func(name string) string) (f nftrace.Filter, duration time.Duration, err error) {
	var errs []error
	bad := func(name, want string) {
		errs = append(errs, fmt.Errorf("%s: value %q: want %s", name, get(name), want))
	}
	if f.Source, err = network(get("from")); err != nil {
		bad("from", "an IP address or a network such as 10.0.0.0/8")
	}
	to := get("to")
	if at, not := netip.ParseAddrPort(to); not == nil && at.Port() != 0 {
		to, f.Port = at.Addr().String(), at.Port()
	}
	if f.Destination, err = network(to); err != nil {
		bad("to", "ADDRESS, ADDRESS:PORT or a network such as 10.0.0.0/8")
	}
	if f.Source.IsValid() && f.Destination.IsValid() && f.Source.Addr().Is4() != f.Destination.Addr().Is4() {
		bad("from", "an address of the family of to")
	}
	if f.Port, err = port(get("port"), f.Port); err != nil {
		bad("port", "one port from 1 to 65535")
	}
	if duration, err = time.ParseDuration(cmp.Or(get("for"), DefaultFor.String())); err != nil || duration < time.Second || duration > MaxFor {
		bad("for", fmt.Sprintf("a duration from 1s to %s", MaxFor))
	}
	return f, duration, errors.Join(errs...)
}

// port reads a port. An empty text means the known port.
func port(text string, known uint16) (uint16, error) {
	if text == "" {
		return known, nil
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err == nil && (n == 0 || known != 0 && known != uint16(n)) {
		err = strconv.ErrRange
	}
	return uint16(n), err
}

// network reads an address or a network, "" for none. Packets carry an IPv4-mapped IPv6 address as IPv4.
func network(text string) (netip.Prefix, error) {
	if text == "" {
		return netip.Prefix{}, nil
	}
	if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	return netip.ParsePrefix(text)
}
