package installer

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
)

func TestAllProblemsAreReportedTogether(t *testing.T) {
	t.Parallel()
	env := cluster("KUBECONFIG_MODE=384", "CHAINED_CNI_PLUGIN=maybe", "REPAIR_DELETE_PODS=no way")
	delete(env, "KUBERNETES_SERVICE_HOST")
	mustFail(t, env, []string{
		"--bogus=1", "--health-port=99999", "stray", "--log_output_level=loud", "--once=perhaps", "--monitoring-port=9876",
		"--cni-network-config=" + `{"type":"istio-cni","a":"__NOBODY_KNOWS__"}`, "--kube-ca-file",
	},
		"flag provided but not defined: -bogus",
		`flag --health-port: value "99999": want a decimal port from 0 to 65535`,
		`stray argument "stray"`,
		`flag --log_output_level: value "loud": scope "default", level "loud": want debug, info, warn, error, fatal or none`,
		`flag --once: value "perhaps": want true or false`,
		"--monitoring-port (flag --monitoring-port) and --ctrlz_port (default) are both 9876: want different ports",
		"flag --cni-network-config: placeholder __NOBODY_KNOWS__: nothing is known to replace it",
		"flag needs an argument: -kube-ca-file",
		`environment variable KUBECONFIG_MODE: value "384": want permissions in octal digits, like 0600`,
		`environment variable CHAINED_CNI_PLUGIN: value "maybe": want true or false`,
		`environment variable REPAIR_DELETE_PODS: value "no way": want true or false`,
		"environment variable KUBERNETES_SERVICE_HOST: not set",
	)
}

func TestAMissingAddressOfTheAPIServerIsReportedHostFirst(t *testing.T) {
	t.Parallel()
	_, err := build(nil, nil)
	if err == nil || strings.Index(err.Error(), "_HOST: not set") > strings.Index(err.Error(), "_PORT: not set") {
		t.Errorf("error %v", err)
	}
	for _, args := range [][]string{{"--uninstall"}, {"--cni-enable-install=false"}} {
		if _, err := build(args, nil); err != nil {
			t.Errorf("%q needs no API server: %v", args, err)
		}
	}
}

func TestABadValueCausesNoFurtherProblem(t *testing.T) {
	t.Parallel()
	_, err := build(nil, (cluster("CHAINED_CNI_PLUGIN=maybe", "ISTIO_OWNED_CNI_CONFIG=true", "KUBERNETES_SERVICE_PORT=x",
		"CNI_AGENT_RUN_DIR=run")))
	if err == nil || strings.Count(err.Error(), "\n") != 2 {
		t.Errorf("want three problems and no contradiction:\n%v", err)
	}
}

func TestPortsThatAreOffDoNotClash(t *testing.T) {
	t.Parallel()
	c := mustLoad(t, cluster("HEALTH_PORT=0", "MONITORING_PORT=0"), "--ctrlz_port=0")
	if c.HealthPort != 0 || c.MonitoringPort != 0 || c.IntrospectionPort != 0 {
		t.Errorf("%s", c)
	}
}

func TestASocketsPathHasALimit(t *testing.T) {
	t.Parallel()
	mustFail(t, cluster(), []string{"--cni-agent-run-dir=/" + strings.Repeat("x", 100)},
		"flag --cni-agent-run-dir: value ", "/log.sock\": want a path of at most 107 bytes")
}

func TestMode(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		args []string
		want cniconf.Mode
		err  string
	}{
		{"inline without a word", nil, cniconf.Inline, ""},
		{"standalone when not chained", []string{"--chained-cni-plugin=false"}, cniconf.Standalone, ""},
		{"a chosen name of the standalone file", []string{"--chained-cni-plugin=false", "--cni-conf-name=x.conf"}, cniconf.Standalone, ""},
		{"owned does not depend on ambient mode", []string{"--istio-owned-cni-config"}, cniconf.Owned, ""},
		{"auto", []string{"--cni-conf-mode=auto"}, cniconf.Auto, ""},
		{"the chart's chained=true does not contradict standalone", []string{"--cni-conf-mode=standalone", "--chained-cni-plugin=true"}, cniconf.Standalone, ""},
		{"the chart's owned=false does not contradict owned", []string{"--cni-conf-mode=owned", "--istio-owned-cni-config=false"}, cniconf.Owned, ""},
		{"inline, not chained", []string{"--cni-conf-mode=inline", "--chained-cni-plugin=false"}, 0, "flag --cni-conf-mode (inline) contradicts flag --chained-cni-plugin (false)"},
		{"auto, not chained", []string{"--cni-conf-mode=auto", "--chained-cni-plugin=false"}, 0, "flag --cni-conf-mode (auto) contradicts flag --chained-cni-plugin (false)"},
		{"owned, not chained", []string{"--istio-owned-cni-config", "--chained-cni-plugin=false"}, 0, "flag --istio-owned-cni-config (true) contradicts flag --chained-cni-plugin (false)"},
		{"drop-in, owned", []string{"--cni-conf-mode=dropin", "--istio-owned-cni-config"}, 0, "flag --cni-conf-mode (dropin) contradicts flag --istio-owned-cni-config (true)"},
		{"the own file is the primary", []string{"--istio-owned-cni-config", "--cni-conf-name=02-istio-cni.conflist"}, 0, "cannot be the primary configuration as well"},
		{"an owned file that no runtime reads", []string{"--istio-owned-cni-config", "--istio-owned-cni-config-filename=02-x.conf"}, 0, "want a name that ends in .conflist"},
		{"once and uninstall", []string{"--once", "--uninstall"}, 0, "flag --once and flag --uninstall contradict each other"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if tc.err != "" {
				mustFail(t, cluster(), tc.args, tc.err)
				return
			}
			c := mustLoad(t, cluster(), tc.args...)
			if c.Want.Mode != tc.want {
				t.Errorf("mode %q, want %q", c.Want.Mode, tc.want)
			}
		})
	}
}

func TestW1BothNamesOfTheOwnedFileAreRead(t *testing.T) {
	t.Parallel()
	for _, env := range []map[string]string{
		cluster("ISTIO_OWNED_CNI_CONFIG=true", "ISTIO_OWNED_CNI_CONF_FILENAME=01-x.conflist"),
		cluster("ISTIO_OWNED_CNI_CONFIG=true", "ISTIO_OWNED_CNI_CONFIG_FILENAME=01-x.conflist"),
		cluster("ISTIO_OWNED_CNI_CONFIG=true", "ISTIO_OWNED_CNI_CONFIG_FILENAME=", "ISTIO_OWNED_CNI_CONF_FILENAME=01-x.conflist"),
	} {
		if c := mustLoad(t, env); c.Want.OwnedName != "01-x.conflist" || len(c.warnings) > 0 {
			t.Errorf("%v: own file %q, warnings %q", env, c.Want.OwnedName, c.warnings)
		}
	}
	c := mustLoad(t, cluster("ISTIO_OWNED_CNI_CONFIG=true", "ISTIO_OWNED_CNI_CONFIG_FILENAME=01-right.conflist",
		"ISTIO_OWNED_CNI_CONF_FILENAME=01-chart.conflist"))
	want := []string{
		"environment variables ISTIO_OWNED_CNI_CONFIG_FILENAME and ISTIO_OWNED_CNI_CONF_FILENAME differ: the first one counts",
	}
	if diff := cmp.Diff(want, c.warnings); diff != "" || c.Want.OwnedName != "01-right.conflist" {
		t.Errorf("own file %q, warnings -want +got:\n%s", c.Want.OwnedName, diff)
	}
}

func TestW2OneDecisionAboutTheOwnedMode(t *testing.T) {
	t.Parallel()
	for _, ambient := range []string{"false", "true"} {
		if c := mustLoad(t, cluster("ISTIO_OWNED_CNI_CONFIG=true", "AMBIENT_ENABLED="+ambient, "AMBIENT_PODS=ignore")); c.Want.Mode != cniconf.Owned {
			t.Errorf("ambient %s: mode %q", ambient, c.Want.Mode)
		}
	}
}

func TestW3ADiscoveredNameIsNeverAUsersName(t *testing.T) {
	t.Parallel()
	if c := mustLoad(t, cluster()); c.Want.ConfName != "" {
		t.Errorf("nobody chose a name, and it is %q", c.Want.ConfName)
	}
}

// TestW30LevelsAreSeparate: the level of the plugin's records does not follow the agent's, nor the other way round.
func TestW30LevelsAreSeparate(t *testing.T) {
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

// TestW32EmptyVariablesAreUnset takes what made the reference write standalone files of mode 0.
func TestW32EmptyVariablesAreUnset(t *testing.T) {
	t.Parallel()
	env := cluster()
	for _, s := range table() {
		for _, name := range s.Env {
			if env[name] == "" {
				env[name] = ""
			}
		}
	}
	if len(env) < 60 {
		t.Fatalf("only %d variables are tried", len(env))
	}
	got, want := mustLoad(t, env), mustLoad(t, cluster())
	if diff := cmp.Diff(want.String(), got.String()); diff != "" {
		t.Errorf("-without +empty:\n%s", diff)
	}
	if got.Want.Mode != cniconf.Inline || got.KubeconfigMode != 0o600 {
		t.Errorf("mode %q, kubeconfig mode %s", got.Want.Mode, got.KubeconfigMode)
	}
}

func TestAKubeconfigForEverybodyIsWarnedOf(t *testing.T) {
	t.Parallel()
	c := mustLoad(t, cluster("KUBECONFIG_MODE=644"))
	if len(c.warnings) != 1 || !strings.Contains(c.warnings[0], "every user of the node may read the kubeconfig") {
		t.Errorf("warnings %q", c.warnings)
	}
}

func TestAnEmptyFlagTurnsTheConfigMapOff(t *testing.T) {
	t.Parallel()
	if c := mustLoad(t, cluster("CONFIG_MAP=x"), "--config-map="); c.ConfigMap != "" {
		t.Errorf("ConfigMap %q", c.ConfigMap)
	}
}

func TestNodeNameIsNoGuess(t *testing.T) {
	t.Parallel()
	if c := mustLoad(t, cluster()); c.NodeName != "" {
		t.Errorf("node %q without anybody having said so", c.NodeName)
	}
	if c := mustLoad(t, cluster("KUBERNETES_NODE_NAME=n1")); c.NodeName != "n1" {
		t.Errorf("node %q", c.NodeName)
	}
	if c := mustLoad(t, cluster("KUBERNETES_NODE_NAME=n1", "NODE_NAME=n2")); c.NodeName != "n2" {
		t.Errorf("node %q", c.NodeName)
	}
}

// TestAmbientModeIsRefused: its pods would start outside of the mesh, and nobody would see it. The node can be given back all
// the same.
func TestAmbientModeIsRefused(t *testing.T) {
	t.Parallel()
	template := `{"type":"istio-cni","ambient_enabled":true,"kubernetes":{"kubeconfig":"/var/run/istio-cni/istio-cni-kubeconfig"}}`
	for _, tc := range []struct {
		name string
		env  map[string]string
		args []string
		want string // a part of the error, "" for none
	}{
		{"variable", cluster("AMBIENT_ENABLED=true"), nil, "environment variable AMBIENT_ENABLED: ambient mode is not supported"},
		{"flag", cluster(), []string{"--ambient-enabled"}, "flag --ambient-enabled: ambient mode is not supported"},
		{"flag over variable", cluster("AMBIENT_ENABLED=false"), []string{"--ambient-enabled=true"}, "flag --ambient-enabled: ambient mode"},
		{"once", cluster("AMBIENT_ENABLED=true"), []string{"--once"}, "--ambient-pods=ignore"},
		{"dry run", cluster("AMBIENT_ENABLED=true"), []string{"--dry-run"}, "--ambient-pods=ignore"},
		{"nothing installed", cluster("AMBIENT_ENABLED=true", "CNI_ENABLE_INSTALL=false"), nil, "--ambient-pods=ignore"},
		{"template", cluster("CNI_NETWORK_CONFIG=" + template), nil, "environment variable CNI_NETWORK_CONFIG: ambient mode is not supported"},
		{"refused by hand", cluster("AMBIENT_ENABLED=true", "AMBIENT_PODS=refuse"), nil, "ambient mode is not supported"},
		{"neither", cluster("AMBIENT_ENABLED=true", "AMBIENT_PODS=yes"), nil, "want one of refuse, ignore"},
		{"off", cluster("AMBIENT_ENABLED=false"), nil, ""},
		{"empty", cluster("AMBIENT_ENABLED="), nil, ""},
		{"ignored by a flag", cluster("AMBIENT_ENABLED=true"), []string{"--ambient-pods=ignore"}, ""},
		{"ignored by a variable", cluster("AMBIENT_ENABLED=true", "AMBIENT_PODS=ignore"), nil, ""},
		{"uninstall", cluster("AMBIENT_ENABLED=true"), []string{"--uninstall"}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			_, err := build(tc.args, tc.env)
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q in it", err, tc.want)
			}
		})
	}
}

func TestWarnings(t *testing.T) {
	t.Parallel()
	env := cluster("AMBIENT_ENABLED=true", "AMBIENT_PODS=ignore", "REPAIR_ENABLED=true", "LOG_UDS_ADDRESS=/run/other.sock")
	delete(env, "POD_NAMESPACE")
	args := []string{"--log_target=stdout", "--log_caller=x", "--log_stacktrace_level=y"}
	c := mustLoad(t, env, args...)
	for _, want := range []string{
		"environment variable AMBIENT_ENABLED: this program serves sidecar mode only: pods of ambient mode start outside of the mesh",
		"the name of this node is not set",
		"environment variable LOG_UDS_ADDRESS: the plugin looks for its log socket in the run directory",
		"environment variable POD_NAMESPACE: not set",
		"flag --log_target has no effect", "flag --log_caller has no effect", "flag --log_stacktrace_level has no effect",
	} {
		if !slices.ContainsFunc(c.warnings, func(w string) bool { return strings.HasPrefix(w, want) }) {
			t.Errorf("warnings lack %q: %q", want, c.warnings)
		}
	}
	c = mustLoad(t, env, append(args, "--uninstall")...)
	if len(c.warnings) > 0 {
		t.Errorf("warnings of an uninstall: %q", c.warnings)
	}
	// What the 1.22 chart sets is no reason to warn.
	c = mustLoad(t, cluster("LOG_UDS_ADDRESS=/var/run/istio-cni/log.sock", "REPAIR_RUN_AS_DAEMON=true"))
	if len(c.warnings) > 0 {
		t.Errorf("warnings %q", c.warnings)
	}
}

// TestTheChartsEnvironment is what the reference's chart at its newest gives, value for value.
func TestTheChartsEnvironment(t *testing.T) {
	t.Parallel()
	env := cluster("CURRENT_AGENT_VERSION=1.31", "AMBIENT_ENABLED=false", "AMBIENT_DNS_CAPTURE=true", "AMBIENT_IPV6=true",
		"AMBIENT_ENABLEMENT_SELECTOR="+selectorYAML, "AMBIENT_RECONCILE_POD_RULES_ON_STARTUP=true",
		"ENABLE_AMBIENT_DETECTION_RETRY=false", "ISTIO_OWNED_CNI_CONFIG=false", "CHAINED_CNI_PLUGIN=true",
		"EXCLUDE_NAMESPACES=kube-system", "REPAIR_ENABLED=true", "REPAIR_LABEL_PODS=false", "REPAIR_DELETE_PODS=false",
		"REPAIR_REPAIR_PODS=true", "REPAIR_INIT_CONTAINER_NAME=istio-validation",
		"REPAIR_BROKEN_POD_LABEL_KEY=cni.istio.io/uninitialized", "REPAIR_BROKEN_POD_LABEL_VALUE=true", "NATIVE_NFTABLES=false",
		"REPAIR_NODE_NAME=n1", "REPAIR_RUN_AS_DAEMON=true", "REPAIR_SIDECAR_ANNOTATION=sidecar.istio.io/status",
		"ALLOW_SWITCH_TO_HOST_NS=true", "NODE_NAME=n1", "GOMEMLIMIT=0", "POD_NAME=istio-cni-node-abcde")
	c := mustLoad(t, env, "--log_output_level=info", "--log_as_json")
	if c.Want.Mode != cniconf.Inline || c.NodeName != "n1" || !c.Repair.Switches.InPlace || !c.logJSON ||
		!slices.Equal(c.Want.Stanza.ExcludeNamespaces, []string{"kube-system"}) {
		t.Errorf("%s", c)
	}
	if len(c.warnings) > 0 || !c.RepairEnabled || c.Repair.Node != "n1" {
		t.Errorf("warnings %q, repair %+v", c.warnings, c.Repair)
	}
}

func TestHelp(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"--help"}, {"-h"}, {"--bogus", "--help"}} {
		if _, err := build(args, nil); !errors.Is(err, settings.ErrHelp) {
			t.Errorf("%q: error %v", args, err)
		}
	}
	text := help()
	for _, s := range table() {
		if !strings.Contains(text, s.String()) {
			t.Errorf("help lacks %s", s)
		}
		for _, name := range s.Env {
			if !strings.Contains(text, "$"+name) {
				t.Errorf("help lacks variable %s", name)
			}
		}
		if s.Use == "" {
			t.Errorf("%s has no usage", s)
		}
	}
	// The reference's own, written out so that a row that is lost is noticed.
	for name := range strings.FieldsSeq(`CNI_CONF_NAME CHAINED_CNI_PLUGIN CNI_NETWORK_CONFIG CNI_NETWORK_CONFIG_FILE
		ISTIO_OWNED_CNI_CONFIG_FILENAME ISTIO_OWNED_CNI_CONF_FILENAME ISTIO_OWNED_CNI_CONFIG LOG_LEVEL MOUNTED_CNI_NET_DIR
		CNI_AGENT_RUN_DIR KUBECONFIG_MODE CNI_CONF_GROUP_READ KUBE_CA_FILE SKIP_TLS_VERIFY MONITORING_PORT ZTUNNEL_UDS_ADDRESS
		AMBIENT_ENABLED ENABLE_AMBIENT_DETECTION_RETRY REPAIR_ENABLED REPAIR_DELETE_PODS REPAIR_LABEL_PODS
		REPAIR_BROKEN_POD_LABEL_KEY REPAIR_BROKEN_POD_LABEL_VALUE REPAIR_NODE_NAME REPAIR_SIDECAR_ANNOTATION
		REPAIR_INIT_CONTAINER_NAME REPAIR_INIT_CONTAINER_TERMINATION_MESSAGE REPAIR_INIT_CONTAINER_EXIT_CODE
		REPAIR_LABEL_SELECTORS REPAIR_FIELD_SELECTORS EXCLUDE_NAMESPACES POD_NAMESPACE AMBIENT_ENABLEMENT_SELECTOR
		AMBIENT_DNS_CAPTURE AMBIENT_IPV6 AMBIENT_RECONCILE_POD_RULES_ON_STARTUP AMBIENT_DISABLE_SAFE_UPGRADE NATIVE_NFTABLES
		REPAIR_REPAIR_PODS FORCE_IPTABLES_BINARY KUBERNETES_SERVICE_PROTOCOL KUBERNETES_SERVICE_HOST KUBERNETES_SERVICE_PORT
		KUBERNETES_NODE_NAME ALLOW_SWITCH_TO_HOST_NS NODE_NAME POD_NAME REVISION SYSTEM_NAMESPACE HOST_PROBE_SNAT_IP
		HOST_PROBE_SNAT_IPV6 AMBIENT_USE_SCOPED_XTABLES_LOCKING AMBIENT_ENABLE_AWS_BRANCH_ENI_PROBE GOMEMLIMIT GOMAXPROCS
		CURRENT_AGENT_VERSION REPAIR_RUN_AS_DAEMON CNI_NET_DIR KUBECFG_FILE_NAME UPDATE_CNI_BINARIES SKIP_CNI_BINARIES
		LOG_UDS_ADDRESS CNI_EVENT_ADDRESS CNI_ENABLE_INSTALL CNI_ENABLE_REINSTALL EBPF_ENABLED EXCLUDED_NAMESPACES
		--log_output_level --log_as_json --log_target --log_caller --log_stacktrace_level --ctrlz_port --ctrlz_address
		--once --uninstall --dry-run`) {
		if !strings.Contains(text, name) {
			t.Errorf("help lacks %s", name)
		}
	}
	for row := range strings.Lines(text) {
		if len(row) > 125 {
			t.Errorf("line of %d columns: %s", len(row), row)
		}
	}
	for _, want := range []string{"EXIT CODES:\n   0  done\n   1  failed", "   2  a bad value or flag", "(default: 0600)"} {
		if !strings.Contains(text, want) {
			t.Errorf("help lacks %q", want)
		}
	}
}

// TestTheConfigurationIsPrintedWithoutSecrets looks for the token in all that prints a configuration.
func TestTheConfigurationIsPrintedWithoutSecrets(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, "s3cr3t.t0k3n\n", dir, "token")
	c := mustLoad(t, cluster(), "--service-account-dir="+dir,
		`--cni-network-config={"type":"istio-cni","policy":{"k8s_auth_token":"__SERVICEACCOUNT_TOKEN__"},
			"kubernetes":{"kubeconfig":"/x/__SERVICEACCOUNT_TOKEN__"}}`)
	if !strings.Contains(string(c.Want.Stanza.Template), `"k8s_auth_token":"s3cr3t.t0k3n"`) {
		t.Fatalf("the template is %s", c.Want.Stanza.Template)
	}
	var log strings.Builder
	slog.New(slog.NewJSONHandler(&log, nil)).Info("configuration", slog.Any("config", c))
	slog.New(slog.NewTextHandler(&log, nil)).Info("configuration", slog.Any("config", &c))
	for _, text := range []string{
		c.String(), log.String(), fmt.Sprintf("%v %+v %s %v", c, c, c, &c), strings.Join(c.warnings, "\n"),
	} {
		if strings.Contains(text, "s3cr3t") || text == "" {
			t.Errorf("a token, or nothing, is printed: %s", text)
		}
	}
	for _, want := range []string{"cni-network-config", "bytes, not shown", "kubeconfig-mode", `\"0600\" (default)`} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("log lacks %q:\n%s", want, log.String())
		}
	}
}

func TestThePathOfTheProgramMayBeUnknown(t *testing.T) {
	t.Parallel()
	env := around(cluster())
	env.executable = func() (string, error) { return "", errors.New("no proc") }
	if _, err := buildAround(nil, env); err == nil || !strings.Contains(err.Error(), "flag --cni-source-binary: not given") {
		t.Errorf("error %v", err)
	}
	if _, err := buildAround([]string{"--cni-source-binary=/x"}, env); err != nil {
		t.Error(err)
	}
}
