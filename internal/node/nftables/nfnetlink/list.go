package nfnetlink

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// errUnsettled is the error for a list that changed during each attempt.
var errUnsettled = errors.New("the objects changed at each attempt to list them")

// List returns the parsed objects of a dump by another netlink protocol (NETLINK_ROUTE, …): get is the type of the request, body the
// part after its header. parse receives each message without its header; List leaves out an object for which it returns false. Above
// limit objects the error is ErrUninspectable. Then, and after an error of parse, the rest of the list stays in the kernel.
func List[T any](protocol int, get uint16, body []byte, limit int, parse func(message []byte) (T, bool, error)) (all []T, err error) {
	err = complete(func() error {
		all = nil
		seen := 0
		return list(protocol, get, body, func(r raw) error {
			if seen++; seen > limit {
				return fmt.Errorf("%w: it holds more than %d of them", ErrUninspectable, limit)
			}
			one, wanted, broken := parse(r.payload)
			if wanted && broken == nil {
				all = append(all, one)
			}
			return broken
		})
	})
	return all, err
}

// complete repeats a listing while objects change during it, because such a list may lack entries.
func complete(listing func() error) error {
	const attempts = 5
	for range attempts {
		if err := listing(); !errors.Is(err, ErrChanged) {
			return err
		}
	}
	return errUnsettled
}

func list(protocol int, get uint16, body []byte, each func(raw) error) error {
	c, err := open(protocol)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // nothing was written
	var b Buffer
	at := c.header(&b, get, unix.NLM_F_DUMP)
	b.data = append(b.data, body...)
	finish(&b, at)
	if err := c.send(b.data); err != nil {
		return err
	}
	return c.collect(context.Background(), each)
}
