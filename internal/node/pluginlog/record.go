package pluginlog

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// timeLayout is the form in which the reference's plugin writes a time: UTC, always six digits of a second's fraction.
const timeLayout = "2006-01-02T15:04:05.000000Z"

const (
	// maxText bounds the message and each text of a record, so that none of them crowds out the others.
	maxText = 16 << 10
	// maxLine bounds a record. The agent takes 256 KiB.
	maxLine = 224 << 10
)

const (
	scopeKey = "scope"
	// renamed is put before a key that would be taken for one of the record's own.
	renamed = "attr."
)

// handler makes each slog record one line of the log, with flat keys as the reference's plugin has them: the members of
// a group have its name and a dot before theirs.
type handler struct {
	log    *Log
	prefix string // the open groups, each followed by a dot
	attrs  []slog.Attr
}

func (h handler) Enabled(_ context.Context, level slog.Level) bool {
	return h.log.enabled(Level(level))
}

func (h handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	h.attrs = slices.Clip(h.attrs)
	for _, a := range attrs {
		h.attrs = appendFlat(h.attrs, h.prefix, a)
	}
	return h
}

func (h handler) WithGroup(name string) slog.Handler {
	if name != "" {
		h.prefix += name + "."
	}
	return h
}

// Handle adds the record to the log. Every record has a time, that of the log's clock: the agent drops records without one.
// Handle never returns an error, as no sink may fail the plugin.
func (h handler) Handle(ctx context.Context, r slog.Record) error {
	attrs := slices.Clip(h.attrs)
	r.Attrs(func(a slog.Attr) bool {
		attrs = appendFlat(attrs, h.prefix, a)
		return true
	})
	h.log.add(h.log.record(ctx, Level(r.Level), r.Message, attrs...))
	return nil
}

// appendFlat adds an attribute, a group as its members. The record's own keys are compared without regard to case,
// because that is how a Go receiver matches the keys of an object to the fields of its struct.
func appendFlat(attrs []slog.Attr, prefix string, a slog.Attr) []slog.Attr {
	a.Value = a.Value.Resolve()
	if a.Equal(slog.Attr{}) {
		return attrs
	}
	if a.Value.Kind() == slog.KindGroup {
		if a.Key != "" {
			prefix += a.Key + "."
		}
		for _, member := range a.Value.Group() {
			attrs = appendFlat(attrs, prefix, member)
		}
		return attrs
	}
	a.Key = prefix + a.Key
	own := func(key string) bool { return strings.EqualFold(key, a.Key) }
	if slices.ContainsFunc([]string{slog.LevelKey, slog.TimeKey, slog.MessageKey, scopeKey}, own) {
		a.Key = renamed + a.Key
	}
	return append(attrs, a)
}

// record makes a record of flat attributes, of which the last of equal keys counts, as for every reader of JSON.
func (l *Log) record(ctx context.Context, level Level, msg string, attrs ...slog.Attr) record {
	var b bytes.Buffer
	r := slog.NewRecord(l.now(), slog.Level(level), msg, 0)
	if l.scope != "" {
		r.AddAttrs(slog.String(scopeKey, l.scope))
	}
	r.AddAttrs(attrs...)
	_ = slog.NewJSONHandler(&b, &slog.HandlerOptions{ReplaceAttr: replace}).Handle(ctx, r) // to memory
	if line := printable.Lines(b.Bytes()); len(line) <= maxLine {
		return record{level: level, line: line}
	}
	return l.record(ctx, level, msg, slog.Int("dropped_attributes", len(attrs)))
}

// replace writes level and time as the reference's plugin does, and bounds texts.
func replace(_ []string, a slog.Attr) slog.Attr {
	switch value := a.Value.Any().(type) {
	case slog.Level:
		a.Value = slog.StringValue(Level(value).String())
	case time.Time:
		layout := time.RFC3339Nano
		if a.Key == slog.TimeKey {
			layout, value = timeLayout, value.UTC()
		}
		a.Value = slog.StringValue(value.Format(layout)) // slog's own makes no JSON of the year 10000
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

// boundedError is an error as text, even if it could be JSON. The handler recovers a panic of Error.
type boundedError struct{ error }

func (e boundedError) Error() string { return bounded(e.error.Error()) }
