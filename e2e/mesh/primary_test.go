package mesh

import (
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

const bridge = `"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
  "ipam": {"type": "host-local", "ranges": [{{.Ranges}}], "routes": [{{.Routes}}], "dataDir": "/run/cni-ipam"}`

// primary is a CNI configuration of a node, with the values to install the agent.
type primary struct {
	name     string
	networks map[string]string
	values   string
	// netDir and binDir are where containerd looks, if not in the default directories.
	netDir, binDir string
	// before, if set, runs on the node before it has pods.
	before func(*scenario)
	// wantFiles are the files in /etc/cni/net.d while the agent is installed; afterwards the original files are
	// restored.
	wantFiles []string
}

func primaries() []primary {
	conflist := map[string]string{"10-e2e.conflist": `{"cniVersion": "1.0.0", "name": "e2e", "plugins": [{` + bridge + `}]}`}
	return []primary{
		{
			name: "a single plugin", values: "{}", wantFiles: []string{"10-bridge.conf.istio-cni-saved", "10-bridge.conflist"},
			networks: map[string]string{"10-bridge.conf": `{"cniVersion": "0.3.1", "name": "single", "aNumber": 12345678901234567890, ` + bridge + "}\n"},
		},
		{
			name: "a list and others after it", values: "{}", wantFiles: []string{"10-e2e.conflist", "87-podman.conflist"},
			networks: merged(conflist, map[string]string{"87-podman.conflist": `{"cniVersion": "0.4.0", "name": "podman", "plugins": [{"type": "loopback"}]}`}),
		},
		{
			name: "delegates of flannel", values: "{}", before: (*scenario).flannel, wantFiles: []string{"10-flannel.conflist"},
			networks: map[string]string{"10-flannel.conflist": `{"name": "cbr0", "cniVersion": "0.3.1", "plugins": [
  {"type": "flannel", "dataDir": "/run/cni-flannel", "delegate": {"hairpinMode": true, "isDefaultGateway": true, "ipMasq": true}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}`},
		},
		{
			name: "a single plugin that delegates", values: "{}", before: (*scenario).flannel,
			wantFiles: []string{"10-flannel.conf.istio-cni-saved", "10-flannel.conflist"},
			networks: map[string]string{"10-flannel.conf": `{"name": "cbr0", "cniVersion": "0.3.1", "type": "flannel",
  "dataDir": "/run/cni-flannel", "delegate": {"isDefaultGateway": true, "ipMasq": true}}`},
		},
		{
			name: "directories that only containerd names", values: "{}", networks: conflist, wantFiles: []string{"10-e2e.conflist"},
			netDir: "/etc/cni/elsewhere", binDir: "/opt/cni/elsewhere",
		},
		{
			name: "a file of our own", values: "{chained: true, istioOwnedCNIConfig: true}", networks: conflist,
			wantFiles: []string{"02-istio-cni.conflist", "10-e2e.conflist"},
		},
		{
			name: "the mode that suits the runtime", values: "{chained: true, confMode: auto}", networks: conflist, wantFiles: []string{"10-e2e.conflist"},
		},
		{
			name: "programs of the node write the rules", values: "{backend: iptables}", networks: conflist, wantFiles: []string{"10-e2e.conflist"},
		},
		{
			name: "tables of nftables", values: "{global: {nativeNftables: true}}", networks: conflist, wantFiles: []string{"10-e2e.conflist"},
		},
	}
}

func merged(a, b map[string]string) map[string]string {
	all := maps.Clone(a)
	maps.Copy(all, b)
	return all
}

// TestPrimaryNetworks installs the agent on nodes with different CNI configurations, checks that a pod is redirected,
// and that uninstalling restores the files.
func TestPrimaryNetworks(t *testing.T) {
	for _, p := range primaries() {
		t.Run(p.name, func(t *testing.T) {
			s := newScenario(t, cluster.Options{Networks: p.networks, NetDir: p.netDir, BinDir: p.binDir})
			if p.before != nil {
				p.before(s)
			}
			s.UntilNodeReady()
			before := s.Networks()
			objects := s.Install(p.values)
			s.Step("the agent is ready; files: %q", s.NetworkFiles())
			if got := s.NetworkFiles(); !slices.Equal(got, p.wantFiles) {
				t.Errorf("files %q, want %q", got, p.wantFiles)
			}
			first := s.NetworkFile(p.wantFiles[slices.IndexFunc(p.wantFiles, func(name string) bool { return strings.HasSuffix(name, "list") })])
			if n := strings.Count(first, `"type": "istio-cni"`) + strings.Count(first, `"type":"istio-cni"`); n != 1 {
				t.Errorf("%d entries of istio-cni in %s", n, first)
			}
			if dirs := s.programDirs(); !slices.Equal(s.programs(), dirs) {
				t.Errorf("the plugin is in %q, want it in %q", s.programs(), dirs)
			}
			s.checkCapture()
			s.Uninstall(objects)
			s.RemoveAll()
			if after := s.Networks(); !maps.Equal(before, after) {
				t.Errorf("files were %q\nand are now %q", before, after)
			}
			s.Pod("later", lab.Plain())
			s.UntilReady("later")
			s.Step("the agent is uninstalled, the files are as before, and pods start and end")
		})
	}
}

// programDirs are the directories of the node that are to have the plugin: the default one, and the runtime's.
func (s *scenario) programDirs() []string {
	return slices.Compact([]string{"/opt/cni/bin", s.BinDir()})
}

// programs are the directories of the node that have the plugin.
func (s *scenario) programs() (dirs []string) {
	s.Helper()
	for _, dir := range s.programDirs() {
		if _, err := os.Stat(s.NodeFile(dir + "/istio-cni")); err == nil {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// checkCapture checks that an injected pod is redirected from its start, and a plain pod is not.
func (s *scenario) checkCapture() {
	s.Helper()
	s.Pod("captured", lab.Injected())
	s.Pod("plain", lab.Plain())
	s.UntilReady("captured", "plain")
	if n := lab.Restarts(s.Get(lab.App, "captured")); n != 0 {
		s.Errorf("%d container restarts", n)
	}
	s.Flows("captured")
	if flow := s.Flow("plain", ""); flow != lab.Untouched {
		s.Errorf("plain: traffic by a proxy: %+v", flow)
	}
	s.Step("an injected pod is redirected, a plain pod is not")
}

// flannel installs the flannel plugin and writes the subnet file of its daemon.
func (s *scenario) flannel() {
	s.Helper()
	s.Plugin("flannel", s.Flannel)
	s.OnNode("sh", "-c", `mkdir -p /run/flannel && printf 'FLANNEL_NETWORK=10.88.0.0/16\nFLANNEL_SUBNET=10.88.0.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n' >/run/flannel/subnet.env`)
}

// TestNoNetworkYet: the agent starts before the node has a CNI configuration. It changes no file until there is one,
// and the first injected pod is redirected.
func TestNoNetworkYet(t *testing.T) {
	for _, hostNetwork := range []bool{false, true} {
		name, values := "agent in the network of pods", "{}"
		if hostNetwork {
			name, values = "agent on the node's network", "{hostNetwork: true, healthPort: 18000, monitoringPort: 25014}"
		}
		t.Run(name, func(t *testing.T) {
			s := newScenario(t, cluster.Options{Networks: map[string]string{}})
			s.Until("the node to be there", func() bool { return s.NodeIs(core.ConditionFalse) })
			s.Apply(s.Chart(values))
			s.Pod("first", lab.Injected())
			if hostNetwork {
				s.Until("the agent to run", func() bool { a := s.Agent(); return a != nil && a.Status.Phase == core.PodRunning })
				s.Until("the agent to log that it waits for a configuration", func() bool {
					return strings.Contains(s.Output(lab.Mesh, s.Agent().Name, "install-cni", false), "waiting for a valid CNI configuration")
				})
				if lab.Ready(s.Agent()) {
					t.Error("the agent is ready without a CNI configuration")
				}
			}
			if files := s.NetworkFiles(); len(files) != 0 || s.NodeIs(core.ConditionTrue) {
				t.Errorf("files %q, node ready: %t", files, s.NodeIs(core.ConditionTrue))
			}
			s.Step("the agent waits; the CNI configuration is written")
			s.Must(s.PutNetwork("10-e2e.conflist", []byte(strings.NewReplacer("{{.Ranges}}", `[{"subnet": "10.88.0.0/24"}]`, "{{.Routes}}", `{"dst": "0.0.0.0/0"}`).
				Replace(`{"cniVersion": "1.0.0", "name": "e2e", "plugins": [{`+bridge+`}]}`))))
			s.UntilAgentReady()
			s.UntilNodeReady()
			s.UntilReady("first")
			s.Flows("first")
			s.Step("node, agent and the first pod are ready; its validation had %d restarts, repaired: %t",
				s.Get(lab.App, "first").Status.InitContainerStatuses[0].RestartCount, s.Event("first", "RepairBrokenPod", ""))
			s.checkCapture()
		})
	}
}

// TestCNINetworkConfigTemplate: the plugin's configuration is a template in a ConfigMap, as in Istio's first
// documents, without the chart.
func TestCNINetworkConfigTemplate(t *testing.T) {
	s := newScenario(t, cluster.Options{})
	s.UntilNodeReady()
	text, err := os.ReadFile("../../manifests/examples/network-config.yaml")
	s.Must(err)
	before := s.Networks()
	objects := s.Parse(text)
	s.Apply(objects)
	ready := func() bool {
		set, err := s.Client().AppsV1().DaemonSets("kube-system").Get(t.Context(), "istio-cni-node", meta.GetOptions{})
		s.Must(err)
		return set.Status.NumberReady == 1
	}
	s.Until("the agent", ready)
	s.checkCapture()
	s.Delete(objects)
	s.Until("the network to be as before", func() bool { return maps.Equal(before, s.Networks()) })
	s.RemoveAll()
}
