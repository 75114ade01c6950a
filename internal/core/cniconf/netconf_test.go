package cniconf

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/meshcni/istio-cni/internal/core/redirect"
)

func TestParse(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, stanza string
		change       func(want *NetConf) // of the defaults
	}{
		{
			"the stanza of the reference's installer today",
			`{"cniVersion":"1.0.0","name":"k8s-pod-network","type":"istio-cni","ipam":{},"dns":{},"plugin_log_level":"info",
				"cni_agent_run_dir":"/var/run/istio-cni","ambient_enabled":true,"enablement_selectors":[],
				"exclude_namespaces":["istio-system","kube-system"],"pod_namespace":"istio-system","native_nftables":false,
				"enable_ambient_detection_retry":false}`,
			func(c *NetConf) {
				c.CNIVersion, c.Name, c.Type, c.LogLevel = "1.0.0", "k8s-pod-network", "istio-cni", "info"
				c.AmbientEnabled, c.ExcludeNamespaces, c.AgentNamespace = true, []string{"istio-system", "kube-system"}, "istio-system"
				c.EnablementSelectors = []byte("[]")
			},
		},
		{
			"a stanza of 2020 with its nested object",
			`{"cniVersion":"0.3.1","name":"n","type":"istio-cni","log_level":"debug","log_uds_address":"/run/x/log.sock",
				"kubernetes":{"kubeconfig":"/etc/cni/net.d/ZZZ-istio-cni-kubeconfig","cni_bin_dir":"/opt/cni/bin",
				"exclude_namespaces":["kube-system"],"intercept_type":"iptables","node_name":"n1","k8s_api_root":"https://1.2.3.4"}}`,
			func(c *NetConf) {
				c.CNIVersion, c.Type, c.LogLevel, c.RunDir = "0.3.1", "istio-cni", "debug", "/run/x"
				c.Kubeconfig, c.ExcludeNamespaces = "/etc/cni/net.d/ZZZ-istio-cni-kubeconfig", []string{"kube-system"}
			},
		},
		{
			"flat keys win over nested ones",
			`{"name":"n","exclude_namespaces":["a"],"cni_agent_run_dir":"/r","kubernetes":{"kubeconfig":"/k","exclude_namespaces":["b"]}}`,
			func(c *NetConf) {
				c.RunDir, c.Kubeconfig, c.ExcludeNamespaces = "/r", "/r/istio-cni-kubeconfig", []string{"a"}
			},
		},
		{"nothing but a name, and null lists", `{"name":"n","exclude_namespaces":null,"prevResult":null}`, func(*NetConf) {}},
		{
			"this program's own settings",
			`{"name":"n","second_ip_family":"reject","api_timeout":"1500ms","force_iptables_binary":"legacy","prevResult": {"a":1},"sandboxed_runtimes":["a*"]}`,
			func(c *NetConf) {
				c.SecondFamily, c.APITimeout, c.ForceIptables, c.Backend = redirect.Reject, 1500*time.Millisecond, "legacy", redirect.Tools
				c.PrevResult, c.SandboxedRuntimes = []byte(`{"a":1}`), []string{"a*"}
			},
		},
		{
			"native tables, and annotations from the runtime",
			`{"name":"n","native_nftables":true,"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"a":"b"},"dns":{}}}`,
			func(c *NetConf) {
				c.Backend, c.Annotations, c.AnnotationsDelivered = redirect.Native, map[string]string{"a": "b"}, true
			},
		},
		{
			"a backend, and a pod without annotations as containerd passes it",
			`{"name":"n","backend":"netlink","runtimeConfig":{"io.kubernetes.cri.pod-annotations":null}}`,
			func(c *NetConf) { c.Backend, c.AnnotationsDelivered = redirect.Netlink, true },
		},
	} {
		want := NetConf{
			Name: "n", RunDir: DefaultRunDir, Kubeconfig: DefaultRunDir + "/istio-cni-kubeconfig",
			APITimeout: DefaultAPITimeout, SandboxedRuntimes: SandboxedRuntimes(), Backend: redirect.Auto,
		}
		tc.change(&want)
		got, err := Parse([]byte(tc.stanza))
		if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" || err != nil {
			t.Errorf("%s: error %v (-want +got):\n%s", tc.name, err, diff)
		}
	}
}

func TestParse_ProblemsByKey(t *testing.T) {
	t.Parallel()
	got, err := Parse([]byte(`{"name":"n","exclude_namespaces":"kube-system","second_ip_family":"drop","api_timeout":"0s",
		"force_iptables_binary":"nftables","ambient_enabled":"yes","plugin_log_level":7,"pod_namespace":"istio-system",
		"sandboxed_runtimes":["a","[b"]}`))
	if err != nil || got.AgentNamespace != "istio-system" || got.Problems == nil {
		t.Fatalf("error %v; a good key is lost beside bad ones, or no problems: %+v", err, got)
	}
	for _, want := range []string{
		`network configuration key "exclude_namespaces": value "kube-system": want a list of strings`,
		`network configuration key "second_ip_family": value "drop": want bypass, capture or reject`,
		`network configuration key "api_timeout": value "0s": want a duration like "10s"`,
		`network configuration key "force_iptables_binary": value "nftables": want legacy, nft or nothing`,
		`network configuration key "ambient_enabled": value "yes": want true or false`,
		`network configuration key "sandboxed_runtimes": value ["a","[b"]: syntax error in pattern`,
		`network configuration key "plugin_log_level": value 7: want a string`,
	} {
		if !strings.Contains(got.Problems.Error(), want) {
			t.Errorf("problems lack %q:\n%v", want, got.Problems)
		}
	}
}

func TestParse_ContradictingBackends(t *testing.T) {
	t.Parallel()
	for stanza, want := range map[string]string{
		`{"name":"n","backend":"magic"}`:                                           `key "backend": value "magic": want auto, netlink, native or iptables`,
		`{"name":"n","backend":"netlink","native_nftables":true}`:                  "native nftables and the backend netlink",
		`{"name":"n","backend":"netlink","force_iptables_binary":"nft"}`:           "a forced variant of the iptables programs (nft)",
		`{"name":"n","backend":"native","native_nftables":true,"api_timeout":"x"}`: `key "api_timeout"`,
	} {
		got, err := Parse([]byte(stanza))
		if err != nil || got.Problems == nil || !strings.Contains(got.Problems.Error(), want) {
			t.Errorf("%s: %v, problems %v, want %q", stanza, err, got.Problems, want)
		}
	}
}

func TestParse_Refusals(t *testing.T) {
	t.Parallel()
	for _, stanza := range []string{``, `null garbage`, `[]`, `"x"`, `{"name":7}`, `{"cniVersion":{}}`, `{"name":"n"`} {
		if _, err := Parse([]byte(stanza)); err == nil || !strings.HasPrefix(err.Error(), "parsing network configuration: ") {
			t.Errorf("stanza %q: error %v", stanza, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"name":"n","exclude_namespaces":["a"],"api_timeout":"1s"}`))
	f.Add([]byte(`{"kubernetes":{"kubeconfig":"/k"},"log_uds_address":"/a/b"}`))
	f.Fuzz(func(t *testing.T, stanza []byte) {
		c, err := Parse(stanza)
		if err == nil && (c.Kubeconfig == "" || c.APITimeout <= 0) {
			t.Errorf("stanza %q gives no kubeconfig or no budget: %+v", stanza, c)
		}
	})
}
