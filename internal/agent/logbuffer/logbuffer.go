// Package logbuffer remembers the last records of a log.
//
// It promises that memory is bounded and grows as it is needed, and that then a record costs a copy of its text alone. It never changes, filters or
// redacts a record.
//
// Start at Buffer.
package logbuffer

import (
	"bytes"
	"slices"
	"sync"
	"time"
)

// Buffer has the last lines that were written to it. It is safe for concurrent use.
type Buffer struct {
	mu sync.Mutex
	// before and now have at most half bytes each: when now is full, it takes the place of before.
	before, now []byte
	half        int
}

// New returns a buffer of size bytes; it has at least the last half of that.
func New(size int) *Buffer {
	return &Buffer{half: size / 2}
}

// Write appends one record, which is a line. Of a record that is longer than a half it keeps the beginning.
func (b *Buffer) Write(line []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	kept := line
	if len(kept) > b.half {
		kept = append(slices.Clip(line[:b.half-1]), '\n')
	}
	if len(b.now)+len(kept) > b.half {
		b.before, b.now = b.now, b.before[:0]
	}
	if need := len(b.now) + len(kept); need > cap(b.now) {
		b.now = append(make([]byte, 0, min(max(need, 2*cap(b.now)), b.half)), b.now...)
	}
	b.now = append(b.now, kept...)
	return len(line), nil
}

// Since returns the lines of that time and later, and those without a time, as a text.
func (b *Buffer) Since(from time.Time) []byte {
	b.mu.Lock()
	all := slices.Concat(b.before, b.now)
	b.mu.Unlock()
	text := all[:0]
	for line := range bytes.Lines(all) {
		if at, has := timeOf(line); !has || !at.Before(from) {
			text = append(text, line...)
		}
	}
	return text
}

// timeOf returns the time with which the handlers of log/slog begin a line.
func timeOf(line []byte) (at time.Time, has bool) {
	for _, prefix := range []string{"time=", `{"time":"`} {
		if rest, is := bytes.CutPrefix(line, []byte(prefix)); is {
			if end := bytes.IndexAny(rest, " \"\n"); end > 0 {
				at, err := time.Parse(time.RFC3339Nano, string(rest[:end]))
				return at, err == nil
			}
		}
	}
	return time.Time{}, false
}
