// Package installer is the role "istio-cni install", also called install-cni: the node agent that puts the plugin on a
// node, keeps it there and gives the node back.
//
// Its configuration promises every flag and variable of the reference at its place in one table, that all problems are
// reported together before anything is touched, and that neither an error nor the printed configuration holds a token.
// Reading it touches nothing but the files of a template.
//
// Start at load; the tables are in settings.go.
package installer

import (
	"encoding/json"
	"io/fs"
	"path"

	"github.com/meshcni/istio-cni/internal/agent/departure"
	"github.com/meshcni/istio-cni/internal/agent/podrepair"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
)

// Exit codes.
const (
	exitOK     = applet.ExitOK
	exitFailed = applet.ExitError // the node is not as wanted
	exitUsage  = applet.ExitUsage // a bad value or flag; nothing was touched
)

// Names that the reference gives to files.
const (
	logSocketName = "log.sock"
)

// Config is all that a run of the agent depends on, read once. What the plugin is told (Stanza, Log.Plugin) may be
// read again with an overlay; the rest takes a restart.
type Config struct {
	Action Action
	// DryRun says what would be done and does nothing; it implies Once unless the action is Uninstall.
	DryRun bool
	// UninstallOnExit decides about giving the node back when the agent is told to end.
	UninstallOnExit departure.Policy
	// Install false leaves the node's files to somebody else, Reinstall false heals nothing after the first install.
	Install, Reinstall bool

	Conf       ConfFiles
	Binaries   Binaries
	Kubeconfig Kubeconfig
	// Stanza is what the plugin is told. Its Template, when there is one, may hold a token.
	Stanza cniconf.Stanza

	// RunDir holds sockets, kubeconfig and log file; it is the same path on the host and for the agent.
	RunDir        string
	RunDirMode    fs.FileMode
	LogSocket     string
	LogSocketMode fs.FileMode
	// HostRoots are prefixes under which a path of the host may be seen by the agent, best first.
	HostRoots []string
	// NetnsDirs and HostProc are paths of the host: where network namespaces are mounted, and its procfs.
	NetnsDirs []string
	HostProc  string

	// HealthPort, MonitoringPort and IntrospectionPort are TCP ports; 0 is off. The last one listens on
	// IntrospectionAddress, a loopback address, the others on all.
	HealthPort, MonitoringPort, IntrospectionPort uint16
	IntrospectionAddress                          string

	// ConfigDir is a mounted directory of live configuration and ConfigMap the name of an object; "" is off.
	ConfigDir, ConfigMap string
	// Namespace, PodName and DaemonSet are the agent's own; the first two are "" when nobody told. NodeName is the
	// Kubernetes name of this node, "" when unknown: a host name is no safe guess of it.
	Namespace, PodName, DaemonSet, NodeName string

	Log Log
	// RepairEnabled switches race repair on; without a node name there is none.
	RepairEnabled bool
	Repair        podrepair.Settings

	// Warnings are sentences for the log.
	Warnings []string

	lines []line
}

// Action is what the agent was started for.
type Action string

// Actions.
const (
	Stay      Action = "stay" // install, watch, heal
	Once      Action = "once"
	Uninstall Action = "uninstall"
)

// Mode says where our stanza goes.
type Mode string

// Modes. ModeAuto is drop-in where the runtime is known to load it, else inline.
const (
	ModeAuto       Mode = "auto"
	ModeInline     Mode = "inline"     // into the primary configuration
	ModeDropIn     Mode = "dropin"     // a file beside the primary, loaded by the runtime
	ModeOwned      Mode = "owned"      // a copy of the primary with our stanza, sorted before it
	ModeStandalone Mode = "standalone" // a file with our stanza alone, as multus wants it
)

// ConfFiles is about files of the CNI configuration.
type ConfFiles struct {
	Mode Mode
	// Name is the base name that somebody chose with CNI_CONF_NAME: of the primary configuration, or of our own file in
	// standalone mode. It is "" when the name is to be discovered, and never holds a discovered one.
	Name string
	// OwnedName is the base name of our file in owned mode.
	OwnedName string
	// Dir is the directory as the agent sees it, HostDir as the host does.
	Dir, HostDir string
	// FileMode is that of files that are ours alone; an edited file keeps its own.
	FileMode fs.FileMode
	// CacheDir is libcni's cache of living sandboxes, a path of the host.
	CacheDir string
}

// OwnFile is the base name of the file that is ours alone, "" when the mode has none or names it by the network.
func (c ConfFiles) OwnFile() string {
	switch {
	case c.Mode == ModeOwned:
		return c.OwnedName
	case c.Mode == ModeStandalone && c.Name != "":
		return c.Name
	case c.Mode == ModeStandalone:
		return cniconf.StandaloneName
	}
	return ""
}

// Binaries is about the program's copies on the node.
type Binaries struct {
	// Source is the file to copy.
	Source string
	// Dirs are the targets as the agent sees them.
	Dirs []string
	// Update false leaves existing files alone; Skip names files that are not to be written at all.
	Update bool
	Skip   []string
}

// Kubeconfig is about the plugin's credentials.
type Kubeconfig struct {
	// Path is the file of this version, in the run directory. Historic is that of versions before 1.23 in the
	// configuration directory, as the agent sees it: to be written when WriteHistoric, to be removed otherwise.
	Path, Historic string
	WriteHistoric  bool
	Mode           fs.FileMode
	// ServiceAccountDir holds token, ca.crt and namespace; CAFile replaces its ca.crt unless "".
	ServiceAccountDir, CAFile string
	SkipTLSVerify             bool
	// Protocol, Host and Port lead to the API server. Host and Port are given unless nothing is to be installed.
	Protocol, Host string
	Port           uint16
}

// CA is the file of the certificate authority.
func (k Kubeconfig) CA() string {
	if k.CAFile != "" {
		return k.CAFile
	}
	return path.Join(k.ServiceAccountDir, "ca.crt")
}

// Token is the file of the service account's token.
func (k Kubeconfig) Token() string { return path.Join(k.ServiceAccountDir, "token") }

// Log is about the agent's log. Agent is the level of its own records. Plugin is the level that the plugin is told and
// that relayed records are held to; neither level follows the other.
type Log struct {
	Agent, Plugin pluginlog.Level
	JSON          bool
}

// environment is what the configuration is read from besides arguments.
type environment struct {
	getenv func(string) (string, bool)
	// readFile reads a file of bounded size; its error keeps fs.ErrNotExist.
	readFile func(string) ([]byte, error)
	// hostname stands in a template for a node name that nobody gave.
	hostname func() (string, error)
	// executable is the path of this program.
	executable func() (string, error)
	// selectors turns AMBIENT_ENABLEMENT_SELECTOR, which is YAML, into a JSON list.
	selectors func(string) (json.RawMessage, error)
}

// load reads arguments and environment. The error joins all problems, each with the flag or variable, the value and the
// cause; it is errHelp when help was asked for.
func load(args []string, env environment) (Config, error) {
	in, err := parse(args, env)
	if err != nil {
		return Config{}, err
	}
	return in.config()
}
