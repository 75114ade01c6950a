package logserver

import (
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/node/pluginlog"
)

// scopeKey has the same value in every relayed record, which distinguishes relayed records from the agent's own.
const scopeKey = "scope"

var errNoRecord = errors.New("not a log record")

// parse parses a record: a JSON object with level, time (RFC 3339), msg and attributes; the last of duplicate keys wins. As
// in Istio's agent, a record without one of the three is malformed. The level "fatal" becomes error because log/slog has no
// fatal level. The record's own scope is dropped.
func parse(line string) (slog.Record, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal([]byte(line), &members); err != nil {
		return slog.Record{}, err
	}
	var own [3]string
	for i, key := range []string{slog.LevelKey, slog.TimeKey, slog.MessageKey} {
		text, ok := attrValue(members[key]).Any().(string)
		if !ok {
			return slog.Record{}, errNoRecord
		}
		own[i] = text
		delete(members, key)
	}
	level, err := pluginlog.ParseLevel(own[0])
	at, notTime := time.Parse(time.RFC3339Nano, own[1])
	if err != nil || notTime != nil || own[0] == "" || level == pluginlog.LevelNone {
		return slog.Record{}, errNoRecord
	}
	record := slog.NewRecord(at, min(level, pluginlog.LevelError).Level(), strings.TrimSpace(own[2]), 0)
	delete(members, scopeKey)
	for _, key := range slices.Sorted(maps.Keys(members)) {
		record.AddAttrs(slog.Attr{Key: key, Value: attrValue(members[key])})
	}
	return record, nil
}

// attrValue keeps the kind of a value. A string is unquoted; any other value keeps its text, so that no number loses digits.
func attrValue(value json.RawMessage) slog.Value {
	var text string
	if len(value) > 0 && value[0] == '"' && json.Unmarshal(value, &text) == nil {
		return slog.StringValue(text)
	}
	return slog.AnyValue(value)
}
