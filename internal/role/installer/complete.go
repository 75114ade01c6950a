package installer

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"github.com/meshcni/istio-cni/internal/agent/nodeagent"
	"github.com/meshcni/istio-cni/internal/agent/runtimedirs"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/node/runtimeconf"
)

// complete derives values that depend on several settings, and reports contradictions.
func (in input) complete(d *draft) error {
	d.places()
	if d.Source == "" {
		d.Source, _ = in.executable() // files reports an unknown path
	}
	d.levels()
	err := errors.Join(d.observer(), d.action(), d.mode(), d.files(), d.ports(), d.apiServer(), d.ambient())
	if d.Action != nodeagent.Uninstall {
		err = errors.Join(err, in.fillTemplate(d))
	}
	d.caveats()
	return err
}

func (d *draft) action() error {
	d.Action = nodeagent.Stay
	switch {
	case d.once && d.uninstall:
		return fmt.Errorf("%s and %s contradict each other", d.at("once"), d.at("uninstall"))
	case d.uninstall:
		d.Action = nodeagent.Uninstall
	case d.once, d.DryRun:
		d.Action = nodeagent.Once
	}
	return nil
}

// observer switches off everything that changes a node or a pod, unless the user has switched it on.
func (d *draft) observer() error {
	if !d.Observe {
		return nil
	}
	d.Audit.Observe = true
	var errs []error
	for name, on := range map[string]*bool{
		"cni-enable-install": &d.Install, "repair-enabled": &d.RepairEnabled, "audit-mode": &d.Audit.Repair,
		"audit-pod-condition": &d.Audit.PodCondition, "once": &d.once, "uninstall": &d.uninstall,
	} {
		if at := d.at(name); *on && at.Given() {
			errs = append(errs, fmt.Errorf("%s (%s) contradicts %s: an observer changes nothing", at, at.Text, d.at("cni-observe")))
		} else if *on {
			*on = false
			d.derive(name, "--cni-observe")
		}
	}
	return errors.Join(errs...)
}

// mode resolves the mode of the configuration. Istio's agent has owned files in ambient mode only; here they do not depend on it.
func (d *draft) mode() error {
	var errs []error
	given := d.Want.Mode != ""
	clash := func(is bool, a, b string) {
		if is {
			errs = append(errs, fmt.Errorf("%s (%s) contradicts %s (%s)", d.at(a), d.at(a).Text, d.at(b), d.at(b).Text))
		}
	}
	clash(given && d.Want.Mode != cniconf.Standalone && !d.chained, "cni-conf-mode", "chained-cni-plugin")
	clash(given && d.Want.Mode != cniconf.Owned && d.owned, "cni-conf-mode", "istio-owned-cni-config")
	clash(d.owned && !d.chained, "istio-owned-cni-config", "chained-cni-plugin")
	if given {
		return errors.Join(errs...)
	}
	from := "chained-cni-plugin"
	d.Want.Mode = cniconf.Inline
	switch {
	case !d.chained:
		d.Want.Mode = cniconf.Standalone
	case d.owned:
		d.Want.Mode, from = cniconf.Owned, "istio-owned-cni-config"
	}
	if d.at(from).Given() {
		d.derive("cni-conf-mode", d.at(from).Name)
	}
	return errors.Join(errs...)
}

// derive records that the value of a setting comes from another setting.
func (d *draft) derive(flag, from string) {
	d.origins["--"+flag] = settings.Origin{Source: settings.Derived, Name: from}
}

// places derives paths.
func (d *draft) places() {
	mode := fs.FileMode(0o600)
	if d.groupRead {
		mode = 0o640
	}
	d.Want.FileMode = uint32(mode)
	d.GracePeriod = nodeagent.GracePeriod
	d.CacheDir, d.HostRoots = d.Places.Cache, d.Places.Roots
	d.Detect = runtimedirs.Detect{
		Net: !d.at("mounted-cni-net-dir").Given() && path.Clean(d.HostNetDir) == runtimeconf.DefaultConfDir,
		Bin: !d.at("mounted-cni-bin-dirs").Given(),
	}
	d.OldKubeconfig = path.Join(d.NetDir, d.oldKubeconfig)
	d.Token = path.Join(d.serviceAccountDir, "token")
	switch {
	case d.skipTLSVerify:
	case d.caFile != "":
		d.CA = d.caFile
	default:
		d.CA = path.Join(d.serviceAccountDir, "ca.crt")
	}
	if d.serverPort != 0 {
		d.Server.Port = fmt.Sprint(d.serverPort)
	}
	if d.LogSocket == "" {
		d.LogSocket = path.Join(d.RunDir, nodeagent.LogSocketName)
	}
	if d.NodeName == "" && d.kubernetesNode != "" {
		d.NodeName = d.kubernetesNode
		d.derive("node-name", d.at("kubernetes-node-name").Name)
	}
	if d.Repair.Node == "" && d.NodeName != "" {
		d.Repair.Node = d.NodeName
		d.derive("repair-node-name", "--node-name")
	}
	d.Want.Stanza.RunDir, d.Want.Stanza.AgentNamespace = d.RunDir, d.Namespace
}

// levels resolves the levels. A flag that names the plugin's scope wins over its setting, and LOG_OUTPUT_LEVEL over both.
func (d *draft) levels() {
	explicit := d.at("plugin-log-level")
	named := d.liveScopes.pluginNamed || d.scopes.pluginNamed && d.at("log_output_level").Source == settings.FromFlag
	d.scopes = d.scopes.with(d.liveScopes)
	d.AgentLevel = d.scopes.agent
	if !explicit.Given() || named && explicit.Source != settings.FromFlag {
		d.PluginLevel = d.scopes.plugin
		d.derive("plugin-log-level", "--log_output_level")
	}
	d.Want.Stanza.LogLevel = d.PluginLevel.String()
	for _, scope := range d.scopes.unknown {
		d.warn(fmt.Sprintf("%s: this program has no scope %q", d.at("log_output_level"), scope))
	}
}

// files checks combinations of names that would not make a valid configuration.
func (d *draft) files() error {
	var errs []error
	if _, err := socket(d.LogSocket); err != nil {
		errs = append(errs, fmt.Errorf("%s: value %q gives the log socket %q: %w",
			d.at("cni-agent-run-dir"), d.RunDir, d.LogSocket, err))
	}
	if d.Want.Mode == cniconf.Owned {
		at := d.at("istio-owned-cni-config-filename")
		if path.Ext(d.Want.OwnedName) != ".conflist" {
			errs = append(errs, fmt.Errorf("%s: value %q: want a name that ends in .conflist: the file holds a list, "+
				"which runtimes read from no other", at, d.Want.OwnedName))
		}
		if d.Want.ConfName == d.Want.OwnedName {
			errs = append(errs, fmt.Errorf("%s: value %q: is the own file (%s), and cannot be the primary configuration as well",
				d.at("cni-conf-name"), d.Want.ConfName, at))
		}
	}
	if _, err := redirect.ChooseBackend(d.Want.Stanza.Backend, d.Want.Stanza.NativeNFTables, d.Want.Stanza.ForceIptables); err != nil {
		errs = append(errs, fmt.Errorf("--backend (%s), --native-nftables (%s) and --force-iptables-binary (%s): %w",
			d.at("backend"), d.at("native-nftables"), d.at("force-iptables-binary"), err))
	}
	if d.Source == "" && d.Action != nodeagent.Uninstall {
		errs = append(errs, errors.New("flag --cni-source-binary: not given, and the path of this program cannot be read"))
	}
	return errors.Join(errs...)
}

func (d *draft) ports() error {
	var errs []error
	taken := map[uint16]string{}
	for _, p := range []struct {
		name string
		port uint16
	}{{"health-port", d.HealthPort}, {"monitoring-port", d.MonitoringPort}, {"ctrlz_port", d.IntrospectionPort}} {
		if other, ok := taken[p.port]; ok && p.port != 0 {
			errs = append(errs, fmt.Errorf("--%s (%s) and --%s (%s) are both %d: want different ports",
				other, d.at(other), p.name, d.at(p.name), p.port))
		}
		taken[p.port] = p.name
	}
	return errors.Join(errs...)
}

// apiServer requires an address: without it the plugin would have no credentials, and all pods of the mesh would wait.
func (d *draft) apiServer() error {
	if d.Action == nodeagent.Uninstall || !d.Install || d.DryRun {
		return nil
	}
	var errs []error
	for _, what := range []string{"host", "port"} {
		if !d.at("kubernetes-service-" + what).Given() {
			errs = append(errs, fmt.Errorf("environment variable KUBERNETES_SERVICE_%s: not set: want the API server's %s", strings.ToUpper(what), what))
		}
	}
	return errors.Join(errs...)
}

// caveats warns of valid settings that may be unintended.
func (d *draft) caveats() {
	if d.Action == nodeagent.Uninstall {
		return
	}
	const others = fs.FileMode(0o007)
	if d.KubeconfigMode&others != 0 {
		d.warn(fmt.Sprintf("%s: every user of the node may read the kubeconfig, which holds a token", d.at("kubeconfig-mode")))
	}
	if d.RepairEnabled && d.Action == nodeagent.Stay && d.Repair.Node == "" {
		d.warn("the name of this node is not set (REPAIR_NODE_NAME, KUBERNETES_NODE_NAME or NODE_NAME): pods that started without redirection stay so " +
			"(REPAIR_ENABLED=false silences this)")
	}
	if d.Namespace == "" && d.Install {
		d.warn("environment variable POD_NAMESPACE: not set: the plugin cannot tell the agent's own pods, and changes of the " +
			"ConfigMap and the removal of the DaemonSet go unnoticed")
	}
	if at := d.at("log-uds-address"); d.Want.Stanza.Template == nil && d.LogSocket != path.Join(d.RunDir, nodeagent.LogSocketName) {
		d.warn(fmt.Sprintf("%s: the plugin looks for its log socket in the run directory, as %s", at, nodeagent.LogSocketName))
	}
	for _, name := range []string{"log_target", "log_caller", "log_stacktrace_level"} {
		if d.at(name).Source == settings.FromFlag {
			d.warn("flag --" + name + " has no effect")
		}
	}
	d.templateCaveats()
}

// templateCaveats warns of settings that a template overrides, and of the template's kubeconfig.
func (d *draft) templateCaveats() {
	if d.Want.Stanza.Template == nil {
		return
	}
	for _, name := range []string{
		"exclude-namespaces", "ambient-enablement-selector", "enable-ambient-detection-retry", "native-nftables",
		"second-ip-family", "api-timeout", "force-iptables-binary", "plugin-log-level",
	} {
		if at := d.at(name); at.Given() && at.Source != settings.Derived {
			d.warn(fmt.Sprintf("%s: has no effect: a template replaces the stanza", at))
		}
	}
	conf, err := cniconf.Parse(d.shownTemplate)
	ours, historic := path.Join(d.RunDir, cniconf.KubeconfigName), path.Join(d.HostNetDir, d.oldKubeconfig)
	if err == nil && conf.Kubeconfig != ours && path.Clean(conf.Kubeconfig) != historic {
		d.warn(fmt.Sprintf("the template makes the plugin read kubeconfig %q; the agent writes %q and, on the host, %q",
			conf.Kubeconfig, ours, historic))
	}
}

// oneLine formats an error as one line.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
