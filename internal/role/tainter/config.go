package tainter

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/standalone"
	"github.com/meshcni/istio-cni/internal/applet/settings"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/kube"
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

	access kube.Config
	lines  []slog.Attr
}

// LogValue is each setting in force with where it comes from. There is no secret among them.
func (c Config) LogValue() slog.Value { return slog.GroupValue(c.lines...) }

// environment is what the configuration is read from besides arguments.
type environment struct {
	getenv   func(string) (string, bool)
	hostname func() (string, error)
}

// errHelp is the answer to --help.
var errHelp = settings.ErrHelp

// load reads arguments and environment. The error joins all problems; it is errHelp when help was asked for.
func load(args []string, env environment) (Config, error) {
	d := draft{}
	found, errs := settings.Find(d.rows(), args, env.getenv)
	if errors.Is(errs, errHelp) {
		return Config{}, errHelp
	}
	d.found = found
	// The mode comes first: it has the defaults of the others.
	problems := []error{errs, d.chooseMode()}
	problems = append(problems, found.Apply(d.rows()), d.complete(env))
	d.describe()
	return d.Config, errors.Join(problems...)
}

// draft is a configuration in the making.
type draft struct {
	Config

	found      settings.Found
	namespaces []string
	selectors  []string
}

// chooseMode finds the mode by what was given, if it was not given itself.
func (d *draft) chooseMode() error {
	if at := d.found["mode"]; at.Given && Mode(at.Text) != Auto {
		d.Mode = Mode(at.Text)
		if d.Mode != Legacy && d.Mode != Untaint {
			d.Mode = Untaint
			return fmt.Errorf("%s: value %q: want auto, legacy or untaint", at.Where, at.Text)
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
	for _, s := range table() {
		if at := d.found[s.name]; s.mode == mode && at.Given {
			places = append(places, at.Where)
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
	access, err := standalone.Access(d.Kubeconfig, env.getenv)
	d.access = access
	errs = append(errs, err)
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
	if !d.found["effect"].Given {
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
	var rows []settings.Setting
	for _, s := range table() {
		if s.mode == "" || s.mode == d.Mode {
			rows = append(rows, s.row(d))
		}
	}
	d.lines = append([]slog.Attr{slog.String("in-mode", string(d.Mode))}, d.found.Describe(rows)...)
}
