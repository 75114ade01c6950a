package cluster

import (
	"bytes"
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	core "k8s.io/api/core/v1"
)

// nodeTools returns the programs that tier Node needs, with the packages that provide them.
func nodeTools() map[string]string {
	return map[string]string{
		"containerd": "containerd", "containerd-shim-runc-v2": "containerd", "ctr": "containerd", "runc": "runc",
		"iptables": "iptables", "nft": "nftables", "conntrack": "conntrack", "mount": "mount",
		referencePlugins + "/bridge": "containernetworking-plugins",
	}
}

const (
	referencePlugins = "/usr/lib/cni"
	runtimeSocket    = "/run/containerd/containerd.sock"
)

var (
	//go:embed containerd.toml
	containerdConfig string
	//go:embed kubelet.yaml
	kubeletConfig string
	//go:embed conflist.json
	primaryConflist string
)

// startNode starts containerd and the kubelet and does not wait for the node.
func (m *Machine) startNode(ctx context.Context) error {
	if err := m.launch(Containerd, m.containerd()...); err != nil {
		return err
	}
	ctr := func(args ...string) error {
		return m.do(ctx, "ctr", append([]string{"--address", runtimeSocket}, args...)...)
	}
	err := Until(ctx, "containerd", func() (bool, error) {
		if err := m.alive(Containerd); err != nil {
			return false, err
		}
		return ctr("version") == nil, nil
	})
	if err != nil {
		return err
	}
	for len(m.images) > 0 { // containerd keeps them on disk
		if err := ctr("--namespace", "k8s.io", "image", "import", m.images[0]); err != nil {
			return err
		}
		m.images = m.images[1:]
	}
	return m.begin(Kubelet, "--config="+m.run.path("state", "kubelet.yaml"), "--hostname-override="+m.name,
		"--kubeconfig="+filepath.Join(m.run.pki(), "kubelet.kubeconfig"), "--node-ip="+m.nodeIP(), "--v=2",
		"--container-runtime-endpoint=unix://"+runtimeSocket) // the field of the configuration is of Kubernetes 1.27
}

// Recorders is the directory where containerd 2 looks for a CNI plugin first: a program there can record the calls of the plugin of
// the same name in /opt/cni/bin.
const Recorders = "/opt/cni/recorders"

// containerd returns the command of containerd, which finds its shim and runc in PATH.
func (m *Machine) containerd() []string {
	config := []string{"--config", m.run.path("state", "containerd.toml")}
	dir := m.cluster.options.Runtime
	if dir == "" {
		return append([]string{"/usr/bin/containerd"}, config...)
	}
	path := strings.Replace(environment()[0], "=", "="+dir+":", 1)
	return append([]string{"/usr/bin/env", path, filepath.Join(dir, "containerd")}, config...)
}

// configureNode writes the configuration of containerd and kubelet, and the CNI configuration with its plugins.
func (m *Machine) configureNode(ctx context.Context) error {
	taints, err := json.Marshal(append([]core.Taint{}, m.cluster.options.RegisterWithTaints...))
	if err != nil {
		return fmt.Errorf("writing taints: %w", err)
	}
	values := map[string]string{
		"State": m.run.state(), "PKI": m.run.pki(), "Pause": m.cluster.options.Pause, "Socket": runtimeSocket, "PodCIDR": m.podCIDR(),
		"NetDir": m.NetDir(), "BinDir": m.BinDir(), "Taints": string(taints), "Runtime": m.cluster.options.Runtime, "Recorders": Recorders,
	}
	values["Ranges"], values["Routes"] = m.ranges()
	files := map[string]string{
		m.run.path("state", "containerd.toml"): containerdConfig,
		m.run.path("state", "kubelet.yaml"):    kubeletConfig,
	}
	for _, dir := range []string{m.NetDir(), m.BinDir()} {
		if err = os.MkdirAll(m.NodeFile(dir), 0o755); err != nil {
			return fmt.Errorf("making a directory: %w", err)
		}
	}
	networks := m.cluster.options.Networks
	if networks == nil {
		networks = map[string]string{PrimaryNetwork: primaryConflist}
	}
	for name, text := range networks {
		files[m.networkFile(name)] = text
	}
	for name, text := range files {
		if err = writeTemplate(name, text, values); err != nil {
			return err
		}
	}
	if err = os.MkdirAll(m.run.path("state", "manifests"), 0o755); err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	plugins := referencePlugins
	if m.cluster.options.Runtime != "" {
		plugins = filepath.Join(m.cluster.options.Runtime, "cni")
	}
	return m.do(ctx, "sh", "-c", "cp "+plugins+"/* "+m.BinDir())
}

// writeTemplate executes a template and writes the result to a file.
func writeTemplate(name, text string, values map[string]string) error {
	var out bytes.Buffer
	parsed, err := template.New(filepath.Base(name)).Option("missingkey=error").Parse(text)
	if err == nil {
		err = parsed.Execute(&out, values)
	}
	if err == nil {
		err = os.WriteFile(name, out.Bytes(), 0o644)
	}
	if err != nil {
		return fmt.Errorf("writing %q: %w", name, err)
	}
	return nil
}

// ranges returns the address ranges and routes of pods, in the format of host-local.
func (m *Machine) ranges() (ranges, routes string) {
	range4, range6 := `[{"subnet": "`+m.podCIDR()+`"}]`, `[{"subnet": "`+podCIDR6+`"}]`
	const route4, route6 = `{"dst": "0.0.0.0/0"}`, `{"dst": "::/0"}`
	switch m.cluster.options.Families {
	case IPv6:
		return range6, route6
	case DualStack:
		return range4 + ", " + range6, route4 + ", " + route6
	case IPv4:
	}
	return range4, route4
}

// PrimaryNetwork is the file name of the default CNI configuration, without Options.Networks.
const PrimaryNetwork = "10-e2e.conflist"

// NetDir is where the node's containerd looks for CNI configurations, BinDir where it looks for plugins.
func (m *Machine) NetDir() string { return cmp.Or(m.cluster.options.NetDir, "/etc/cni/net.d") }

// BinDir is described with NetDir.
func (m *Machine) BinDir() string { return cmp.Or(m.cluster.options.BinDir, "/opt/cni/bin") }

// networkFile returns the path, seen from the test, of a file in the node's NetDir.
func (m *Machine) networkFile(name string) string { return m.NodeFile(filepath.Join(m.NetDir(), name)) }

// PutNetwork writes a CNI configuration by an atomic rename, as an installer does. containerd uses the first one by
// name.
func (m *Machine) PutNetwork(name string, text []byte) error {
	path := m.networkFile(name)
	temporary := path + ".new"
	if err := os.WriteFile(temporary, text, 0o644); err != nil {
		return fmt.Errorf("writing a network configuration: %w", err)
	}
	if err := os.Rename(temporary, path); err != nil {
		return fmt.Errorf("writing a network configuration: %w", err)
	}
	return nil
}

// NodeFile returns the path, seen from the test, of a file of the node below /etc/cni, /opt/cni, /var/lib/cni,
// /var/lib/kubelet or /var/log.
func (m *Machine) NodeFile(path string) string {
	return m.run.path("state", "root", strings.TrimPrefix(path, "/"))
}
