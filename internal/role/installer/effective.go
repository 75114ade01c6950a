package installer

import (
	"fmt"
	"log/slog"
	"strings"
)

// line is one setting in force.
type line struct{ name, value, from string }

// effective lists the settings that have an effect, in the order of the help.
func (d *draft) effective(all []setting) []line {
	var out []line
	for _, s := range all {
		if s.scope == forNothing {
			continue
		}
		shown := s.into(d).String()
		if s.quiet && shown != "" {
			shown = fmt.Sprintf("(%d bytes, not shown)", len(shown))
		}
		out = append(out, line{s.String(), shown, d.origins[s.String()].String()})
	}
	return out
}

// Effective is the configuration in force, a line for each setting: name, value and where that comes from. It holds no
// secret.
func (c Config) Effective() string {
	var b strings.Builder
	for _, l := range c.lines {
		fmt.Fprintf(&b, "%s = %q (%s)\n", l.name, l.value, l.from)
	}
	return b.String()
}

// String is Effective, so that a configuration that is printed by mistake gives no token away.
func (c Config) String() string { return c.Effective() }

// LogValue is Effective as attributes.
func (c Config) LogValue() slog.Value {
	attrs := make([]slog.Attr, len(c.lines))
	for i, l := range c.lines {
		attrs[i] = slog.String(strings.TrimLeft(l.name, "-"), fmt.Sprintf("%s (%s)", l.value, l.from))
	}
	return slog.GroupValue(attrs...)
}
