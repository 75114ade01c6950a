package installer

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// row has a valid text of a setting with the resulting changes of the configuration, and an invalid text, "" if all are valid.
type row struct {
	name, good, bad, change string
}

// with has further arguments that the setting needs to have an effect.
func with(name string) []string {
	filled := func(placeholder string) []string {
		return []string{`--cni-network-config={"type":"istio-cni","x":"` + placeholder + `"}`}
	}
	return map[string][]string{
		"--istio-owned-cni-config-filename": {"--istio-owned-cni-config"},
		"--ambient-enabled":                 {"--node-name=n1"},
		"AMBIENT_DISABLE_SAFE_UPGRADE":      {"--node-name=n1", "--ambient-enabled"},
		"--cni-event-address":               filled("__CNI_EVENT_ADDRESS__"),
		"--kubernetes-node-name":            filled("__KUBERNETES_NODE_NAME__"),
		"--log-level":                       filled("__LOG_LEVEL__"),
	}[name]
}

// rows is the contract, setting by setting.
func rows() []row {
	return []row{
		{"--once", "true", "yes", "Action: stay -> once"},
		{"--uninstall", "true", "2", "Action: stay -> uninstall"},
		{"--dry-run", "true", " true", "Action: stay -> once; DryRun: false -> true"},
		{"--uninstall-on-exit", "never", "Auto", "UninstallOnExit: auto -> never"},
		{"--cni-observe", "true", "yes", "Audit.Observe: false -> true; Install: true -> false; Observe: false -> true"},
		{"--cni-enable-install", "false", "yes", "Install: true -> false"},
		{"--cni-enable-reinstall", "false", "yes", "Reinstall: true -> false"},
		{"--cni-conf-mode", "dropin", "drop-in", "Want.Mode: inline -> dropin"},
		{"--chained-cni-plugin", "false", "yes", "Want.Mode: inline -> standalone"},
		{"--istio-owned-cni-config", "1", "yes", "Want.Mode: inline -> owned"},
		{"--istio-owned-cni-config-filename", "00-x.conflist", "a/b", "Want.OwnedName: 02-istio-cni.conflist -> 00-x.conflist"},
		{"--cni-conf-name", "10-calico.conflist", "..", "Want.ConfName:  -> 10-calico.conflist"},
		{"--mounted-cni-net-dir", "/mnt/net.d/", "etc/cni", "Detect.Net: true -> false; NetDir: /host/etc/cni/net.d -> /mnt/net.d; OldKubeconfig: /host/etc/cni/net.d/ZZZ-istio-cni-kubeconfig -> /mnt/net.d/ZZZ-istio-cni-kubeconfig"},
		{"--cni-net-dir", "/etc/k/net.d", "./x", "Detect.Net: true -> false; HostNetDir: /etc/cni/net.d -> /etc/k/net.d"},
		{"--cni-conf-group-read", "true", "yes", "Want.FileMode: 384 -> 416"},
		{"--cni-cache-dir", "/var/x", "x", "CacheDir: /var/lib/cni/results -> /var/x; Places.Cache: /var/lib/cni/results -> /var/x"},
		{"--host-roots", "/a, /b/,/a", ",", "HostRoots: [/host /host/proc/1/root] -> [/a /b]; Places.Roots: [/host /host/proc/1/root] -> [/a /b]"},
		{"--netns-dirs", "/a,/b/", "a", "Places.Netns: [/var/run/netns /var/run/docker/netns] -> [/a /b]"},
		{"--host-proc", "/p", "p", "Places.Proc: /proc -> /p"},
		{"--cni-network-config-file", "testdata/template.json", "testdata/none", `Want.Stanza.Template:  -> {"type": "istio-cni", "log_level": "warn"}`},
		{"--cni-network-config", `{"type":"istio-cni"}`, "{}", `Want.Stanza.Template:  -> {"type":"istio-cni"}`},
		{"--mounted-cni-bin-dirs", "/b1,/b2", " , ", "BinDirs: [/host/opt/cni/bin] -> [/b1 /b2]; Detect.Bin: true -> false"},
		{"--cni-source-binary", "/opt/x", "x", "Source: /usr/local/bin/istio-cni -> /opt/x"},
		{"--update-cni-binaries", "false", "yes", "Update: true -> false"},
		{"--skip-cni-binaries", "a,b c\n,d", "a,/b", "Skip: [] -> [a b c d]"},
		{"--exclude-namespaces", " kube-system, ,istio-system", "Kube", "Want.Stanza.ExcludeNamespaces: [] -> [kube-system istio-system]"},
		{"--ambient-enabled", "true", "yes", "Ambient.Enabled: false -> true; Want.Stanza.AmbientEnabled: false -> true"},
		{"--ambient-pods", "ignore", "Ignore", ""},
		{"--ambient-enablement-selector", "- podSelector: {}", "x: y", `Want.Stanza.EnablementSelectors:  -> [{"podSelector":{},"namespaceSelector":{}}]`},
		{"--enable-ambient-detection-retry", "true", "yes", "Want.Stanza.AmbientDetectionRetry: false -> true"},
		{"--ztunnel-uds-address", "/z.sock", "z.sock", "Ambient.Socket: /var/run/ztunnel/ztunnel.sock -> /z.sock"},
		{"AMBIENT_DNS_CAPTURE", "true", "yes", "Ambient.DNSCapture: false -> true"},
		{"AMBIENT_IPV6", "1", "yes", "Ambient.IPv6: false -> true"},
		{"AMBIENT_RECONCILE_POD_RULES_ON_STARTUP", "true", "yes", "Ambient.ReconcileOnStart: false -> true"},
		{"AMBIENT_DISABLE_SAFE_UPGRADE", "true", "yes", "UninstallOnExit: auto -> always"},
		{"HOST_PROBE_SNAT_IP", "10.0.0.9", "fd00::1", "Ambient.ProbeV4: 169.254.7.127 -> 10.0.0.9"},
		{"HOST_PROBE_SNAT_IPV6", "fd00::1", "10.0.0.9", "Ambient.ProbeV6: fd16:9254:7127:1337:ffff:ffff:ffff:ffff -> fd00::1"},
		{"SYSTEM_NAMESPACE", "mesh", "a.b", "Ambient.SystemNamespace: istio-system -> mesh"},
		{"ALLOW_SWITCH_TO_HOST_NS", "true", "yes", "Ambient.SwitchNamespace: false -> true"},
		{"--backend", "native", "magic", "Want.Stanza.Backend: auto -> native"},
		{"--native-nftables", "true", "yes", "Want.Stanza.NativeNFTables: false -> true"},
		{"--second-ip-family", "reject", "Reject", "Want.Stanza.SecondFamily: bypass -> reject"},
		{"--sandboxed-runtimes", "a, b-*", "a,[", "Want.Stanza.SandboxedRuntimes: [] -> [a b-*]"},
		{"--cni-conf-version", "1.0.0", "1.2.0", "Want.Stanza.CNIVersion: 0.3.1 -> 1.0.0"},
		{"--api-timeout", "3s", "1h", "Want.Stanza.APITimeout: 10s -> 3s"},
		{"--force-iptables-binary", "nft", "nftables", "Want.Stanza.ForceIptables:  -> nft"},
		{"--plugin-log-level", "debug", "loud", "PluginLevel: info -> debug; Want.Stanza.LogLevel: info -> debug"},
		{"--kubeconfig-mode", "0640", "384", "KubeconfigMode: -rw------- -> -rw-r-----"},
		{"--kubecfg-file-name", "k", "a/b", "OldKubeconfig: /host/etc/cni/net.d/ZZZ-istio-cni-kubeconfig -> /host/etc/cni/net.d/k"},
		{"--service-account-dir", "/sa", "sa", "CA: /var/run/secrets/kubernetes.io/serviceaccount/ca.crt -> /sa/ca.crt; Token: /var/run/secrets/kubernetes.io/serviceaccount/token -> /sa/token"},
		{"--kube-ca-file", "/ca.pem", "", "CA: /var/run/secrets/kubernetes.io/serviceaccount/ca.crt -> /ca.pem"},
		{"--skip-tls-verify", "true", "yes", "CA: /var/run/secrets/kubernetes.io/serviceaccount/ca.crt -> "},
		{"--kubernetes-service-protocol", "http", "ftp", "Server.Protocol: https -> http"},
		{"--kubernetes-service-host", "[fd00::1]", "https://a", "Server.Host:  -> fd00::1"},
		{"--kubernetes-service-port", "6443", "0", "Server.Port:  -> 6443"},
		{"--cni-agent-run-dir", "/run/x", "x", "LogSocket: /var/run/istio-cni/log.sock -> /run/x/log.sock; RunDir: /var/run/istio-cni -> /run/x; Want.Stanza.RunDir: /var/run/istio-cni -> /run/x"},
		{"--run-dir-mode", "755", "rw", "RunDirMode: -rwx------ -> -rwxr-xr-x"},
		{"--log-uds-address", "/run/l.sock", strings.Repeat("/x", 54), "LogSocket: /var/run/istio-cni/log.sock -> /run/l.sock"},
		{"--log-socket-mode", "0o666", "0o8", "LogSocketMode: -rw------- -> -rw-rw-rw-"},
		{"--cni-event-address", "/run/e.sock", "", `Want.Stanza.Template: {"type":"istio-cni","x":"/var/run/istio-cni/pluginevent.sock"} -> {"type":"istio-cni","x":"/run/e.sock"}`},
		{"--health-port", "8001", "http", "HealthPort: 8000 -> 8001"},
		{"--monitoring-port", "0", "65536", "MonitoringPort: 15014 -> 0"},
		{"--ctrlz_port", "9877", "1e3", "IntrospectionPort: 9876 -> 9877"},
		{"--ctrlz_address", "::1", "0.0.0.0", "IntrospectionAddress: localhost -> ::1"},
		{"--profiling", "true", "yes", "Profiling: false -> true"},
		{"--config-map", "other", "a_b", "ConfigMap: istio-cni-config -> other"},
		{"--config-dir", "/etc/config", "x", "ConfigDir:  -> /etc/config"},
		{"--pod-namespace", "ns", "a.b", "Namespace:  -> ns; Want.Stanza.AgentNamespace:  -> ns"},
		{"--pod-name", "istio-cni-node-x", "-a", "PodName:  -> istio-cni-node-x"},
		{"--daemonset-name", "d", "a_b", "DaemonSet: istio-cni-node -> d"},
		{"--node-name", "n1.example.com", "Node", "NodeName:  -> n1.example.com; Repair.Node:  -> n1.example.com"},
		{"--kubernetes-node-name", "n2", "a_b", `NodeName:  -> n2; Repair.Node:  -> n2; Want.Stanza.Template: {"type":"istio-cni","x":"host-1"} -> {"type":"istio-cni","x":"n2"}`},
		{"--log_output_level", "default:error,cni-plugin:debug", "cni-agent:", "AgentLevel: info -> error; Log: info JSON=false -> error JSON=false; PluginLevel: info -> debug; Want.Stanza.LogLevel: info -> debug"},
		{"LOG_OUTPUT_LEVEL", "cni-agent:error", "cni-agent:loud", "AgentLevel: info -> error; Log: info JSON=false -> error JSON=false"},
		{"--log_as_json", "true", "yes", "Log: info JSON=false -> info JSON=true"},
		{"--log-level", "trace", "", `Want.Stanza.Template: {"type":"istio-cni","x":"warn"} -> {"type":"istio-cni","x":"trace"}`},
		{"--repair-enabled", "false", "yes", "RepairEnabled: true -> false"},
		{"--repair-repair-pods", "true", "yes", "Repair.Switches.InPlace: false -> true"},
		{"--repair-delete-pods", "true", "yes", "Repair.Switches.Delete: false -> true"},
		{"--repair-label-pods", "true", "yes", "Repair.Switches.Label: false -> true"},
		{"--repair-evict", "true", "yes", "Repair.Evict: false -> true"},
		{"--repair-broken-pod-label-key", "broken", "A/b", "Repair.LabelKey: cni.istio.io/uninitialized -> broken"},
		{"--repair-broken-pod-label-value", "Yes_1.0", "-a", "Repair.LabelValue: true -> Yes_1.0"},
		{"--repair-node-name", "n", "a_b", "Repair.Node:  -> n"},
		{"--repair-sidecar-annotation", "a.b/c", "a b", "Repair.Predicate.Annotation: sidecar.istio.io/status -> a.b/c"},
		{"--repair-init-container-name", "v", "a_b", "Repair.Predicate.Container: istio-validation -> v"},
		{"--repair-init-container-termination-message", "m m", "", "Repair.Predicate.Message:  -> m m"},
		{"--audit-interval", "0", "-1s", "Audit.Interval: 5m0s -> 0s"},
		{"--audit-mode", "repair", "x", "Audit.Repair: false -> true"},
		{"--audit-pod-condition", "true", "yes", "Audit.PodCondition: false -> true"},
		{"--repair-init-container-exit-code", "55", "256", "Repair.Predicate.ExitCode: 126 -> 55"},
		{"--repair-label-selectors", "a=b", "a b", "Repair.LabelSelectors:  -> a=b"},
		{"--repair-field-selectors", "spec.schedulerName=b", "a", "Repair.FieldSelectors:  -> spec.schedulerName=b"},
	}
}

// flat returns the fields of a configuration as texts, by their path.
func flat(into map[string]string, path string, v reflect.Value) map[string]string {
	if v.Kind() != reflect.Struct || v.Type() == reflect.TypeFor[netip.Addr]() {
		into[path] = strings.TrimSpace(fmt.Sprintf(map[bool]string{true: "%s", false: "%v"}[v.Type() == reflect.TypeFor[json.RawMessage]()], v))
		return into
	}
	for i := range v.NumField() {
		if field := v.Type().Field(i); field.Anonymous {
			flat(into, path, v.Field(i))
		} else if field.IsExported() && field.Name != "Lines" {
			flat(into, strings.TrimPrefix(path+"."+field.Name, "."), v.Field(i))
		}
	}
	return into
}

// outcome is the configuration with the settings of the agent's log.
func outcome(d draft) map[string]string {
	return flat(map[string]string{"Log": fmt.Sprintf("%s JSON=%t", d.scopes.agent, d.logJSON)}, "", reflect.ValueOf(d.Config))
}

// changed lists the fields that differ.
func changed(before, after draft) string {
	old, all := outcome(before), []string{}
	for path, value := range outcome(after) {
		if value != old[path] {
			all = append(all, fmt.Sprintf("%s: %s -> %s", path, old[path], value))
		}
	}
	slices.Sort(all)
	return strings.Join(all, "; ")
}

func table() []settings.Setting { return settings.All(Settings()) }

// TestSettings_EveryRow: settings without effect have no row. A flag requests an action, never an inherited
// environment.
func TestSettings_EveryRow(t *testing.T) {
	t.Parallel()
	var have, want, flagsOnly, live []string
	seen := map[string]bool{}
	for _, s := range table() {
		if !s.Ignored {
			have = append(have, s.String())
		}
		if len(s.Env) == 0 && !s.Ignored {
			flagsOnly = append(flagsOnly, s.Name)
		}
		if s.Live {
			live = append(live, s.String())
		}
		if err := s.Value.Set(s.Default); s.Default != "" && err != nil {
			t.Errorf("%s: default %q: %v", s, s.Default, err)
		}
		for _, name := range append(s.Env, "--"+s.Name) {
			if name != "--" && seen[name] {
				t.Errorf("two rows are named %s", name)
			}
			seen[name] = true
		}
	}
	for _, r := range rows() {
		want = append(want, r.name)
	}
	slices.Sort(have)
	slices.Sort(want)
	check.Diff(t, "rows and settings", want, have)
	want = []string{"once", "uninstall", "dry-run", "ctrlz_port", "ctrlz_address", "log_output_level", "log_as_json"}
	check.Diff(t, "settings without a variable,", want, flagsOnly)
	check.Diff(t, "settings that live configuration may change", strings.Fields(`--cni-network-config
		--exclude-namespaces --second-ip-family --sandboxed-runtimes --native-nftables --backend --force-iptables-binary --cni-conf-version
		--api-timeout --plugin-log-level LOG_OUTPUT_LEVEL --ambient-enablement-selector --enable-ambient-detection-retry
		AMBIENT_DNS_CAPTURE`), live)
}

// TestSettings sets each setting by its flag, by each of its variables, and by live configuration, to a good value and to a bad one.
// Settings without effect have no row; switches among them accept only booleans.
func TestSettings(t *testing.T) {
	t.Parallel()
	for _, s := range table() {
		r := row{name: "--" + s.Name, good: "true"}
		if at := slices.IndexFunc(rows(), func(r row) bool { return r.name == s.String() }); at >= 0 {
			r = rows()[at]
		} else if s.Arg == "" {
			r.bad = "yes"
		}
		given := cluster()
		for _, name := range s.Env {
			delete(given, name)
		}
		without, _ := build(with(r.name), given)
		check := func(d draft, err error) {
			t.Helper()
			if got := changed(without, d); err != nil || got != r.change {
				t.Errorf("%s: error %v, changed:\n%s\nwant:\n%s", r.name, err, got, r.change)
			}
		}
		refused := func(env map[string]string, args []string, origin string) {
			t.Helper()
			if _, err := build(args, env); r.bad != "" && (err == nil || !strings.Contains(err.Error(), origin+": ")) {
				t.Errorf("%s, %q: error %v", r.name, r.bad, err)
			}
		}
		if s.Name != "" {
			check(build(append(with(r.name), r.name+"="+r.good), cluster()))
			refused(cluster(), append(with(r.name), r.name+"="+r.bad), "flag "+r.name)
		}
		for _, name := range s.Env {
			check(build(with(r.name), cluster(name+"="+r.good)))
			refused(cluster(name+"="+r.bad), with(r.name), "environment variable "+name)
			applies(t, s, r, started(t, cluster("REPAIR_ENABLED="), with(r.name)...), name)
		}
	}
}

// applies sets a key of live configuration to the values of a row: a setting that is not live keeps its value, and needs a restart.
func applies(t *testing.T, s settings.Setting, r row, in input, key string) {
	t.Helper()
	without, _ := in.build()
	layer := configMap(map[string]string{key: r.good + "\n", "unheard-of": "x"}) // as in a file
	d, err := in.build(layer)
	_, frozen, failed := in.reload(layer)
	want, restart := r.change, []string(nil)
	if !s.Live && !s.Ignored {
		want, restart = "", []string{key}
	}
	if got := changed(without, d); err != nil || failed != nil || got != want || !slices.Equal(frozen, restart) {
		t.Errorf("key %s: errors %v, %v; need a restart: %q; changed:\n%s\nwant:\n%s", key, err, failed, frozen, got, want)
	}
	_, _, err = in.reload(configMap(map[string]string{key: r.bad}))
	if !s.Ignored && s.Value.Set(r.bad) != nil && (err == nil || !strings.Contains(err.Error(), `ConfigMap "istio-cni-config" key `+key+": ")) {
		t.Errorf("key %s, %q: error %v", key, r.bad, err)
	}
}

// TestChart_Versions: the schema lists the versions that the plugin serves.
func TestChart_Versions(t *testing.T) {
	text, err := os.ReadFile("../../../manifests/istio-cni/values.schema.json")
	check.OK(t, err)
	if enum := `"confVersion": {"enum": ["", "` + strings.Join(cniconf.Versions(), `", "`) + `"]}`; !strings.Contains(string(text), enum) {
		t.Errorf("the schema lacks %s", enum)
	}
}

// cluster is the environment that Kubernetes gives to each container.
func cluster(more ...string) map[string]string {
	env := map[string]string{
		"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443", "POD_NAMESPACE": "istio-system",
		"REPAIR_ENABLED": "false",
	}
	for _, pair := range more {
		name, value, _ := strings.Cut(pair, "=")
		env[name] = value
	}
	return env
}

// around returns an environment with a host and a program of fixed names.
func around(env map[string]string) environment {
	return environment{
		getenv:     func(name string) (string, bool) { v, ok := env[name]; return v, ok },
		hostname:   func() (string, error) { return "host-1", nil },
		executable: func() (string, error) { return "/usr/local/bin/istio-cni", nil },
	}
}

// build builds the configuration of arguments and an environment.
func build(args []string, env map[string]string) (draft, error) {
	return buildAround(args, around(env))
}

func buildAround(args []string, env environment) (draft, error) {
	in, err := parse(args, env)
	if err != nil {
		return draft{}, err
	}
	return in.build()
}

func mustLoad(t *testing.T, env map[string]string, args ...string) draft {
	t.Helper()
	d, err := build(args, env)
	check.OK(t, err, args)
	return d
}

func mustFail(t *testing.T, env map[string]string, args []string, wants ...string) {
	t.Helper()
	_, err := build(args, env)
	for _, want := range wants {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q with %v: error lacks %q:\n%v", args, env, want, err)
		}
	}
}

func write(tb testing.TB, text string, path ...string) string {
	tb.Helper()
	name := filepath.Join(path...)
	check.OK(tb, os.WriteFile(name, []byte(text), 0o600))
	return name
}
