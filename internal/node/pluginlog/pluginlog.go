// Package pluginlog is the log of one invocation of the CNI plugin: a log/slog logger whose records go to stderr at
// once, and to the node agent's socket and the rolling file of the run directory when the invocation ends.
//
// It promises that a record is one line holding one JSON object in the form the node agent reads; that records written
// before the run directory was known reach the socket and the file as well; and that no sink, whether dead, full, slow
// or hanging, ever fails an invocation or delays it, Close included, by more than Options.Patience. What is given up to
// keep that promise are log records, and the log says how many.
//
// It never touches stdout, never creates the run directory, never starts a process, and offers no way to dump an
// environment or a whole configuration. It does not serve the socket; that is the agent's work.
//
// Start reading at Log. The line is made in record.go; each sink has a file of its own.
package pluginlog

import (
	"context"
	"io"
	"log/slog"
	"path/filepath"
	"sync"
	"time"
)

// DefaultPatience is what all sinks together may cost an invocation. It leaves a fifth of the promised 100 ms for a
// scheduler that is late.
const DefaultPatience = 80 * time.Millisecond

// maxKept bounds the bytes of the records that wait for Close.
const maxKept = 256 << 10

// Options are what is known of the log when the plugin starts. The zero value logs nothing anywhere, at level info.
type Options struct {
	// Stderr receives each record as it is made. A nil Stderr receives none.
	Stderr io.Writer
	// RunDir is the agent's directory on the node, holding log.sock and istio-cni.log. Empty means neither is used.
	RunDir string
	// Level is the lowest level that is logged. Until Configure is called lower ones are kept back, not lost.
	Level Level
	// Scope is the value of the key "scope" of each record; empty leaves the key out.
	Scope string
	// Now tells the time of each record; nil means the system's clock.
	Now func() time.Time
	// Patience is the longest delay that all sinks together may cause; 0 means DefaultPatience.
	Patience time.Duration
}

// Log is the log of one invocation. Its methods may be called from several goroutines.
type Log struct {
	scope    string
	now      func() time.Time
	patience time.Duration
	file     rollingFile
	stderr   *stream
	logger   *slog.Logger
	closing  sync.Once

	mu         sync.Mutex
	runDir     string
	level      Level
	configured bool
	kept       buffer
	waited     time.Duration // what stderr has cost so far
}

// New returns the log of one invocation. The caller ends it with Close.
func New(o Options) *Log {
	if o.Stderr == nil {
		o.Stderr = io.Discard
	}
	if o.Now == nil {
		o.Now = time.Now //nolint:forbidigo // the only clock of the package; callers that need another one pass it
	}
	if o.Patience <= 0 {
		o.Patience = DefaultPatience
	}
	l := &Log{
		scope:    o.Scope,
		now:      o.Now,
		patience: o.Patience,
		file:     rollingFile{limit: maxFile, now: o.Now},
		stderr:   newStream(o.Stderr, maxKept),
		runDir:   o.RunDir,
		level:    o.Level,
		kept:     buffer{limit: maxKept},
	}
	l.logger = slog.New(&handler{log: l})
	return l
}

// Logger returns the logger to pass down. It may still be used after Close; its records then reach stderr only.
func (l *Log) Logger() *slog.Logger {
	return l.logger
}

// Configure sets the run directory and the level once the plugin's stanza is known. They hold for the records made
// before as well: those the new level admits go to the new run directory's sinks, and to stderr if they were kept back.
func (l *Log) Configure(runDir string, level Level) {
	l.mu.Lock()
	l.runDir, l.level, l.configured = runDir, level, true
	late := l.kept.show(level)
	idle := l.stderr.push(late)
	l.mu.Unlock()
	l.waitForStderr(idle)
}

// Close delivers the kept records to the run directory's sinks. It returns when they have them or the patience is used
// up, whichever is first. A sink that failed is named in a warning on stderr, as nothing else can be done about it. A
// second Close does nothing.
func (l *Log) Close() {
	l.closing.Do(func() {
		l.mu.Lock()
		runDir := l.runDir
		records := l.kept.take(l.level, l.dropNotice)
		left := l.patience - l.waited
		l.mu.Unlock()

		ctx, cancel := context.WithTimeout(context.Background(), left)
		defer cancel()
		if runDir != "" && len(records) > 0 {
			l.deliver(ctx, left, runDir, records)
		}
		select {
		case <-l.stderr.push(nil):
		case <-ctx.Done():
		}
	})
}

// deliver gives the records to the file and the socket at the same time. A sink that does not return is left behind:
// a write to a hung file system cannot be called back.
func (l *Log) deliver(ctx context.Context, left time.Duration, runDir string, records []record) {
	ctx, cancel := context.WithTimeout(ctx, left-left/10) // the last tenth is for saying on stderr what failed
	defer cancel()
	sinks := map[string]func() error{
		filepath.Join(runDir, fileName):   func() error { return l.file.write(runDir, join(records)) },
		filepath.Join(runDir, socketName): func() error { return relay(ctx, filepath.Join(runDir, socketName), records) },
	}
	type outcome struct {
		sink string
		err  error
	}
	outcomes := make(chan outcome, len(sinks))
	for name, send := range sinks {
		go func() { outcomes <- outcome{name, send()} }()
	}
	for len(sinks) > 0 {
		select {
		case o := <-outcomes:
			delete(sinks, o.sink)
			l.sayLost(o.sink, o.err)
		case <-ctx.Done():
			for name := range sinks {
				l.sayLost(name, ctx.Err())
			}
			return
		}
	}
}

// sayLost warns that a sink may not have the records. It does not wait: Close does, at its end.
func (l *Log) sayLost(sink string, err error) {
	if err == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if LevelWarn >= l.level {
		l.stderr.push(l.line(LevelWarn, "log sink failed, its records may be lost",
			slog.String("sink", sink), slog.Any("error", err)))
	}
}

// dropNotice is the record that stands for those the buffer had no room for.
func (l *Log) dropNotice(level Level, dropped int) []byte {
	return l.line(level, "log records dropped: too many in one invocation", slog.Int("dropped", dropped))
}

// line makes a record of the log's own.
func (l *Log) line(level Level, msg string, attrs ...slog.Attr) []byte {
	var fields []field
	for _, a := range attrs {
		fields = appendAttr(fields, "", a)
	}
	return encode(l.now(), level, l.scope, msg, fields)
}

// enabled reports whether records of the level are wanted. Before Configure every level may turn out to be.
func (l *Log) enabled(level Level) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.configured || level >= l.level
}

// emit sends a record to stderr and keeps it for Close.
func (l *Log) emit(level Level, line []byte) {
	l.mu.Lock()
	shown := level >= l.level
	l.kept.add(record{level: level, line: line, shown: shown})
	if !shown {
		l.mu.Unlock()
		return
	}
	idle := l.stderr.push(line) // under the lock, so that stderr has the order of the buffer
	l.mu.Unlock()
	l.waitForStderr(idle)
}

// waitForStderr returns when stderr has all lines given to it. All waits of an invocation together last a third of the
// patience at most; after that lines still go to stderr, but nobody waits for them.
func (l *Log) waitForStderr(idle <-chan struct{}) {
	l.mu.Lock()
	left := l.patience/3 - l.waited
	l.mu.Unlock()
	if left <= 0 {
		return
	}
	began := l.now()
	timer := time.NewTimer(left)
	defer timer.Stop()
	waited := left
	select {
	case <-idle:
		waited = min(max(l.now().Sub(began), 0), left)
	case <-timer.C:
	}
	l.mu.Lock()
	l.waited += waited
	l.mu.Unlock()
}
