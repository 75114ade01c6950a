package installer

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/nodeagent"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/agent/racerepair"
	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/agent/teardown"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
)

// groups is the table of all settings. A variable is spelled like its flag unless the row says otherwise.
func (d *draft) groups() []settings.Group {
	return []settings.Group{
		{Title: "What to do", Rows: settings.Named("", d.actionSettings()...)},
		{Title: "CNI configuration", Rows: settings.Named("", slices.Concat(d.modeSettings(), d.placeSettings(), podwork.PathRows(&d.Places))...)},
		{Title: "Program files", Rows: settings.Named("", d.binarySettings()...)},
		{Title: "Configuration of the plugin", Rows: settings.Named("", slices.Concat(podwork.PluginRows(&d.Want.Stanza), live(d.pluginSettings()))...)},
		{Title: "The plugin's credentials", Rows: settings.Named("", d.kubeconfigSettings()...)},
		{Title: "The agent's sockets and ports", Rows: settings.Named("", d.serviceSettings()...)},
		{Title: "The agent and the cluster", Rows: settings.Named("", d.clusterSettings()...)},
		{Title: "Log", Rows: d.logSettings()},
		{Title: "Race repair: pods that started without redirection", Rows: settings.Named("", d.repairSettings()...)},
		{Title: "Ambient mode", Rows: settings.Named("", append(d.ambientSettings(), d.ambientVariables()...)...)},
		{Title: "Audit: the redirection of running pods", Rows: settings.Named("", auditor.Rows(&d.Audit)...)},
		{Title: "Accepted without effect", Rows: ignoredSettings()},
	}
}

// Settings returns the table for generated files: the chart's schema and the manual.
func Settings() []settings.Group { return new(draft).groups() }

// Rows are the flags for the completion.
func Rows() []settings.Setting { return settings.All(Settings()) }

func names(of ...string) []string { return of }

// live marks settings that live configuration may change.
func live(rows []settings.Setting) []settings.Setting {
	for i := range rows {
		rows[i].Live = true
	}
	return rows
}

func (d *draft) actionSettings() []settings.Setting {
	return []settings.Setting{
		{Name: "once", FlagOnly: true, Use: "install and exit, as an init container or by hand", Value: settings.Bool(&d.once)},
		{Name: "uninstall", FlagOnly: true, Use: "remove the installation and exit", Value: settings.Bool(&d.uninstall)},
		{Name: "dry-run", FlagOnly: true, Use: "print the changes once, without making them", Value: settings.Bool(&d.DryRun)},
		{
			Name: "uninstall-on-exit", Arg: "WHEN", Default: "auto",
			Use:   "uninstall at the end: always, never, or auto: when the DaemonSet is gone or no longer meant for this node",
			Value: settings.Choice(&d.UninstallOnExit, teardown.Auto, teardown.Always, teardown.Never),
		},
		{
			Name: "cni-observe", Default: "false", Use: "only audit the pods of the node, beside the agent of another plugin: install, repair and write nothing",
			Value: settings.Bool(&d.Observe),
		},
		{Name: "cni-enable-install", Default: "true", Use: "false: install nothing, only serve", Value: settings.Bool(&d.Install)},
		{
			Name: "cni-enable-reinstall", Default: "true", Chart: true, Use: "false: leave later changes by others to program and configuration alone, and say so in /readyz",
			Value: settings.Bool(&d.Reinstall),
		},
	}
}

// modeSettings select how the plugin configuration gets into the network configuration.
func (d *draft) modeSettings() []settings.Setting {
	return []settings.Setting{
		{
			Name: "cni-conf-mode", Arg: "MODE",
			Use: "place of the stanza: inline (in the primary configuration), dropin (a file beside it), owned (a copy of it),  " +
				"standalone (a file alone, for multus) or auto (dropin where the runtime loads it, else inline); without it " +
				"CHAINED_CNI_PLUGIN and ISTIO_OWNED_CNI_CONFIG decide",
			Value: settings.Choice(&d.Want.Mode, cniconf.Inline, cniconf.DropIn, cniconf.Owned, cniconf.Standalone, cniconf.Auto),
		},
		{Name: "chained-cni-plugin", Default: "true", Use: "false: mode standalone", Value: settings.Bool(&d.chained)},
		{Name: "istio-owned-cni-config", Default: "false", Use: "mode owned", Value: settings.Bool(&d.owned)},
		{
			Name: "istio-owned-cni-config-filename", Arg: "NAME", Default: cniconf.OwnedName,
			Env:   names("ISTIO_OWNED_CNI_CONFIG_FILENAME", "ISTIO_OWNED_CNI_CONF_FILENAME"),
			Use:   "own file of mode owned; it must sort before the primary configuration",
			Value: settings.Text(&d.Want.OwnedName, settings.FileName),
		},
	}
}

// placeSettings are files and directories of the network configuration.
func (d *draft) placeSettings() []settings.Setting {
	return []settings.Setting{
		{
			Name: "cni-conf-name", Arg: "NAME",
			Use:   "primary configuration, instead of the first valid one; in mode standalone our own file, there " + cniconf.StandaloneName,
			Value: settings.Text(&d.Want.ConfName, settings.Optional(settings.FileName)),
		},
		{
			Name: "mounted-cni-net-dir", Arg: "DIR", Default: "/host/etc/cni/net.d",
			Use:   "configuration directory as mounted here; if unset, and --cni-net-dir is the default, the directory of the node's runtime if it can be read",
			Value: settings.Text(&d.NetDir, settings.AbsolutePath),
		},
		{
			Name: "cni-net-dir", Arg: "DIR", Default: "/etc/cni/net.d",
			Use: "configuration directory as the host sees it, for templates", Value: settings.Text(&d.HostNetDir, settings.AbsolutePath),
		},
		{Name: "cni-conf-group-read", Default: "false", Use: "own files have mode 0640 instead of 0600", Value: settings.Bool(&d.groupRead)},
		{
			Name: "cni-network-config-file", Arg: "FILE",
			Use:   "template of the stanza; an existing file wins over CNI_NETWORK_CONFIG",
			Value: settings.Text(&d.templateFile, nil),
		},
		{
			Name: "cni-network-config", Arg: "JSON", Keys: names("cni_network_config"), Live: true, Secret: true,
			Use: "template of the stanza: a JSON object of type istio-cni with placeholders like __KUBECONFIG_FILEPATH__; " +
				"it replaces all other configuration of the plugin",
			Value: settings.Text(&d.template, nil),
		},
	}
}

func (d *draft) binarySettings() []settings.Setting {
	return []settings.Setting{
		{
			Name: "mounted-cni-bin-dirs", Arg: "DIRS", Default: "/host/opt/cni/bin",
			Use:   "comma list of program directories as mounted here; if unset, and the default is mounted, the directory of the node's runtime if it can be read",
			Value: settings.List(&d.BinDirs, ",", 1, settings.AbsolutePath),
		},
		{
			Name: "cni-source-binary", Arg: "FILE",
			Use: "program to copy; without it this one", Value: settings.Text(&d.Source, settings.AbsolutePath),
		},
		{
			Name: "update-cni-binaries", Default: "true", Chart: true, Use: "false: leave existing program files alone",
			Value: settings.Bool(&d.Update),
		},
		{
			Name: "skip-cni-binaries", Arg: "NAMES", Chart: true, Use: "program files not to write, between commas or blanks",
			Value: settings.List(&d.Skip, ", \t\r\n", 0, settings.FileName),
		},
	}
}

func (d *draft) pluginSettings() []settings.Setting {
	stanza := &d.Want.Stanza
	return []settings.Setting{
		{
			Name: "cni-conf-version", Arg: "VERSION", Default: cniconf.StandaloneVersion,
			Use:   "cniVersion of the file of mode standalone; multus refuses one that is lower than its own",
			Value: settings.Choice(&stanza.CNIVersion, cniconf.Versions()...),
		},
		{
			Name: "api-timeout", Arg: "DURATION", Default: cniconf.DefaultAPITimeout.String(), Use: "time limit of the plugin's look-up of a pod",
			Value: settings.Of(&stanza.APITimeout, cniconf.ParseAPITimeout, time.Duration.String),
		},
		{
			Name: "plugin-log-level", Arg: "LEVEL",
			Use:   "level of the plugin, here and in its own log; without it the level of scope cni-plugin in --log_output_level",
			Value: settings.Of(&d.PluginLevel, logLevel, pluginlog.Level.String),
		},
	}
}

func (d *draft) kubeconfigSettings() []settings.Setting {
	return []settings.Setting{
		{
			Name: "kubeconfig-mode", Arg: "MODE", Default: "0600", Chart: true,
			Use: "permissions of the kubeconfig, in octal whatever the prefix", Value: settings.Permissions(&d.KubeconfigMode),
		},
		{
			Name: "kubecfg-file-name", Arg: "NAME", Default: "ZZZ-istio-cni-kubeconfig",
			Use:   "kubeconfig of versions before 1.23: written for a template, removed otherwise",
			Value: settings.Text(&d.oldKubeconfig, settings.FileName),
		},
		{
			Name: "service-account-dir", Arg: "DIR", Default: "/var/run/secrets/kubernetes.io/serviceaccount",
			Use: "directory of token and ca.crt", Value: settings.Text(&d.serviceAccountDir, settings.AbsolutePath),
		},
		{
			Name: "kube-ca-file", Arg: "FILE",
			Use:   "certificate authority of the API server, instead of ca.crt in the service account's directory",
			Value: settings.Text(&d.caFile, nil),
		},
		{
			Name: "skip-tls-verify", Default: "false", Chart: true, Use: "accept any certificate of the API server",
			Value: settings.Bool(&d.skipTLSVerify),
		},
		{
			Name: "kubernetes-service-protocol", Arg: "SCHEME", Default: "https", Use: "https or http",
			Value: settings.Choice(&d.Server.Protocol, "https", "http"),
		},
		{
			Name: "kubernetes-service-host", Arg: "HOST", Use: "API server; Kubernetes sets it in each container",
			Value: settings.Text(&d.Server.Host, serverHost),
		},
		{
			Name: "kubernetes-service-port", Arg: "PORT", Use: "port of the API server; Kubernetes sets it in each container",
			Value: settings.Port(&d.serverPort, 1),
		},
	}
}

func (d *draft) serviceSettings() []settings.Setting {
	return []settings.Setting{
		{
			Name: "cni-agent-run-dir", Arg: "DIR", Default: cniconf.DefaultRunDir,
			Use: "sockets, kubeconfig and log file; the same path here and on the host", Value: settings.Text(&d.RunDir, settings.AbsolutePath),
		},
		{Name: "run-dir-mode", Arg: "MODE", Default: "0700", Use: "permissions of that directory, in octal", Value: settings.Permissions(&d.RunDirMode)},
		{
			Name: "log-uds-address", Arg: "SOCKET", Use: "socket for the plugin's log; without it " + nodeagent.LogSocketName + " in the run directory",
			Value: settings.Text(&d.LogSocket, settings.Optional(socket)),
		},
		{
			Name: "log-socket-mode", Arg: "MODE", Default: "0600", Chart: true,
			Use: "permissions of the log socket, in octal", Value: settings.Permissions(&d.LogSocketMode),
		},
		{
			Name: "cni-event-address", Arg: "SOCKET", Default: cniconf.DefaultRunDir + "/pluginevent.sock",
			Use: "fills __CNI_EVENT_ADDRESS__ of a template and nothing else", Value: settings.Text(&d.eventAddress, nil),
		},
		{Name: "health-port", Arg: "PORT", Default: "8000", Use: "/healthz and /readyz; 0: off", Value: settings.Port(&d.HealthPort, 0)},
		{Name: "monitoring-port", Arg: "PORT", Default: "15014", Use: "/metrics; 0: off", Value: settings.Port(&d.MonitoringPort, 0)},
		{Name: "ctrlz_port", Arg: "PORT", FlagOnly: true, Default: "9876", Use: "the page; 0: off", Value: settings.Port(&d.IntrospectionPort, 0)},
		{
			Name: "ctrlz_address", Arg: "ADDRESS", FlagOnly: true, Default: "localhost",
			Use: "loopback address of the page", Value: settings.Checked(&d.IntrospectionAddress, loopback),
		},
		{
			Name: "profiling", Default: "false", Chart: true, Use: "serve Go profiles at /debug/pprof/ of --ctrlz_port",
			Value: settings.Bool(&d.Profiling),
		},
	}
}

func (d *draft) clusterSettings() []settings.Setting {
	name := settings.Optional(settings.Check(selector.CheckName))
	return []settings.Setting{
		{
			Name: "config-map", Arg: "NAME", Default: "istio-cni-config",
			Use:   "object in POD_NAMESPACE whose changes for the plugin take effect at once; an empty flag turns it off",
			Value: settings.Text(&d.ConfigMap, name),
		},
		{
			Name: "config-dir", Arg: "DIR", Use: "mounted directory with one file per variable, watched like the object",
			Value: settings.Text(&d.ConfigDir, settings.Optional(settings.AbsolutePath)),
		},
		{
			Name: "pod-namespace", Arg: "NAME", Use: "own namespace; passed to the plugin, which lets the agent's own pods through",
			Value: settings.Text(&d.Namespace, settings.Optional(settings.Check(selector.CheckNamespace))),
		},
		{Name: "pod-name", Arg: "NAME", Use: "own pod", Value: settings.Text(&d.PodName, name)},
		{Name: "daemonset-name", Arg: "NAME", Default: "istio-cni-node", Use: "own DaemonSet", Value: settings.Checked(&d.DaemonSet, selector.CheckName)},
		{Name: "node-name", Arg: "NAME", Use: "this node; without it KUBERNETES_NODE_NAME", Value: settings.Text(&d.NodeName, name)},
		{
			Name: "kubernetes-node-name", Arg: "NAME",
			Use:   "fills __KUBERNETES_NODE_NAME__ of a template; without it --node-name, else the host's name",
			Value: settings.Text(&d.kubernetesNode, name),
		},
	}
}

func (d *draft) logSettings() []settings.Setting {
	return []settings.Setting{
		{
			Name: "log_output_level", Arg: "LEVELS", Default: "default:info",
			Use: "SCOPE:LEVEL pairs between commas, or one LEVEL; scopes cni-agent, cni-plugin, default, all " +
				"(formerly install, repair, cni), levels debug, info, warn, error, fatal, none",
			Value: settings.Of(&d.scopes, readScopes, func(s scopes) string { return s.text }),
		},
		{
			Env: names(liveLevels), Arg: "LEVELS", Live: true,
			Use:   "like --log_output_level, for the named scopes or, without a scope, for all; it wins over that flag and needs no restart",
			Value: settings.Of(&d.liveScopes, readScopes, func(s scopes) string { return s.text }),
		},
		{Name: "log_as_json", Default: "false", Use: "one JSON object per line", Value: settings.Bool(&d.logJSON)},
		{
			Name: "log-level", Arg: "LEVEL", Env: names("LOG_LEVEL"), Default: "warn",
			Use: "fills __LOG_LEVEL__ of a template and nothing else", Value: settings.Text(&d.templateLevel, nil),
		},
		ignored("log_target", "TARGET", "", "the log goes to stderr"),
		ignored("log_caller", "SCOPES", "", "no record names its caller"),
		ignored("log_stacktrace_level", "LEVELS", "", "no record has a stack"),
	}
}

// repairSettings are the settings of race repair, with a prefix.
func (d *draft) repairSettings() []settings.Setting {
	rows := []settings.Setting{{
		Name: "repair-enabled", Default: "true", Use: "look for pods that started without redirection", Value: settings.Bool(&d.RepairEnabled),
	}}
	for _, row := range racerepair.Rows(&d.Repair) {
		row.Name = "repair-" + row.Name
		rows = append(rows, row)
	}
	return rows
}

// ignoredSettings are settings of Istio's charts that this program does not need.
func ignoredSettings() []settings.Setting {
	rows := []settings.Setting{
		ignored("log-uds-socket", "SOCKET", "", "a name of --log-uds-address that never worked"),
		ignored("repair-run-as-daemon", "", "REPAIR_RUN_AS_DAEMON", "versions 1.11 to 1.18"),
		ignored("ebpf-enabled", "", "EBPF_ENABLED", "versions 1.18 to 1.20"),
		ignored("", "", "AMBIENT_USE_SCOPED_XTABLES_LOCKING", "no program of iptables runs for a pod of ambient mode, so there is no lock"),
		ignored("", "", "AMBIENT_ENABLE_AWS_BRANCH_ENI_PROBE", "security groups for pods on AWS with tcp_early_demux=0 are not served"),
	}
	for _, env := range []string{"CURRENT_AGENT_VERSION", "REVISION"} {
		rows = append(rows, ignored("", "TEXT", env, "not read"))
	}
	for _, env := range []string{"GOMEMLIMIT", "GOMAXPROCS"} {
		rows = append(rows, ignored("", "TEXT", env, "read by the Go runtime itself"))
	}
	return rows
}

// ignored returns a setting without effect: a switch accepts any boolean, other settings any text.
func ignored(name, arg, env, use string) settings.Setting {
	s := settings.Setting{Name: name, Arg: arg, Use: use, Ignored: true, Value: settings.Text(new(string), nil)}
	if env != "" {
		s.Env = names(env)
	}
	if arg == "" {
		s.Value = settings.Bool(new(bool))
	}
	return s
}

// The path of a unix socket has at most 108 bytes with its final zero, unix(7).
const longestSocket = 107

func socket(s string) (string, error) {
	s, err := settings.AbsolutePath(s)
	if err == nil && len(s) > longestSocket {
		return "", fmt.Errorf("want a path of at most %d bytes: the kernel takes no longer one for a socket", longestSocket)
	}
	return s, err
}

func loopback(s string) error {
	if addr, err := netip.ParseAddr(s); s != "localhost" && (err != nil || !addr.IsLoopback()) {
		return errors.New("want localhost, ::1 or an address in 127.0.0.0/8: what it serves is not for others")
	}
	return nil
}

func serverHost(s string) (string, error) {
	s = strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")
	if s == "" || strings.ContainsAny(s, " \t\r\n/[]@?#\"") {
		return "", errors.New("want a host name or an IP address")
	}
	return s, nil
}
