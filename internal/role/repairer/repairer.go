// Package repairer is the role "istio-cni repair", also called istio-cni-repair: race repair without the node agent, for
// one node or for all of them.
//
// It promises the flags and variables of the reference's command (Istio 1.4 to 1.18), that all problems of its
// configuration are reported together before anything is asked of the API server, and the actions of the node agent. Without the
// name of a node it looks after the pods of all nodes, whose namespaces it cannot reach: redirecting in place takes the name.
//
// It never prints a token.
//
// Start at Run; the table is in config.go.
package repairer

import (
	"context"
	"log/slog"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podrepair"
	"github.com/meshcni/istio-cni/internal/agent/serve"
	"github.com/meshcni/istio-cni/internal/agent/standalone"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/kube"
)

// Exit codes.
const (
	exitOK     = applet.ExitOK
	exitFailed = applet.ExitError // some pod could not be looked after
	exitUsage  = applet.ExitUsage // a bad value or flag; nothing was asked or changed
)

// clock is the time of day, for events and retries.
func clock() time.Time { return time.Now() } //nolint:forbidigo // what everything below takes its clock from

// Run is the role. It ends when each pod was looked after or, with --run-as-daemon, when it is told to.
func Run(c applet.Call) int {
	return service.Run(c, "repair", help, func() (service.Service, error) {
		cfg, err := load(c.Args, c.Getenv)
		if err != nil {
			return service.Service{}, err
		}
		log := standalone.Logger(c.Stderr, cfg.LogLevel, cfg.LogJSON)
		path, _ := c.Getenv("PATH")
		return service.Service{
			Config: cfg, Warnings: cfg.Warnings, Log: log,
			Work: func(ctx context.Context) error { return act(ctx, cfg, path, log) },
		}, nil
	})
}

func act(ctx context.Context, cfg Config, path string, log *slog.Logger) error {
	api, err := kube.NewClient(cfg.access)
	if err != nil {
		return err
	}
	defer api.Close()
	options := podrepair.Options{
		API: api, Log: log, Metrics: metrics.NewRepair(applet.Build().Version()),
		Settings: cfg.Repair, Plugin: func() (cniconf.NetConf, error) { return cfg.Stanza.NetConf() },
		ToolPath: path, Host: cfg.Host,
	}
	options.Events = kube.NewEventRecorder(api, kube.EventOptions{Log: log, Count: options.Metrics.EventReported}) //nolint:contextcheck // it ends with Shutdown
	defer options.Events.Shutdown()
	if cfg.Paths.Reachable() && !cfg.elsewhere() {
		options.Find = cfg.Paths.Find
	}
	if !cfg.Daemon {
		return podrepair.Once(ctx, options)
	}
	state := health.NewState(health.Options{Log: log, Now: clock}, podrepair.Part)
	options.Health = state
	return standalone.Serve(ctx, log, func(ctx context.Context) error {
		podrepair.Run(ctx, options)
		return nil
	},
		serve.Port{Flag: "--health-port", Number: int(cfg.HealthPort), Handler: state.Handler()},
		serve.Port{Flag: "--monitoring-port", Number: int(cfg.MonitoringPort), Handler: options.Metrics.Handler()},
	)
}
