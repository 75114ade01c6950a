package installer

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/meshcni/istio-cni/internal/applet/arguments"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// errHelp is the answer to --help: the caller prints help and is done.
var errHelp = arguments.ErrHelp

// input is what the program was started with. It is the same for the whole run; the configuration is made of it as
// often as files or an overlay change.
type input struct {
	environment

	flags map[string]string
	// usage are mistakes in the arguments themselves.
	usage []error
}

// draft is a configuration in the making, with settings that only help to complete it.
type draft struct {
	Config

	once, uninstall, chained, owned, groupRead bool

	scopes             scopes
	historicKubeconfig string
	ambientPods        ambientPods

	template, templateFile, templateLevel string
	eventAddress, kubernetesNode          string
	// shownTemplate is the stanza of the template without the token.
	shownTemplate json.RawMessage

	// origins has an entry for each setting that has a value, by its String.
	origins map[string]origin
}

// origin says where a setting comes from.
type origin struct {
	kind originKind
	name string
	// layer is the overlay that has it.
	layer string
}

type originKind uint8

const (
	fromDefault originKind = iota
	fromEnv
	fromOverlay
	fromFlag
	derived // of another setting
)

func (o origin) String() string {
	switch o.kind {
	case fromFlag:
		return "flag " + o.name
	case fromOverlay:
		return o.layer + " key " + o.name
	case fromEnv:
		return "environment variable " + o.name
	case derived:
		return "derived from " + o.name
	case fromDefault:
	}
	return "default"
}

// parse reads arguments. Mistakes in them are kept for the report of all problems; the only error is errHelp.
func parse(args []string, env environment) (input, error) {
	in := input{environment: env, flags: map[string]string{}}
	var flags []arguments.Flag
	for _, s := range settings(env) {
		if s.flag != "" {
			flags = append(flags, arguments.Flag{Name: s.flag, Switch: s.arg == ""})
		}
	}
	var err error
	in.usage, err = arguments.Parse(flags, args, func(name, text string) { in.flags[name] = text })
	return in, err
}

// lookup gives the text of a setting: a flag before an overlay before the environment. An empty variable is as good as
// none; an empty key of an overlay is somebody's wish for the default, whatever the environment was at the start.
func (in input) lookup(s setting, layers []layer) (string, origin, bool) {
	if text, ok := in.flags[s.flag]; ok {
		return text, origin{kind: fromFlag, name: "--" + s.flag}, true
	}
	if s.scope == forPlugin {
		if text, at, ok := overlaid(s, layers); ok && text == "" {
			return s.def, at, s.def != ""
		} else if ok {
			return text, at, true
		}
	}
	for _, name := range s.env {
		if text, _ := in.getenv(name); text != "" {
			return text, origin{kind: fromEnv, name: name}, true
		}
	}
	return s.def, origin{}, s.def != ""
}

// config makes the configuration without an overlay.
func (in input) config() (Config, error) {
	d, err := in.build(nil)
	if err != nil {
		return Config{}, err
	}
	return d.Config, nil
}

// build makes a configuration. A value that cannot be read gives way to the default, so that what is wrong between other
// values is reported as well.
func (in input) build(layers []layer) (draft, error) {
	d := draft{origins: map[string]origin{}}
	errs := append([]error(nil), in.usage...)
	for _, s := range settings(in.environment) {
		given, at, ok := in.lookup(s, layers)
		if !ok {
			continue
		}
		d.origins[s.String()] = at
		if err := s.into(&d).Set(given); err != nil {
			errs = append(errs, fmt.Errorf("%s: value %s: %w", at, s.quote(given), err))
			_ = s.into(&d).Set(s.def) // a setting whose default is empty stays as it is
		}
		d.warn(in.disagreement(s, at))
	}
	errs = append(errs, in.complete(&d))
	d.lines = d.effective(settings(in.environment))
	return d, errors.Join(errs...)
}

// disagreement is a sentence about variables that should say the same and do not.
func (in input) disagreement(s setting, used origin) string {
	if used.kind != fromEnv {
		return ""
	}
	taken, _ := in.getenv(used.name)
	for _, name := range s.env {
		if other, _ := in.getenv(name); other != "" && other != taken {
			return fmt.Sprintf("environment variables %s and %s differ: the first one counts", used.name, name)
		}
	}
	return ""
}

// quote shows a value in an error, a long one by its beginning.
func (s setting) quote(text string) string {
	const most = 120
	if s.quiet {
		return fmt.Sprintf("of %d bytes", len(text))
	}
	return printable.Quote(text, most)
}

func (d *draft) warn(sentence string) {
	if sentence != "" {
		d.Warnings = append(d.Warnings, sentence)
	}
}

// at is where a setting comes from, by its flag.
func (d *draft) at(name string) origin { return d.origins["--"+name] }

// isMissing tells a file that is not there from one that cannot be read.
func isMissing(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// bare is a text without blanks around it.
func bare(text string) string { return strings.TrimSpace(text) }
