// Package pluginlog is the log of one invocation of the CNI plugin: a log/slog logger. It writes records to stderr as
// soon as the configuration is known, and to the node agent's socket and the rolling file of the run directory when the
// invocation ends.
//
// It promises that a record is one line with one JSON object in the form that the node agent reads; that records from
// before the run directory was known also reach the socket and the file; and that no sink, whether dead, full, slow or
// hanging, fails an invocation or delays it, Close included, by more than Log.Timeout. The log counts the records that it
// drops.
//
// It never touches stdout, never creates the run directory, never starts a process, and has no function that
// dumps an environment or a whole configuration. The agent serves the socket.
//
// Start reading at Log. record.go makes the lines; file.go has the rolling file.
package pluginlog

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// DefaultTimeout is the delay that all sinks together may cause. It leaves a fifth of the promised 100 ms for
// delays of the scheduler.
const DefaultTimeout = 80 * time.Millisecond

// maxKept bounds the bytes of an invocation's records. Errors may use twice as many, so that a flood of debug records does
// not displace the record of a failure.
const maxKept = 256 << 10

// lowest is the level before Configure because the configuration may admit any record.
const lowest = Level(math.MinInt)

// Log is the log of one invocation. Its methods may be called from several goroutines.
type Log struct {
	// Timeout is the longest delay that all sinks together may cause. Set it before Close.
	Timeout time.Duration

	stderr io.Writer
	root   handler
	now    func() time.Time

	mu      sync.Mutex
	runDir  string
	level   Level
	records []record
	size    int           // of the records, in bytes
	written int           // records written to stderr, or being written
	dropped int           // records beyond maxKept
	idle    chan struct{} // closed when stderr has all records
}

// record is a line of the log.
type record struct {
	level Level
	line  []byte
}

// New returns the log of one invocation. If scope is not empty, each record has it under the key "scope". The log
// keeps all records until Configure. The caller must call Close.
func New(stderr io.Writer, scope string) *Log {
	if file, ok := stderr.(*os.File); ok {
		stderr = withoutSIGPIPE(file)
	}
	l := &Log{
		Timeout: DefaultTimeout, stderr: stderr, level: lowest, idle: make(chan struct{}),
		now: time.Now, //nolint:forbidigo // the only clock of the package
	}
	close(l.idle)
	l.root = handler{log: l, with: func(to slog.Handler) slog.Handler {
		if scope == "" {
			return to
		}
		return to.WithAttrs([]slog.Attr{slog.String("scope", scope)})
	}}
	return l
}

// withoutSIGPIPE returns a copy of stderr's file. Go's runtime ends a process that writes to a broken pipe on descriptor 1 or 2,
// but not on a higher one: a container runtime that stops reading must not end an ADD half-way. A signal handler would cost each
// start a goroutine and a thread.
func withoutSIGPIPE(file *os.File) io.Writer {
	fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return file
	}
	return os.NewFile(uintptr(fd), file.Name())
}

// Logger returns the logger to pass to other code.
func (l *Log) Logger() *slog.Logger {
	return slog.New(l.root)
}

// Configure sets the run directory and the level once the plugin's configuration is known. They also apply to the
// earlier records. Call it at most once.
func (l *Log) Configure(runDir string, level Level) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.records = slices.DeleteFunc(l.records, func(r record) bool { return r.level < level })
	l.runDir, l.level = runDir, level
	l.wakeStderr()
}

func (l *Log) enabled(level Level) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return level >= l.level
}

// add keeps a record if there is room, and starts to write it to stderr.
func (l *Log) add(r record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	limit := maxKept
	if r.level >= LevelError {
		limit *= 2
	}
	if l.size+len(r.line) > limit {
		l.dropped++
		return
	}
	l.size += len(r.line)
	l.records = append(l.records, r)
	l.wakeStderr()
}

// note adds a record of the log itself, even without room, if the level admits it. The caller holds the lock.
func (l *Log) note(ctx context.Context, level Level, msg string, attrs ...slog.Attr) {
	r := slog.NewRecord(l.now(), slog.Level(level), msg, 0)
	r.AddAttrs(attrs...)
	if level >= l.level {
		l.records = append(l.records, l.root.record(ctx, r))
		l.wakeStderr()
	}
}

// wakeStderr starts the goroutine that writes records to stderr, unless it runs or the level is not known. The caller holds the lock.
func (l *Log) wakeStderr() {
	select {
	case <-l.idle:
		if l.level != lowest {
			l.idle = make(chan struct{})
			go l.writeStderr()
		}
	default:
	}
}

// writeStderr writes records to stderr until all are written. It hangs as long as stderr does.
func (l *Log) writeStderr() {
	for {
		l.mu.Lock()
		fresh := l.records[l.written:]
		l.written = len(l.records)
		if len(fresh) == 0 {
			close(l.idle)
			l.mu.Unlock()
			return
		}
		l.mu.Unlock()
		_, _ = l.stderr.Write(lines(fresh)) // there is no other place for the error
	}
}

func lines(records []record) (all []byte) {
	for _, r := range records {
		all = append(all, r.line...)
	}
	return all
}

// Close delivers the records to the run directory's sinks and waits for stderr. It returns when all sinks have the records
// or at the timeout. It reports a failed sink in a warning on stderr. Without Configure there is no run directory, and the
// level is info.
func (l *Log) Close() {
	if l.enabled(lowest) {
		l.Configure("", LevelInfo)
	}
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
}

// deliver passes the records to the file and the socket at the same time, with an extra record that counts the dropped
// ones. It reserves the last tenth of the timeout for a warning on stderr about a failed sink.
func (l *Log) deliver(ctx context.Context) {
	l.mu.Lock()
	if l.dropped > 0 {
		l.note(ctx, max(LevelWarn, l.level), "log records dropped: too many in one invocation", slog.Int("dropped", l.dropped))
	}
	runDir, text := l.runDir, lines(l.records)
	l.mu.Unlock()
	if runDir == "" || len(text) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, l.Timeout*9/10)
	defer cancel()
	var sinks sync.WaitGroup
	for name, send := range map[string]func(path string) error{
		fileName:   func(path string) error { return appendFile(path, text, maxFile, l.now()) },
		socketName: func(path string) error { return relay(ctx, path, text) },
	} {
		path := filepath.Join(runDir, name)
		sinks.Go(func() {
			// deliver abandons a call that does not return because a write to a hung file system cannot be cancelled.
			sent := make(chan error, 1)
			go func() { sent <- send(path) }()
			var err error
			select {
			case err = <-sent:
			case <-ctx.Done():
				err = ctx.Err()
			}
			if err == nil || errors.Is(err, fs.ErrNotExist) { // no run directory, or no agent
				return
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			l.note(ctx, LevelWarn, "log sink failed, its records may be lost", slog.String("sink", path), slog.Any("error", err))
		})
	}
	sinks.Wait()
}

// socketName is the name of the node agent's log socket in the run directory.
const socketName = "log.sock"

// relay sends lines to the node agent in one request. The error is fs.ErrNotExist if there is no agent.
func relay(ctx context.Context, socket string, lines []byte) error {
	agent, err := agentapi.Dial(ctx, socket)
	if err != nil {
		return err
	}
	defer func() { _ = agent.Close() }()
	return agent.Log(ctx, slices.Collect(strings.Lines(string(lines))))
}
