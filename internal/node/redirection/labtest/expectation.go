package labtest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
)

// Expectation is a Request with its expected answer.
type Expectation struct {
	Request
	// Want has the expected answers in order. In the first, a missing destination means the request's, and a missing source
	// the sender's own address: a change of either on the way is a wrong answer. In later ones, a missing destination means
	// the request's, and a missing source or source port any.
	Want []Hop
	// WantErr is the expected error, instead of Want.
	WantErr error
}

// Wrong is a wrong answer.
type Wrong struct {
	Expectation
	Got Answer
}

// Error returns the request, the expected and the actual answer.
func (w *Wrong) Error() string {
	return fmt.Sprintf("  sent: %s\nwanted: %s\n   got: %s", w.Request, w.wanted(w.Got), w.Got)
}

// Check sends the request and compares the answer.
func (q Expectation) Check(ctx context.Context) error { return q.Compare(q.Send(ctx)) }

// Compare compares an answer with the expected one. The error is a *Wrong.
func (q Expectation) Compare(got Answer) error {
	if q.right(got) {
		return nil
	}
	return &Wrong{Expectation: q, Got: got}
}

func (q Expectation) right(got Answer) bool {
	if !errors.Is(got.Err, q.WantErr) {
		return false
	}
	want := q.wanted(got).Hops
	if len(want) != len(got.Hops) {
		return false
	}
	for i, h := range got.Hops {
		w := want[i]
		if h.By != w.By || h.Dst.IsValid() && h.Dst != w.Dst || !matches(w.From, h.From) {
			return false
		}
	}
	return true
}

func matches(want, got netip.AddrPort) bool {
	return !want.IsValid() || want == got || want.Port() == 0 && want.Addr() == got.Addr()
}

// wanted returns the expected answer, completed with the addresses of the request.
func (q Expectation) wanted(got Answer) Answer {
	want := Answer{Err: q.WantErr}
	for i, h := range q.Want {
		if !h.Dst.IsValid() && q.Via != Ping {
			h.Dst = q.To
		}
		if i == 0 && !h.From.IsValid() {
			h.From = got.Own
		}
		want.Hops = append(want.Hops, h)
	}
	return want
}
