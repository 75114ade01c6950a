package nodeagent

import (
	"io/fs"
	"log/slog"
	"path"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/installation"
	"github.com/meshcni/istio-cni/internal/agent/racerepair"
	"github.com/meshcni/istio-cni/internal/agent/teardown"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/node/selfcheck"
)

// GracePeriod is for how long the program stays on the node after its stanza: runtimes reload a configuration within a second,
// and a pod that is being created has read the old one.
const GracePeriod = 2 * time.Second

// LogSocketName is the name that the plugin knows of the log socket in the run directory.
const LogSocketName = "log.sock"

// Config is all that a run of the agent depends on, read once. The stanza and the plugin's log level may be read again with
// live configuration; the rest takes a restart.
type Config struct {
	// Config is the installation on this node.
	installation.Config

	Action Action
	// DryRun prints what would be done and changes nothing.
	DryRun bool
	// UninstallOnExit decides whether the agent uninstalls when it is terminated.
	UninstallOnExit teardown.Policy
	// Install false leaves the node's files alone.
	Install bool

	LogSocket     string
	LogSocketMode fs.FileMode
	// Places lead race repair to the namespaces of pods.
	Places sandbox.Places

	// HealthPort, MonitoringPort and IntrospectionPort are TCP ports; 0 is off. The last one listens on
	// IntrospectionAddress, a loopback address, the others on all.
	HealthPort, MonitoringPort, IntrospectionPort uint16
	IntrospectionAddress                          string

	// ConfigDir is a mounted directory of live configuration and ConfigMap the name of an object; "" is off.
	ConfigDir, ConfigMap string
	// Namespace, PodName and DaemonSet are the agent's own; the first two are "" if they are not known. NodeName is the
	// Kubernetes name of this node, "" if unknown: a host name is no safe guess of it.
	Namespace, PodName, DaemonSet, NodeName string

	// PluginLevel is that of the plugin's relayed log; it does not follow the level of the agent.
	PluginLevel pluginlog.Level
	// RepairEnabled switches race repair on; without a node name there is none.
	RepairEnabled bool
	Repair        racerepair.Settings

	// Lines are the settings in force, without secrets.
	Lines []settings.Line
}

// Action is the purpose of a run.
type Action string

// Actions.
const (
	Stay      Action = "stay" // install, watch, heal
	Once      Action = "once"
	Uninstall Action = "uninstall"
)

// String lists the settings in force, so that a configuration that is printed by mistake shows no token.
func (c Config) String() string {
	var text strings.Builder
	for _, l := range c.Lines {
		text.WriteString(l.String() + "\n")
	}
	return text.String()
}

// LogValue is the same for the handlers of log/slog, one of which would encode each field.
func (c Config) LogValue() slog.Value { return slog.StringValue(c.String()) }

// clientConfig is the agent's own way to the API server.
func (c Config) clientConfig() kube.Config {
	return kube.Config{Server: c.Server, TokenFile: c.Token, CAFile: c.CA, SkipVerify: c.CA == ""}
}

// watchesRuntime tells whether the mode depends on the node's container runtime.
func (c Config) watchesRuntime() bool {
	return c.Install && (c.Want.Mode == cniconf.Auto || c.Want.Mode == cniconf.DropIn) && c.NodeName != ""
}

// lockFile is held by the agent that serves the node, podSocket is where plugins ask about pods, and verdictFile has the
// self-test's result for them.
func (c Config) lockFile() string    { return c.RunDir + "/install.lock" }
func (c Config) podSocket() string   { return path.Join(c.RunDir, agentapi.SocketName) }
func (c Config) verdictFile() string { return path.Join(c.RunDir, selfcheck.FileName) }
