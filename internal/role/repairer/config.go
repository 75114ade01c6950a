package repairer

import (
	"errors"
	"fmt"
	"slices"

	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/agent/racerepair"
	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/agent/standalone"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// Config has all inputs of a run.
type Config struct {
	standalone.Process

	Repair racerepair.Settings
	// Daemon false repairs all present pods once.
	Daemon bool
	// Stanza is the plugin's configuration: it decides which pods are of the mesh.
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

// elsewhere reports whether the pods are another node's: a pod's address could match on this node by accident only.
func (c *Config) elsewhere() bool {
	return c.Host != "" && c.Repair.Node != "" && c.Host != c.Repair.Node
}

// load reads arguments and environment. The error joins all problems; it is settings.ErrHelp for a request of the help.
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
		cfg.Warnings = append(cfg.Warnings, fmt.Sprintf("--node-name %s is not the own node, which is %s: no pod can be redirected in place, "+
			"only deleted or labelled", cfg.Repair.Node, cfg.Host))
	}
	if cfg.Host == "" {
		cfg.Host = cfg.Repair.Node
	}
	cfg.lines = settings.Lines(rows, origins)
	return cfg, problems
}

// rows is the table. The variables of race repair are accepted with dashes, as in the reference's command, and with underscores.
func (c *Config) rows() []settings.Setting {
	rows := []settings.Setting{{
		Name: "run-as-daemon", Env: settings.Dashed("REPAIR_", "run-as-daemon"), Default: "false",
		Use: "go on, and repair pods as they come; without it: repair those that there are, and exit", Value: settings.Bool(&c.Daemon),
	}}
	for _, row := range racerepair.Rows(&c.Repair) {
		row.Env = settings.Dashed("REPAIR_", row.Name)
		rows = append(rows, row)
	}
	logJSON := "true" // as in the reference's command
	return slices.Concat(rows, podwork.PluginRows(&c.Stanza), podwork.PathRows(&c.Places), c.Rows("REPAIR_", "repair", "8002", "15034", logJSON),
		[]settings.Setting{
			{
				Name: "agent-namespace", Arg: "NAMESPACE", Env: []string{"POD_NAMESPACE"}, Use: "namespace of the node agent",
				Value: settings.Checked(&c.Stanza.AgentNamespace, selector.CheckName),
			},
			{
				Name: "host", Arg: "NAME", Env: []string{"KUBERNETES_NODE_NAME", "NODE_NAME"}, Use: "the own node, for events",
				Value: settings.Text(&c.Host, nil),
			},
		})
}
