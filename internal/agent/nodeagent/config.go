package nodeagent

import (
	"io/fs"
	"log/slog"
	"path"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/decisions"
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

// GracePeriod is the time between the removal of the stanza and the removal of the program: runtimes reload a configuration within
// a second, and for a pod in creation the runtime has read the old one.
const GracePeriod = 2 * time.Second

// LogSocketName is the name of the log socket in the run directory, for the agent and the plugin.
const LogSocketName = "log.sock"

// Config has all inputs of a run of the agent, read once. Live configuration may change the stanza and the log levels;
// the other settings require a restart.
type Config struct {
	// Config is the installation on this node.
	installation.Config

	Action Action
	// DryRun prints the changes and applies none of them.
	DryRun bool
	// UninstallOnExit decides whether the agent uninstalls when it is terminated.
	UninstallOnExit teardown.Policy
	// Install false leaves the node's files unchanged.
	Install bool
	// Observe is for an agent beside that of another plugin: it only audits. Install, RepairEnabled and all that writes are off then.
	Observe bool

	LogSocket     string
	LogSocketMode fs.FileMode
	// Places are the directories in which race repair finds the network namespaces of pods.
	Places sandbox.Places

	// HealthPort, MonitoringPort and IntrospectionPort are TCP ports; 0 is off. IntrospectionPort listens on
	// IntrospectionAddress, a loopback address, the others on all addresses.
	HealthPort, MonitoringPort, IntrospectionPort uint16
	IntrospectionAddress                          string
	// Profiling serves Go's profiles at IntrospectionPort.
	Profiling bool

	// ConfigDir is a mounted directory of live configuration and ConfigMap the name of an object; "" is off.
	ConfigDir, ConfigMap string
	// Namespace, PodName and DaemonSet are the agent's own; the first two are "" if unknown. NodeName is the Kubernetes name of
	// this node, "" if unknown: the host name can differ.
	Namespace, PodName, DaemonSet, NodeName string

	// AgentLevel is the level of the agent's own log, PluginLevel the level of the plugin's log, relayed or not.
	AgentLevel, PluginLevel pluginlog.Level
	// RepairEnabled enables race repair, which also needs a node name.
	RepairEnabled bool
	Repair        racerepair.Settings
	// Audit is the verification of the node's pods after their start, which also needs a node name.
	Audit auditor.Settings

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

// LogValue returns the text of String because a handler of log/slog would otherwise encode each field.
func (c Config) LogValue() slog.Value { return slog.StringValue(c.String()) }

// clientConfig returns the agent's own access to the API server.
func (c Config) clientConfig() kube.Config {
	return kube.Config{Server: c.Server, TokenFile: c.Token, CAFile: c.CA, SkipVerify: c.CA == ""}
}

// watchesRuntime reports whether the mode depends on the node's container runtime.
func (c Config) watchesRuntime() bool {
	return c.Install && (c.Want.Mode == cniconf.Auto || c.Want.Mode == cniconf.DropIn) && c.NodeName != ""
}

// lockFile is held by the agent that serves the node, podSocket is the socket for the plugins' pod lookups, verdictFile has the
// self-test's result for the plugins, and decisionsFile the decisions for the next agent.
func (c Config) lockFile() string      { return c.RunDir + "/install.lock" }
func (c Config) podSocket() string     { return path.Join(c.RunDir, agentapi.SocketName) }
func (c Config) verdictFile() string   { return path.Join(c.RunDir, selfcheck.FileName) }
func (c Config) decisionsFile() string { return path.Join(c.RunDir, decisions.KeptName) }
