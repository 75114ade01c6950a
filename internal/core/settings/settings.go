// Package settings reads the settings of a role by one table: a row for each, with its flag, its environment variables,
// default, help, and the field of the configuration that it fills.
//
// It promises that a flag beats a layer of live configuration (for settings that may change at run time), that beats a
// variable, and that beats the default; that an empty variable counts as unset; that all problems are reported together, each with
// the place, the value and the cause; and that every value in force can be listed with its origin. It never prints, never
// reads the environment by itself and never ends the program.
//
// Start at Setting, then Parse and Input.Read. values.go has the types of values, help.go the text of --help.
package settings

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Value is the field of a configuration that a setting fills. The error of Set names the expected form; the caller
// adds the text. String spells the value in force, the same for equal values.
type Value interface {
	Set(text string) error
	String() string
}

// Setting is one row of a table.
type Setting struct {
	// Name is that of the flag, "" for a variable without one. Aliases are further spellings of the flag.
	Name    string
	Aliases []string
	// Arg names the flag's argument in the help. It is "" for a switch, which needs no argument and is "true" then.
	Arg string
	// Env are variables, of which the first that is not empty counts. Named fills it where it is nil, unless FlagOnly.
	Env      []string
	FlagOnly bool
	// Default is the text that counts if none is given; "" leaves the value as it is. Shown replaces it in the help.
	Default, Shown string
	Use            string
	Value          Value

	// Keys are further names of the setting in live configuration.
	Keys []string
	// Live settings may be changed by live configuration.
	Live bool
	// Chart settings may be given in the chart's value "agent", by ChartName.
	Chart bool
	// Ignored settings are accepted without effect.
	Ignored bool
	// Secret values are neither quoted in errors nor listed.
	Secret bool
	// KeepEmpty makes a variable count that is set and empty.
	KeepEmpty bool
	// Repeated flags add up, separated by commas; of others the last one counts.
	Repeated bool
}

// String is the flag with its dashes, or the variable if there is no flag.
func (s Setting) String() string {
	if s.Name != "" {
		return "--" + s.Name
	}
	return s.Env[0]
}

// ChartName is the name of the flag in camel case, from which the chart makes the variable again.
func (s Setting) ChartName() string {
	words := strings.Split(s.Name, "-")
	for i, word := range words[1:] {
		words[i+1] = strings.ToUpper(word[:1]) + word[1:]
	}
	return strings.Join(words, "")
}

func (s Setting) flags() []string {
	if s.Name == "" {
		return s.Aliases
	}
	return slices.Concat([]string{s.Name}, s.Aliases)
}

// quote shows a text in an error, a long one by its beginning.
func (s Setting) quote(text string) string {
	const most = 120
	if s.Secret {
		return fmt.Sprintf("of %d bytes", len(text))
	}
	return printable.Quote(text, most)
}

// Named sets the variable of each row whose Env is nil: the prefix and the name of the flag in capitals, with
// underscores.
func Named(prefix string, rows ...Setting) []Setting {
	for i, s := range rows {
		if s.Env == nil && !s.FlagOnly {
			rows[i].Env = []string{prefix + strings.ReplaceAll(strings.ToUpper(s.Name), "-", "_")}
		}
	}
	return rows
}

// Dashed returns the variables of a flag for earlier programs: first the one that keeps the dashes of the flag, then the one
// with underscores, which a shell can set.
func Dashed(prefix, name string) []string {
	upper := prefix + strings.ToUpper(name)
	return slices.Compact([]string{upper, strings.ReplaceAll(upper, "-", "_")})
}

// Sources of texts. A Derived value follows from that of another setting.
const (
	FromFlag        = "flag"
	FromEnvironment = "environment variable"
	Derived         = "derived from"
)

// Origin is a text with its source.
type Origin struct {
	// Source is one of the constants, the name of a layer of live configuration and "key", or "" for the default.
	Source string
	// Name is the flag with its dashes, the variable, the key of the layer, or the setting that another is derived from.
	Name string
	Text string
}

// Given reports whether the text was given and is not the default.
func (o Origin) Given() bool { return o.Source != "" }

// String names the source.
func (o Origin) String() string {
	if o.Given() {
		return o.Source + " " + o.Name
	}
	return "default"
}

// Layer is live configuration: keys are the names of variables, others do not count.
type Layer struct {
	// Name is for people, as in `ConfigMap "istio-cni-config"`.
	Name string
	Data map[string]string
}

// text returns the text of a setting in the first layer that has one of its keys, trimmed of a file's final newline.
func (s Setting) text(layers []Layer) (Origin, bool) {
	for _, l := range layers {
		for _, key := range slices.Concat(s.Env, s.Keys) {
			if text, ok := l.Data[key]; ok {
				return Origin{Source: l.Name + " key", Name: key, Text: strings.TrimSpace(text)}, true
			}
		}
	}
	return Origin{}, false
}

// Input holds the arguments and the environment of a program. Read can be called more than once.
type Input struct {
	flags  map[string][]string
	getenv func(string) (string, bool)
	// mistakes are those in the arguments themselves.
	mistakes []error
}

// flag returns the text of a setting's flag.
func (in Input) flag(s Setting) (Origin, bool) {
	for _, name := range s.flags() {
		texts, ok := in.flags[name]
		switch {
		case !ok:
			continue
		case !s.Repeated:
			texts = texts[len(texts)-1:]
		}
		return Origin{Source: FromFlag, Name: "--" + name, Text: strings.Join(texts, ",")}, true
	}
	return Origin{}, false
}

// Find returns the text of a setting with its origin. An empty text of a layer selects the default, whatever the
// environment variable is.
func (in Input) Find(s Setting, layers ...Layer) Origin {
	if given, ok := in.flag(s); ok {
		return given
	}
	if s.Live {
		if found, ok := s.text(layers); ok {
			if found.Text = cmp.Or(found.Text, s.Default); found.Text == "" {
				return Origin{}
			}
			return found
		}
	}
	for _, name := range s.Env {
		if text, set := in.getenv(name); text != "" || set && s.KeepEmpty {
			return Origin{Source: FromEnvironment, Name: name, Text: text}
		}
	}
	return Origin{Text: s.Default}
}

// Origins has that of each setting, by its String.
type Origins map[string]Origin

// Flag returns the origin of a setting by the name of its flag.
func (o Origins) Flag(name string) Origin { return o["--"+name] }

// Read fills the value of every row. It replaces an invalid text by the default, so that problems between other values are
// found as well. The error joins all problems, those of the arguments included.
func (in Input) Read(rows []Setting, layers ...Layer) (Origins, error) {
	origins := Origins{}
	problems := slices.Clone(in.mistakes)
	for _, s := range rows {
		at := in.Find(s, layers...)
		if at.Text != "" || at.Given() {
			if err := s.Value.Set(at.Text); err != nil {
				problems = append(problems, fmt.Errorf("%s: value %s: %w", at, s.quote(at.Text), err))
				_ = s.Value.Set(s.Default) // a value whose default is empty stays as it is
			}
		}
		origins[s.String()] = at
	}
	return origins, errors.Join(problems...)
}

// Disagreement returns a sentence about variables of one setting that differ, "" if they agree or if none of them counts.
func (in Input) Disagreement(s Setting, used Origin) string {
	if used.Source != FromEnvironment {
		return ""
	}
	for _, name := range s.Env {
		if other, _ := in.getenv(name); other != "" && other != used.Text {
			return fmt.Sprintf("environment variables %s and %s differ: the first one counts", used.Name, name)
		}
	}
	return ""
}

// Frozen lists the keys of layers that differ from the values in force of settings that are not live; scratch are rows of
// the same table over another configuration, which Frozen writes to. A flag overrides every layer.
func (in Input) Frozen(inForce, scratch []Setting, layers []Layer) (keys []string, err error) {
	var problems []error
	for i, s := range inForce {
		if s.Live || s.Ignored || in.Find(s).Source == FromFlag {
			continue
		}
		wanted, ok := s.text(layers)
		if !ok || wanted.Text == "" {
			continue
		}
		if err := scratch[i].Value.Set(wanted.Text); err != nil {
			problems = append(problems, fmt.Errorf("%s: value %s: %w", wanted, s.quote(wanted.Text), err))
		} else if scratch[i].Value.String() != s.Value.String() {
			keys = append(keys, wanted.Name)
		}
	}
	slices.Sort(keys)
	return keys, errors.Join(problems...)
}

// Line is a setting in force, for people.
type Line struct {
	Name   string `json:"name"`
	Value  string `json:"value"`
	Origin string `json:"origin"`
}

// String is one line of text.
func (l Line) String() string { return fmt.Sprintf("%s = %q (%s)", l.Name, l.Value, l.Origin) }

// Lines lists the settings that have an effect, in the order of the table. It holds no secret.
func Lines(rows []Setting, origins Origins) []Line {
	var lines []Line
	for _, s := range rows {
		if s.Ignored {
			continue
		}
		shown := s.Value.String()
		if s.Secret && shown != "" {
			shown = fmt.Sprintf("(%d bytes, not shown)", len(shown))
		}
		lines = append(lines, Line{s.String(), shown, origins[s.String()].String()})
	}
	return lines
}
