package logrelay

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"time"
	"unicode"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// The keys of a record that are not attributes, and the one that the relay sets itself.
const (
	levelKey   = "level"
	timeKey    = "time"
	messageKey = "msg"
	scopeKey   = "scope"

	// renamed is put before a key that would be taken for the relay's own, as the plugin does.
	renamed = "attr."
)

var errNoRecord = errors.New("not a log record")

// relay logs one record. A record below the level is unwanted whatever the rate.
func (s *Server) relay(ctx context.Context, line string, now time.Time) fate {
	record, err := parse(line)
	if err != nil {
		return rejectedRecord
	}
	if record.Level < s.options.Level.Level() {
		return unwantedRecord
	}
	if s.bySize.TokensAt(now) < float64(len(line)) || !s.byCount.AllowN(now, 1) || !s.bySize.AllowN(now, len(line)) {
		return droppedRecord
	}
	if s.records.Handle(ctx, record) != nil {
		return droppedRecord
	}
	return relayedRecord
}

// parse reads a record: a JSON object with level, time (RFC 3339) and msg, and attributes besides, of which the last
// of the same key counts. As with the reference a record without one of the three is none.
func parse(line string) (slog.Record, error) {
	dec := json.NewDecoder(strings.NewReader(line))
	if start, err := dec.Token(); err != nil || start != json.Delim('{') {
		return slog.Record{}, errNoRecord
	}
	m := members{own: make(map[string]string, 3), places: make(map[string]int)}
	for dec.More() {
		name, err := dec.Token()
		if err != nil {
			return slog.Record{}, errNoRecord
		}
		key, _ := name.(string) // a key is nothing else
		var value json.RawMessage
		if dec.Decode(&value) != nil || !m.add(key, value) {
			return slog.Record{}, errNoRecord
		}
	}
	if _, err := dec.Token(); err != nil || atEnd(dec) != nil {
		return slog.Record{}, errNoRecord
	}
	return m.record()
}

// members are those of a record: its own three, and the attributes, whose places are by key.
type members struct {
	own    map[string]string
	attrs  []slog.Attr
	places map[string]int
}

// add reports whether the value may stand for the key.
func (m *members) add(key string, value json.RawMessage) bool {
	switch key {
	case levelKey, timeKey, messageKey:
		text, isText := attrValue(value).Any().(string)
		m.own[key] = text
		return isText
	case scopeKey:
		if string(value) == `"`+scope+`"` {
			return true
		}
		key = renamed + key
	}
	key = shown(key)
	if at, seen := m.places[key]; seen {
		m.attrs[at].Value = attrValue(value)
		return true
	}
	m.places[key] = len(m.attrs)
	m.attrs = append(m.attrs, slog.Attr{Key: key, Value: attrValue(value)})
	return true
}

func (m *members) record() (slog.Record, error) {
	level, known := levelOf(m.own[levelKey])
	at, err := time.Parse(time.RFC3339Nano, m.own[timeKey])
	msg, hasMessage := m.own[messageKey]
	if !known || err != nil || !hasMessage {
		return slog.Record{}, errNoRecord
	}
	record := slog.NewRecord(at, level, strings.TrimSpace(msg), 0)
	record.AddAttrs(m.attrs...)
	return record, nil
}

// levelOf reads the four levels of the reference's plugin, and its fifth, which a plugin of this program sends as an
// error already.
func levelOf(name string) (slog.Level, bool) {
	switch name {
	case "debug":
		return slog.LevelDebug, true
	case "info":
		return slog.LevelInfo, true
	case "warn":
		return slog.LevelWarn, true
	case "error", "fatal":
		return slog.LevelError, true
	default:
		return 0, false
	}
}

// attrValue keeps the kind of a value. Text is unquoted; everything else stays as it was written, so that no number
// loses digits.
func attrValue(value json.RawMessage) slog.Value {
	var text string
	if len(value) > 0 && value[0] == '"' && json.Unmarshal(value, &text) == nil {
		return slog.StringValue(shown(text))
	}
	return slog.AnyValue(json.RawMessage(shown(string(value))))
}

// shown replaces what a reader's terminal obeys or hides. The control characters of ASCII, line ends among them, are escaped
// by the handlers of log/slog.
func shown(text string) string {
	return strings.Map(func(r rune) rune {
		if r >= ' ' && !printable.Is(r) {
			return unicode.ReplacementChar
		}
		return r
	}, text)
}
