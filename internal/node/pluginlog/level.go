package pluginlog

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
)

// Level is the lowest level that is logged. The zero value is info.
type Level slog.Level

// The levels that a configuration may name. No record of this program has LevelFatal; LevelNone admits no record.
const (
	LevelDebug = Level(slog.LevelDebug)
	LevelInfo  = Level(slog.LevelInfo)
	LevelWarn  = Level(slog.LevelWarn)
	LevelError = Level(slog.LevelError)
	LevelFatal = Level(12)
	LevelNone  = Level(math.MaxInt)
)

// levels has the named levels in ascending order.
var levels = []struct { //nolint:gochecknoglobals // a constant table
	name  string
	level Level
}{{"debug", LevelDebug}, {"info", LevelInfo}, {"warn", LevelWarn}, {"error", LevelError}, {"fatal", LevelFatal}, {"none", LevelNone}}

// ParseLevel reads the value of plugin_log_level. An empty or unknown value means info; an unknown value also returns
// an error for the caller to log. (The reference treats an unknown value as "none" and logs nothing.)
func ParseLevel(s string) (Level, error) {
	for _, l := range levels {
		if l.name == s {
			return l.level, nil
		}
	}
	if s == "" {
		return LevelInfo, nil
	}
	return LevelInfo, fmt.Errorf("parsing log level %q: want one of debug, info, warn, error, fatal, none", s)
}

// Scopes has levels by scope. A scope is the name of a part of the program.
type Scopes map[string]Level

// ParseScopes reads SCOPE:LEVEL pairs between commas, or one level, which applies to the scope "default". Charts pass the
// same text to all programs, and each program has its own scopes.
func ParseScopes(text string) (Scopes, error) {
	scopes := Scopes{}
	var errs []error
	for pair := range strings.SplitSeq(text, ",") {
		scope, word, found := strings.Cut(strings.TrimSpace(pair), ":")
		if !found {
			scope, word = "default", scope
		}
		level, err := ParseLevel(word)
		if err != nil || word == "" {
			errs = append(errs, fmt.Errorf("scope %q, level %q: want debug, info, warn, error, fatal or none", scope, word))
		}
		scopes[scope] = level
	}
	return scopes, errors.Join(errs...)
}

// Of returns the level of a scope: its own, else the level of "default", else the level of "all", else info.
func (s Scopes) Of(scope string) Level {
	for _, name := range []string{scope, "default", "all"} {
		if level, ok := s[name]; ok {
			return level
		}
	}
	return LevelInfo
}

// Level returns the slog.Level, which makes a Level a slog.Leveler.
func (l Level) Level() slog.Level {
	return slog.Level(l)
}

// String returns the name of the level. A level between two named ones has the name of the lower one.
func (l Level) String() string {
	name := "debug"
	for _, named := range levels {
		if l >= named.level {
			name = named.name
		}
	}
	return name
}
