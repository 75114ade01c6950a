package zds

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unicode/utf8"
)

// The wire types of protobuf.
const (
	wireVarint  = 0
	wireFixed64 = 1
	wireBytes   = 2
	wireGroup   = 3
	wireEnd     = 4
	wireFixed32 = 5
)

// message is a message that is being encoded.
type message struct {
	data []byte
	err  error
}

// text adds a string. The empty one is the default of proto3 and is left out.
func (m *message) text(field uint64, value string) {
	if !utf8.ValidString(value) {
		m.err = fmt.Errorf("%q is not UTF-8", value)
	}
	if value != "" {
		m.bytes(field, []byte(value))
	}
}

// message adds a message, an empty one as well.
func (m *message) message(field uint64, inner message) {
	m.err = errors.Join(m.err, inner.err)
	m.bytes(field, inner.data)
}

func (m *message) bytes(field uint64, value []byte) {
	m.data = binary.AppendUvarint(m.data, field<<3|wireBytes)
	m.data = binary.AppendUvarint(m.data, uint64(len(value)))
	m.data = append(m.data, value...)
}

func (m *message) finish() ([]byte, error) {
	if m.err == nil && len(m.data) > MaxSize {
		m.err = fmt.Errorf("the message has %d bytes, %d is the maximum", len(m.data), MaxSize)
	}
	return m.data, m.err
}

// field is a field of a message that is being decoded.
type field struct {
	number uint64
	wire   uint64
	value  uint64 // of a number
	data   []byte // of a string or a message
}

func (f field) text(to *string) error {
	if err := f.is(wireBytes); err != nil {
		return err
	}
	if !utf8.Valid(f.data) {
		return fmt.Errorf("field %d is not UTF-8", f.number)
	}
	*to = string(f.data)
	return nil
}

func (f field) message(take func(field) error) error {
	if err := f.is(wireBytes); err != nil {
		return err
	}
	return decode(f.data, take)
}

func (f field) is(wire uint64) error {
	if f.wire != wire {
		return fmt.Errorf("field %d has wire type %d, not %d", f.number, f.wire, wire)
	}
	return nil
}

// errTruncated means that a message ends inside of a field.
var errTruncated = errors.New("the message is truncated")

// decode calls take for each field in turn. take ignores a field that it does not know.
func decode(data []byte, take func(field) error) error {
	if len(data) > MaxSize {
		return fmt.Errorf("the message has %d bytes, %d is the maximum", len(data), MaxSize)
	}
	for len(data) > 0 {
		f, rest, err := split(data)
		if err == nil && f.wire == wireEnd {
			err = fmt.Errorf("field %d ends a group that did not begin", f.number)
		}
		if err == nil {
			err = take(f)
		}
		if err != nil {
			return err
		}
		data = rest
	}
	return nil
}

// split cuts off the first field.
func split(data []byte) (f field, rest []byte, err error) {
	tag, rest, err := uvarint(data)
	if err != nil {
		return f, nil, err
	}
	const maxNumber = 1<<29 - 1
	if f.number, f.wire = tag>>3, tag&7; f.number == 0 || f.number > maxNumber {
		return f, nil, fmt.Errorf("%d is no number of a field", f.number)
	}
	size := uint64(0)
	switch f.wire {
	case wireVarint:
		f.value, rest, err = uvarint(rest)
	case wireFixed64:
		size = 8
	case wireBytes:
		size, rest, err = uvarint(rest)
	case wireGroup:
		rest, err = skipGroup(f.number, rest)
	case wireEnd:
	case wireFixed32:
		size = 4
	default:
		err = fmt.Errorf("field %d has the unknown wire type %d", f.number, f.wire)
	}
	if err == nil && size > uint64(len(rest)) {
		err = errTruncated
	}
	if err != nil {
		return f, nil, err
	}
	f.data, rest = rest[:size], rest[size:]
	return f, rest, nil
}

// skipGroup returns what follows the end of a group, a form that only unknown fields can have.
func skipGroup(number uint64, data []byte) ([]byte, error) {
	for {
		f, rest, err := split(data)
		if err != nil || f.wire == wireEnd && f.number == number {
			return rest, err
		}
		if f.wire == wireEnd {
			return nil, fmt.Errorf("field %d ends group %d", f.number, number)
		}
		data = rest
	}
}

func uvarint(data []byte) (value uint64, rest []byte, err error) {
	value, n := binary.Uvarint(data)
	switch {
	case n == 0:
		return 0, nil, errTruncated
	case n < 0:
		return 0, nil, errors.New("a number has more than 64 bits")
	}
	return value, data[n:], nil
}
