package installer

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/agent/departure"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
)

// row says what a setting does: the text and what it makes of the configuration, what is there without it, and texts
// that are refused.
type row struct {
	name, good string
	of         func(Config) any
	want, def  any
	bad        []string
	with       []string // further arguments
}

const (
	selectorYAML = "- podSelector: {}"
	selectorJSON = `[{"podSelector":{},"namespaceSelector":{}}]`
)

// filled is a template that shows a placeholder, and of gives what it was filled with.
func filled(placeholder string) (with []string, of func(Config) any) {
	return []string{`--cni-network-config={"type":"istio-cni","x":"` + placeholder + `"}`}, func(c Config) any {
		var stanza struct{ X string }
		if err := json.Unmarshal(c.Stanza.Template, &stanza); err != nil {
			return err
		}
		return stanza.X
	}
}

func template(name, good, placeholder, def string, bad ...string) row {
	with, of := filled(placeholder)
	return row{name, good, of, good, def, bad, with}
}

// rows is the contract, setting by setting.
func rows() []row {
	mode := func(m uint32) fs.FileMode { return fs.FileMode(m) }
	notBool := []string{"yes", "2", " true"}
	notPath := []string{"etc/cni", "./x"}
	notName := []string{"a/b", "..", " a"}
	notOctal := []string{"384", "0x180", "01000", "rw", "-1", "0o8"}
	notPort := []string{"65536", "-x", "http", "0x50", "1e3"}
	notObject := []string{"Node", "a_b", "-a"}
	return []row{
		{"--once", "true", func(c Config) any { return c.Action }, Once, Stay, notBool, nil},
		{"--uninstall", "true", func(c Config) any { return c.Action }, Uninstall, Stay, notBool, nil},
		{
			"--dry-run", "true",
			func(c Config) any { return fmt.Sprintf("%s %t", c.Action, c.DryRun) },
			"once true", "stay false", notBool, nil,
		},
		{
			"--uninstall-on-exit", "never",
			func(c Config) any { return c.UninstallOnExit },
			departure.Never, departure.Auto,
			[]string{"no", "Auto"},
			nil,
		},
		{"--cni-enable-install", "false", func(c Config) any { return c.Install }, false, true, notBool, nil},
		{"--cni-enable-reinstall", "false", func(c Config) any { return c.Reinstall }, false, true, notBool, nil},

		{
			"--cni-conf-mode", "dropin",
			func(c Config) any { return c.Conf.Mode },
			ModeDropIn, ModeInline,
			[]string{"chained", "drop-in"},
			nil,
		},
		{
			"--chained-cni-plugin", "false",
			func(c Config) any { return c.Conf.Mode },
			ModeStandalone, ModeInline, notBool, nil,
		},
		{"--istio-owned-cni-config", "1", func(c Config) any { return c.Conf.Mode }, ModeOwned, ModeInline, notBool, nil},
		{
			"--istio-owned-cni-config-filename", "00-x.conflist",
			func(c Config) any { return c.Conf.OwnFile() },
			"00-x.conflist", "02-istio-cni.conflist", notName,
			[]string{"--istio-owned-cni-config"},
		},
		{
			"--cni-conf-name", "10-calico.conflist",
			func(c Config) any { return c.Conf.Name },
			"10-calico.conflist", "", notName, nil,
		},
		{
			"--mounted-cni-net-dir", "/mnt/net.d/",
			func(c Config) any { return c.Conf.Dir },
			"/mnt/net.d", "/host/etc/cni/net.d", notPath, nil,
		},
		{
			"--cni-net-dir", "/etc/k/net.d",
			func(c Config) any { return c.Conf.HostDir },
			"/etc/k/net.d", "/etc/cni/net.d", notPath, nil,
		},
		{
			"--cni-conf-group-read", "true",
			func(c Config) any { return c.Conf.FileMode },
			mode(0o640), mode(0o600), notBool, nil,
		},
		{
			"--cni-cache-dir", "/var/x",
			func(c Config) any { return c.Conf.CacheDir },
			"/var/x", "/var/lib/cni/results", notPath, nil,
		},
		{
			"--host-roots", "/a, /b/,/a",
			func(c Config) any { return c.HostRoots },
			[]string{"/a", "/b"},
			[]string{"/host", "/host/proc/1/root"},
			[]string{"a,/b", ","},
			nil,
		},
		{
			"--cni-network-config-file", "testdata/template.json",
			func(c Config) any { return c.Stanza.Template != nil },
			true, false,
			[]string{"testdata/none", "testdata"},
			nil,
		},
		{
			"--cni-network-config", `{"type":"istio-cni"}`,
			func(c Config) any { return string(c.Stanza.Template) },
			`{"type":"istio-cni"}`, "", nil, nil,
		},

		{
			"--mounted-cni-bin-dirs", "/b1,/b2",
			func(c Config) any { return c.Binaries.Dirs },
			[]string{"/b1", "/b2"},
			[]string{"/host/opt/cni/bin"},
			[]string{"bin", " , "},
			nil,
		},
		{
			"--cni-source-binary", "/opt/x",
			func(c Config) any { return c.Binaries.Source },
			"/opt/x", "/usr/local/bin/istio-cni", notPath, nil,
		},
		{"--update-cni-binaries", "false", func(c Config) any { return c.Binaries.Update }, false, true, notBool, nil},
		{
			"--skip-cni-binaries", "a,b c\n,d",
			func(c Config) any { return c.Binaries.Skip },
			[]string{"a", "b", "c", "d"},
			[]string(nil),
			[]string{"a,/b"},
			nil,
		},

		{
			"--exclude-namespaces", " kube-system, ,istio-system",
			func(c Config) any { return c.Stanza.ExcludeNamespaces },
			[]string{"kube-system", "istio-system"},
			[]string(nil),
			[]string{"kube-system istio-system", "Kube"},
			nil,
		},
		{
			"--ambient-enabled", "true", func(c Config) any { return c.Stanza.AmbientEnabled }, true, false, notBool,
			[]string{"--ambient-pods=ignore"},
		},
		{name: "--ambient-pods", good: "ignore", bad: []string{"yes", "Ignore"}},
		{
			"--ambient-enablement-selector", selectorYAML,
			func(c Config) any { return string(c.Stanza.EnablementSelectors) },
			selectorJSON, "",
			[]string{"x: y"},
			nil,
		},
		{
			"--enable-ambient-detection-retry", "true",
			func(c Config) any { return c.Stanza.AmbientDetectionRetry },
			true, false, notBool, nil,
		},
		{
			"--backend", "native", func(c Config) any { return c.Stanza.Backend }, redirect.Native, redirect.Auto,
			[]string{"magic"},
			nil,
		},
		{"--native-nftables", "true", func(c Config) any { return c.Stanza.NativeNFTables }, true, false, notBool, nil},
		{
			"--second-ip-family", "reject",
			func(c Config) any { return c.Stanza.SecondFamily },
			redirect.Reject, redirect.Bypass,
			[]string{"drop", "Reject"},
			nil,
		},
		{
			"--api-timeout", "3s",
			func(c Config) any { return c.Stanza.APITimeout },
			3 * time.Second, time.Duration(0),
			[]string{"3", "0s", "1h"},
			nil,
		},
		{
			"--force-iptables-binary", "nft",
			func(c Config) any { return c.Stanza.ForceIptables },
			"nft", "",
			[]string{"nftables"},
			nil,
		},
		{
			"--plugin-log-level", "debug",
			func(c Config) any { return c.Stanza.LogLevel },
			"debug", "info",
			[]string{"loud"},
			nil,
		},

		{
			"--kubeconfig-mode", "0640",
			func(c Config) any { return c.Kubeconfig.Mode },
			mode(0o640), mode(0o600), notOctal, nil,
		},
		{
			"--kubecfg-file-name", "k",
			func(c Config) any { return c.Kubeconfig.Historic },
			"/host/etc/cni/net.d/k", "/host/etc/cni/net.d/ZZZ-istio-cni-kubeconfig", notName, nil,
		},
		{
			"--service-account-dir", "/sa",
			func(c Config) any { return c.Kubeconfig.Token() },
			"/sa/token", "/var/run/secrets/kubernetes.io/serviceaccount/token", notPath, nil,
		},
		{
			"--kube-ca-file", "/ca.pem",
			func(c Config) any { return c.Kubeconfig.CA() },
			"/ca.pem", "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt", nil, nil,
		},
		{"--skip-tls-verify", "true", func(c Config) any { return c.Kubeconfig.SkipTLSVerify }, true, false, notBool, nil},
		{
			"--kubernetes-service-protocol", "http",
			func(c Config) any { return c.Kubeconfig.Protocol },
			"http", "https",
			[]string{"ftp"},
			nil,
		},
		{
			"--kubernetes-service-host", "fd00::1",
			func(c Config) any { return c.Kubeconfig.Host },
			"fd00::1", "10.96.0.1",
			[]string{"a b", "https://a"},
			nil,
		},
		{
			"--kubernetes-service-port", "6443",
			func(c Config) any { return c.Kubeconfig.Port },
			uint16(6443), uint16(443), append(notPort, "0"), nil,
		},

		{
			"--cni-agent-run-dir", "/run/x",
			func(c Config) any { return c.Stanza.RunDir + " " + c.LogSocket + " " + c.Kubeconfig.Path },
			"/run/x /run/x/log.sock /run/x/istio-cni-kubeconfig",
			"/var/run/istio-cni /var/run/istio-cni/log.sock /var/run/istio-cni/istio-cni-kubeconfig", notPath, nil,
		},
		{"--run-dir-mode", "755", func(c Config) any { return c.RunDirMode }, mode(0o755), mode(0o700), notOctal, nil},
		{
			"--log-uds-address", "/run/l.sock",
			func(c Config) any { return c.LogSocket },
			"/run/l.sock", "/var/run/istio-cni/log.sock", append(notPath, "/"+strings.Repeat("x", 107)), nil,
		},
		{
			"--log-socket-mode", "0o666",
			func(c Config) any { return c.LogSocketMode },
			mode(0o666), mode(0o600), notOctal, nil,
		},
		template("--cni-event-address", "/run/e.sock", "__CNI_EVENT_ADDRESS__", "/var/run/istio-cni/pluginevent.sock"),
		{"--health-port", "8001", func(c Config) any { return c.HealthPort }, uint16(8001), uint16(8000), notPort, nil},
		{"--monitoring-port", "0", func(c Config) any { return c.MonitoringPort }, uint16(0), uint16(15014), notPort, nil},
		{
			"--ctrlz_port", "9877",
			func(c Config) any { return c.IntrospectionPort },
			uint16(9877), uint16(9876), notPort, nil,
		},
		{
			"--ctrlz_address", "::1",
			func(c Config) any { return c.IntrospectionAddress },
			"::1", "localhost",
			[]string{"0.0.0.0", "example.com"},
			nil,
		},

		{"--config-map", "other", func(c Config) any { return c.ConfigMap }, "other", "istio-cni-config", notObject, nil},
		{"--config-dir", "/etc/config", func(c Config) any { return c.ConfigDir }, "/etc/config", "", notPath, nil},
		{
			"--pod-namespace", "ns",
			func(c Config) any { return c.Namespace + " " + c.Stanza.AgentNamespace },
			"ns ns", "istio-system istio-system", append(notObject, "a.b"), nil,
		},
		{"--pod-name", "istio-cni-node-x", func(c Config) any { return c.PodName }, "istio-cni-node-x", "", notObject, nil},
		{"--daemonset-name", "d", func(c Config) any { return c.DaemonSet }, "d", "istio-cni-node", notObject, nil},
		{"--node-name", "n1.example.com", func(c Config) any { return c.NodeName }, "n1.example.com", "", notObject, nil},
		template("--kubernetes-node-name", "n2", "__KUBERNETES_NODE_NAME__", "host-1", notObject...),

		{
			"--log_output_level", "default:error,cni-plugin:debug",
			func(c Config) any { return c.Log },
			Log{Agent: pluginlog.LevelError, Plugin: pluginlog.LevelDebug},
			Log{},
			[]string{"loud", "cni-agent:", "info,"},
			nil,
		},
		{"--log_as_json", "true", func(c Config) any { return c.Log.JSON }, true, false, notBool, nil},
		template("--log-level", "trace", "__LOG_LEVEL__", "warn"),

		{"--repair-enabled", "true", func(c Config) any { return c.RepairEnabled }, true, true, notBool, nil},
		{"--repair-repair-pods", "true", func(c Config) any { return c.Repair.Switches.InPlace }, true, false, notBool, nil},
		{"--repair-delete-pods", "true", func(c Config) any { return c.Repair.Switches.Delete }, true, false, notBool, nil},
		{"--repair-label-pods", "true", func(c Config) any { return c.Repair.Switches.Label }, true, false, notBool, nil},
		{"--repair-evict", "true", func(c Config) any { return c.Repair.Evict }, true, false, notBool, nil},
		{
			"--netns-dirs", "/a,/b/",
			func(c Config) any { return c.NetnsDirs },
			[]string{"/a", "/b"},
			[]string{"/var/run/netns", "/var/run/docker/netns"},
			[]string{"a"},
			nil,
		},
		{"--host-proc", "/p", func(c Config) any { return c.HostProc }, "/p", "/proc", []string{"p"}, nil},
		{
			"--repair-broken-pod-label-key", "broken",
			func(c Config) any { return c.Repair.LabelKey },
			"broken", "cni.istio.io/uninitialized",
			[]string{"a b", "A/b", "/b", "a/"},
			nil,
		},
		{
			"--repair-broken-pod-label-value", "Yes_1.0",
			func(c Config) any { return c.Repair.LabelValue },
			"Yes_1.0", "true",
			[]string{"a b", "-a"},
			nil,
		},
		{"--repair-node-name", "n", func(c Config) any { return c.Repair.Node }, "n", "", notObject, nil},
		{
			"--repair-sidecar-annotation", "a.b/c",
			func(c Config) any { return c.Repair.Predicate.Annotation },
			"a.b/c", "sidecar.istio.io/status",
			[]string{"a b"},
			nil,
		},
		{
			"--repair-init-container-name", "v",
			func(c Config) any { return c.Repair.Predicate.Container },
			"v", "istio-validation", notObject, nil,
		},
		{
			"--repair-init-container-termination-message", "m m",
			func(c Config) any { return c.Repair.Predicate.Message },
			"m m", "", nil, nil,
		},
		{
			"--repair-init-container-exit-code", "55",
			func(c Config) any { return c.Repair.Predicate.ExitCode },
			55, 126,
			[]string{"256", "-1", "x"},
			nil,
		},
		{"--repair-label-selectors", "a=b", func(c Config) any { return c.Repair.LabelSelectors }, "a=b", "", []string{"a b"}, nil},
		{"--repair-field-selectors", "a=b", func(c Config) any { return c.Repair.FieldSelectors }, "a=b", "", []string{"a"}, nil},

		{name: "--repair-run-as-daemon", good: "true", bad: notBool},
		{name: "--ebpf-enabled", good: "true", bad: notBool},
		{name: "ALLOW_SWITCH_TO_HOST_NS", good: "true", bad: notBool},
		{name: "AMBIENT_DNS_CAPTURE", good: "true", bad: notBool},
		{name: "AMBIENT_IPV6", good: "true", bad: notBool},
		{name: "AMBIENT_RECONCILE_POD_RULES_ON_STARTUP", good: "true", bad: notBool},
		{name: "AMBIENT_DISABLE_SAFE_UPGRADE", good: "true", bad: notBool},
		{name: "AMBIENT_USE_SCOPED_XTABLES_LOCKING", good: "true", bad: notBool},
		{name: "AMBIENT_ENABLE_AWS_BRANCH_ENI_PROBE", good: "true", bad: notBool},
		{name: "HOST_PROBE_SNAT_IP", good: "169.254.7.127", bad: []string{"169.254.7"}},
		{name: "HOST_PROBE_SNAT_IPV6", good: "fd16::1", bad: []string{"fd16"}},
		{name: "--log_target", good: "stdout"},
		{name: "--log_caller", good: "all"},
		{name: "--log_stacktrace_level", good: "default:none"},
		{name: "--ztunnel-uds-address", good: "/x"},
		{name: "--log-uds-socket", good: "/x"},
		{name: "CURRENT_AGENT_VERSION", good: "1.27.0"},
		{name: "REVISION", good: "default"},
		{name: "SYSTEM_NAMESPACE", good: "istio-system"},
		{name: "GOMEMLIMIT", good: "100"},
		{name: "GOMAXPROCS", good: "2"},
	}
}

func (r row) check(t *testing.T, c Config, want any) {
	t.Helper()
	if r.of == nil {
		return
	}
	if diff := cmp.Diff(want, r.of(c)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestEverySettingHasARow(t *testing.T) {
	t.Parallel()
	var have, want []string
	for _, s := range settings(around(nil)) {
		have = append(have, s.String())
	}
	for _, r := range rows() {
		want = append(want, r.name)
	}
	slices.Sort(have)
	slices.Sort(want)
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("rows and settings differ, -rows +settings:\n%s", diff)
	}
}

// TestSettings takes each setting by flag, by each of its variables, by an empty variable, and with bad values.
func TestSettings(t *testing.T) {
	t.Parallel()
	all := settings(around(nil))
	for _, r := range rows() {
		s := all[slices.IndexFunc(all, func(s setting) bool { return s.String() == r.name })]
		t.Run(strings.TrimLeft(r.name, "-"), func(t *testing.T) {
			t.Parallel()
			if s.flag != "" {
				r.byFlag(t, s)
			}
			for _, name := range s.env {
				r.byVariable(t, name)
			}
		})
	}
}

func (r row) byFlag(t *testing.T, s setting) {
	t.Helper()
	r.check(t, mustLoad(t, cluster(), append(r.with, "--"+s.flag+"="+r.good)...), r.want)
	if s.arg != "" {
		r.check(t, mustLoad(t, cluster(), append(r.with, "--"+s.flag, r.good)...), r.want)
	}
	for _, bad := range r.bad {
		mustFail(t, cluster(), append(r.with, "--"+s.flag+"="+bad), fmt.Sprintf("flag --%s: value %s: ", s.flag, s.quote(bad)))
	}
	if len(s.env) == 0 {
		return
	}
	// The flag hides the variable, even a bad one.
	env := cluster()
	for _, name := range s.env {
		env[name] = "\x00"
	}
	r.check(t, mustLoad(t, env, append(r.with, "--"+s.flag+"="+r.good)...), r.want)
}

func (r row) byVariable(t *testing.T, name string) {
	t.Helper()
	r.check(t, mustLoad(t, cluster(name+"="+r.good), r.with...), r.want)
	if !strings.HasPrefix(name, "KUBERNETES_SERVICE_") && name != "POD_NAMESPACE" {
		r.check(t, mustLoad(t, cluster(name+"="), r.with...), r.def)
	}
	for _, bad := range r.bad {
		mustFail(t, cluster(name+"="+bad), r.with, fmt.Sprintf("environment variable %s: value ", name), ": ")
	}
}
