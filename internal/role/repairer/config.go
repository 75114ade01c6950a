package repairer

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/meshcni/istio-cni/internal/agent/podrepair"
	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/agent/standalone"
	"github.com/meshcni/istio-cni/internal/applet/settings"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
	"github.com/meshcni/istio-cni/internal/node/podns"
)

// Config is all that a run depends on.
type Config struct {
	Repair podrepair.Settings
	// Daemon false is one look at all pods.
	Daemon bool
	// Stanza is what the plugin would be told: it decides which pods are of the mesh.
	Stanza cniconf.Stanza
	// Paths are where namespaces of pods are named.
	Paths podns.Places

	HealthPort, MonitoringPort uint16
	// Kubeconfig is used instead of the account of the pod, unless "".
	Kubeconfig string
	// Host is the node where this runs, for events.
	Host     string
	LogLevel pluginlog.Level
	LogJSON  bool

	// Warnings are sentences for the log.
	Warnings []string

	access kube.Config
	lines  []slog.Attr
}

// elsewhere tells whether the pods are another node's: addresses of pods could be found here by accident only.
func (c Config) elsewhere() bool {
	return c.Host != "" && c.Repair.Node != "" && c.Host != c.Repair.Node
}

// LogValue is each setting in force with where it comes from. There is no secret among them.
func (c Config) LogValue() slog.Value { return slog.GroupValue(c.lines...) }

// load reads arguments and environment. The error joins all problems; it is settings.ErrHelp when help was asked for.
func load(args []string, getenv func(string) (string, bool)) (Config, error) {
	cfg := Config{}
	rows := cfg.rows()
	found, mistakes := settings.Find(rows, args, getenv)
	if errors.Is(mistakes, settings.ErrHelp) {
		return cfg, mistakes
	}
	problems := []error{mistakes, found.Apply(rows)}
	access, err := standalone.Access(cfg.Kubeconfig, getenv)
	problems = append(problems, err)
	cfg.access = access
	if _, err := redirect.ChooseBackend(cfg.Stanza.Backend, cfg.Stanza.NativeNFTables, cfg.Stanza.ForceIptables); err != nil {
		problems = append(problems, fmt.Errorf("--backend, --native-nftables and --force-iptables-binary: %w", err))
	}
	if cfg.HealthPort != 0 && cfg.HealthPort == cfg.MonitoringPort {
		problems = append(problems, fmt.Errorf("--health-port and --monitoring-port are both %d", cfg.HealthPort))
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
	cfg.lines = found.Describe(rows)
	return cfg, errors.Join(problems...)
}

// rows is the table. Its places are those of c.
func (c *Config) rows() []settings.Setting {
	rows := []settings.Setting{{
		Name: "run-as-daemon", Env: settings.Dashed("REPAIR_", "run-as-daemon"), Default: "false",
		Use: "go on, and look after pods as they come; without it: look after those that there are, and exit",
		Set: func(s string) error { return settings.Toggle(&c.Daemon, s) },
	}}
	for _, row := range podrepair.Rows() {
		rows = append(rows, settings.Setting{
			Name: row.Name, Arg: row.Arg, Env: settings.Dashed("REPAIR_", row.Name), Default: row.Default, Use: row.Use,
			Set: func(s string) error { return row.Set(&c.Repair, s) },
		})
	}
	return append(append(append(rows, c.pluginRows()...), c.pathRows()...), c.processRows()...)
}

// pluginRows are those of the plugin's stanza that decide about pods.
func (c *Config) pluginRows() []settings.Setting {
	return []settings.Setting{
		{
			Name: "exclude-namespaces", Arg: "LIST", Env: []string{"EXCLUDE_NAMESPACES", "EXCLUDED_NAMESPACES"},
			Use: "namespaces that the plugin leaves alone, between commas: as the node agent is told",
			Set: func(s string) error { c.Stanza.ExcludeNamespaces = split(s); return nil },
		},
		{
			Name: "agent-namespace", Arg: "NAMESPACE", Env: []string{"POD_NAMESPACE"}, Use: "namespace of the node agent",
			Set: func(s string) error { c.Stanza.AgentNamespace = s; return selector.CheckName(s) },
		},
		{
			Name: "second-ip-family", Arg: "MODE", Env: []string{"SECOND_IP_FAMILY"},
			Use: "what becomes of the family of a pod's further addresses: as the node agent is told",
			Set: func(s string) (err error) { c.Stanza.SecondFamily, err = redirect.ParseSecondFamily(s); return err },
		},
		{
			Name: "force-iptables-binary", Arg: "VARIANT", Env: []string{"FORCE_IPTABLES_BINARY"}, Use: "legacy or nft",
			Set: func(s string) error {
				c.Stanza.ForceIptables = s
				if s != "" && s != "legacy" && s != "nft" {
					return errors.New("want legacy, nft or nothing")
				}
				return nil
			},
		},
		{
			Name: "backend", Arg: "WAY", Env: []string{"CNI_BACKEND"},
			Use: "auto, netlink, native or iptables: as the node agent is told",
			Set: func(s string) (err error) { c.Stanza.Backend, err = redirect.ParseBackend(s); return err },
		},
		{
			Name: "native-nftables", Env: []string{"NATIVE_NFTABLES"}, Default: "false", Use: "the same as --backend=native",
			Set: func(s string) error { return settings.Toggle(&c.Stanza.NativeNFTables, s) },
		},
	}
}

// pathRows say where namespaces are named.
func (c *Config) pathRows() []settings.Setting {
	list := func(into *[]string) func(string) error { return func(s string) error { return paths(into, s) } }
	one := func(into *string) func(string) error { return func(s string) error { *into = s; return absolute(s) } }
	return []settings.Setting{
		{
			Name: "cni-cache-dir", Arg: "DIR", Env: []string{"CNI_CACHE_DIR"}, Default: "/var/lib/cni/results",
			Use: "libcni's cache on the node", Set: one(&c.Paths.Cache),
		},
		{
			Name: "netns-dirs", Arg: "DIRS", Env: []string{"NETNS_DIRS"}, Default: "/var/run/netns,/var/run/docker/netns",
			Use: "where container runtimes mount network namespaces on the node", Set: list(&c.Paths.Netns),
		},
		{
			Name: "host-proc", Arg: "DIR", Env: []string{"HOST_PROC"}, Default: "/proc", Use: "procfs of the node", Set: one(&c.Paths.Proc),
		},
		{
			Name: "host-roots", Arg: "DIRS", Env: []string{"HOST_ROOTS"}, Default: "/host,/host/proc/1/root",
			Use: "prefixes under which a container may see the paths of the node", Set: list(&c.Paths.Roots),
		},
	}
}

func (c *Config) processRows() []settings.Setting {
	return []settings.Setting{
		{
			Name: "kubeconfig", Arg: "FILE", Env: []string{"KUBECONFIG"}, Use: "instead of the account of the pod",
			Set: func(s string) error { c.Kubeconfig = s; return nil },
		},
		{
			Name: "health-port", Arg: "PORT", Env: []string{"REPAIR_HEALTH_PORT"}, Default: "8002",
			Use: "/healthz and /readyz of the daemon; 0 is off. It is not the agent's 8000", Set: func(s string) error { return settings.Port(&c.HealthPort, s) },
		},
		{
			Name: "monitoring-port", Arg: "PORT", Env: []string{"REPAIR_MONITORING_PORT"}, Default: "15034",
			Use: "metrics of the daemon; 0 is off. It is not the agent's 15014", Set: func(s string) error { return settings.Port(&c.MonitoringPort, s) },
		},
		{
			Name: "log_output_level", Arg: "LEVEL", Env: []string{"LOG_LEVEL"}, Default: "info",
			Use: "debug, info, warn, error or none, or SCOPE:LEVEL pairs, of which default and all count",
			Set: func(s string) (err error) {
				c.LogLevel, err = pluginlog.ParseScopes(s, "default", "all", "repair")
				return err
			},
		},
		{
			// The command of old wrote JSON.
			Name: "log_as_json", Env: []string{"LOG_AS_JSON"}, Default: "true", Use: "log JSON",
			Set: func(s string) error { return settings.Toggle(&c.LogJSON, s) },
		},
		{
			Name: "host", Arg: "NAME", Env: []string{"KUBERNETES_NODE_NAME", "NODE_NAME"}, Use: "the own node, for events",
			Set: func(s string) error { c.Host = s; return nil },
		},
	}
}

func split(text string) []string {
	var all []string
	for one := range strings.SplitSeq(text, ",") {
		if one = strings.TrimSpace(one); one != "" {
			all = append(all, one)
		}
	}
	return all
}

func paths(into *[]string, text string) error {
	*into = split(text)
	var wrong []error
	for _, path := range *into {
		wrong = append(wrong, absolute(path))
	}
	return errors.Join(wrong...)
}

func absolute(path string) error {
	if !strings.HasPrefix(path, "/") {
		return fmt.Errorf("%q: want an absolute path", path)
	}
	return nil
}

// helpHead has verbs for the three exit codes.
const helpHead = `NAME:
   istio-cni repair - looks after pods that started before the CNI plugin was there

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
   %d  failed: some pod could not be looked after
   %d  a bad value or flag; nothing was asked or changed

A flag beats the environment, and that beats the default. An empty variable counts as unset, an empty flag as the empty
text. All problems are reported together.

FLAGS:
`

// help is the text of --help.
func help() string {
	var b strings.Builder
	fmt.Fprintf(&b, helpHead, exitOK, exitFailed, exitUsage)
	settings.Help(&b, (&Config{}).rows())
	return b.String()
}
