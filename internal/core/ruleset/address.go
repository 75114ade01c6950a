package ruleset

import (
	"net/netip"
	"slices"
)

// Address prints an address as iptables and nft do, with glibc's inet_ntop. glibc prints the last 32 bits of an IPv6
// address dotted if exactly the 96 bits before them are zero; netip does so only for IPv4-mapped addresses.
func Address(a netip.Addr) string {
	raw := a.As16()
	zero := !slices.ContainsFunc(raw[:12], func(b byte) bool { return b != 0 })
	if a.Is4() || !zero || raw[12] == 0 && raw[13] == 0 {
		return a.String()
	}
	return "::" + netip.AddrFrom4([4]byte(raw[12:])).String()
}

// FamilyOf returns the family of an address.
func FamilyOf(a netip.Addr) Family {
	if a.Is6() {
		return IPv6
	}
	return IPv4
}
