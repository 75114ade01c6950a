package nfnetlink_test

import (
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// expression writes one, and reads its name and attributes.
func expression(t *testing.T, write func(*nfnetlink.Buffer)) (string, nfnetlink.Fields) {
	t.Helper()
	var b nfnetlink.Buffer
	write(&b)
	data, err := b.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	for e := range nfnetlink.Attributes(data).All() {
		if name, f, ok := nfnetlink.SplitExpression(e); ok {
			return name, f
		}
	}
	t.Fatalf("no expression in %x", data)
	return "", nfnetlink.Fields{}
}

func TestExpressionsComeBack(t *testing.T) {
	name, f := expression(t, func(b *nfnetlink.Buffer) { b.Meta(unix.NFT_META_MARK) })
	if n, ok := f.Numbers(unix.NFTA_META_KEY, unix.NFTA_META_DREG); name != "meta" || !ok || n[0] != unix.NFT_META_MARK || n[1] != nfnetlink.Register {
		t.Errorf("meta: %q %v %v", name, n, ok)
	}
	name, f = expression(t, func(b *nfnetlink.Buffer) { b.Compare(true, []byte("lo\x00")) })
	if register, negated, value, ok := f.Comparison(); name != "cmp" || !ok || register != nfnetlink.Register || !negated || string(value) != "lo\x00" {
		t.Errorf("cmp: %d %v %q %v", register, negated, value, ok)
	}
	name, f = expression(t, func(b *nfnetlink.Buffer) { b.And([]byte{0xff, 0xf0}) })
	if register, mask, ok := f.BitwiseMask(); name != "bitwise" || !ok || register != nfnetlink.Register || !slices.Equal(mask, []byte{0xff, 0xf0}) {
		t.Errorf("bitwise: %d %x %v", register, mask, ok)
	}
	for _, want := range []nfnetlink.Verdict{{Code: nfnetlink.Drop}, {Code: nfnetlink.Return}, {Code: nfnetlink.Jump, Chain: "C"}} {
		_, f = expression(t, func(b *nfnetlink.Buffer) { b.Verdict(want) })
		if got, ok := f.ReadVerdict(); !ok || got != want {
			t.Errorf("verdict %v was read as %v (%v)", want, got, ok)
		}
	}
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
	_, f := expression(t, more(func(*nfnetlink.Buffer) {}))
	if _, _, _, ok := f.Comparison(); !ok {
		t.Error("the comparison itself is not read")
	}
	_, f = expression(t, more(func(b *nfnetlink.Buffer) { b.Uint32(7, 1) }))
	if _, _, _, ok := f.Comparison(); ok {
		t.Error("an attribute too many is passed over")
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

// TestNetworksComeBack compares the whole bytes of a prefix, or all bytes under a mask.
func TestNetworksComeBack(t *testing.T) {
	for _, text := range []string{"10.0.0.0/8", "10.128.0.0/9", "1.2.3.4/32", "0.0.0.0/0", "fd00::/64", "fd00:8000::/17", "::1/128"} {
		want := netip.MustParsePrefix(text)
		var b nfnetlink.Buffer
		b.Network(12, false, want)
		data, _ := b.Bytes()
		var value, mask []byte
		for e := range nfnetlink.Attributes(data).All() {
			switch name, f, _ := nfnetlink.SplitExpression(e); name {
			case "bitwise":
				_, mask, _ = f.BitwiseMask()
			case "cmp":
				_, _, value, _ = f.Comparison()
			}
		}
		if got, ok := nfnetlink.ReadNetwork(want.Addr().BitLen()/8, value, mask); !ok || got != want {
			t.Errorf("%s: %x under %x is read as %s (%v)", text, value, mask, got, ok)
		}
	}
	for _, bad := range [][2][]byte{{{10, 0, 0, 0}, {255, 0, 255, 0}}, {{10, 1, 0, 0}, {255, 0, 0, 0}}, {{}, nil}, {{1, 2, 3, 4, 5}, nil}} {
		if p, ok := nfnetlink.ReadNetwork(4, bad[0], bad[1]); ok {
			t.Errorf("%x is read as %s", bad, p)
		}
	}
}
