package installer

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
	"github.com/meshcni/istio-cni/internal/test/check"
)

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

func TestLive_ChangesPlugin(t *testing.T) {
	t.Parallel()
	in := started(t, cluster("EXCLUDE_NAMESPACES=old", "AMBIENT_PODS=ignore"))
	before, err := in.build()
	check.OK(t, err)
	c, frozen, err := in.reload(configMap(map[string]string{
		"EXCLUDED_NAMESPACES": "a,b\n", "AMBIENT_ENABLED": "true", "AMBIENT_ENABLEMENT_SELECTOR": selectorYAML,
		"NATIVE_NFTABLES":                "true\n", // as a file has it
		"ENABLE_AMBIENT_DETECTION_RETRY": "true", "SECOND_IP_FAMILY": "capture", "API_TIMEOUT": "5s",
		"FORCE_IPTABLES_BINARY": "legacy", "CNI_BACKEND": "native", "PLUGIN_LOG_LEVEL": "debug", "unheard-of": "x",
	}))
	if err != nil || len(frozen) > 0 {
		t.Fatal(err, frozen)
	}
	want := before.Config
	want.PluginLevel = pluginlog.LevelDebug
	stanza := &want.Want.Stanza
	stanza.ExcludeNamespaces = []string{"a", "b"}
	stanza.AmbientEnabled, stanza.NativeNFTables, stanza.AmbientDetectionRetry = true, true, true
	stanza.EnablementSelectors, stanza.LogLevel = []byte(selectorJSON), "debug"
	stanza.SecondFamily, stanza.APITimeout, stanza.ForceIptables = redirect.Capture, 5*time.Second, "legacy"
	stanza.Backend = redirect.Native
	c.Lines = want.Lines
	check.Diff(t, "result", want, c)
	again, _, err := in.reload()
	if diff := cmp.Diff(before.String(), again.String()); err != nil || diff != "" {
		t.Errorf("error %v, without it -before +after:\n%s", err, diff)
	}
	if _, _, err = started(t, cluster()).reload(configMap(map[string]string{"AMBIENT_ENABLED": "true"})); err == nil ||
		!strings.Contains(err.Error(), "ambient mode is not supported") {
		t.Errorf("ambient mode in the ConfigMap: error %v", err)
	}
	c, frozen, err = started(t, cluster()).reload(configMap(map[string]string{"cni_network_config": chart2020}))
	if err != nil || len(frozen) > 0 || !strings.Contains(string(c.Want.Stanza.Template), `"log_level": "warn"`) {
		t.Errorf("template %s, frozen %q, error %v", c.Want.Stanza.Template, frozen, err)
	}
}

func TestLive_NeedsRestart(t *testing.T) {
	t.Parallel()
	in := started(t, cluster("KUBECONFIG_MODE=0600", "CHAINED_CNI_PLUGIN=true", "LOG_LEVEL=warn"), "--health-port=9000")
	c, frozen, err := in.reload(configMap(map[string]string{
		"KUBECONFIG_MODE": "600", "CHAINED_CNI_PLUGIN": "T", // other spellings of the same
		"HEALTH_PORT":         "8000", // a flag has decided
		"CNI_CONF_NAME":       "10-x.conflist",
		"MONITORING_PORT":     "0",
		"POD_NAMESPACE":       "elsewhere",
		"ZTUNNEL_UDS_ADDRESS": "/x", "CURRENT_AGENT_VERSION": "9", "REPAIR_NODE_NAME": "",
		"ISTIO_OWNED_CNI_CONF_FILENAME": "00-x.conflist",
	}))
	want := []string{"CNI_CONF_NAME", "ISTIO_OWNED_CNI_CONF_FILENAME", "MONITORING_PORT", "POD_NAMESPACE"}
	if diff := cmp.Diff(want, frozen); diff != "" || err != nil {
		t.Errorf("error %v, -want +got:\n%s", err, diff)
	}
	if c.Want.ConfName != "" || c.MonitoringPort != 15014 || c.Want.Stanza.AgentNamespace != "istio-system" {
		t.Errorf("a setting of the agent changed: %s", c)
	}
}

func TestLive_Problems(t *testing.T) {
	t.Parallel()
	in := started(t, cluster())
	_, _, err := in.reload(configMap(map[string]string{
		"API_TIMEOUT": "soon", "CNI_NETWORK_CONFIG": `{"type":"x","secret":"hunter2"}`,
	}))
	for _, want := range []string{
		`ConfigMap "istio-cni-config" key API_TIMEOUT: value "soon": `, `want a duration like "10s"`,
		`ConfigMap "istio-cni-config" key CNI_NETWORK_CONFIG: want a JSON object with "type": "istio-cni"`,
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Fatalf("error lacks %q:\n%v", want, err)
		}
	}
	if strings.Contains(err.Error(), "hunter2") {
		t.Errorf("the error shows the template: %v", err)
	}
	if _, _, err := in.reload(configMap(map[string]string{"KUBECONFIG_MODE": "9"})); err == nil ||
		!strings.Contains(err.Error(), `key KUBECONFIG_MODE: value "9": want permissions`) {
		t.Errorf("error %v", err)
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
