// Package zdstest is ztunnel's side of package zds, for tests: a second implementation of the messages, which refuses whatever the agent
// need not send. Start reading at DecodeRequest.
package zdstest

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/zds"
)

// Hello returns ztunnel's first message, of version V1.
func Hello() []byte { return []byte{0x08, 1} }

// Ack returns ztunnel's answer to a request: "" for success, or the text of an error.
func Ack(text string) []byte {
	var ack []byte
	if text != "" {
		ack = embedded(text)
	}
	return embedded(string(ack))
}

// embedded returns a message with a string or a message as field 1.
func embedded(content string) []byte {
	return append(binary.AppendUvarint([]byte{0x0a}, uint64(len(content))), content...)
}

// DecodeRequest decodes a request. A field that its kind does not have is an error, and so is an Add without a workload.
func DecodeRequest(data []byte) (r zds.Request, err error) {
	outer, err := parse(string(data), 1, 2, 3, 5)
	if err != nil || len(outer) != 1 {
		return r, fmt.Errorf("%x is not one request: %w", data, err)
	}
	for number, content := range outer {
		r.Kind = zds.Kind(number)
		var body, workload map[byte]string
		switch r.Kind {
		case zds.Add:
			if body, err = parse(content, 1, 2); err == nil {
				workload, err = parse(body[2], 1, 2, 3)
			}
			if _, described := body[2]; !described {
				err = fmt.Errorf("%x has no workload", data)
			}
			r.UID, r.Workload = body[1], zds.Workload{Name: workload[1], Namespace: workload[2], ServiceAccount: workload[3]}
		case zds.Del:
			body, err = parse(content, 2)
			r.UID = body[2]
		case zds.Keep:
			body, err = parse(content, 1)
			r.UID = body[1]
		case zds.SnapshotSent:
			_, err = parse(content)
		}
	}
	return r, err
}

// parse returns the fields of a message by their numbers. All are strings or messages.
func parse(message string, known ...byte) (map[byte]string, error) {
	all := map[byte]string{}
	for rest := []byte(message); len(rest) > 0; {
		number, wire := rest[0]>>3, rest[0]&7
		length, n := binary.Uvarint(rest[1:])
		if wire != 2 || !slices.Contains(known, number) || n <= 0 || length > uint64(len(rest[1+max(n, 0):])) {
			return nil, fmt.Errorf("%x of %x is no known field", rest, message)
		}
		end := 1 + n + int(length) //nolint:gosec // checked above
		all[number], rest = string(rest[1+n:end]), rest[end:]
	}
	return all, nil
}
