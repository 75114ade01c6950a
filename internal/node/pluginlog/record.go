package pluginlog

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// timeLayout is the form in which the reference's plugin writes a time: UTC, always six digits of a second's fraction.
const timeLayout = "2006-01-02T15:04:05.000000Z"

// maxText bounds the message and each value of a record, so that one of them cannot crowd out all other records.
const maxText = 64 << 10

// renamed is put before a key that would be taken for one of the record's own.
const renamed = "attr."

// handler makes each slog record one line of the log. It holds what WithAttrs and WithGroup have added.
type handler struct {
	log    *Log
	prefix string // the open groups, each followed by a dot
	fields []field
}

// field is an attribute ready for writing: the dotted key, and the value as JSON.
type field struct {
	key   string
	value []byte
}

func (h *handler) Enabled(_ context.Context, level slog.Level) bool {
	return h.log.enabled(Level(level))
}

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	fields := slices.Clip(h.fields)
	for _, a := range attrs {
		fields = appendAttr(fields, h.prefix, a)
	}
	return &handler{log: h.log, prefix: h.prefix, fields: fields}
}

func (h *handler) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	return &handler{log: h.log, prefix: h.prefix + name + ".", fields: h.fields}
}

// Handle logs the record. The time is the log's clock's, and there always is one: the agent drops a record without.
// It never returns an error, as no sink may fail the plugin.
func (h *handler) Handle(_ context.Context, r slog.Record) error {
	fields := slices.Clip(h.fields)
	r.Attrs(func(a slog.Attr) bool {
		fields = appendAttr(fields, h.prefix, a)
		return true
	})
	level := Level(r.Level)
	h.log.emit(level, encode(h.log.now(), level, h.log.scope, r.Message, fields))
	return nil
}

// appendAttr adds an attribute to the fields, a group as its members. As slog asks, empty attributes and empty groups
// are left out and the members of a group without a name stand beside it.
func appendAttr(fields []field, prefix string, a slog.Attr) []field {
	a.Value = a.Value.Resolve()
	if a.Equal(slog.Attr{}) {
		return fields
	}
	if a.Value.Kind() != slog.KindGroup {
		return append(fields, field{key: label(prefix + a.Key), value: encodeValue(a.Value)})
	}
	if a.Key != "" {
		prefix += a.Key + "."
	}
	for _, member := range a.Value.Group() {
		fields = appendAttr(fields, prefix, member)
	}
	return fields
}

// label makes a key safe beside the record's own keys. They are compared without regard to case, because that is how
// a Go receiver matches the keys of an object to the fields of its struct.
func label(key string) string {
	key = strings.ToValidUTF8(key, "\uFFFD")
	for _, own := range []string{"level", "time", "msg", "scope"} {
		if strings.EqualFold(key, own) {
			return renamed + key
		}
	}
	return key
}

// encode writes the record as one line. Of fields with the same key the last one counts, where the first one stood.
func encode(at time.Time, level Level, scope, msg string, fields []field) []byte {
	line := []byte(`{"level":"` + level.String() + `","time":"` + at.UTC().Format(timeLayout) + `","msg":`)
	line = append(line, quote(msg)...)
	if scope != "" {
		line = append(append(line, `,"scope":`...), quote(scope)...)
	}
	for _, f := range lastOfEach(fields) {
		line = append(append(line, ','), quote(f.key)...)
		line = append(append(line, ':'), f.value...)
	}
	return append(line, '}', '\n')
}

func lastOfEach(fields []field) []field {
	places := make(map[string]int, len(fields))
	unique := make([]field, 0, len(fields))
	for _, f := range fields {
		if i, seen := places[f.key]; seen {
			unique[i] = f
			continue
		}
		places[f.key] = len(unique)
		unique = append(unique, f)
	}
	return unique
}

// encodeValue returns the value as JSON on one line, whatever it is: what cannot be encoded becomes a string saying so.
func encodeValue(v slog.Value) (encoded []byte) {
	defer func() {
		if p := recover(); p != nil {
			encoded = quote(fmt.Sprintf("!PANIC: %v", p))
		}
	}()
	switch v.Kind() { //nolint:exhaustive // the other kinds encode as themselves
	case slog.KindString:
		return quote(v.String())
	case slog.KindDuration:
		return quote(v.Duration().String())
	}
	value := v.Any()
	if err, ok := value.(error); ok {
		return quote(err.Error())
	}
	encoded, err := marshal(value)
	if err != nil {
		return quote("!ERROR: " + err.Error())
	}
	if len(encoded) > maxText {
		return quote(string(encoded))
	}
	return encoded
}

// quote returns the text as a JSON string of twice maxText at most, whatever has to be escaped in it.
func quote(s string) []byte {
	if len(s) <= maxText {
		if encoded, err := marshal(s); err == nil && len(encoded) <= maxText+len(`""`) {
			return encoded
		}
	}
	encoded, err := marshal(printable.Text(s, maxText)) // in which only quotes and backslashes are still escaped
	if err != nil {
		return []byte(`""`)
	}
	return encoded
}

// marshal is json.Marshal with <, > and & left readable, and with all that is not printable escaped.
func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return printable.Lines(bytes.TrimSuffix(b.Bytes(), []byte("\n"))), nil
}
