package tainter

import (
	"errors"
	"fmt"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/standalone"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/kube"
)

// Mode selects the controller that this one replaces.
type Mode string

// Modes. Auto selects a mode by the given settings.
const (
	Auto    Mode = "auto"
	Legacy  Mode = "legacy"  // of Istio 1.8 to 1.17: requirements from a ConfigMap, taints are added and removed
	Untaint Mode = "untaint" // of istiod since 1.22: taints are removed
)

// Config has all inputs of a run.
type Config struct {
	standalone.Process

	Mode Mode
	// Daemon false decides once about all nodes; DryRun does so and changes nothing.
	Daemon, DryRun bool
	// Policy has its requirements in mode untaint; in mode legacy they are in the ConfigMap.
	Policy                            readiness.Policy
	ConfigMapNamespace, ConfigMapName string
	// Condition is the type of the node condition to publish, "" for none.
	Condition string

	LeaderElect                               bool
	LeaseNamespace, LeaseName                 string
	LeaseDuration, RenewDeadline, RetryPeriod time.Duration

	PodName, NodeName string

	// Warnings are sentences for the log.
	Warnings []string

	client kube.Config
	lines  []settings.Line
}

// environment has the sources of the configuration besides arguments.
type environment struct {
	getenv   func(string) (string, bool)
	hostname func() (string, error)
}

// draft is an incomplete configuration.
type draft struct {
	Config

	namespaces             []string
	selector, ownNamespace string
}

// load reads arguments and environment. The error joins all problems; it is settings.ErrHelp for a request of the help.
func load(args []string, env environment) (Config, error) {
	d := draft{}
	in, err := settings.Parse(d.rows(), args, env.getenv)
	if err != nil {
		return Config{}, err
	}
	// The mode comes first: the defaults of other settings depend on it.
	given := map[string]settings.Origin{}
	for _, s := range d.rows() {
		if at := in.Find(s); at.Given() {
			given[s.Name] = at
		}
	}
	modeErr := d.chooseMode(given)
	d.ownNamespace = given["pod-namespace"].Text
	rows := d.rows()
	origins, err := in.Read(rows)
	err = errors.Join(err, modeErr, d.complete(env, given))
	d.lines = []settings.Line{{Name: "in-mode", Value: string(d.Mode), Origin: origins.Flag("mode").String()}}
	for i, line := range settings.Lines(rows, origins) {
		if only := differences()[rows[i].Name].only; only == "" || only == d.Mode {
			d.lines = append(d.lines, line)
		}
	}
	return d.Config, err
}

// chooseMode selects the mode by the given settings, unless the mode is given. Read reports an invalid mode.
func (d *draft) chooseMode(given map[string]settings.Origin) error {
	places := map[Mode][]string{}
	for _, s := range d.rows() {
		if only := differences()[s.Name].only; only != "" && given[s.Name].Given() {
			places[only] = append(places[only], given[s.Name].String())
		}
	}
	d.Mode = Untaint
	other := Legacy
	switch Mode(given["mode"].Text) {
	case Legacy:
		d.Mode, other = Legacy, Untaint
	case "", Auto:
		if len(places[Legacy]) > 0 {
			d.Mode = Legacy
		}
		if len(places[Legacy]) > 0 && len(places[Untaint]) > 0 {
			return fmt.Errorf("%s is of mode legacy and %s of mode untaint: choose one by --mode", places[Legacy][0], places[Untaint][0])
		}
		return nil
	case Untaint:
	}
	for _, place := range places[other] {
		d.Warnings = append(d.Warnings, place+" has no effect in mode "+string(d.Mode))
	}
	return nil
}

// complete derives values that depend on several settings.
func (d *draft) complete(env environment, given map[string]settings.Origin) error {
	client, err := d.ClientConfig(env.getenv)
	d.client = client
	if d.PodName == "" {
		if d.PodName, _ = env.hostname(); d.PodName == "" {
			d.PodName = "istio-cni-taint"
		}
	}
	if d.Mode == Untaint {
		d.Policy.Requirements = []readiness.Requirement{{Name: d.selector, Namespaces: d.namespaces, Selector: d.selector}}
		if !given["effect"].Given() {
			d.Policy.Effects = readiness.AnyEffect
		}
	}
	return errors.Join(err, d.checkLease())
}

// checkLease compares the times: a leader must stop leading before another replica may lead.
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
