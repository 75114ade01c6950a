// Package nfnetlinktest finds what in a rule's expressions means something, for tests that change it.
//
// It promises to name no byte of the netlink encoding. Start reading at Values.
package nfnetlinktest

import (
	"bytes"
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Values gives the places of all bytes of expressions, as they are written, that are neither the head of an attribute nor
// padding nor in a counter.
func Values(expressions nfnetlink.Attributes) []int { return values(expressions, 0) }

func values(data nfnetlink.Attributes, from int) []int {
	var out []int
	for len(data) > 0 {
		n, kind := int(binary.NativeEndian.Uint16(data)), binary.NativeEndian.Uint16(data[2:])
		switch {
		case bytes.Contains(data[4:n], []byte("counter")) && kind&unix.NLA_F_NESTED != 0:
		case kind&unix.NLA_F_NESTED != 0:
			out = append(out, values(data[4:n], from+4)...)
		default:
			for i := 4; i < n; i++ {
				out = append(out, from+i)
			}
		}
		padded := min((n+3)&^3, len(data))
		data, from = data[padded:], from+padded
	}
	return out
}
