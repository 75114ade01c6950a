// Package repairer is the role "istio-cni repair", also called istio-cni-repair: race repair without the node agent, for
// one node or for all nodes.
//
// It promises the flags and variables of Istio's command (versions 1.4 to 1.18), that all problems of its configuration
// are reported together before any request to the API server, and the actions of the node agent. Without a node's name it
// repairs the pods of all nodes, but cannot reach their namespaces: redirecting in place needs the name.
//
// It never prints a token.
//
// Start at Run.
package repairer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/meshcni/istio-cni/internal/agent/eventrecorder"
	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/nodepods"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/agent/racerepair"
	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/agent/standalone"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
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

// Config has all inputs of a run.
type Config struct {
	standalone.Process

	Repair racerepair.Settings
	// Daemon false repairs all present pods once.
	Daemon bool
	// Stanza is the plugin's configuration: it decides which pods are in the mesh.
	Stanza cniconf.Stanza
	// Places are the directories in which race repair finds the namespaces of pods.
	Places sandbox.Places
	// Host is the node of this process, for events.
	Host string

	// Warnings are sentences for the log.
	Warnings []string

	client kube.Config
	lines  []settings.Line
}

// elsewhere reports whether the pods are on another node: a pod's address could match on this node only by accident.
func (c *Config) elsewhere() bool {
	return c.Host != "" && c.Repair.Node != "" && c.Host != c.Repair.Node
}

// load reads arguments and environment. The error joins all problems; it is settings.ErrHelp for a help request.
func load(args []string, getenv func(string) (string, bool)) (Config, error) {
	cfg := Config{}
	rows := cfg.rows()
	in, err := settings.Parse(rows, args, getenv)
	if err != nil {
		return cfg, err
	}
	origins, problems := in.Read(rows)
	cfg.client, err = cfg.ClientConfig(getenv)
	problems = errors.Join(problems, err)
	if _, err := redirect.ChooseBackend(cfg.Stanza.Backend, cfg.Stanza.NativeNFTables, cfg.Stanza.ForceIptables); err != nil {
		problems = errors.Join(problems, fmt.Errorf("--backend, --native-nftables and --force-iptables-binary: %w", err))
	}
	if cfg.Repair.Node == "" && cfg.Repair.Switches.InPlace {
		cfg.Warnings = append(cfg.Warnings, "--repair-pods without --node-name: no pod can be redirected in place, only deleted or labelled")
	}
	if cfg.elsewhere() && cfg.Repair.Switches.InPlace {
		cfg.Warnings = append(cfg.Warnings, fmt.Sprintf("--node-name %s is not this node, %s: no pod can be redirected in place, "+
			"only deleted or labelled", cfg.Repair.Node, cfg.Host))
	}
	if cfg.Host == "" {
		cfg.Host = cfg.Repair.Node
	}
	cfg.lines = settings.Lines(rows, origins)
	return cfg, problems
}

// Rows are the flags for the completion.
func Rows() []settings.Setting { return new(Config).rows() }

// rows is the table. The variables of race repair are accepted with dashes, as in Istio's command, and with underscores.
func (c *Config) rows() []settings.Setting {
	rows := []settings.Setting{{
		Name: "run-as-daemon", Env: settings.Dashed("REPAIR_", "run-as-daemon"), Default: "false",
		Use: "keep running and repair new pods; without it: repair the present pods and exit", Value: settings.Bool(&c.Daemon),
	}}
	for _, row := range racerepair.Rows(&c.Repair) {
		row.Env = settings.Dashed("REPAIR_", row.Name)
		rows = append(rows, row)
	}
	logJSON := "true" // as in Istio's command
	return slices.Concat(rows, podwork.PluginRows(&c.Stanza), podwork.PathRows(&c.Places), c.Rows("REPAIR_", "repair", "8002", "15034", logJSON),
		[]settings.Setting{
			{
				Name: "agent-namespace", Arg: "NAMESPACE", Env: []string{"POD_NAMESPACE"}, Use: "namespace of the node agent",
				Value: settings.Checked(&c.Stanza.AgentNamespace, selector.CheckName),
			},
			{
				Name: "host", Arg: "NAME", Env: []string{"KUBERNETES_NODE_NAME", "NODE_NAME"}, Use: "this node, for events",
				Value: settings.Text(&c.Host, nil),
			},
		})
}

// helpHead has verbs for the three exit codes.
const helpHead = `NAME:
   istio-cni repair - repairs pods that started before the CNI plugin was installed

USAGE:
   istio-cni repair [flags]   (also: istio-cni-repair [flags])

EXAMPLES:
   istio-cni repair --node-name=$NODE --repair-pods --kubeconfig=$HOME/.kube/config
      on a node, by hand: redirect broken pods in place, once
   istio-cni repair --delete-pods --evict --run-as-daemon
      for all nodes: evict broken pods whenever they appear
   istio-cni repair --kubeconfig=$HOME/.kube/config
      no action is enabled: only create an Event on each broken pod

Each pod gets the first enabled action that applies: redirecting in place, deleting, labelling. The node agent
does the same by itself (REPAIR_ENABLED).

EXIT CODES:
   %d  done
   %d  failed: some pod could not be repaired, or pods could not be listed
   %d  a bad value or flag; no request was sent, nothing was changed

A flag beats the environment, and that beats the default. An empty variable counts as unset, an empty flag as the empty
text. All problems are reported together.

`
