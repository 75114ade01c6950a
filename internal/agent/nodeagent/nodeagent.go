// Package nodeagent runs the parts of the node agent: installation, self-test, log relay, pod lookups of plugins, race repair,
// live configuration, health and metrics.
//
// It promises that no step of the installation waits for the API server, that one agent at a time serves a node, that invalid
// live configuration changes nothing, and that the agent uninstalls only for a reason that package teardown returns.
//
// It never reads arguments or the environment, and never decides about a pod.
//
// Start at Run; agent.go has the life of the agent, sockets.go its Unix sockets, live.go its live configuration, loglevel.go the log
// levels.
package nodeagent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"strings"
	"syscall"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/decisions"
	"github.com/meshcni/istio-cni/internal/agent/installation"
	"github.com/meshcni/istio-cni/internal/agent/logbuffer"
	"github.com/meshcni/istio-cni/internal/agent/racerepair"
	"github.com/meshcni/istio-cni/internal/agent/teardown"
	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/node/selfcheck"
)

// Options are the inputs and dependencies of the agent.
type Options struct {
	Config Config
	Log    *slog.Logger
	// Level is the level of Log.
	Level *slog.LevelVar
	// Recent has the last records of Log for bug reports.
	Recent *logbuffer.Buffer
	// Stdout receives the lines of a dry run.
	Stdout io.Writer
	// Version is the version of the program, ToolPath the search path of iptables in the form of $PATH.
	Version, ToolPath string
	// Reload computes the configuration with live values; the first layer that has a key counts. Frozen are the changed keys
	// that require a restart. On an error the last good configuration stays in force.
	Reload func(layers ...settings.Layer) (c Config, frozen []string, err error)
}

// Run performs the configured action. It ends with the action or, for Stay, with ctx.
func Run(ctx context.Context, o Options) error {
	switch {
	case o.Config.DryRun:
		return o.dryRun()
	case o.Config.Action == Once:
		return o.once(ctx)
	case o.Config.Action == Uninstall:
		return o.uninstall(ctx)
	}
	return o.stay(ctx)
}

func (o Options) installation(report installation.Report) *installation.Installation {
	return installation.New(o.Log, hostfs.Disk{}, o.Config.Config, report, nil)
}

// dryRun prints the changes that the action would make.
func (o Options) dryRun() error {
	i := o.installation(installation.Report{})
	plan := i.Plan
	if o.Config.Action == Uninstall {
		plan = i.PlanUninstall
	}
	lines, err := plan()
	if len(lines) == 0 && err == nil {
		lines = []string{"nothing to do"}
	}
	_, _ = fmt.Fprintln(o.Stdout, strings.Join(lines, "\n"))
	return err
}

// lock acquires the node's lock, so that no other agent works on the node at the same time.
func (c Config) lock() (*hostfs.FileLock, error) {
	err := (hostfs.Disk{}).MkdirAll(c.RunDir, c.RunDirMode)
	// The kubelet creates the directory of a volume world-readable, but this directory holds sockets and a token.
	if info, statErr := os.Stat(c.RunDir); err == nil && statErr == nil && info.Mode().Perm() != c.RunDirMode.Perm() {
		if err = os.Chmod(c.RunDir, c.RunDirMode); err != nil {
			err = fmt.Errorf("setting the mode of the run directory: %w", err)
		}
	}
	if hint := hostfs.Hint(err); hint != "" {
		err = fmt.Errorf("%w (%s)", err, hint)
	}
	if err != nil {
		return nil, err
	}
	return hostfs.Lock(c.lockFile())
}

// removeRest removes files of the run directory that the installation does not own: the self-test's verdict, the decisions, a
// socket that a killed agent left, and the lock.
func (c Config) removeRest() error {
	var errs []error
	for _, file := range []string{c.verdictFile(), c.decisionsFile(), c.podSocket(), c.eventSocket(), c.lockFile()} {
		errs = append(errs, (hostfs.Disk{}).Remove(file))
	}
	return errors.Join(errs...)
}

// once installs and ends. Like an init container it waits for missing files of other programs.
func (o Options) once(ctx context.Context) error {
	if !o.Config.Install {
		o.Log.InfoContext(ctx, "nothing is installed (CNI_ENABLE_INSTALL=false)")
		return nil
	}
	held, err := o.Config.lock()
	if err != nil {
		return fmt.Errorf("another node agent is at work here: %w", err)
	}
	defer func() { _ = held.Close() }()
	if err := o.installation(installation.Report{}).Until(ctx); err != nil {
		return err
	}
	o.Log.InfoContext(ctx, "installed")
	return nil
}

// uninstall removes the installation on the user's command.
func (o Options) uninstall(ctx context.Context) error {
	held, err := o.Config.lock()
	if busy := (*hostfs.HeldError)(nil); errors.As(err, &busy) {
		return fmt.Errorf("a node agent is at work here and would install again: %w", err)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.EROFS) {
		return err
	}
	err = o.installation(installation.Report{}).Uninstall(ctx)
	if held != nil {
		err = errors.Join(err, held.Close(), o.Config.removeRest())
	}
	if err == nil {
		o.Log.InfoContext(ctx, "uninstalled")
	}
	return err
}

// GracePeriod is the time between the removal of the stanza and the removal of the program: runtimes reload a configuration within
// a second, and for a pod in creation the runtime has read the old configuration.
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
	// Observe is for an agent beside another plugin's agent: it only audits. Install, RepairEnabled and all writes are off then.
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
	// Ambient is the service of pods in ambient mode, which also needs a node name. The stanza has who is in that mode.
	Ambient Ambient

	// Lines are the settings in force, without secrets.
	Lines []settings.Line
}

// Ambient has the settings of ambient mode.
type Ambient struct {
	Enabled bool
	// Config has what pods' rules depend on. Live configuration may change DNSCapture.
	ambient.Config
	// Socket is where ztunnel connects, the same path here and on the host.
	Socket string
	// ReconcileOnStart renews the rules of pods that an earlier agent enrolled, if they differ.
	ReconcileOnStart bool
	// SystemNamespace has ztunnel's own pods, which are never enrolled: they have label app=ztunnel.
	SystemNamespace string
	// SwitchNamespace is false if this process is in the node's network namespace; see HostNamespace.
	SwitchNamespace bool
}

// HostNamespace returns the path of the node's network namespace as this process sees it: that of the node's process 1, or
// without SwitchNamespace its own. The path does not exist if the node's procfs is not visible.
func (c Config) HostNamespace() string {
	if !c.Ambient.SwitchNamespace {
		return "/proc/self/ns/net"
	}
	return c.nodeNamespace()
}

func (c Config) nodeNamespace() string {
	proc := cmp.Or(hostpath.Detect(c.Places.Roots, c.Places.Proc).Proc, path.Join(c.Places.Roots[0], c.Places.Proc))
	return path.Join(proc, "1/ns/net")
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

// lockFile is held by the agent that serves the node, podSocket is the socket for the plugins' pod lookups and eventSocket for their events, verdictFile has the
// self-test's result for the plugins, and decisionsFile the decisions for the next agent.
func (c Config) lockFile() string      { return c.RunDir + "/install.lock" }
func (c Config) podSocket() string     { return path.Join(c.RunDir, agentapi.SocketName) }
func (c Config) eventSocket() string   { return path.Join(c.RunDir, agentapi.EventSocketName) }
func (c Config) verdictFile() string   { return path.Join(c.RunDir, selfcheck.FileName) }
func (c Config) decisionsFile() string { return path.Join(c.RunDir, decisions.KeptName) }
