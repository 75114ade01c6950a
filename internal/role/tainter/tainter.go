// Package tainter is the role "istio-cni taint", also called istio-cni-taint: the controller that keeps nodes free of
// mesh pods until the plugin's agent is ready there.
//
// It promises the flags, variables, names and defaults of both controllers that there were: the one of Istio 1.8 to 1.17
// (mode legacy) and the one inside istiod since 1.22 (mode untaint); and that all problems of its configuration are
// reported together before anything is asked of the API server.
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
	"time"

	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/serve"
	"github.com/meshcni/istio-cni/internal/agent/standalone"
	"github.com/meshcni/istio-cni/internal/agent/taint"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/kube"
)

// Exit codes. The legacy controller exited 255 for a bad command line; here it is 2 as in the other roles.
const (
	exitOK     = applet.ExitOK
	exitFailed = applet.ExitError // some node is not as wanted
	exitUsage  = applet.ExitUsage // a bad value or flag; nothing was asked or changed
)

// clock is the time of day, for leases, events, health and decisions.
func clock() time.Time { return time.Now() } //nolint:forbidigo // what everything below takes its clock from

// Run is the role. It ends when the work is done or, for the controller, when it is told to.
func Run(c applet.Call) int {
	return service.Run(c, "taint", help, func() (service.Service, error) {
		cfg, err := load(c.Args, environment{getenv: c.Getenv, hostname: os.Hostname})
		if err != nil {
			return service.Service{}, err
		}
		log := standalone.Logger(c.Stderr, cfg.LogLevel, cfg.LogJSON)
		return service.Service{
			Config: cfg, Warnings: cfg.Warnings, Log: log,
			Work: func(ctx context.Context) error { return act(ctx, c.Stdout, cfg, log) },
		}, nil
	})
}

// act does what was asked for.
func act(ctx context.Context, stdout io.Writer, cfg Config, log *slog.Logger) error {
	api, err := kube.NewClient(cfg.access)
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
	return standalone.Serve(ctx, log, func(ctx context.Context) error { return taint.Run(ctx, options) },
		serve.Port{Flag: "--health-port", Number: int(cfg.HealthPort), Handler: options.Health.Handler()},
		serve.Port{Flag: "--monitoring-port", Number: int(cfg.MonitoringPort), Handler: options.Metrics.Handler()},
	)
}

func (c Config) options(api *kube.Client, log *slog.Logger) taint.Options {
	reasons := make([]string, 0, len(readiness.Reasons()))
	for _, reason := range readiness.Reasons() {
		reasons = append(reasons, string(reason))
	}
	options := taint.Options{
		API: api, Log: log, Policy: c.Policy, Condition: c.Condition, Host: c.NodeName,
		Health:  health.NewState(health.Options{Log: log, Now: clock}, taint.Parts()...),
		Metrics: metrics.NewTaint(applet.Build().Version(), reasons),
	}
	options.Events = kube.NewEventRecorder(api, kube.EventOptions{Log: log, Count: options.Metrics.EventReported})
	if c.Mode == Legacy {
		options.ConfigMap = taint.ConfigMap{Namespace: c.ConfigMapNamespace, Name: c.ConfigMapName}
	}
	if c.LeaderElect {
		options.Lease = &taint.Lease{
			Namespace: c.LeaseNamespace, Name: c.LeaseName, Identity: c.PodName + "_" + rand.Text(),
			Duration: c.LeaseDuration, Deadline: c.RenewDeadline, Retry: c.RetryPeriod,
		}
	}
	return options
}
