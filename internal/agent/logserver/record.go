package logserver

import (
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
)

const (
	// scopeKey has the value scope in every relayed record, which distinguishes the record from the agent's own.
	scopeKey = "scope"
	scope    = "cni-plugin"
	// renamed prefixes a key that could pass for the relay's own, as in the plugin.
	renamed = "attr."
)

var errNoRecord = errors.New("not a log record")

// parse parses a record: a JSON object with level, time (RFC 3339), msg and attributes; of duplicate keys the last counts. As
// in the reference, a record without one of the three is malformed. The level "fatal" becomes error, as a plugin of this
// program sends it.
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
	for _, key := range slices.Sorted(maps.Keys(members)) {
		value := attrValue(members[key])
		if key == scopeKey {
			if value.String() == scope {
				continue
			}
			key = renamed + key
		}
		record.AddAttrs(slog.Attr{Key: shown(key), Value: value})
	}
	return record, nil
}

// attrValue keeps the kind of a value. A string is unquoted; any other value keeps its text, so that no number loses digits.
func attrValue(value json.RawMessage) slog.Value {
	var text string
	if len(value) > 0 && value[0] == '"' && json.Unmarshal(value, &text) == nil {
		return slog.StringValue(shown(text))
	}
	return slog.AnyValue(json.RawMessage(shown(string(value))))
}

// shown replaces characters that a terminal interprets or hides. The handlers of log/slog escape the control characters of
// ASCII, line ends among them.
func shown(text string) string {
	return strings.Map(func(r rune) rune {
		if r >= ' ' && !printable.Is(r) {
			return unicode.ReplacementChar
		}
		return r
	}, text)
}
