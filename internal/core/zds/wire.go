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
		var tag, size uint64
		if tag, data, err = uvarint(data); err != nil {
			return nil, err
		}
		const maxNumber = 1<<29 - 1
		number, rest := tag>>3, data
		switch {
		case number == 0 || number > maxNumber:
			return nil, fmt.Errorf("%d is no number of a field", number)
		case number == 1 && tag&7 != wire:
			return nil, fmt.Errorf("field 1 has wire type %d, not %d", tag&7, wire)
		}
		switch tag & 7 {
		case wireVarint:
			_, rest, err = uvarint(data)
			size = uint64(len(data) - len(rest))
		case wireFixed64:
			size = 8
		case wireBytes:
			size, data, err = uvarint(data)
		case wireFixed32:
			size = 4
		default:
			err = fmt.Errorf("field %d has the unknown wire type %d", number, tag&7)
		}
		if err == nil && size > uint64(len(data)) {
			err = errTruncated
		}
		if err != nil {
			return nil, err
		}
		if number == 1 {
			all = append(all, data[:size])
		}
		data = data[size:]
	}
	return all, nil
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
