package redirect

import "errors"

// Backend selects the mechanism that writes rules into a namespace.
type Backend string

// The backends. Auto is Netlink, or Native in a pod with its own user namespace, or Tools where the kernel lacks a feature that both need.
const (
	Auto Backend = "auto"
	// Netlink writes the rules that iptables-nft would, without a process.
	Netlink Backend = "netlink"
	// Native writes native nf_tables tables, as the reference does with NATIVE_NFTABLES, without a process.
	Native Backend = "native"
	// Tools starts the iptables programs of the host.
	Tools Backend = "iptables"
)

// ParseBackend parses the name of a backend; "" is Auto.
func ParseBackend(text string) (Backend, error) {
	switch b := Backend(text); b {
	case Auto, Netlink, Native, Tools:
		return b, nil
	case "":
		return Auto, nil
	}
	return Auto, errors.New("want auto, netlink, native or iptables")
}

// ChooseBackend combines three settings: the backend, the reference's switch for native tables, and a forced variant
// of the iptables programs ("" if not set), which selects Tools.
func ChooseBackend(configured Backend, native bool, variant string) (Backend, error) {
	open := configured == "" || configured == Auto
	switch {
	case native && !open && configured != Native:
		return Auto, errors.New("native nftables and the backend " + string(configured) + " exclude each other")
	case native: // as with the reference, also if a variant is forced
		return Native, nil
	case variant != "" && !open && configured != Tools:
		return Auto, errors.New("a forced variant of the iptables programs (" + variant + ") and a backend that starts none exclude each other")
	case variant != "":
		return Tools, nil
	case open:
		return Auto, nil
	}
	return configured, nil
}
