package pluginlog

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
)

// stream hands lines to a writer that may block, in order, from a goroutine that lives only while there are lines.
type stream struct {
	w     io.Writer
	limit int

	mu      sync.Mutex
	pending []byte
	idle    chan struct{} // closed when the writer has everything
}

func newStream(w io.Writer, limit int) *stream {
	if f, ok := w.(*os.File); ok {
		w = descriptor{f}
	}
	idle := make(chan struct{})
	close(idle)
	return &stream{w: w, limit: limit, idle: idle}
}

// push queues the lines and returns a channel that is closed once the writer has all that was queued. When a writer
// that does not take them has let too many pile up, they are dropped.
func (s *stream) push(lines []byte) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(lines) == 0 || len(s.pending)+len(lines) > s.limit && len(s.pending) > 0 {
		return s.idle
	}
	s.pending = append(s.pending, lines...)
	select {
	case <-s.idle:
		s.idle = make(chan struct{})
		go s.drain()
	default:
	}
	return s.idle
}

func (s *stream) drain() {
	for {
		s.mu.Lock()
		lines := s.pending
		s.pending = nil
		if len(lines) == 0 {
			close(s.idle)
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		_, _ = s.w.Write(lines) // a dead stderr has nobody to be told
	}
}

// descriptor writes to a file without the check of os.File for a broken pipe, which kills the process when the file is
// its stderr: a runtime that has stopped reading must not end an ADD half-way.
type descriptor struct{ file *os.File }

func (d descriptor) Write(p []byte) (int, error) {
	conn, err := d.file.SyscallConn()
	if err != nil {
		return 0, err
	}
	written := 0
	var werr error
	err = conn.Write(func(fd uintptr) (done bool) {
		for written < len(p) {
			n, failed := syscall.Write(int(fd), p[written:])
			switch {
			case errors.Is(failed, syscall.EINTR):
			case errors.Is(failed, syscall.EAGAIN):
				return false // when there is room this function is called again
			case failed != nil:
				werr = failed
				return true
			default:
				written += n
			}
		}
		return true
	})
	return written, errors.Join(err, werr)
}
