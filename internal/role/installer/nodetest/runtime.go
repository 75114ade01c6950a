package nodetest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
)

// systemPlugins is where Debian keeps the reference plugins.
const systemPlugins = "/usr/lib/cni"

// BridgeList is a configuration of a primary CNI that works here, as a list.
const BridgeList = `{
  "cniVersion": "1.0.0",
  "name": "pods",
  "plugins": [
    {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "mtu": 1400.0,
      "ipam": {"type": "host-local", "subnet": "10.77.0.0/16", "routes": [{"dst": "0.0.0.0/0"}]}},
    {"type": "tuning", "sysctl": {}, "x-note": 12345678901234567890}
  ]
}
`

// BridgeSingle is one of a single plugin.
const BridgeSingle = `{"cniVersion": "0.4.0", "name": "pods", "type": "bridge",
	"bridge": "cni0", "isGateway": true, "ipMasq": false,
	"ipam": {"type": "host-local", "subnet": "10.77.0.0/16", "routes": [{"dst": "0.0.0.0/0"}]}}
`

// Loaded is what the runtime takes from its directory.
type Loaded struct {
	File string
	*libcni.NetworkConfigList
}

// Types are the plugins in the order in which they run.
func (l Loaded) Types() []string {
	types := make([]string, len(l.Plugins))
	for i, p := range l.Plugins {
		types[i] = p.Network.Type
	}
	return types
}

// Load loads the configuration as containerd does (go-cni, opts.go, with one configuration): the first file in the order
// of names decides, and it must be valid.
func (n *Node) Load() (Loaded, error) {
	dir := n.Path(NetDir)
	files, err := libcni.ConfFiles(dir, []string{".conf", ".conflist", ".json"})
	if err != nil {
		return Loaded{}, err
	}
	if len(files) == 0 {
		return Loaded{}, libcni.NoConfigsFoundError{Dir: dir}
	}
	slices.Sort(files)
	list, err := load(files[0])
	if err == nil && len(list.Plugins) == 0 {
		err = errors.New("no plugins") //nolint:err113 // go-cni's own check
	}
	if err != nil {
		return Loaded{}, fmt.Errorf("loading %q: %w", filepath.Base(files[0]), err)
	}
	return Loaded{filepath.Base(files[0]), list}, nil
}

func load(file string) (*libcni.NetworkConfigList, error) {
	if filepath.Ext(file) == ".conflist" {
		return libcni.ConfListFromFile(file)
	}
	single, err := libcni.ConfFromFile(file) //nolint:staticcheck // what runtimes call
	if err != nil {
		return nil, err
	}
	if single.Network.Type == "" {
		return nil, errors.New("no type") //nolint:err113 // go-cni's own check
	}
	return libcni.ConfListFromConf(single) //nolint:staticcheck // what runtimes call
}

// Pod is a sandbox.
type Pod struct {
	Namespace, Name, UID string
	// Netns names its network namespace for the test, path does for the host.
	Netns, path string
	id          string
}

// NewPod makes a sandbox, with a file in the host's directory of namespaces as runtimes have it, and tells the API server
// of the pod.
func (n *Node) NewPod(namespace, name string, describe func(*kubetest.Pod)) Pod {
	n.tb.Helper()
	number := n.pods.Add(1)
	p := Pod{
		Namespace: namespace, Name: name, UID: fmt.Sprintf("00000000-0000-4000-8000-%012d", number),
		Netns: netnstest.New(n.tb), path: "/var" + netnsDir + "/cni-" + strconv.FormatInt(number, 10),
		id: fmt.Sprintf("sandbox%d", number),
	}
	netnstest.Run(n.tb, p.Netns, "ip", "link", "set", "lo", "up")
	file := n.Path(strings.TrimPrefix(p.path, "/var"))
	if err := touch(file); err != nil {
		n.tb.Fatal(err)
	}
	err := n.as("", func() error { return unix.Mount(p.Netns, file, "", unix.MS_BIND, "") })
	if err != nil {
		n.tb.Fatalf("mounting a pod's network namespace: %v", err)
	}
	pod := kubetest.Pod{Namespace: namespace, Name: name, UID: p.UID}
	describe(&pod)
	n.API.SetPod(pod)
	return p
}

// End removes the pod's namespace from the host, as the runtime does after DEL.
func (n *Node) End(p Pod) {
	n.tb.Helper()
	file := n.Path(strings.TrimPrefix(p.path, "/var"))
	err := n.as("", func() error { return unix.Unmount(file, unix.MNT_DETACH) })
	if err = errors.Join(err, os.Remove(file)); err != nil {
		n.tb.Fatalf("ending a pod: %v", err)
	}
}

// Captured reports whether the pod's traffic goes to its sidecar.
func (p Pod) Captured(n *Node) bool {
	n.tb.Helper()
	return strings.Contains(netnstest.Run(n.tb, p.Netns, "iptables-save"), "-A OUTPUT -j ISTIO_OUTPUT")
}

func (p Pod) runtime() *libcni.RuntimeConf {
	return &libcni.RuntimeConf{
		ContainerID: p.id, NetNS: p.path, IfName: "eth0",
		Args: [][2]string{
			{"IgnoreUnknown", "1"},
			{"K8S_POD_NAMESPACE", p.Namespace},
			{"K8S_POD_NAME", p.Name},
			{"K8S_POD_INFRA_CONTAINER_ID", p.id},
			{"K8S_POD_UID", p.UID},
		},
	}
}

// runtimeDo does something as the host's runtime.
func (n *Node) runtimeDo(do func(context.Context, *libcni.CNIConfig) error) error {
	var stderr record
	starter := &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: &stderr}, PluginDecoder: version.PluginDecoder{}}
	cni := libcni.NewCNIConfigWithCacheDir([]string{BinDir, systemPlugins}, filepath.Dir(CacheDir), starter)
	err := n.as(n.host, func() error { return do(context.WithoutCancel(n.tb.Context()), cni) })
	if err != nil && stderr.String() != "" {
		err = fmt.Errorf("%w; plugins said: %s", err, stderr.String())
	}
	return err
}

// Add loads the configuration and runs it for a pod.
func (n *Node) Add(p Pod) (Loaded, error) {
	list, err := n.Load()
	if err != nil {
		return list, err
	}
	return list, n.runtimeDo(func(ctx context.Context, cni *libcni.CNIConfig) error {
		_, err := cni.AddNetworkList(ctx, list.NetworkConfigList, p.runtime())
		return err
	})
}

// Del runs the configuration that the pod was made with backwards, from libcni's cache, whatever the directory holds now.
func (n *Node) Del(p Pod, network string) error {
	return n.runtimeDo(func(ctx context.Context, cni *libcni.CNIConfig) error {
		named := &libcni.NetworkConfigList{Name: network}
		text, conf, err := cni.GetNetworkListCachedConfig(named, p.runtime())
		if err != nil {
			return err
		}
		list, err := libcni.NetworkConfFromBytes(text)
		if err != nil {
			return err
		}
		return cni.DelNetworkList(ctx, list, conf)
	})
}
