// Package tainter is the role "istio-cni taint", also called istio-cni-taint: the controller that keeps nodes free of mesh pods
// until the plugin's agent is ready there.
//
// It promises the flags, variables, names and defaults of both controllers of the reference: the one of Istio 1.8 to 1.17 (mode
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
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/meshcni/istio-cni/internal/agent/eventrecorder"
	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/standalone"
	"github.com/meshcni/istio-cni/internal/agent/taint"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/kube"
)

// Run runs the role. It ends when the work is done or, for the controller, with a signal. The legacy controller exited 255 for
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

// helpHead has verbs for the three exit codes.
const helpHead = `NAME:
   istio-cni taint - controller: keeps nodes free of new pods by a taint until the CNI agent is ready there

USAGE:
   istio-cni taint [flags]   (also: istio-cni-taint [flags])

EXAMPLES:
   istio-cni taint --namespace=kube-system
      instead of istiod's untaint controller: removes cni.istio.io/not-ready from nodes whose agent is ready
   istio-cni taint --add
      the same, and puts it back when a node is rebooted or its agent is gone for longer than --hysteresis
   istio-cni-taint --configmap-namespace=istio-system --configmap-name=istio-cni-taint-configmap
      instead of the taint controller of Istio 1.8 to 1.17
   istio-cni taint --kubeconfig=$HOME/.kube/config --dry-run
      by hand: print what would be done

EXIT CODES:
   %d  done
   %d  failed: some node could not be changed
   %d  a bad value or flag; no request was sent, nothing was changed

A flag beats the environment, and that beats the default. An empty variable counts as unset. All problems are reported
together.

`
