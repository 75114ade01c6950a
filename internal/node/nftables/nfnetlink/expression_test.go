package nfnetlink_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// TestAttributes_NothingIsPassedOver adds an attribute to a comparison: one too many, of a kind that is too high or present twice is
// never ignored.
func TestAttributes_NothingIsPassedOver(t *testing.T) {
	type result struct{ split, comparison bool }
	for kind, want := range map[uint16]result{0: {true, true}, 7: {true, false}, 12: {}, unix.NFTA_CMP_OP: {}} {
		var b nfnetlink.Buffer
		b.Expression("cmp", func() {
			b.Uint32(unix.NFTA_CMP_SREG, nfnetlink.Register)
			b.Uint32(unix.NFTA_CMP_OP, unix.NFT_CMP_EQ)
			b.Data(unix.NFTA_CMP_DATA, []byte{1})
			if kind > 0 {
				b.Uint32(kind, 1)
			}
		})
		data, err := b.Bytes()
		name, f, split := nfnetlink.SplitExpression(nfnetlink.Attributes(data).Get(unix.NFTA_LIST_ELEM))
		_, _, _, comparison := f.Comparison()
		if got := (result{split, split && comparison}); got != want || name != "cmp" || err != nil {
			t.Errorf("%q with attribute %d: %+v, want %+v (%v)", name, kind, got, want, err)
		}
	}
}

// TestExpression_NoOtherBytesAreANetwork: a mask with a hole, an address beyond its mask, none, one that is too long.
func TestExpression_NoOtherBytesAreANetwork(t *testing.T) {
	for _, bad := range [][2][]byte{{{10, 0, 0, 0}, {255, 0, 255, 0}}, {{10, 1, 0, 0}, {255, 0, 0, 0}}, {{}, nil}, {{1, 2, 3, 4, 5}, nil}} {
		if p, ok := nfnetlink.ReadNetwork(4, bad[0], bad[1]); ok {
			t.Errorf("%x is read as %s", bad, p)
		}
	}
}
