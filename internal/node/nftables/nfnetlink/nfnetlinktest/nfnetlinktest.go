// Package nfnetlinktest changes a rule's expressions, for tests of the packages that read them.
//
// It promises to change no byte of the netlink encoding itself. Start reading at Flips.
package nfnetlinktest

import (
	"bytes"
	"encoding/binary"
	"iter"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Flips returns expressions that differ from the given ones in one bit each, with the offset of the changed byte.
func Flips(expressions nfnetlink.Attributes) iter.Seq2[int, nfnetlink.Attributes] {
	return func(yield func(int, nfnetlink.Attributes) bool) {
		for _, at := range values(expressions, 0) {
			for bit := range 8 {
				changed := slices.Clone(expressions)
				changed[at] ^= 1 << bit
				if !yield(at, changed) {
					return
				}
			}
		}
	}
}

// values returns the offsets of all bytes of encoded expressions outside of attribute headers, padding and counters.
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
