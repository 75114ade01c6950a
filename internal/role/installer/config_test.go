package installer

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestSettings_Conflicts: install.txtar has the other conflicts, core/settings and settings_test.go single settings.
func TestSettings_Conflicts(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"--istio-owned-cni-config", "--cni-conf-name=02-istio-cni.conflist"}, "cannot be the primary configuration as well"},
		{[]string{"--monitoring-port=9876"}, "--monitoring-port (flag --monitoring-port) and --ctrlz_port (default) are both 9876: want different ports"},
		{[]string{"--backend=netlink", "--force-iptables-binary=legacy"}, "--backend (flag --backend), --native-nftables (default) and --force-iptables-binary (flag"},
		{[]string{"--cni-source-binary="}, "flag --cni-source-binary: "},
		{[]string{"--cni-agent-run-dir=/" + strings.Repeat("x", 100)}, "/log.sock\": want a path of at most 107 bytes"},
		{[]string{`--cni-network-config={"type":"istio-cni","a":"__NOBODY_KNOWS__"}`}, "flag --cni-network-config: placeholder __NOBODY_KNOWS__: nothing is known"},
	} {
		mustFail(t, cluster(), tc.args, tc.want)
	}
	_, err := build(nil, cluster("CHAINED_CNI_PLUGIN=maybe", "ISTIO_OWNED_CNI_CONFIG=true", "KUBERNETES_SERVICE_PORT=x", "CNI_AGENT_RUN_DIR=run"))
	if err == nil || strings.Count(err.Error(), "\n") != 2 {
		t.Errorf("want three bad values and no contradiction:\n%v", err)
	}
	env := around(cluster())
	env.executable = func() (string, error) { return "", errors.New("no proc") }
	check.Fails(t, check.Err(buildAround(nil, env)), "flag --cni-source-binary: not given")
}

func TestSettings_Agree(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		env    map[string]string
		args   []string
		change string
	}{
		{"the chart's chained=true and standalone", cluster("CHAINED_CNI_PLUGIN=true"), []string{"--cni-conf-mode=standalone"}, "Want.Mode: inline -> standalone"},
		{"the chart's owned=false and owned", cluster("ISTIO_OWNED_CNI_CONFIG=false"), []string{"--cni-conf-mode=owned"}, "Want.Mode: inline -> owned"},
		{"W-2: owned does not depend on ambient mode", cluster("ISTIO_OWNED_CNI_CONFIG=true", "AMBIENT_ENABLED=false"), nil, "Want.Mode: inline -> owned"},
		{"ports that are off", cluster("HEALTH_PORT=0"), []string{"--ctrlz_port=-1"}, "HealthPort: 8000 -> 0; IntrospectionPort: 9876 -> 0"},
		{"no ConfigMap", cluster("CONFIG_MAP=x"), []string{"--config-map="}, "ConfigMap: istio-cni-config -> "},
		{"two names of the node", cluster("KUBERNETES_NODE_NAME=n1", "NODE_NAME=n2"), nil, "NodeName:  -> n2; Repair.Node:  -> n2"},
		{"W-1: the second name of the owned file", cluster("ISTIO_OWNED_CNI_CONF_FILENAME=01-x.conflist"), nil, "Want.OwnedName: 02-istio-cni.conflist -> 01-x.conflist"},
		{"no API server to install nothing", map[string]string{"POD_NAMESPACE": "istio-system", "REPAIR_ENABLED": "false"}, []string{"--cni-enable-install=false"}, "Install: true -> false; Server.Host: 10.96.0.1 -> ; Server.Port: 443 -> "},
	} {
		d := mustLoad(t, tc.env, tc.args...)
		if got := changed(mustLoad(t, cluster()), d); got != tc.change || len(d.warnings) > 0 {
			t.Errorf("%s: changed:\n%s\nwant:\n%s\nwarnings %q", tc.name, got, tc.change, d.warnings)
		}
	}
	d := mustLoad(t, cluster("ISTIO_OWNED_CNI_CONFIG_FILENAME=01-right.conflist", "ISTIO_OWNED_CNI_CONF_FILENAME=01-chart.conflist"))
	if len(d.warnings) != 1 || !strings.Contains(d.warnings[0], "differ: the first one applies") || d.Want.OwnedName != "01-right.conflist" {
		t.Errorf("W-1: own file %q, warnings %q", d.Want.OwnedName, d.warnings)
	}
}

// TestLevels_Separate: the level of the plugin's records does not follow the agent's, nor vice versa.
func TestLevels_Separate(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		levels        string
		agent, plugin pluginlog.Level
		warnings      int
	}{
		{"debug", pluginlog.LevelDebug, pluginlog.LevelDebug, 0},
		{"default:info,cni-plugin:debug", pluginlog.LevelInfo, pluginlog.LevelDebug, 0},
		{"cni-agent:debug", pluginlog.LevelDebug, pluginlog.LevelInfo, 0},
		{"cni-agent:none, all:error", pluginlog.LevelNone, pluginlog.LevelError, 0},
		{"cni-plugin:fatal,all:warn,default:error", pluginlog.LevelError, pluginlog.LevelFatal, 0},
		{"install:debug,cni:error", pluginlog.LevelDebug, pluginlog.LevelError, 0},
		{"repair:warn", pluginlog.LevelWarn, pluginlog.LevelInfo, 0},
		{"default:warn,ads:debug,xds:debug", pluginlog.LevelWarn, pluginlog.LevelWarn, 2},
	} {
		c := mustLoad(t, cluster(), "--log_output_level="+tc.levels)
		if c.scopes.agent != tc.agent || c.PluginLevel != tc.plugin || c.Want.Stanza.LogLevel != tc.plugin.String() ||
			len(c.warnings) != tc.warnings {
			t.Errorf("%s: %s and %s, in the plugin's configuration %s, warnings %q", tc.levels, c.scopes.agent, c.PluginLevel, c.Want.Stanza.LogLevel, c.warnings)
		}
	}
}

// TestAmbient_Contradictions: uninstalling works with any settings.
func TestAmbient_Contradictions(t *testing.T) {
	t.Parallel()
	template := `{"type":"istio-cni","ambient_enabled":true,"kubernetes":{"kubeconfig":"/var/run/istio-cni/istio-cni-kubeconfig"}}`
	plain := strings.Replace(template, `"ambient_enabled":true,`, "", 1)
	served := func(more string) map[string]string {
		return cluster("AMBIENT_ENABLED=true", "NODE_NAME=n1", more)
	}
	for _, tc := range []struct {
		name string
		env  map[string]string
		args []string
		want string // a part of the error, "" for no error
	}{
		{"template", cluster("CNI_NETWORK_CONFIG=" + template), nil, "environment variable CNI_NETWORK_CONFIG: ambient_enabled is true in the template"},
		{"ignored by a flag", cluster("AMBIENT_ENABLED=true"), []string{"--ambient-pods=ignore"}, ""},
		{"ignored by a variable", cluster("AMBIENT_ENABLED=true", "AMBIENT_PODS=ignore"), nil, ""},
		{"uninstall", cluster("AMBIENT_ENABLED=true"), []string{"--uninstall"}, ""},
		{"served without a node", cluster("AMBIENT_ENABLED=true"), nil, "NODE_NAME is not set"},
		{"served by the agent alone", served("CNI_NETWORK_CONFIG=" + plain), nil, "CNI_NETWORK_CONFIG: ambient_enabled is false in the template"},
		{"served", served("CNI_NETWORK_CONFIG=" + template), nil, ""},
	} {
		_, err := build(tc.args, tc.env)
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want %q in it", tc.name, err, tc.want)
		}
	}
}

// TestAmbient_ProbeAddress: an address that no packet can have is an error that names its variable.
func TestAmbient_ProbeAddress(t *testing.T) {
	t.Parallel()
	for name, texts := range map[string][]string{
		"HOST_PROBE_SNAT_IP":   {"169.254.7", "169.254.7.127/32", "0.0.0.0", "127.0.0.1", "224.0.0.1", "fd16::1"},
		"HOST_PROBE_SNAT_IPV6": {"169.254.7.127", "::", "::1", "ff02::1", "fe80::1%eth0", "::ffff:169.254.7.127"},
	} {
		for _, text := range texts {
			mustFail(t, cluster(name+"="+text), nil, "environment variable "+name+`: value "`+text+`": want a unicast address`)
		}
	}
}

// TestAmbient_HostNamespace: without the node's procfs it is a path that does not exist, and never a namespace of the agent's own.
func TestAmbient_HostNamespace(t *testing.T) {
	t.Parallel()
	without, with := t.TempDir(), t.TempDir()
	check.OK(t, os.MkdirAll(with+"/procfs/1/ns", 0o700))
	for _, c := range []struct {
		roots, more, want string
	}{
		{without + "," + with, "ALLOW_SWITCH_TO_HOST_NS=true", with + "/procfs/1/ns/net"},
		{without, "ALLOW_SWITCH_TO_HOST_NS=true", without + "/procfs/1/ns/net"},
		{with, "X=", "/proc/self/ns/net"},
	} {
		check.Equal(t, mustLoad(t, cluster("HOST_ROOTS="+c.roots, "HOST_PROC=/procfs", c.more)).HostNamespace(), c.want)
	}
}

// TestObserver_Contradictions: an observer changes nothing, regardless of other settings.
func TestObserver_Contradictions(t *testing.T) {
	t.Parallel()
	for _, set := range []string{"REPAIR_ENABLED=true", "AUDIT_MODE=repair", "AUDIT_POD_CONDITION=true", "CNI_ENABLE_INSTALL=true"} {
		name, _, _ := strings.Cut(set, "=")
		want := "environment variable " + name
		check.Fails(t, check.Err(build(nil, cluster("CNI_OBSERVE=true", set))), want)
	}
	for _, flag := range []string{"--once", "--uninstall"} {
		check.Fails(t, check.Err(build([]string{flag}, cluster("CNI_OBSERVE=true"))), "flag "+flag)
	}
	c := mustLoad(t, cluster("CNI_OBSERVE=true", "REPAIR_ENABLED=false", "AUDIT_MODE=report", "AMBIENT_ENABLED=true", "NODE_NAME=node-1"))
	if c.Install || c.RepairEnabled || c.Audit.Repair || c.Audit.Interval == 0 || !c.Ambient.Enabled {
		t.Errorf("%+v", c)
	}
}

func TestSettings_Warnings(t *testing.T) {
	t.Parallel()
	env := cluster("AMBIENT_ENABLED=true", "AMBIENT_PODS=ignore", "REPAIR_ENABLED=true", "LOG_UDS_ADDRESS=/run/other.sock", "KUBECONFIG_MODE=644")
	delete(env, "POD_NAMESPACE")
	args := []string{"--log_target=stdout", "--log_caller=x", "--log_stacktrace_level=y"}
	c := mustLoad(t, env, args...)
	for _, want := range []string{
		"environment variable AMBIENT_ENABLED: pods of ambient mode are ignored, and start outside of the mesh",
		"the name of this node is not set",
		"environment variable LOG_UDS_ADDRESS: the plugin looks for its log socket in the run directory",
		"environment variable POD_NAMESPACE: not set",
		"environment variable KUBECONFIG_MODE: every user of the node may read the kubeconfig",
		"flag --log_target has no effect", "flag --log_caller has no effect", "flag --log_stacktrace_level has no effect",
	} {
		if !slices.ContainsFunc(c.warnings, func(w string) bool { return strings.HasPrefix(w, want) }) {
			t.Errorf("warnings lack %q: %q", want, c.warnings)
		}
	}
	c = mustLoad(t, env, append(args, "--uninstall")...)
	check.Equal(t, len(c.warnings), 0, "warnings", c.warnings)
	// Settings of the 1.22 chart cause no warning.
	c = mustLoad(t, cluster("LOG_UDS_ADDRESS=/var/run/istio-cni/log.sock", "REPAIR_RUN_AS_DAEMON=true"))
	check.Equal(t, len(c.warnings), 0, "warnings", c.warnings)
}

func started(t *testing.T, env map[string]string, args ...string) input {
	t.Helper()
	in, err := parse(args, around(env))
	check.OK(t, err)
	return in
}

// configMap is a layer of live configuration.
func configMap(data map[string]string) settings.Layer {
	return settings.Layer{Name: `ConfigMap "istio-cni-config"`, Data: data}
}

// TestLive_Removed: a template, and several keys, are gone with the layer. TestSettings has each key.
func TestLive_Removed(t *testing.T) {
	t.Parallel()
	in := started(t, cluster("EXCLUDE_NAMESPACES=old"))
	before, err := in.build()
	check.OK(t, err)
	c, frozen, err := in.reload(configMap(map[string]string{"EXCLUDED_NAMESPACES": "a,b\n", "cni_network_config": chart2020}))
	if err != nil || len(frozen) > 0 || !strings.Contains(string(c.Want.Stanza.Template), `"log_level": "warn"`) {
		t.Errorf("template %s, frozen %q, error %v", c.Want.Stanza.Template, frozen, err)
	}
	check.Diff(t, "namespaces", []string{"a", "b"}, c.Want.Stanza.ExcludeNamespaces)
	again, _, err := in.reload()
	if diff := cmp.Diff(before.String(), again.String()); err != nil || diff != "" {
		t.Errorf("error %v, without it -before +after:\n%s", err, diff)
	}
}

// TestLive_SameValue: a key needs no restart if its value is the present one in another spelling, or if a flag has decided.
func TestLive_SameValue(t *testing.T) {
	t.Parallel()
	in := started(t, cluster("KUBECONFIG_MODE=0600", "CHAINED_CNI_PLUGIN=true"), "--health-port=9000")
	_, frozen, err := in.reload(configMap(map[string]string{
		"KUBECONFIG_MODE": "600", "CHAINED_CNI_PLUGIN": "T", "HEALTH_PORT": "8000", "CURRENT_AGENT_VERSION": "9", "REPAIR_NODE_NAME": "",
	}))
	check.OK(t, err)
	check.Equal(t, len(frozen), 0, frozen)
}

func TestLive_Problems(t *testing.T) {
	t.Parallel()
	_, _, err := started(t, cluster()).reload(configMap(map[string]string{
		"API_TIMEOUT": "soon", "CNI_NETWORK_CONFIG": `{"type":"x","secret":"hunter2"}`,
	}))
	check.Fails(t, err, `key API_TIMEOUT: value "soon": want a duration like "10s"`, `key CNI_NETWORK_CONFIG: want a JSON object with "type": "istio-cni"`)
	if strings.Contains(err.Error(), "hunter2") {
		t.Errorf("the error shows the template: %v", err)
	}
}

func TestLive_FlagOfPluginLevel(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		args []string
		want string
	}{
		{nil, "error"},
		{[]string{"--log_output_level=debug"}, "error"},
		{[]string{"--log_output_level=info,cni-plugin:debug"}, "debug"},
		{[]string{"--plugin-log-level=warn"}, "warn"},
		{[]string{"--log_output_level=info,cni-plugin:debug", "--plugin-log-level=warn"}, "warn"},
	} {
		c, _, err := started(t, cluster("PLUGIN_LOG_LEVEL=fatal"), tc.args...).reload(configMap(map[string]string{"PLUGIN_LOG_LEVEL": "error"}))
		if err != nil || c.Want.Stanza.LogLevel != tc.want {
			t.Errorf("%q: level %q, error %v, want %q", tc.args, c.Want.Stanza.LogLevel, err, tc.want)
		}
	}
}
