// Package logbuffer remembers the last records of a log.
//
// It promises that memory is bounded and grows only as needed, and that a record then costs one copy. It never changes, filters or
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

// Buffer has the last lines written to it. It is safe for concurrent use.
type Buffer struct {
	mu sync.Mutex
	// before and now have at most half of the bytes each: a full now replaces before.
	before, now []byte
	half        int
}

// New returns a buffer of size bytes, which keeps at least the last half of them.
func New(size int) *Buffer {
	return &Buffer{half: size / 2}
}

// Write appends one record, which is a line. It truncates a record that is longer than half of the buffer.
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

// Since returns the lines logged at or after a time, and the lines without a time, as text.
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

// timeOf returns the time at the beginning of a line from a handler of log/slog.
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
