// Package repairer is the role "istio-cni repair", also called istio-cni-repair: race repair without the node agent, for
// one node or for all of them.
//
// It promises the flags and variables of the reference's command (Istio 1.4 to 1.18), that all problems of its configuration
// are reported together before any request to the API server, and the actions of the node agent. Without the name of a node it
// repairs the pods of all nodes, whose namespaces it cannot reach: redirecting in place needs the name.
//
// It never prints a token.
//
// Start at Run; the table is in config.go.
package repairer

import (
	"context"
	"log/slog"
	"sync"

	"github.com/meshcni/istio-cni/internal/agent/eventrecorder"
	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/nodepods"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/agent/standalone"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/kube"
)

// Run runs the role. It ends after one repair of each pod or, with --run-as-daemon, with a signal.
func Run(c applet.Call) int {
	return service.Run(c, "repair", helpHead, []settings.Group{{Title: "Flags", Rows: new(Config).rows()}}, func() (service.Service, error) {
		cfg, err := load(c.Args, c.Getenv)
		if err != nil {
			return service.Service{}, err
		}
		log := standalone.Logger(c.Stderr, cfg.LogLevel, cfg.LogJSON)
		path, _ := c.Getenv("PATH")
		return service.Service{
			Config: cfg.lines, Warnings: cfg.Warnings, Log: log,
			Work: func(ctx context.Context) error { return act(ctx, cfg, path, log) },
		}, nil
	})
}

func act(ctx context.Context, cfg Config, path string, log *slog.Logger) error {
	api, err := kube.NewClient(cfg.client)
	if err != nil {
		return err
	}
	defer api.Close()
	options := nodepods.Options{
		Env: podwork.Env{
			Log: log, Plugin: sync.OnceValues(cfg.Stanza.NetConf), ToolPath: path, Host: cfg.Host, Node: cfg.Repair.Node,
		},
		API: api, Metrics: metrics.NewRepair(applet.Version()), Repair: &cfg.Repair,
	}
	options.Events = eventrecorder.New(api, eventrecorder.Options{Log: log, Count: options.Metrics.EventReported}) //nolint:contextcheck // it ends with Shutdown
	defer options.Events.Shutdown()
	if cfg.Places.Reachable() && !cfg.elsewhere() {
		options.Find = cfg.Places.Find
	}
	if !cfg.Daemon {
		return nodepods.Once(ctx, options)
	}
	state := health.NewState(health.Options{Log: log}, nodepods.Part)
	options.Health = state
	return cfg.Serve(ctx, log, state.Handler(), options.Metrics.Handler(), func(ctx context.Context) error {
		pods, err := nodepods.New(options)
		if err == nil {
			pods.Run(ctx)
		}
		return err
	})
}

// helpHead has verbs for the three exit codes.
const helpHead = `NAME:
   istio-cni repair - repairs pods that started before the CNI plugin was there

USAGE:
   istio-cni repair [flags]   (also: istio-cni-repair [flags])

EXAMPLES:
   istio-cni repair --node-name=$NODE --repair-pods --kubeconfig=$HOME/.kube/config
      on a node, by hand: redirect broken pods in place, once
   istio-cni repair --delete-pods --evict --run-as-daemon
      for all nodes: evict broken pods as they come
   istio-cni repair --kubeconfig=$HOME/.kube/config
      nothing is switched on: make an Event on each broken pod, and no more

Of what is switched on, the first counts that can help a pod: redirecting in place, deleting, labelling. The node agent
does the same by itself (REPAIR_ENABLED).

EXIT CODES:
   %d  done
   %d  failed: some pod could not be repaired, or pods could not be listed
   %d  a bad value or flag; no request was sent, nothing was changed

A flag beats the environment, and that beats the default. An empty variable counts as unset, an empty flag as the empty
text. All problems are reported together.

`
