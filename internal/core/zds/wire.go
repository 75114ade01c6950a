package zds

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// The wire types of protobuf, except groups, which proto3 does not have.
const (
	wireVarint  = 0
	wireFixed64 = 1
	wireBytes   = 2
	wireFixed32 = 5
)

// appended adds a string or a message to a message.
func appended(message []byte, field uint64, content string) []byte {
	message = binary.AppendUvarint(message, field<<3|wireBytes)
	message = binary.AppendUvarint(message, uint64(len(content)))
	return append(message, content...)
}

// errTruncated means that a message ends inside of a field.
var errTruncated = errors.New("the message is truncated")

// first returns the contents of every field 1 of a message, in order; all of them must have the wire type. It skips other fields.
func first(data []byte, wire uint64) (all [][]byte, err error) {
	if len(data) > MaxSize {
		return nil, fmt.Errorf("the message has %d bytes, %d is the maximum", len(data), MaxSize)
	}
	for len(data) > 0 {
		tag, content, rest, err := cut(data)
		switch {
		case err != nil:
			return nil, err
		case tag>>3 != 1:
		case tag&7 != wire:
			return nil, fmt.Errorf("field 1 has wire type %d, not %d", tag&7, wire)
		default:
			all = append(all, content)
		}
		data = rest
	}
	return all, nil
}

// cut returns the tag and the content of a message's first field, without the content of a number, and what follows.
func cut(data []byte) (tag uint64, content, rest []byte, err error) {
	if tag, data, err = uvarint(data); err != nil {
		return 0, nil, nil, err
	}
	const maxNumber = 1<<29 - 1
	number, size := tag>>3, uint64(0)
	switch wire := tag & 7; {
	case number == 0 || number > maxNumber:
		err = fmt.Errorf("%d is no number of a field", number)
	case wire == wireVarint:
		_, data, err = uvarint(data)
	case wire == wireFixed64:
		size = 8
	case wire == wireBytes:
		size, data, err = uvarint(data)
	case wire == wireFixed32:
		size = 4
	default:
		err = fmt.Errorf("field %d has the unknown wire type %d", number, wire)
	}
	if err == nil && size > uint64(len(data)) {
		err = errTruncated
	}
	if err != nil {
		return 0, nil, nil, err
	}
	return tag, data[:size], data[size:], nil
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
