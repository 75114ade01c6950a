package pluginlog

import (
	"bytes"
	"context"
	"log/slog"
	"time"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// timeLayout is the time format of the reference's plugin: UTC, always with six digits of a second.
const timeLayout = "2006-01-02T15:04:05.000000Z"

const (
	// maxText bounds the message and each text of a record, so that a long one leaves room for the others.
	maxText = 16 << 10
	// maxLine bounds a record. The agent accepts requests of 1 MiB.
	maxLine = 224 << 10
)

// handler makes each slog record one line of the log: an object with the members level, time, msg, scope and the
// attributes. No attribute of this program uses one of these keys; the linter checks the first three.
type handler struct {
	log  *Log
	with func(slog.Handler) slog.Handler // adds the handler's attributes and groups to another one
}

func (h handler) Enabled(_ context.Context, level slog.Level) bool {
	return h.log.enabled(Level(level))
}

func (h handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return handler{h.log, func(to slog.Handler) slog.Handler { return h.with(to).WithAttrs(attrs) }}
}

func (h handler) WithGroup(name string) slog.Handler {
	return handler{h.log, func(to slog.Handler) slog.Handler { return h.with(to).WithGroup(name) }}
}

// Handle adds the record to the log. It never returns an error because no sink may fail the plugin.
func (h handler) Handle(ctx context.Context, r slog.Record) error {
	h.log.add(h.record(ctx, r))
	return nil
}

// record makes a record with the time of the log's clock because the agent drops records without a time.
func (h handler) record(ctx context.Context, r slog.Record) record {
	r.Time = h.log.now()
	var b bytes.Buffer
	_ = h.with(slog.NewJSONHandler(&b, &slog.HandlerOptions{ReplaceAttr: replace})).Handle(ctx, r) // to memory
	line := printable.Lines(b.Bytes())
	if len(line) > maxLine {
		short := slog.NewRecord(r.Time, r.Level, r.Message, 0)
		short.AddAttrs(slog.Int("dropped_attributes", r.NumAttrs()))
		return h.log.root.record(ctx, short)
	}
	return record{Level(r.Level), line}
}

// replace formats level and times like the reference's plugin, and bounds texts.
func replace(_ []string, a slog.Attr) slog.Attr {
	switch value := a.Value.Any().(type) {
	case slog.Level:
		a.Value = slog.StringValue(Level(value).String())
	case time.Time:
		a.Value = slog.StringValue(value.UTC().Format(timeLayout))
	case time.Duration:
		a.Value = slog.StringValue(value.String())
	case string:
		a.Value = slog.StringValue(bounded(value))
	case error:
		a.Value = slog.AnyValue(boundedError{value})
	}
	return a
}

func bounded(text string) string {
	if len(text) <= maxText {
		return text
	}
	return printable.Text(text, maxText)
}

// boundedError formats an error as text, even if it implements json.Marshaler. The handler recovers a panic of Error.
type boundedError struct{ error }

func (e boundedError) Error() string { return bounded(e.error.Error()) }
