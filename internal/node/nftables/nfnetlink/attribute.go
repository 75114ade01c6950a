package nfnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"strings"

	"golang.org/x/sys/unix"
)

// typeMask removes the flags NLA_F_NESTED and NLA_F_NET_BYTEORDER from an attribute's type.
const typeMask = 1<<14 - 1

// Buffer builds netlink messages and attributes. The zero Buffer is empty and ready to use. Numbers are big endian
// because nfnetlink requires it.
type Buffer struct {
	data []byte
	err  error
}

// Bytes returns the encoded messages, or an error if an attribute is longer than the 65535 bytes that its length field
// allows.
func (b *Buffer) Bytes() ([]byte, error) { return b.data, b.err }

// Attribute adds an attribute.
func (b *Buffer) Attribute(kind uint16, value []byte) {
	at := b.open(kind)
	b.data = append(b.data, value...)
	b.close(at)
}

// Uint32 adds an attribute with a 32-bit number.
func (b *Buffer) Uint32(kind uint16, value uint32) {
	b.Attribute(kind, binary.BigEndian.AppendUint32(make([]byte, 0, 4), value))
}

// Uint64 adds an attribute with a 64-bit number.
func (b *Buffer) Uint64(kind uint16, value uint64) {
	b.Attribute(kind, binary.BigEndian.AppendUint64(make([]byte, 0, 8), value))
}

// String adds an attribute that ends with a zero byte.
func (b *Buffer) String(kind uint16, value string) {
	at := b.open(kind)
	b.data = append(append(b.data, value...), 0)
	b.close(at)
}

// Nested adds an attribute that contains the attributes that fill adds.
func (b *Buffer) Nested(kind uint16, fill func()) {
	at := b.open(kind | unix.NLA_F_NESTED)
	fill()
	b.close(at)
}

// open starts an attribute and returns its offset.
func (b *Buffer) open(kind uint16) int {
	at := len(b.data)
	b.data = binary.NativeEndian.AppendUint16(append(b.data, 0, 0), kind)
	return at
}

// close sets the attribute's length and pads it to a multiple of four bytes.
func (b *Buffer) close(at int) {
	n := len(b.data) - at
	if n > 1<<16-1 && b.err == nil {
		b.err = fmt.Errorf("an attribute of %d bytes is too long for netlink", n)
	}
	binary.NativeEndian.PutUint16(b.data[at:], uint16(n)) //nolint:gosec // checked above
	for len(b.data)%unix.NLA_ALIGNTO != 0 {
		b.data = append(b.data, 0)
	}
}

// errCut is returned if the last attribute is incomplete.
var errCut = errors.New("netlink attributes are cut off")

// Attributes is a received sequence of attributes.
type Attributes []byte

// Attribute is one netlink attribute; Kind is its type without the flags.
type Attribute struct {
	Kind  uint16
	Value []byte
}

// All returns the attributes in order. A broken attribute ends the sequence; Check reports it.
func (a Attributes) All() iter.Seq[Attribute] {
	return func(yield func(Attribute) bool) {
		for rest := a; len(rest) > 0; {
			attribute, behind, err := splitFirst(rest)
			if err != nil || !yield(attribute) {
				return
			}
			rest = behind
		}
	}
}

// Get returns the first attribute of a kind, the zero Attribute if there is none.
func (a Attributes) Get(kind uint16) Attribute {
	for attribute := range a.All() {
		if attribute.Kind == kind {
			return attribute
		}
	}
	return Attribute{}
}

// Check returns an error if the attributes are incomplete.
func (a Attributes) Check() error {
	for rest := a; len(rest) > 0; {
		_, behind, err := splitFirst(rest)
		if err != nil {
			return err
		}
		rest = behind
	}
	return nil
}

func splitFirst(a Attributes) (Attribute, Attributes, error) {
	if len(a) < unix.SizeofNlAttr {
		return Attribute{}, nil, errCut
	}
	n := int(binary.NativeEndian.Uint16(a))
	if n < unix.SizeofNlAttr || n > len(a) {
		return Attribute{}, nil, errCut
	}
	padded := min((n+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1), len(a))
	kind := binary.NativeEndian.Uint16(a[2:]) & typeMask
	return Attribute{kind, a[unix.SizeofNlAttr:n]}, a[padded:], nil
}

// Uint32 returns a big-endian number. It returns false if the value does not have 4 bytes.
func (a Attribute) Uint32() (uint32, bool) {
	if len(a.Value) != 4 {
		return 0, false
	}
	return binary.BigEndian.Uint32(a.Value), true
}

// Uint64 returns a big-endian number. It returns false if the value does not have 8 bytes.
func (a Attribute) Uint64() (uint64, bool) {
	if len(a.Value) != 8 {
		return 0, false
	}
	return binary.BigEndian.Uint64(a.Value), true
}

// Text returns a string, with or without a zero byte at the end.
func (a Attribute) Text() string { return strings.TrimSuffix(string(a.Value), "\x00") }
