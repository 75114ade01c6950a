// Package settings reads the settings of a role from one table. Each row has a setting's flag, environment variables,
// default, help, and the field of the configuration that it fills.
//
// It promises this precedence: flag, layer of live configuration (for settings that may change at run time), environment
// variable, default. An empty variable is unset. It reports all problems together, each with the place, the value and
// the cause, and can list every value in force with its origin. It never prints, never reads the environment by itself
// and never ends the program.
//
// Start at Setting, then Parse and Input.Read. values.go has the types of values, help.go the text of --help, complete.go the completion
// of arguments and the nearest name for a misspelt one.
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
// adds the text. String returns the value in force, the same text for equal values.
type Value interface {
	Set(text string) error
	String() string
}

// Setting is one row of a table.
type Setting struct {
	// Name is the flag's name, "" for a variable without a flag. Aliases are further spellings of the flag.
	Name    string
	Aliases []string
	// Arg names the flag's argument in the help. It is "" for a switch: without an argument a switch is "true".
	Arg string
	// Env has the environment variables; the first one that is not empty applies. Named fills a nil Env, unless FlagOnly.
	Env      []string
	FlagOnly bool
	// Default is the text to use if the user gives none; "" leaves the value unchanged. Shown replaces it in the help.
	Default, Shown string
	Use            string
	Value          Value

	// Keys are additional names of the setting in live configuration.
	Keys []string
	// Live settings can be changed by live configuration.
	Live bool
	// Chart settings may be given in the chart's value "agent", by ChartName.
	Chart bool
	// Ignored settings are accepted without effect.
	Ignored bool
	// Local settings name something of the machine on which the command runs: the kubectl plugin refuses them.
	Local bool
	// Secret values appear neither in errors nor in lists.
	Secret bool
	// KeepEmpty makes an empty variable apply if it is set.
	KeepEmpty bool
	// Repeated flags are joined by commas; otherwise the last flag applies.
	Repeated bool
}

// String returns the flag with its dashes, or the variable of a setting without a flag.
func (s Setting) String() string {
	if s.Name != "" {
		return dashed(s.Name)
	}
	return s.Env[0]
}

// ChartName returns the flag's name in camel case. The chart derives the variable from it.
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

// quote formats a text for an error, truncated if long.
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

// Dashed returns the variables of a flag in earlier programs: first the variable that keeps the flag's dashes, then the
// variable with underscores, which a shell can set.
func Dashed(prefix, name string) []string {
	upper := prefix + strings.ToUpper(name)
	return slices.Compact([]string{upper, strings.ReplaceAll(upper, "-", "_")})
}

// Sources of texts. A Derived value follows from another setting.
const (
	FromFlag        = "flag"
	FromEnvironment = "environment variable"
	Derived         = "derived from"
)

// Origin is a text with its source.
type Origin struct {
	// Source is one of the constants, a layer's name followed by "key", or "" for the default.
	Source string
	// Name is the flag with its dashes, the variable, the key of the layer, or the setting that a Derived value follows from.
	Name string
	Text string
}

// Given reports whether the text is not the default.
func (o Origin) Given() bool { return o.Source != "" }

// String names the source.
func (o Origin) String() string {
	if o.Given() {
		return o.Source + " " + o.Name
	}
	return "default"
}

// Layer is live configuration: keys are names of variables; other keys are ignored.
type Layer struct {
	// Name is for people, like `ConfigMap "istio-cni-config"`.
	Name string
	Data map[string]string
}

// text returns the text of a setting in the first layer that has one of its keys, without the final newline of a file.
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
	// mistakes are the errors in the arguments themselves.
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
		return Origin{Source: FromFlag, Name: dashed(name), Text: strings.Join(texts, ",")}, true
	}
	return Origin{}, false
}

// Texts returns all texts of a setting's flag, in order, by the spelling that applies.
func (in Input) Texts(s Setting) []string {
	for _, name := range s.flags() {
		if texts, ok := in.flags[name]; ok {
			return texts
		}
	}
	return nil
}

// Find returns the text of a setting with its origin. An empty text in a layer selects the default, whatever the
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

// Origins has the origin of each setting, by its String.
type Origins map[string]Origin

// Flag returns the origin of a setting by the name of its flag.
func (o Origins) Flag(name string) Origin { return o[dashed(name)] }

// Read fills the value of every row. It replaces an invalid text by the default, so that callers still find conflicts
// between other values. The error joins all problems, including the arguments'.
func (in Input) Read(rows []Setting, layers ...Layer) (Origins, error) {
	origins := Origins{}
	problems := slices.Clone(in.mistakes)
	for _, s := range rows {
		at := in.Find(s, layers...)
		if at.Text != "" || at.Given() {
			if err := s.Value.Set(at.Text); err != nil {
				problems = append(problems, fmt.Errorf("%s: value %s: %w", at, s.quote(at.Text), err))
				_ = s.Value.Set(s.Default) // a value with an empty default stays unchanged
			}
		}
		origins[s.String()] = at
	}
	return origins, errors.Join(problems...)
}

// Disagreement returns a sentence about differing variables of one setting, "" if they agree or do not apply.
func (in Input) Disagreement(s Setting, used Origin) string {
	if used.Source != FromEnvironment {
		return ""
	}
	for _, name := range s.Env {
		if other, _ := in.getenv(name); other != "" && other != used.Text {
			return fmt.Sprintf("environment variables %s and %s differ: the first one applies", used.Name, name)
		}
	}
	return ""
}

// Frozen lists the layers' keys that differ from the values in force of settings that are not live. scratch has the rows of
// the same table for another configuration, which Frozen writes to. A flag overrides every layer.
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

// String returns one line of text.
func (l Line) String() string { return fmt.Sprintf("%s = %q (%s)", l.Name, l.Value, l.Origin) }

// Lines lists the settings that have an effect, in the order of the table. It contains no secrets.
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
