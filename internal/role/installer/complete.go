package installer

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
)

// complete derives what follows from several settings, and reports those that cannot all be meant.
func (in input) complete(d *draft) error {
	d.places()
	d.levels()
	err := errors.Join(d.action(), d.mode(), d.files(), d.ports(), d.apiServer())
	if d.Action != Uninstall {
		err = errors.Join(err, d.ambient(d.at("ambient-enabled").String(), d.Stanza.AmbientEnabled), in.fillTemplate(d))
	}
	d.caveats()
	return err
}

func (d *draft) action() error {
	d.Action = Stay
	switch {
	case d.once && d.uninstall:
		return fmt.Errorf("%s and %s contradict each other", d.at("once"), d.at("uninstall"))
	case d.uninstall:
		d.Action = Uninstall
	case d.once, d.DryRun:
		d.Action = Once
	}
	return nil
}

// errAmbient is a mesh whose pods would start outside of it, in silence.
var errAmbient = errors.New("ambient mode is not supported, and its pods would start outside of the mesh: " +
	"leave such nodes to the agent of Istio, or say --ambient-pods=ignore")

// ambient refuses ambient mode, unless a person said what becomes of its pods.
func (d *draft) ambient(from string, enabled bool) error {
	if enabled && d.ambientPods != ambientIgnore {
		return fmt.Errorf("%s: %w", from, errAmbient)
	}
	return nil
}

// mode settles where the stanza goes. The reference has owned files in ambient mode only; here they depend on nothing.
func (d *draft) mode() error {
	var errs []error
	clash := func(a, b string) {
		errs = append(errs, fmt.Errorf("%s (%s) contradicts %s (%s)", d.at(a), d.value(a), d.at(b), d.value(b)))
	}
	chosen := d.Conf.Mode
	if chosen != "" && chosen != ModeStandalone && !d.chained {
		clash("cni-conf-mode", "chained-cni-plugin")
	}
	if chosen != "" && chosen != ModeOwned && d.owned {
		clash("cni-conf-mode", "istio-owned-cni-config")
	}
	if d.owned && !d.chained {
		clash("istio-owned-cni-config", "chained-cni-plugin")
	}
	if chosen != "" {
		return errors.Join(errs...)
	}
	from := "chained-cni-plugin"
	switch {
	case !d.chained:
		d.Conf.Mode = ModeStandalone
	case d.owned:
		d.Conf.Mode, from = ModeOwned, "istio-owned-cni-config"
	default:
		d.Conf.Mode = ModeInline
	}
	if d.at(from).kind != fromDefault {
		d.origins["--cni-conf-mode"] = origin{kind: derived, name: d.at(from).name}
	}
	return errors.Join(errs...)
}

// value spells a setting that decides about the mode.
func (d *draft) value(name string) string {
	switch name {
	case "chained-cni-plugin":
		return fmt.Sprint(d.chained)
	case "istio-owned-cni-config":
		return fmt.Sprint(d.owned)
	}
	return string(d.Conf.Mode)
}

// places derives paths.
func (d *draft) places() {
	const private, groupMay = fs.FileMode(0o600), fs.FileMode(0o640)
	d.Conf.FileMode = private
	if d.groupRead {
		d.Conf.FileMode = groupMay
	}
	d.Kubeconfig.Path = path.Join(d.RunDir, cniconf.KubeconfigName)
	d.Kubeconfig.Historic = path.Join(d.Conf.Dir, d.historicKubeconfig)
	if d.LogSocket == "" {
		d.LogSocket = path.Join(d.RunDir, logSocketName)
	}
	if d.NodeName == "" && d.kubernetesNode != "" {
		d.NodeName = d.kubernetesNode
		d.origins["--node-name"] = origin{kind: derived, name: d.at("kubernetes-node-name").name}
	}
	if d.Repair.Node == "" && d.NodeName != "" {
		d.Repair.Node = d.NodeName
		d.origins["--repair-node-name"] = origin{kind: derived, name: "--node-name"}
	}
	d.Stanza.RunDir, d.Stanza.AgentNamespace = d.RunDir, d.Namespace
}

// levels settles the plugin's level. A flag that names the plugin's scope is a flag for it and wins over an overlay.
func (d *draft) levels() {
	d.Log.Agent = d.scopes.agent
	explicit := d.origins["--plugin-log-level"]
	named := d.scopes.pluginNamed && d.at("log_output_level").kind == fromFlag
	if explicit.kind == fromDefault || named && explicit.kind != fromFlag {
		d.Log.Plugin = d.scopes.plugin
		d.origins["--plugin-log-level"] = origin{kind: derived, name: "--log_output_level"}
	}
	d.Stanza.LogLevel = d.Log.Plugin.String()
	for _, scope := range d.scopes.unknown {
		d.warn(fmt.Sprintf("%s: scope %q is none of this program", d.at("log_output_level"), scope))
	}
}

// files checks names that together make no configuration.
func (d *draft) files() error {
	var errs []error
	if _, err := socket(d.LogSocket); err != nil {
		errs = append(errs, fmt.Errorf("%s: value %q gives the log socket %q: %w",
			d.at("cni-agent-run-dir"), d.RunDir, d.LogSocket, err))
	}
	if d.Conf.Mode == ModeOwned {
		at := d.at("istio-owned-cni-config-filename")
		if path.Ext(d.Conf.OwnedName) != ".conflist" {
			errs = append(errs, fmt.Errorf("%s: value %q: want a name that ends in .conflist: the file holds a list, "+
				"which runtimes read from no other", at, d.Conf.OwnedName))
		}
		if d.Conf.Name == d.Conf.OwnedName {
			errs = append(errs, fmt.Errorf("%s: value %q: is the own file (%s), and cannot be the primary configuration as well",
				d.at("cni-conf-name"), d.Conf.Name, at))
		}
	}
	if _, err := redirect.ChooseBackend(d.Stanza.Backend, d.Stanza.NativeNFTables, d.Stanza.ForceIptables); err != nil {
		errs = append(errs, fmt.Errorf("--backend (%s), --native-nftables (%s) and --force-iptables-binary (%s): %w",
			d.at("backend"), d.at("native-nftables"), d.at("force-iptables-binary"), err))
	}
	if d.Binaries.Source == "" && d.Action != Uninstall {
		errs = append(errs, errors.New("flag --cni-source-binary: not given, and the kernel does not tell where this program is"))
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

// apiServer insists on an address: without it the plugin would have no credentials, and all pods of the mesh would wait.
func (d *draft) apiServer() error {
	if d.Action == Uninstall || !d.Install || d.DryRun {
		return nil
	}
	var errs []error
	if d.at("kubernetes-service-host").kind == fromDefault {
		errs = append(errs, errors.New("environment variable KUBERNETES_SERVICE_HOST: not set: want the API server's address"))
	}
	if d.at("kubernetes-service-port").kind == fromDefault {
		errs = append(errs, errors.New("environment variable KUBERNETES_SERVICE_PORT: not set: want the API server's port"))
	}
	return errors.Join(errs...)
}

// caveats are sentences about what is allowed and perhaps not meant.
func (d *draft) caveats() {
	if d.Action == Uninstall {
		return
	}
	const others = fs.FileMode(0o007)
	if d.Kubeconfig.Mode&others != 0 {
		d.warn(fmt.Sprintf("%s: everybody on the node may use the kubeconfig, which holds a token", d.at("kubeconfig-mode")))
	}
	if d.Stanza.AmbientEnabled {
		d.warn(d.at("ambient-enabled").String() + ": this program serves sidecar mode only: pods of ambient mode start outside of the mesh")
	}
	if d.RepairEnabled && d.Action == Stay && d.Repair.Node == "" {
		d.warn("nobody said which node this is (REPAIR_NODE_NAME, KUBERNETES_NODE_NAME or NODE_NAME): pods that started without redirection stay so " +
			"(REPAIR_ENABLED=false silences this)")
	}
	if d.Namespace == "" && d.Install {
		d.warn("environment variable POD_NAMESPACE: not set: the plugin cannot tell the agent's own pods, and changes of the " +
			"ConfigMap and the agent's departure go unnoticed")
	}
	if at := d.at("log-uds-address"); d.Stanza.Template == nil && d.LogSocket != path.Join(d.RunDir, logSocketName) {
		d.warn(fmt.Sprintf("%s: the plugin looks for its log socket in the run directory, as %s", at, logSocketName))
	}
	for _, name := range []string{"log_target", "log_caller", "log_stacktrace_level"} {
		if d.at(name).kind == fromFlag {
			d.warn("flag --" + name + " has no effect")
		}
	}
	d.templateCaveats()
}

// templateCaveats are about a template and what it makes meaningless.
func (d *draft) templateCaveats() {
	if d.Stanza.Template == nil {
		return
	}
	for _, name := range []string{
		"exclude-namespaces", "ambient-enablement-selector", "enable-ambient-detection-retry", "native-nftables",
		"second-ip-family", "api-timeout", "force-iptables-binary", "plugin-log-level",
	} {
		if at := d.at(name); at.kind != fromDefault && at.kind != derived {
			d.warn(fmt.Sprintf("%s: the plugin is not told: a template replaces the stanza", at))
		}
	}
	conf, err := cniconf.Parse(d.shownTemplate)
	historic := path.Join(d.Conf.HostDir, d.historicKubeconfig)
	if err == nil && conf.Kubeconfig != d.Kubeconfig.Path && path.Clean(conf.Kubeconfig) != historic {
		d.warn(fmt.Sprintf("the template makes the plugin read kubeconfig %q; the agent writes %q and, on the host, %q",
			conf.Kubeconfig, d.Kubeconfig.Path, historic))
	}
}

// oneLine makes one line of an error.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
