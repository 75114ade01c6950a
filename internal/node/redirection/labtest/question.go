package labtest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
)

// Question is an Ask whose answer is known beforehand.
type Question struct {
	Ask
	// Want are the expected answers, in order. What is left out of the first stands for itself: the destination is
	// the one asked, the source the asker's own address. So a change of either on the way is seen. Of later
	// ones a missing destination is the one asked, a missing source is any, and so is port 0 of one.
	Want []Hop
	// WantErr is how it is to end instead.
	WantErr error
}

// Wrong is a wrong answer.
type Wrong struct {
	Question
	Got Answer
}

// Error has the question, the expected and the actual answer.
func (w *Wrong) Error() string {
	return fmt.Sprintf("asked: %s\n wanted: %s\n    got: %s", w.Ask, w.wanted(w.Got), w.Got)
}

// Check asks and judges.
func (q Question) Check(ctx context.Context) error { return q.Judge(q.Put(ctx)) }

// Judge compares an answer with what is wanted. The error is a *Wrong.
func (q Question) Judge(got Answer) error {
	if q.right(got) {
		return nil
	}
	return &Wrong{Question: q, Got: got}
}

func (q Question) right(got Answer) bool {
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

// wanted completes what is wanted with what is known after asking.
func (q Question) wanted(got Answer) Answer {
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
