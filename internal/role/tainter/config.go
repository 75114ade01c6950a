package tainter

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet/arguments"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
)

// Mode is which of the two controllers this one takes the place of.
type Mode string

// Modes. Auto is chosen by the settings that are given.
const (
	Auto    Mode = "auto"
	Legacy  Mode = "legacy"  // of Istio 1.8 to 1.17: requirements from a ConfigMap, taints are added and removed
	Untaint Mode = "untaint" // of istiod since 1.22: taints are removed
)

// Config is all that a run depends on.
type Config struct {
	Mode Mode
	// Daemon false is one look at all nodes; DryRun is one that changes nothing.
	Daemon, DryRun bool
	// Policy has its requirements in mode untaint; in mode legacy they are in the ConfigMap.
	Policy                            readiness.Policy
	ConfigMapNamespace, ConfigMapName string
	// Condition is the type of the node condition to publish, "" for none.
	Condition string

	LeaderElect                               bool
	LeaseNamespace, LeaseName                 string
	LeaseDuration, RenewDeadline, RetryPeriod time.Duration

	HealthPort, MonitoringPort uint16
	// Kubeconfig is used instead of the account of the pod, unless "".
	Kubeconfig        string
	PodName, NodeName string
	LogLevel          pluginlog.Level
	LogJSON           bool

	// Warnings are sentences for the log.
	Warnings []string

	apiHost, apiPort string
	lines            []slog.Attr
}

// LogValue is each setting in force with where it comes from. There is no secret among them.
func (c Config) LogValue() slog.Value { return slog.GroupValue(c.lines...) }

// environment is what the configuration is read from besides arguments.
type environment struct {
	getenv   func(string) (string, bool)
	hostname func() (string, error)
}

// errHelp is the answer to --help.
var errHelp = arguments.ErrHelp

// origin is where a value comes from.
type origin struct {
	text  string
	where string
	given bool
}

// load reads arguments and environment. The error joins all problems; it is errHelp when help was asked for.
func load(args []string, env environment) (Config, error) {
	flags, errs := parse(args)
	if errors.Is(errs, errHelp) {
		return Config{}, errHelp
	}
	problems := []error{errs}
	d := draft{origins: map[string]origin{}}
	for _, s := range settings() {
		d.origins[s.name] = s.find(flags, env)
	}
	// The mode comes first: it has the defaults of the others.
	problems = append(problems, d.chooseMode())
	for _, s := range settings() {
		at := d.origins[s.name]
		if !at.given {
			at.text = s.defaultOf(&d)
			at.where = "default"
			d.origins[s.name] = at
		}
		if at.text == "" && !at.given {
			continue
		}
		if err := s.set(&d, at.text); err != nil {
			problems = append(problems, fmt.Errorf("%s: value %q: %w", at.where, at.text, err))
		}
	}
	problems = append(problems, d.complete(env))
	d.describe()
	return d.Config, errors.Join(problems...)
}

// find gives the text of a setting: a flag before the environment, of which an empty variable counts as unset.
func (s setting) find(flags map[string][]string, env environment) origin {
	for _, name := range append([]string{s.name}, s.aliases...) {
		if texts, ok := flags[name]; ok {
			return origin{strings.Join(texts, ","), "flag --" + name, true}
		}
	}
	for _, name := range s.env {
		if text, _ := env.getenv(name); text != "" {
			return origin{text, "environment variable " + name, true}
		}
	}
	return origin{}
}

// parse reads arguments. A flag that is given more than once has all its texts.
func parse(args []string) (map[string][]string, error) {
	found := map[string][]string{}
	var flags []arguments.Flag
	for _, s := range settings() {
		for _, name := range append([]string{s.name}, s.aliases...) {
			flags = append(flags, arguments.Flag{Name: name, Switch: s.arg == ""})
		}
	}
	mistakes, err := arguments.Parse("istio-cni taint", flags, args, func(name, text string) {
		found[name] = append(found[name], text)
	})
	if err != nil {
		return nil, err
	}
	return found, errors.Join(mistakes...)
}

// draft is a configuration in the making.
type draft struct {
	Config

	origins    map[string]origin
	namespaces []string
	selectors  []string
}

// chooseMode finds the mode by what was given, if it was not given itself.
func (d *draft) chooseMode() error {
	if at := d.origins["mode"]; at.given && Mode(at.text) != Auto {
		d.Mode = Mode(at.text)
		if d.Mode != Legacy && d.Mode != Untaint {
			d.Mode = Untaint
			return fmt.Errorf("%s: value %q: want auto, legacy or untaint", at.where, at.text)
		}
		d.strangers()
		return nil
	}
	legacy, untaint := d.given(Legacy), d.given(Untaint)
	d.Mode = Untaint
	if len(legacy) > 0 {
		d.Mode = Legacy
	}
	if len(legacy) > 0 && len(untaint) > 0 {
		return fmt.Errorf("%s is of mode legacy and %s of mode untaint: choose one by --mode", legacy[0], untaint[0])
	}
	return nil
}

// given are the places where settings of one mode come from.
func (d *draft) given(mode Mode) []string {
	var places []string
	for _, s := range settings() {
		if at := d.origins[s.name]; s.mode == mode && at.given {
			places = append(places, at.where)
		}
	}
	return places
}

// strangers are settings of the other mode.
func (d *draft) strangers() {
	other := Legacy
	if d.Mode == Legacy {
		other = Untaint
	}
	for _, place := range d.given(other) {
		d.Warnings = append(d.Warnings, place+" has no effect in mode "+string(d.Mode))
	}
}

// complete joins what depends on several settings.
func (d *draft) complete(env environment) error {
	var errs []error
	d.apiHost, _ = env.getenv("KUBERNETES_SERVICE_HOST")
	d.apiPort, _ = env.getenv("KUBERNETES_SERVICE_PORT")
	if d.Kubeconfig == "" && (d.apiHost == "" || d.apiPort == "") {
		errs = append(errs, errors.New(
			"KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set, as they are in a pod: give --kubeconfig"))
	}
	if d.PodName == "" {
		name, err := env.hostname()
		if err != nil {
			name = "istio-cni-taint"
		}
		d.PodName = name
	}
	if d.Mode == Untaint {
		d.require()
	}
	if d.HealthPort != 0 && d.HealthPort == d.MonitoringPort {
		errs = append(errs, fmt.Errorf("--health-port and --monitoring-port are both %d", d.HealthPort))
	}
	return errors.Join(append(errs, d.checkLease())...)
}

// require makes the requirements of mode untaint.
func (d *draft) require() {
	for _, selector := range d.selectors {
		d.Policy.Requirements = append(d.Policy.Requirements, readiness.Requirement{
			Name: selector, Namespaces: d.namespaces, Selector: selector,
		})
	}
	if !d.origins["effect"].given {
		d.Policy.Effects = readiness.AnyEffect
	}
}

// checkLease holds the times to each other: a leader must give up before others may begin.
func (d *draft) checkLease() error {
	if !d.LeaderElect {
		return nil
	}
	var errs []error
	if d.LeaseDuration <= d.RenewDeadline || d.RenewDeadline <= d.RetryPeriod {
		errs = append(errs, fmt.Errorf(
			"want --lease-duration (%s) longer than --renew-deadline (%s), and that longer than --retry-period (%s)",
			d.LeaseDuration, d.RenewDeadline, d.RetryPeriod))
	}
	if d.LeaseDuration%time.Second != 0 {
		errs = append(errs, fmt.Errorf("--lease-duration %s: want whole seconds", d.LeaseDuration))
	}
	return errors.Join(errs...)
}

// describe lists what is in force.
func (d *draft) describe() {
	d.lines = []slog.Attr{slog.String("in-mode", string(d.Mode))}
	for _, s := range settings() {
		if at := d.origins[s.name]; s.mode == "" || s.mode == d.Mode {
			d.lines = append(d.lines, slog.String(s.name, fmt.Sprintf("%s (%s)", at.text, at.where)))
		}
	}
}
