package installer

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
)

func started(t *testing.T, env map[string]string, args ...string) input {
	t.Helper()
	in, err := parse(args, around(env))
	if err != nil {
		t.Fatal(err)
	}
	return in
}

func TestOverlayChangesWhatThePluginIsTold(t *testing.T) {
	t.Parallel()
	if _, _, err := started(t, cluster()).withOverlay(layer{"ConfigMap", map[string]string{"AMBIENT_ENABLED": "true"}}); err == nil ||
		!strings.Contains(err.Error(), "ambient mode is not supported") {
		t.Errorf("ambient mode in the ConfigMap: error %v", err)
	}
	in := started(t, cluster("EXCLUDE_NAMESPACES=old", "AMBIENT_PODS=ignore"))
	before, err := in.config()
	if err != nil {
		t.Fatal(err)
	}
	c, restart, err := in.withOverlay(layer{"ConfigMap \"c\"", map[string]string{
		"EXCLUDED_NAMESPACES": "a,b\n", "AMBIENT_ENABLED": "true", "AMBIENT_ENABLEMENT_SELECTOR": selectorYAML,
		"NATIVE_NFTABLES":                "true\n", // as a file has it
		"ENABLE_AMBIENT_DETECTION_RETRY": "true", "SECOND_IP_FAMILY": "capture", "API_TIMEOUT": "5s",
		"FORCE_IPTABLES_BINARY": "legacy", "CNI_BACKEND": "native", "PLUGIN_LOG_LEVEL": "debug", "unheard-of": "x",
	}})
	if err != nil || len(restart) > 0 {
		t.Fatal(err, restart)
	}
	want := before.Stanza
	want.ExcludeNamespaces = []string{"a", "b"}
	want.AmbientEnabled, want.NativeNFTables, want.AmbientDetectionRetry = true, true, true
	want.EnablementSelectors, want.LogLevel = []byte(selectorJSON), "debug"
	want.SecondFamily, want.APITimeout, want.ForceIptables = redirect.Capture, 5*time.Second, "legacy"
	want.Backend = redirect.Native
	if diff := cmp.Diff(want, c.Stanza); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if c.Log.Plugin != pluginlog.LevelDebug || c.Log.Agent != before.Log.Agent {
		t.Errorf("levels %+v", c.Log)
	}
	// Nothing else changes, and without the overlay everything is as before.
	c.Stanza, c.Log, c.lines, c.Warnings = before.Stanza, before.Log, before.lines, before.Warnings
	if diff := cmp.Diff(before, c, cmp.AllowUnexported(Config{}, line{})); diff != "" {
		t.Errorf("-before +after:\n%s", diff)
	}
	again, _, err := in.withOverlay()
	if diff := cmp.Diff(before.Effective(), again.Effective()); err != nil || diff != "" {
		t.Errorf("error %v, -before +after:\n%s", err, diff)
	}
}

func TestOverlayOfALegacyTemplate(t *testing.T) {
	t.Parallel()
	in := started(t, cluster())
	c, restart, err := in.withOverlay(layer{"ConfigMap \"c\"", map[string]string{"cni_network_config": chart2020}})
	if err != nil || len(restart) > 0 || !strings.Contains(string(c.Stanza.Template), `"log_level":"warn"`) {
		t.Errorf("template %s, restart %q, error %v", c.Stanza.Template, restart, err)
	}
}

func TestOverlayTheFirstLayerCounts(t *testing.T) {
	t.Parallel()
	in := started(t, cluster())
	c, restart, err := in.withOverlay(
		layer{"directory", map[string]string{"EXCLUDE_NAMESPACES": "dir", "HEALTH_PORT": "8000"}},
		layer{"object", map[string]string{"EXCLUDE_NAMESPACES": "obj", "API_TIMEOUT": "5s", "HEALTH_PORT": "1"}})
	if err != nil || len(restart) > 0 || c.Stanza.ExcludeNamespaces[0] != "dir" || c.Stanza.APITimeout.String() != "5s" {
		t.Errorf("stanza %+v, restart %q, error %v", c.Stanza, restart, err)
	}
}

func TestOverlayNamesWhatNeedsARestart(t *testing.T) {
	t.Parallel()
	in := started(t, cluster("KUBECONFIG_MODE=0600", "CHAINED_CNI_PLUGIN=true", "LOG_LEVEL=warn"), "--health-port=9000")
	c, restart, err := in.withOverlay(layer{"x", map[string]string{
		"KUBECONFIG_MODE": "600", "CHAINED_CNI_PLUGIN": "T", // other spellings of the same
		"HEALTH_PORT":         "8000", // a flag has decided
		"CNI_CONF_NAME":       "10-x.conflist",
		"MONITORING_PORT":     "0",
		"POD_NAMESPACE":       "elsewhere",
		"ZTUNNEL_UDS_ADDRESS": "/x", "CURRENT_AGENT_VERSION": "9", "REPAIR_NODE_NAME": "",
		"ISTIO_OWNED_CNI_CONF_FILENAME": "00-x.conflist",
	}})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"CNI_CONF_NAME", "ISTIO_OWNED_CNI_CONF_FILENAME", "MONITORING_PORT", "POD_NAMESPACE"}
	if diff := cmp.Diff(want, restart); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if c.Conf.Name != "" || c.MonitoringPort != 15014 || c.Stanza.AgentNamespace != "istio-system" {
		t.Errorf("a setting of the agent changed: %s", c)
	}
}

func TestOverlayProblemsNameSourceKeyAndCause(t *testing.T) {
	t.Parallel()
	in := started(t, cluster())
	_, _, err := in.withOverlay(layer{`ConfigMap "istio-cni-config"`, map[string]string{
		"API_TIMEOUT": "soon", "NATIVE_NFTABLES": "ja", "CNI_NETWORK_CONFIG": `{"type":"x","secret":"hunter2"}`,
	}})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		`ConfigMap "istio-cni-config" key API_TIMEOUT: value "soon": `, `want a duration like "10s"`,
		`ConfigMap "istio-cni-config" key NATIVE_NFTABLES: value "ja": want true or false`,
		`ConfigMap "istio-cni-config" key CNI_NETWORK_CONFIG: want a JSON object with "type": "istio-cni"`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q:\n%v", want, err)
		}
	}
	if strings.Contains(err.Error(), "hunter2") {
		t.Errorf("the error shows the template: %v", err)
	}
	if _, _, err := in.withOverlay(layer{"directory \"/d\"", map[string]string{"KUBECONFIG_MODE": "9"}}); err == nil ||
		!strings.Contains(err.Error(), `directory "/d" key KUBECONFIG_MODE: value "9": want permissions`) {
		t.Errorf("error %v", err)
	}
}

func TestAFlagOfThePluginsLevelWinsOverTheOverlay(t *testing.T) {
	t.Parallel()
	overlay := layer{"x", map[string]string{"PLUGIN_LOG_LEVEL": "error"}}
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
		c, _, err := started(t, cluster("PLUGIN_LOG_LEVEL=fatal"), tc.args...).withOverlay(overlay)
		if err != nil || c.Stanza.LogLevel != tc.want {
			t.Errorf("%q: level %q, error %v, want %q", tc.args, c.Stanza.LogLevel, err, tc.want)
		}
	}
}
