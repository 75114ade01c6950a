// Package pluginlog is the log of one invocation of the CNI plugin: a log/slog logger whose records go to stderr at
// once, and to the node agent's socket and the rolling file of the run directory when the invocation ends.
//
// It promises that a record is one line holding one JSON object in the form the node agent reads; that records written
// before the run directory was known reach the socket and the file as well; and that no sink, whether dead, full, slow
// or hanging, ever fails an invocation or delays it, Close included, by more than Log.Timeout. The log counts the records
// that it drops for that.
//
// It never touches stdout, never creates the run directory, never starts a process, and offers no way to dump an
// environment or a whole configuration. It does not serve the socket; that is the agent's work.
//
// Start reading at Log. The line is made in record.go; file and socket have a file each.
package pluginlog

import (
	"context"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// DefaultTimeout is the delay that all sinks together may cause. It leaves a fifth of the promised 100 ms for a
// scheduler that is late.
const DefaultTimeout = 80 * time.Millisecond

// maxKept bounds the bytes of the records of an invocation. Errors may use twice as many: a flood of debug records does not
// displace the record of a failure.
const maxKept = 256 << 10

// Log is the log of one invocation. Its methods may be called from several goroutines.
type Log struct {
	// Timeout is the longest delay that all sinks together may cause. It is set before Close.
	Timeout time.Duration

	stderr  io.Writer
	scope   string
	now     func() time.Time
	file    rollingFile
	closing sync.Once

	mu         sync.Mutex
	runDir     string
	level      Level
	configured bool
	records    []record
	size       int // of records, in bytes
	dropped    int
	idle       chan struct{} // closed while stderr has all records
}

// record is a line, which is kept until Close.
type record struct {
	level   Level
	line    []byte
	written bool // to stderr
}

// New returns the log of one invocation, whose records have the scope as the value of the key "scope" unless it is
// empty. Until Configure is called there is no run directory, and the level is info. The caller ends the log with Close.
func New(stderr io.Writer, scope string) *Log {
	if file, ok := stderr.(*os.File); ok {
		stderr = withoutSIGPIPE(file)
	}
	l := &Log{
		Timeout: DefaultTimeout,
		stderr:  stderr, scope: scope, now: time.Now, //nolint:forbidigo // the only clock of the package
		file: rollingFile{limit: maxFile}, idle: make(chan struct{}),
	}
	close(l.idle)
	return l
}

// withoutSIGPIPE returns a copy of stderr's file. The runtime ends a process that writes to a broken pipe by descriptor
// 2, and by no higher one: a container runtime that has stopped reading must not end an ADD half-way.
func withoutSIGPIPE(file *os.File) io.Writer {
	fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return file
	}
	return os.NewFile(uintptr(fd), file.Name())
}

// Logger returns the logger to pass down.
func (l *Log) Logger() *slog.Logger {
	return slog.New(handler{log: l})
}

// Configure sets the run directory and the level once the plugin's configuration is known. They hold for the records
// made before as well: those that the new level admits go to the sinks of the new run directory, and to stderr if that does
// not have them yet.
func (l *Log) Configure(runDir string, level Level) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.runDir, l.level, l.configured = runDir, level, true
	l.wakeStderr()
}

// enabled reports whether records of the level are logged. Before Configure it accepts every level, as it may be admitted.
func (l *Log) enabled(level Level) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.configured || level >= l.level
}

// add keeps a record, if there is room, and starts to write it to stderr.
func (l *Log) add(r record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	limit := maxKept
	if r.level >= LevelError {
		limit *= 2
	}
	if l.size += len(r.line); l.size > limit {
		l.size -= len(r.line)
		if r.level >= l.level {
			l.dropped++
		}
		return
	}
	l.append(r)
}

// append needs the lock.
func (l *Log) append(r record) {
	l.records = append(l.records, r)
	l.wakeStderr()
}

// wakeStderr starts the goroutine that writes records to stderr, unless it runs. It needs the lock.
func (l *Log) wakeStderr() {
	select {
	case <-l.idle:
		l.idle = make(chan struct{})
		go l.writeStderr()
	default:
	}
}

// writeStderr writes the records that stderr does not have, until there are none. It hangs as long as stderr does.
func (l *Log) writeStderr() {
	for {
		l.mu.Lock()
		var lines []byte
		for i := range l.records {
			if r := &l.records[i]; !r.written && r.level >= l.level {
				lines = append(lines, r.line...)
				r.written = true
			}
		}
		if len(lines) == 0 {
			close(l.idle)
			l.mu.Unlock()
			return
		}
		l.mu.Unlock()
		_, _ = l.stderr.Write(lines) // there is no other place to report it
	}
}

// Close delivers the records to the run directory's sinks and waits for stderr. It returns when all have them or the
// timeout is over, whichever is first. A sink that failed is named in a warning on stderr. A second Close does nothing.
func (l *Log) Close() {
	l.closing.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), l.Timeout)
		defer cancel()
		l.deliver(ctx)
		l.mu.Lock()
		idle := l.idle
		l.mu.Unlock()
		select {
		case <-idle:
		case <-ctx.Done():
		}
	})
}

// deliver passes the records to the file and the socket at the same time. It reserves the last tenth of the timeout for a
// warning on stderr about a failed sink.
func (l *Log) deliver(ctx context.Context) {
	runDir, records := l.admitted(ctx)
	if runDir == "" || len(records) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, l.Timeout*9/10)
	defer cancel()
	var sinks sync.WaitGroup
	for name, send := range map[string]func(path string) error{
		fileName:   func(path string) error { return l.file.append(path, records, l.now()) },
		socketName: func(path string) error { return relay(ctx, path, records) },
	} {
		path := filepath.Join(runDir, name)
		sinks.Go(func() {
			// deliver abandons a call that does not return: a write to a hung file system cannot be cancelled.
			sent := make(chan error, 1)
			go func() { sent <- send(path) }()
			var err error
			select {
			case err = <-sent:
			case <-ctx.Done():
				err = ctx.Err()
			}
			if err != nil {
				l.mu.Lock()
				defer l.mu.Unlock()
				l.append(l.record(ctx, LevelWarn, "log sink failed, its records may be lost",
					slog.String("sink", path), slog.Any("error", err)))
			}
		})
	}
	sinks.Wait()
}

// admitted returns the records for the sinks of the run directory. One more record counts those dropped for size.
func (l *Log) admitted(ctx context.Context) (runDir string, records []record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dropped > 0 {
		l.append(l.record(ctx, max(LevelWarn, l.level), "log records dropped: too many in one invocation",
			slog.Int("dropped", l.dropped)))
	}
	for _, r := range l.records {
		if r.level >= l.level {
			records = append(records, r)
		}
	}
	return l.runDir, records
}
