package nfnetlink_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// expression writes one, and reads its attributes.
func expression(t *testing.T, write func(*nfnetlink.Buffer)) nfnetlink.Fields {
	t.Helper()
	var b nfnetlink.Buffer
	write(&b)
	data, err := b.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	for e := range nfnetlink.Attributes(data).All() {
		if _, f, ok := nfnetlink.SplitExpression(e); ok {
			return f
		}
	}
	t.Fatalf("no expression in %x", data)
	return nfnetlink.Fields{}
}

// TestNothingIsPassedOver: an attribute too many, of a kind that is too high or there twice is never ignored.
func TestNothingIsPassedOver(t *testing.T) {
	more := func(write func(*nfnetlink.Buffer)) func(*nfnetlink.Buffer) {
		return func(b *nfnetlink.Buffer) {
			b.Expression("cmp", func() {
				b.Uint32(unix.NFTA_CMP_SREG, nfnetlink.Register)
				b.Uint32(unix.NFTA_CMP_OP, unix.NFT_CMP_EQ)
				b.Data(unix.NFTA_CMP_DATA, []byte{1})
				write(b)
			})
		}
	}
	for want, write := range map[bool]func(*nfnetlink.Buffer){true: func(*nfnetlink.Buffer) {}, false: func(b *nfnetlink.Buffer) { b.Uint32(7, 1) }} {
		f := expression(t, more(write))
		if _, _, _, ok := f.Comparison(); ok != want {
			t.Errorf("the comparison is read: %t, want %t", ok, want)
		}
	}
	for kind, value := range map[uint16]uint32{12: 1, unix.NFTA_CMP_OP: 1} {
		var b nfnetlink.Buffer
		more(func(b *nfnetlink.Buffer) { b.Uint32(kind, value) })(&b)
		data, err := b.Bytes()
		for e := range nfnetlink.Attributes(data).All() {
			if name, _, ok := nfnetlink.SplitExpression(e); ok || err != nil {
				t.Errorf("attribute %d of %s is passed over (%v)", kind, name, err)
			}
		}
	}
}

// TestNoOtherBytesAreANetwork: a mask with a hole, an address beyond its mask, none, one that is too long.
func TestNoOtherBytesAreANetwork(t *testing.T) {
	for _, bad := range [][2][]byte{{{10, 0, 0, 0}, {255, 0, 255, 0}}, {{10, 1, 0, 0}, {255, 0, 0, 0}}, {{}, nil}, {{1, 2, 3, 4, 5}, nil}} {
		if p, ok := nfnetlink.ReadNetwork(4, bad[0], bad[1]); ok {
			t.Errorf("%x is read as %s", bad, p)
		}
	}
}
