package nfnetlink_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestAttributes_TooLong(t *testing.T) {
	var b nfnetlink.Buffer
	b.Nested(1, func() {
		for range 20 {
			b.Attribute(2, make([]byte, 4096))
		}
	})
	b.Uint32(3, 4)
	check.Fails(t, check.Err(b.Bytes()), "too long for netlink")
}

// FuzzAttributes reads any bytes: complete attributes are as long as the data, and the reader never reads past the end of others.
func FuzzAttributes(f *testing.F) {
	f.Add([]byte{8, 0, 1, 0, 1, 2, 3, 4, 5, 0, 2, 0, 9})
	f.Add([]byte{3, 0, 1, 0})
	f.Add([]byte{8, 0, 1})
	f.Fuzz(func(t *testing.T, data []byte) {
		length, complete := 0, nfnetlink.Attributes(data).Check() == nil
		for a := range nfnetlink.Attributes(data).All() {
			length += (4 + len(a.Value) + 3) &^ 3
		}
		if complete && (length < len(data) || length > len(data)+3) || !complete && length >= len(data)+4 {
			t.Errorf("%d of %d bytes were read (complete: %v)", length, len(data), complete)
		}
	})
}

// connected runs fn with a Conn in a new namespace.
func connected(t *testing.T, fn func(*nfnetlink.Conn) error) {
	t.Helper()
	err := netns.Do(netnstest.New(t), func() error {
		conn, err := nfnetlink.Open()
		if err != nil {
			return err
		}
		conn.Budget = nfnetlink.Budget{Objects: 100, Bytes: 1 << 20}
		return errors.Join(fn(conn), conn.Close())
	})
	check.OK(t, err)
}

func newTable(b *nfnetlink.Batch, name string) {
	b.Add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, unix.NFPROTO_IPV4, func(buffer *nfnetlink.Buffer) {
		buffer.String(unix.NFTA_TABLE_NAME, name)
	})
}

// deleteMissing adds a message that the kernel refuses.
func deleteMissing(b *nfnetlink.Batch) {
	b.Add(unix.NFT_MSG_DELTABLE, 0, unix.NFPROTO_IPV4, func(buffer *nfnetlink.Buffer) { buffer.String(unix.NFTA_TABLE_NAME, "missing") })
}

// made commits tables.
func made(t *testing.T, conn *nfnetlink.Conn, names ...string) {
	t.Helper()
	check.OK(t, conn.Transact(func(batch *nfnetlink.Batch) error {
		for _, name := range names {
			newTable(batch, name)
		}
		return nil
	}))
}

func tables(conn *nfnetlink.Conn) (names []string, err error) {
	err = conn.Dump(context.Background(), unix.NFT_MSG_GETTABLE, unix.NFPROTO_IPV4, nil, func(m nfnetlink.Message) error {
		names = append(names, m.Attributes.Get(unix.NFTA_TABLE_NAME).Text())
		return nil
	})
	return names, err
}

// TestTransaction_AllOrNothing also checks that the socket is usable after each error.
func TestTransaction_AllOrNothing(t *testing.T) {
	connected(t, func(conn *nfnetlink.Conn) error {
		generation, err := conn.Generation()
		if err != nil {
			return err
		}
		bad := conn.Batch(generation)
		newTable(bad, "a")
		deleteMissing(bad)
		newTable(bad, "b")
		var refused *nfnetlink.Refused
		err = bad.Commit()
		if !errors.As(err, &refused) || refused.Message != 1 || refused.Offset != 0 || !errors.Is(err, unix.ENOENT) {
			t.Errorf("error %#v, want one about message 1, its first attribute", err)
		}
		if names, listErr := tables(conn); listErr != nil || names != nil {
			t.Errorf("tables %q (%v), want none", names, listErr)
		}

		made(t, conn, "a", "b")
		late := conn.Batch(generation)
		newTable(late, "c")
		if err = late.Commit(); !errors.Is(err, nfnetlink.ErrChanged) || !errors.As(err, &refused) || refused.Message != -1 {
			t.Errorf("error %v for an old generation, want the error of a change", err)
		}
		names, err := tables(conn)
		if !slices.Equal(names, []string{"a", "b"}) {
			t.Errorf("tables %q, want a and b", names)
		}
		return err
	})
}

func TestTransaction_ManyErrors(t *testing.T) {
	connected(t, func(conn *nfnetlink.Conn) error {
		if err := conn.Transact(func(batch *nfnetlink.Batch) error {
			newTable(batch, "a")
			for range 5000 {
				deleteMissing(batch)
			}
			return nil
		}); err == nil {
			t.Error("the transaction was accepted")
		}
		names, err := tables(conn)
		check.Diff(t, "tables", []string(nil), names)
		return err
	})
}

// TestTransaction_Long is longer than the send buffer of a new socket.
func TestTransaction_Long(t *testing.T) {
	const many = 10000
	connected(t, func(conn *nfnetlink.Conn) error {
		if err := conn.Transact(func(batch *nfnetlink.Batch) error {
			newTable(batch, "a")
			for range many {
				batch.Add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, unix.NFPROTO_IPV4, func(b *nfnetlink.Buffer) { b.Chain("a", "again-and-again") })
			}
			return nil
		}); err != nil {
			return err
		}
		names, err := tables(conn)
		check.Diff(t, "tables", []string{"a"}, names)
		return err
	})
}

// TestDump_Budget also checks that all dumps share the budget.
func TestDump_Budget(t *testing.T) {
	for _, test := range []struct {
		budget nfnetlink.Budget
		dumps  int
		fails  bool
	}{
		{nfnetlink.Budget{}, 1, true},
		{nfnetlink.Budget{Objects: 1, Bytes: 1 << 20}, 1, true},
		{nfnetlink.Budget{Objects: 2, Bytes: 1 << 20}, 1, false},
		{nfnetlink.Budget{Objects: 3, Bytes: 1 << 20}, 2, true},
		{nfnetlink.Budget{Objects: 4, Bytes: 1 << 20}, 2, false},
		{nfnetlink.Budget{Objects: 2, Bytes: 60}, 1, true},
	} {
		connected(t, func(conn *nfnetlink.Conn) error {
			made(t, conn, "a", "b")
			conn.Budget = test.budget
			var last error
			for range test.dumps {
				_, last = tables(conn)
			}
			if errors.Is(last, nfnetlink.ErrUninspectable) != test.fails || last != nil && !test.fails {
				t.Errorf("%d dumps with %+v: %v", test.dumps, test.budget, last)
			}
			return nil
		})
	}
}

// TestDump_EndsBetweenMessages: the reader does not wait for the end of the list.
func TestDump_EndsBetweenMessages(t *testing.T) {
	connected(t, func(conn *nfnetlink.Conn) error {
		const many = 5000
		var names []string
		for i := range many {
			names = append(names, fmt.Sprintf("table-%d", i))
		}
		made(t, conn, names...)
		conn.Budget = nfnetlink.Budget{Objects: many, Bytes: 1 << 30}
		enough := errors.New("enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		seen := 0
		err := conn.Dump(ctx, unix.NFT_MSG_GETTABLE, unix.NFPROTO_IPV4, nil, func(nfnetlink.Message) error {
			if seen++; seen == 10 {
				cancel(enough)
			}
			return nil
		})
		// Messages in the same datagram of 32 kB as the tenth are still seen.
		if !errors.Is(err, enough) || seen > many/2 {
			t.Errorf("error %v after %d of %d messages", err, seen, many)
		}
		return nil
	})
}

// TestAttributes_NothingIsPassedOver adds an attribute to a comparison: an extra attribute, one of a higher kind, or a repeated one
// is never ignored.
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

// TestExpression_NoOtherBytesAreANetwork: a mask with a hole, an address beyond its mask, no address, a long address.
func TestExpression_NoOtherBytesAreANetwork(t *testing.T) {
	for _, bad := range [][2][]byte{{{10, 0, 0, 0}, {255, 0, 255, 0}}, {{10, 1, 0, 0}, {255, 0, 0, 0}}, {{}, nil}, {{1, 2, 3, 4, 5}, nil}} {
		if p, ok := nfnetlink.ReadNetwork(4, bad[0], bad[1]); ok {
			t.Errorf("%x is read as %s", bad, p)
		}
	}
}
