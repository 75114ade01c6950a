package redirect

import "errors"

// Backend is the way by which rules get into a namespace.
type Backend string

// The backends. Auto is Netlink, or Native in a pod with a user namespace of its own; where the kernel lacks what that
// takes, Tools.
const (
	Auto Backend = "auto"
	// Netlink writes the rules that iptables-nft would, without a process.
	Netlink Backend = "netlink"
	// Native writes tables of nf_tables' own, as the reference does with NATIVE_NFTABLES, without a process.
	Native Backend = "native"
	// Tools starts the iptables programs of the host.
	Tools Backend = "iptables"
)

// ParseBackend reads the name of one; "" is Auto.
func ParseBackend(text string) (Backend, error) {
	switch b := Backend(text); b {
	case Auto, Netlink, Native, Tools:
		return b, nil
	case "":
		return Auto, nil
	}
	return Auto, errors.New("want auto, netlink, native or iptables")
}

// ChooseBackend joins the three settings of the backend: the backend itself, the reference's switch for
// native tables, and a variant of the iptables programs that is forced ("" for none), which is to ask for these.
func ChooseBackend(configured Backend, native bool, variant string) (Backend, error) {
	open := configured == "" || configured == Auto
	switch {
	case native && !open && configured != Native:
		return Auto, errors.New("native nftables and the backend " + string(configured) + " exclude each other")
	case native: // as with the reference, whatever variant is forced for when the programs are used
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
