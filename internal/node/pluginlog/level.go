package pluginlog

import (
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
)

// Level is the lowest level that is logged. The zero value is info. Where slog wants one of its own, LevelFatal.Level()
// is it.
type Level slog.Level

// The levels a stanza may name. LevelFatal is for the record of a failure nothing can follow; LevelNone admits no
// record at all.
const (
	LevelDebug = Level(slog.LevelDebug)
	LevelInfo  = Level(slog.LevelInfo)
	LevelWarn  = Level(slog.LevelWarn)
	LevelError = Level(slog.LevelError)
	LevelFatal = Level(12)
	LevelNone  = Level(math.MaxInt)
)

// ParseLevel reads the value of plugin_log_level. An empty value is info. So is an unknown one, with an error that the
// caller logs: the reference takes it for "none" and then says nothing about anything.
func ParseLevel(s string) (Level, error) {
	switch s {
	case "debug":
		return LevelDebug, nil
	case "", "info":
		return LevelInfo, nil
	case "warn":
		return LevelWarn, nil
	case "error":
		return LevelError, nil
	case "fatal":
		return LevelFatal, nil
	case "none":
		return LevelNone, nil
	default:
		return LevelInfo, fmt.Errorf("parsing log level %q: want one of debug, info, warn, error, fatal, none", s)
	}
}

// ParseScopes reads one level, or SCOPE:LEVEL pairs between commas, of which those of the given scopes count. Scopes of
// other programs are passed over: charts give one text to all of them.
func ParseScopes(text string, scopes ...string) (Level, error) {
	level := LevelInfo
	for pair := range strings.SplitSeq(text, ",") {
		scope, word, found := strings.Cut(strings.TrimSpace(pair), ":")
		if !found {
			scope, word = scopes[0], scope
		}
		l, err := ParseLevel(word)
		if err != nil || word == "" {
			return level, fmt.Errorf("level %q: want debug, info, warn, error, fatal or none", word)
		}
		if slices.Contains(scopes, scope) {
			level = l
		}
	}
	return level, nil
}

// Level returns the level as log/slog counts it, which makes a Level a slog.Leveler.
func (l Level) Level() slog.Level {
	return slog.Level(l)
}

// String returns the name of the level. A level between two named ones has the name of the lower.
func (l Level) String() string {
	switch {
	case l < LevelInfo:
		return "debug"
	case l < LevelWarn:
		return "info"
	case l < LevelError:
		return "warn"
	case l < LevelFatal:
		return "error"
	case l < LevelNone:
		return "fatal"
	default:
		return "none"
	}
}
