// Package tainter is the role "istio-cni taint", also called istio-cni-taint: the controller that keeps nodes free of mesh pods
// until the plugin's agent is ready there.
//
// It promises the flags, variables, names and defaults of both of Istio's controllers: the one of Istio 1.8 to 1.17 (mode
// legacy) and the one inside istiod since 1.22 (mode untaint); and that all problems of its configuration are reported together
// before any request to the API server.
//
// It never decides about a node and never prints a token.
//
// Start at Run; the tables are in settings.go.
package tainter

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/eventrecorder"
	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/standalone"
	"github.com/meshcni/istio-cni/internal/agent/taint"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/kube"
)

// Run runs the role. It ends when the work is done or, for the controller, with a signal. The legacy controller exited with 255 after
// a bad command line; here the code is 2 as in the other roles.
func Run(c applet.Call) int {
	return service.Run(c, "taint", helpHead, []settings.Group{{Title: "Flags", Rows: new(Config).rows()}}, func() (service.Service, error) {
		cfg, err := load(c.Args, c.Getenv)
		if err != nil {
			return service.Service{}, err
		}
		log := standalone.Logger(c.Stderr, cfg.LogLevel, cfg.LogJSON)
		return service.Service{
			Config: cfg.lines, Warnings: cfg.Warnings, Log: log,
			Work: func(ctx context.Context) error { return act(ctx, c.Stdout, cfg, log) },
		}, nil
	})
}

// act runs the configured action.
func act(ctx context.Context, stdout io.Writer, cfg Config, log *slog.Logger) error {
	api, err := kube.NewClient(cfg.client)
	if err != nil {
		return err
	}
	defer api.Close()
	options := cfg.options(api, log) //nolint:contextcheck // the recorder of events ends with Shutdown
	defer options.Events.Shutdown()
	switch {
	case cfg.DryRun:
		lines, err := taint.Plan(ctx, options)
		for _, line := range lines {
			_, _ = fmt.Fprintln(stdout, line)
		}
		return err
	case !cfg.Daemon:
		return taint.Once(ctx, options)
	}
	return cfg.Serve(ctx, log, options.Health.Handler(), options.Metrics.Handler(), func(ctx context.Context) error {
		taint.Run(ctx, options)
		return nil
	})
}

// options adds the dependencies to the settings.
func (c Config) options(api *kube.Client, log *slog.Logger) taint.Options {
	options := c.Taint
	options.API, options.Log = api, log
	options.Health = health.NewState(health.Options{Log: log}, taint.Parts()...)
	options.Metrics = metrics.NewTaint(applet.Version())
	options.Events = eventrecorder.New(api, eventrecorder.Options{Log: log, Count: options.Metrics.EventReported})
	if c.LeaderElect {
		options.Lease = &c.Lease
		if c.Lease.Identity == "" {
			options.Lease.Identity, _ = os.Hostname()
		}
		options.Lease.Identity += "_" + rand.Text()
	}
	return options
}

// Mode selects the controller that this controller replaces.
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
	// Daemon false decides once about all nodes; DryRun does the same and changes nothing.
	Daemon, DryRun bool
	// Taint has the settings of the controller. Its requirements come from the policy in mode untaint, and from the ConfigMap in mode legacy.
	Taint taint.Options
	// Lease applies with LeaderElect. Its identity is the name of the pod, to which each run adds a random part.
	LeaderElect bool
	Lease       taint.Lease

	// Warnings are sentences for the log.
	Warnings []string

	namespaces             []string
	selector, ownNamespace string

	client kube.Config
	lines  []settings.Line
}

// load reads arguments and environment. The error joins all problems; it is settings.ErrHelp for a help request.
func load(args []string, getenv func(string) (string, bool)) (Config, error) {
	c := Config{}
	in, err := settings.Parse(c.rows(), args, getenv)
	if err != nil {
		return c, err
	}
	// The mode comes first: the defaults of other settings depend on it.
	inputs := map[string]settings.Origin{}
	for _, s := range c.rows() {
		inputs[s.Name] = in.Find(s)
	}
	modeErr := c.chooseMode(inputs)
	c.ownNamespace = inputs["pod-namespace"].Text
	rows := c.rows()
	origins, err := in.Read(rows)
	err = errors.Join(err, modeErr, c.complete(getenv, inputs))
	c.lines = []settings.Line{{Name: "in-mode", Value: string(c.Mode), Origin: origins.Flag("mode").String()}}
	for i, line := range settings.Lines(rows, origins) {
		if only := differences()[rows[i].Name].only; only == "" || only == c.Mode {
			c.lines = append(c.lines, line)
		}
	}
	return c, err
}

// chooseMode selects the mode from the given settings, unless the mode is given. The table reports an invalid mode.
func (c *Config) chooseMode(inputs map[string]settings.Origin) error {
	places := map[Mode][]string{}
	for _, s := range c.rows() {
		if only := differences()[s.Name].only; only != "" && inputs[s.Name].Given() {
			places[only] = append(places[only], inputs[s.Name].String())
		}
	}
	c.Mode = Untaint
	other := Legacy
	switch Mode(inputs["mode"].Text) {
	case Legacy:
		c.Mode, other = Legacy, Untaint
	case "", Auto:
		if len(places[Legacy]) > 0 {
			c.Mode = Legacy
		}
		if len(places[Legacy]) > 0 && len(places[Untaint]) > 0 {
			return fmt.Errorf("%s is of mode legacy and %s of mode untaint: choose one by --mode", places[Legacy][0], places[Untaint][0])
		}
		return nil
	case Untaint:
	}
	for _, place := range places[other] {
		c.Warnings = append(c.Warnings, place+" has no effect in mode "+string(c.Mode))
	}
	return nil
}

// complete derives values that depend on several settings.
func (c *Config) complete(getenv func(string) (string, bool), inputs map[string]settings.Origin) (err error) {
	c.client, err = c.ClientConfig(getenv)
	if c.Mode == Untaint {
		c.Taint.Policy.Requirements = []readiness.Requirement{{Name: c.selector, Namespaces: c.namespaces, Selector: c.selector}}
		c.Taint.Policy.AnyEffect = !inputs["effect"].Given()
		c.Taint.ConfigMap = taint.ConfigMap{}
	}
	return errors.Join(err, c.checkLease())
}

// checkLease compares the times: a leader must stop leading before another replica may lead.
func (c *Config) checkLease() error {
	if !c.LeaderElect {
		return nil
	}
	var errs []error
	l := c.Lease
	if l.Duration <= l.Deadline || l.Deadline <= l.Retry {
		errs = append(errs, fmt.Errorf(
			"want --lease-duration (%s) longer than --renew-deadline (%s), and that longer than --retry-period (%s)",
			l.Duration, l.Deadline, l.Retry))
	}
	if l.Duration%time.Second != 0 {
		errs = append(errs, fmt.Errorf("--lease-duration %s: want whole seconds", l.Duration))
	}
	return errors.Join(errs...)
}

// helpHead has verbs for the three exit codes.
const helpHead = `NAME:
   istio-cni taint - controller: keeps new pods off a node with a taint until its CNI agent is ready

USAGE:
   istio-cni taint [flags]   (also: istio-cni-taint [flags])

EXAMPLES:
   istio-cni taint --namespace=kube-system
      instead of istiod's untaint controller: removes cni.istio.io/not-ready from nodes whose agent is ready
   istio-cni taint --add
      the same, and adds the taint again after a reboot or when the agent is missing for longer than --hysteresis
   istio-cni-taint --configmap-namespace=istio-system --configmap-name=istio-cni-taint-configmap
      instead of the taint controller of Istio 1.8 to 1.17
   istio-cni taint --kubeconfig=$HOME/.kube/config --dry-run
      by hand: print the changes without making them

EXIT CODES:
   %d  done
   %d  failed: some node could not be changed
   %d  a bad value or flag; no request was sent, nothing was changed

A flag beats the environment, and that beats the default. An empty variable counts as unset. All problems are reported
together.

`
