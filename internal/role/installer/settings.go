package installer

import (
	"encoding/json"
	"flag"
	"slices"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/departure"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
)

// setting is one row: a flag, variables that say the same (the first that is not empty counts), and where it goes.
type setting struct {
	flag string // "" for a variable without a flag
	arg  string // what the flag takes, "" for a switch
	env  []string
	def  string
	use  string
	into func(*draft) flag.Value

	scope scope
	// keys are further names under which an overlay has it.
	keys []string
	// quiet keeps the value out of errors and of the printed configuration.
	quiet bool
}

// scope says for whom a setting is.
type scope uint8

const (
	forAgent   scope = iota
	forPlugin        // in the stanza: an overlay may change it
	forNothing       // accepted, without effect
)

func (s setting) String() string {
	if s.flag != "" {
		return "--" + s.flag
	}
	return s.env[0]
}

// names are the keys that an overlay may have for the setting.
func (s setting) names() []string { return slices.Concat(s.env, s.keys) }

// group is a section of the help.
type group struct {
	title    string
	settings func(environment) []setting
}

func groups() []group {
	return []group{
		{"What to do", actionSettings},
		{"CNI configuration", confSettings},
		{"Program files", binarySettings},
		{"What the plugin is told", pluginSettings},
		{"How rules get into a pod", backendSettings},
		{"The plugin's credentials", kubeconfigSettings},
		{"The agent's sockets and ports", serviceSettings},
		{"The agent and the cluster", clusterSettings},
		{"Log", logSettings},
		{"Race repair: pods that started without redirection", repairSettings},
		{"Accepted without effect", ignoredSettings},
	}
}

func settings(env environment) []setting {
	var out []setting
	for _, g := range groups() {
		out = append(out, g.settings(env)...)
	}
	return out
}

func names(of ...string) []string { return of }

func actionSettings(environment) []setting {
	return []setting{
		{
			flag: "once", use: "install and exit, as an init container or by hand",
			into: func(d *draft) flag.Value { return toggle(&d.once) },
		},
		{
			flag: "uninstall", use: "give the node back and exit",
			into: func(d *draft) flag.Value { return toggle(&d.uninstall) },
		},
		{
			flag: "dry-run", use: "say what would be done, once, and touch nothing",
			into: func(d *draft) flag.Value { return toggle(&d.DryRun) },
		},
		{
			flag: "uninstall-on-exit", arg: "WHEN", env: names("UNINSTALL_ON_EXIT"), def: "auto",
			use: "give the node back at the end: always, never, or auto: when the DaemonSet is gone or no longer meant for this node",
			into: func(d *draft) flag.Value {
				return choice(&d.UninstallOnExit, departure.Auto, departure.Always, departure.Never)
			},
		},
		{
			flag: "cni-enable-install", env: names("CNI_ENABLE_INSTALL"), def: "true",
			use: "false: install nothing, only serve", into: func(d *draft) flag.Value { return toggle(&d.Install) },
		},
		{
			flag: "cni-enable-reinstall", env: names("CNI_ENABLE_REINSTALL"), def: "true",
			use: "false: leave later changes by others alone", into: func(d *draft) flag.Value { return toggle(&d.Reinstall) },
		},
	}
}

func confSettings(env environment) []setting {
	return slices.Concat(modeSettings(env), placeSettings(env))
}

// modeSettings say how the stanza gets into the configuration.
func modeSettings(environment) []setting {
	return []setting{
		{
			flag: "cni-conf-mode", arg: "MODE", env: names("CNI_CONF_MODE"),
			use: "where the stanza goes: inline (into the primary configuration), dropin (a file beside it), owned (a copy of it), " +
				"standalone (a file alone, for multus) or auto (dropin where the runtime loads it, else inline); without it " +
				"CHAINED_CNI_PLUGIN and ISTIO_OWNED_CNI_CONFIG decide",
			into: func(d *draft) flag.Value {
				return choice(&d.Conf.Mode, ModeAuto, ModeInline, ModeDropIn, ModeOwned, ModeStandalone)
			},
		},
		{
			flag: "chained-cni-plugin", env: names("CHAINED_CNI_PLUGIN"), def: "true",
			use: "false: mode standalone", into: func(d *draft) flag.Value { return toggle(&d.chained) },
		},
		{
			flag: "istio-owned-cni-config", env: names("ISTIO_OWNED_CNI_CONFIG"), def: "false",
			use: "mode owned", into: func(d *draft) flag.Value { return toggle(&d.owned) },
		},
		{
			flag: "istio-owned-cni-config-filename", arg: "NAME", def: cniconf.OwnedName,
			env:  names("ISTIO_OWNED_CNI_CONFIG_FILENAME", "ISTIO_OWNED_CNI_CONF_FILENAME"),
			use:  "own file of mode owned; it must sort before the primary configuration",
			into: func(d *draft) flag.Value { return text(&d.Conf.OwnedName, baseName) },
		},
	}
}

// placeSettings say which files and directories that is about.
func placeSettings(environment) []setting {
	return []setting{
		{
			flag: "cni-conf-name", arg: "NAME", env: names("CNI_CONF_NAME"),
			use:  "primary configuration, instead of the first valid one; in mode standalone our own file, there " + cniconf.StandaloneName,
			into: func(d *draft) flag.Value { return text(&d.Conf.Name, optional(baseName)) },
		},
		{
			flag: "mounted-cni-net-dir", arg: "DIR", env: names("MOUNTED_CNI_NET_DIR"), def: "/host/etc/cni/net.d",
			use:  "configuration directory as mounted here",
			into: func(d *draft) flag.Value { return text(&d.Conf.Dir, absolute) },
		},
		{
			flag: "cni-net-dir", arg: "DIR", env: names("CNI_NET_DIR"), def: "/etc/cni/net.d",
			use:  "configuration directory as the host sees it, for templates",
			into: func(d *draft) flag.Value { return text(&d.Conf.HostDir, absolute) },
		},
		{
			flag: "cni-conf-group-read", env: names("CNI_CONF_GROUP_READ"), def: "false",
			use:  "own files have mode 0640 instead of 0600",
			into: func(d *draft) flag.Value { return toggle(&d.groupRead) },
		},
		{
			flag: "cni-cache-dir", arg: "DIR", env: names("CNI_CACHE_DIR"), def: "/var/lib/cni/results",
			use:  "where runtimes remember living sandboxes, on the host",
			into: func(d *draft) flag.Value { return text(&d.Conf.CacheDir, absolute) },
		},
		{
			flag: "host-roots", arg: "DIRS", env: names("HOST_ROOTS"), def: "/host,/host/proc/1/root",
			use:  "comma list of prefixes under which paths of the host may be seen",
			into: func(d *draft) flag.Value { return full(list(&d.HostRoots, comma, absolute)) },
		},
		{
			flag: "netns-dirs", arg: "DIRS", env: names("NETNS_DIRS"), def: "/var/run/netns,/var/run/docker/netns",
			use:  "where container runtimes mount network namespaces on the host; race repair looks there",
			into: func(d *draft) flag.Value { return list(&d.NetnsDirs, comma, absolute) },
		},
		{
			flag: "host-proc", arg: "DIR", env: names("HOST_PROC"), def: "/proc",
			use:  "procfs of the host, a path of the host; race repair looks there",
			into: func(d *draft) flag.Value { return text(&d.HostProc, absolute) },
		},
		{
			flag: "cni-network-config-file", arg: "FILE", env: names("CNI_NETWORK_CONFIG_FILE"),
			use:  "template of the stanza; if the file exists it goes before CNI_NETWORK_CONFIG",
			into: func(d *draft) flag.Value { return text(&d.templateFile, anyText) },
		},
		{
			flag: "cni-network-config", arg: "JSON", env: names("CNI_NETWORK_CONFIG"), keys: names("cni_network_config"),
			use: "template of the stanza: a JSON object of type istio-cni with placeholders like __KUBECONFIG_FILEPATH__; " +
				"it replaces all that the plugin is told otherwise",
			into: func(d *draft) flag.Value { return text(&d.template, anyText) }, scope: forPlugin, quiet: true,
		},
	}
}

func binarySettings(env environment) []setting {
	return []setting{
		{
			flag: "mounted-cni-bin-dirs", arg: "DIRS", env: names("MOUNTED_CNI_BIN_DIRS"), def: "/host/opt/cni/bin",
			use:  "comma list of program directories as mounted here",
			into: func(d *draft) flag.Value { return full(list(&d.Binaries.Dirs, comma, absolute)) },
		},
		{
			flag: "cni-source-binary", arg: "FILE", env: names("CNI_SOURCE_BINARY"), def: program(env),
			use:  "program to copy; without it this one",
			into: func(d *draft) flag.Value { return text(&d.Binaries.Source, absolute) },
		},
		{
			flag: "update-cni-binaries", env: names("UPDATE_CNI_BINARIES"), def: "true",
			use: "false: leave existing program files alone", into: func(d *draft) flag.Value { return toggle(&d.Binaries.Update) },
		},
		{
			flag: "skip-cni-binaries", arg: "NAMES", env: names("SKIP_CNI_BINARIES"),
			use:  "program files not to write, between commas or blanks",
			into: func(d *draft) flag.Value { return list(&d.Binaries.Skip, commaOrBlank, baseName) },
		},
	}
}

// program is the path of this program, "" if the kernel does not tell.
func program(env environment) string {
	path, err := env.executable()
	if err != nil {
		return ""
	}
	return path
}

// ambientPods is what becomes of pods of ambient mode, which this program does not serve.
type ambientPods string

const (
	ambientRefuse ambientPods = "refuse"
	ambientIgnore ambientPods = "ignore"
)

func pluginSettings(env environment) []setting {
	return []setting{
		{
			flag: "exclude-namespaces", arg: "NAMES", env: names("EXCLUDE_NAMESPACES", "EXCLUDED_NAMESPACES"),
			use: "comma list of namespaces whose pods are left alone", scope: forPlugin,
			into: func(d *draft) flag.Value { return list(&d.Stanza.ExcludeNamespaces, comma, label) },
		},
		{
			flag: "ambient-enabled", env: names("AMBIENT_ENABLED"), def: "false", scope: forPlugin,
			use:  "refused, as ambient mode is not supported, unless --ambient-pods=ignore; then told to the plugin",
			into: func(d *draft) flag.Value { return toggle(&d.Stanza.AmbientEnabled) },
		},
		{
			flag: "ambient-pods", arg: "WHAT", env: names("AMBIENT_PODS"), def: string(ambientRefuse),
			use: "with ambient mode enabled: refuse to start, or ignore its pods, which are outside of the mesh then",
			into: func(d *draft) flag.Value {
				return choice(&d.ambientPods, ambientRefuse, ambientIgnore)
			},
		},
		{
			flag: "ambient-enablement-selector", arg: "YAML", env: names("AMBIENT_ENABLEMENT_SELECTOR"), scope: forPlugin,
			use: "list of {podSelector, namespaceSelector}; told to the plugin",
			into: func(d *draft) flag.Value {
				return value[json.RawMessage]{
					&d.Stanza.EnablementSelectors, env.selectors, func(j json.RawMessage) string { return string(j) },
				}
			},
		},
		{
			flag: "enable-ambient-detection-retry", env: names("ENABLE_AMBIENT_DETECTION_RETRY"), def: "false", scope: forPlugin,
			use:  "told to the plugin",
			into: func(d *draft) flag.Value { return toggle(&d.Stanza.AmbientDetectionRetry) },
		},
		{
			flag: "second-ip-family", arg: "WHAT", env: names("SECOND_IP_FAMILY"), scope: forPlugin, def: "bypass",
			use: "IPv6 of a pod whose first address is IPv4: bypass, capture or reject",
			into: func(d *draft) flag.Value {
				return stanzaKey(&d.Stanza.SecondFamily, "second_ip_family",
					func(c cniconf.NetConf) redirect.SecondFamily { return c.SecondFamily }, redirect.SecondFamily.String)
			},
		},
		{
			flag: "api-timeout", arg: "DURATION", env: names("API_TIMEOUT"), scope: forPlugin,
			use: "how long the plugin asks the API server about a pod; without it " + cniconf.DefaultAPITimeout.String(),
			into: func(d *draft) flag.Value {
				return stanzaKey(&d.Stanza.APITimeout, "api_timeout",
					func(c cniconf.NetConf) time.Duration { return c.APITimeout }, apiTimeout)
			},
		},
		{
			flag: "plugin-log-level", arg: "LEVEL", env: names("PLUGIN_LOG_LEVEL"), scope: forPlugin,
			use:  "level of the plugin, here and in its own log; without it that of scope cni-plugin in --log_output_level",
			into: func(d *draft) flag.Value { return pluginLevel(&d.Log.Plugin) },
		},
	}
}

// backendSettings say how rules get into a pod.
func backendSettings(environment) []setting {
	return []setting{
		{
			flag: "native-nftables", env: names("NATIVE_NFTABLES"), def: "false", scope: forPlugin,
			use: "the same as --backend=native", into: func(d *draft) flag.Value { return toggle(&d.Stanza.NativeNFTables) },
		},
		{
			flag: "backend", arg: "WAY", env: names("CNI_BACKEND"), def: "auto", scope: forPlugin,
			use: "how rules get into a pod: auto, netlink (those of iptables-nft, without a process), native (tables of nftables' own) " +
				"or iptables (the programs of the host)",
			into: func(d *draft) flag.Value {
				return stanzaKey(&d.Stanza.Backend, "backend", func(c cniconf.NetConf) redirect.Backend { return c.Backend },
					func(b redirect.Backend) string { return string(b) })
			},
		},
		{
			flag: "force-iptables-binary", arg: "VARIANT", env: names("FORCE_IPTABLES_BINARY"), scope: forPlugin,
			use: "legacy or nft, instead of choosing",
			into: func(d *draft) flag.Value {
				return stanzaKey(&d.Stanza.ForceIptables, "force_iptables_binary",
					func(c cniconf.NetConf) string { return c.ForceIptables }, func(s string) string { return s })
			},
		},
	}
}

// apiTimeout spells the time in force: 0 leaves it to the plugin.
func apiTimeout(d time.Duration) string {
	if d == 0 {
		d = cniconf.DefaultAPITimeout
	}
	return d.String()
}

func kubeconfigSettings(environment) []setting {
	return []setting{
		{
			flag: "kubeconfig-mode", arg: "MODE", env: names("KUBECONFIG_MODE"), def: "0600",
			use:  "permissions of the kubeconfig, in octal whatever the prefix",
			into: func(d *draft) flag.Value { return permissions(&d.Kubeconfig.Mode) },
		},
		{
			flag: "kubecfg-file-name", arg: "NAME", env: names("KUBECFG_FILE_NAME"), def: "ZZZ-istio-cni-kubeconfig",
			use:  "kubeconfig of versions before 1.23: written for a template, removed otherwise",
			into: func(d *draft) flag.Value { return text(&d.historicKubeconfig, baseName) },
		},
		{
			flag: "service-account-dir", arg: "DIR", env: names("SERVICE_ACCOUNT_DIR"),
			def: "/var/run/secrets/kubernetes.io/serviceaccount", use: "where token and ca.crt are",
			into: func(d *draft) flag.Value { return text(&d.Kubeconfig.ServiceAccountDir, absolute) },
		},
		{
			flag: "kube-ca-file", arg: "FILE", env: names("KUBE_CA_FILE"),
			use:  "certificate authority of the API server, instead of ca.crt in the service account's directory",
			into: func(d *draft) flag.Value { return text(&d.Kubeconfig.CAFile, anyText) },
		},
		{
			flag: "skip-tls-verify", env: names("SKIP_TLS_VERIFY"), def: "false",
			use:  "do not check who the API server is",
			into: func(d *draft) flag.Value { return toggle(&d.Kubeconfig.SkipTLSVerify) },
		},
		{
			flag: "kubernetes-service-protocol", arg: "SCHEME", env: names("KUBERNETES_SERVICE_PROTOCOL"), def: "https",
			use:  "https or http",
			into: func(d *draft) flag.Value { return choice(&d.Kubeconfig.Protocol, "https", "http") },
		},
		{
			flag: "kubernetes-service-host", arg: "HOST", env: names("KUBERNETES_SERVICE_HOST"),
			use:  "API server; Kubernetes sets it in each container",
			into: func(d *draft) flag.Value { return text(&d.Kubeconfig.Host, serverHost) },
		},
		{
			flag: "kubernetes-service-port", arg: "PORT", env: names("KUBERNETES_SERVICE_PORT"),
			use:  "port of the API server; Kubernetes sets it in each container",
			into: func(d *draft) flag.Value { return port(&d.Kubeconfig.Port, 1) },
		},
	}
}

func serviceSettings(environment) []setting {
	return []setting{
		{
			flag: "cni-agent-run-dir", arg: "DIR", env: names("CNI_AGENT_RUN_DIR"), def: cniconf.DefaultRunDir,
			use:  "sockets, kubeconfig and log file; the same path here and on the host",
			into: func(d *draft) flag.Value { return text(&d.RunDir, absolute) },
		},
		{
			flag: "run-dir-mode", arg: "MODE", env: names("RUN_DIR_MODE"), def: "0700",
			use: "permissions of that directory, in octal", into: func(d *draft) flag.Value { return permissions(&d.RunDirMode) },
		},
		{
			flag: "log-uds-address", arg: "SOCKET", env: names("LOG_UDS_ADDRESS"),
			use:  "socket for the plugin's log; without it " + logSocketName + " in the run directory",
			into: func(d *draft) flag.Value { return text(&d.LogSocket, optional(socket)) },
		},
		{
			flag: "log-socket-mode", arg: "MODE", env: names("LOG_SOCKET_MODE"), def: "0600",
			use: "permissions of that socket, in octal", into: func(d *draft) flag.Value { return permissions(&d.LogSocketMode) },
		},
		{
			flag: "cni-event-address", arg: "SOCKET", env: names("CNI_EVENT_ADDRESS"),
			def: cniconf.DefaultRunDir + "/pluginevent.sock", use: "fills __CNI_EVENT_ADDRESS__ of a template; nothing listens there",
			into: func(d *draft) flag.Value { return text(&d.eventAddress, anyText) },
		},
		{
			flag: "health-port", arg: "PORT", env: names("HEALTH_PORT"), def: "8000",
			use: "/healthz and /readyz; 0: off", into: func(d *draft) flag.Value { return port(&d.HealthPort, 0) },
		},
		{
			flag: "monitoring-port", arg: "PORT", env: names("MONITORING_PORT"), def: "15014",
			use: "/metrics; 0: off", into: func(d *draft) flag.Value { return port(&d.MonitoringPort, 0) },
		},
		{
			flag: "ctrlz_port", arg: "PORT", def: "9876",
			use: "profiles; 0: off", into: func(d *draft) flag.Value { return port(&d.IntrospectionPort, 0) },
		},
		{
			flag: "ctrlz_address", arg: "ADDRESS", def: "localhost",
			use:  "loopback address of the profiles",
			into: func(d *draft) flag.Value { return text(&d.IntrospectionAddress, loopback) },
		},
	}
}

func clusterSettings(environment) []setting {
	return []setting{
		{
			flag: "config-map", arg: "NAME", env: names("CONFIG_MAP"), def: "istio-cni-config",
			use:  "object in POD_NAMESPACE whose changes for the plugin take effect at once; an empty flag turns it off",
			into: func(d *draft) flag.Value { return text(&d.ConfigMap, optional(object)) },
		},
		{
			flag: "config-dir", arg: "DIR", env: names("CONFIG_DIR"),
			use:  "mounted directory with one file per variable, watched like the object",
			into: func(d *draft) flag.Value { return text(&d.ConfigDir, optional(absolute)) },
		},
		{
			flag: "pod-namespace", arg: "NAME", env: names("POD_NAMESPACE"),
			use:  "own namespace; told to the plugin, which lets the agent's own pods through",
			into: func(d *draft) flag.Value { return text(&d.Namespace, optional(label)) },
		},
		{
			flag: "pod-name", arg: "NAME", env: names("POD_NAME"),
			use: "own pod", into: func(d *draft) flag.Value { return text(&d.PodName, optional(object)) },
		},
		{
			flag: "daemonset-name", arg: "NAME", env: names("DAEMONSET_NAME"), def: "istio-cni-node",
			use: "own DaemonSet", into: func(d *draft) flag.Value { return text(&d.DaemonSet, object) },
		},
		{
			flag: "node-name", arg: "NAME", env: names("NODE_NAME"),
			use:  "this node; without it KUBERNETES_NODE_NAME",
			into: func(d *draft) flag.Value { return text(&d.NodeName, optional(object)) },
		},
		{
			flag: "kubernetes-node-name", arg: "NAME", env: names("KUBERNETES_NODE_NAME"),
			use:  "fills __KUBERNETES_NODE_NAME__ of a template; without it --node-name, else the host's name",
			into: func(d *draft) flag.Value { return text(&d.kubernetesNode, optional(object)) },
		},
	}
}

func logSettings(environment) []setting {
	return []setting{
		{
			flag: "log_output_level", arg: "LEVELS", def: "default:info",
			use: "SCOPE:LEVEL pairs between commas, or one LEVEL; scopes cni-agent, cni-plugin, default, all " +
				"(install, repair, cni of old), levels debug, info, warn, error, fatal, none",
			into: func(d *draft) flag.Value { return outputLevel(&d.scopes) },
		},
		{
			flag: "log_as_json", def: "false", use: "one JSON object per line",
			into: func(d *draft) flag.Value { return toggle(&d.Log.JSON) },
		},
		{
			flag: "log-level", arg: "LEVEL", env: names("LOG_LEVEL"), def: "warn",
			use:  "fills __LOG_LEVEL__ of a template and nothing else",
			into: func(d *draft) flag.Value { return text(&d.templateLevel, anyText) },
		},
		ignored("log_target", "TARGET", "", "the log goes to stderr"),
		ignored("log_caller", "SCOPES", "", "no record names its caller"),
		ignored("log_stacktrace_level", "LEVELS", "", "no record has a stack"),
	}
}

// ignored is a setting that is accepted whatever its value.
func ignored(name, arg, env, use string) setting {
	s := setting{flag: name, arg: arg, use: use, scope: forNothing}
	if env != "" {
		s.env = names(env)
	}
	s.into = func(*draft) flag.Value { return text(new(string), anyText) }
	return s
}
