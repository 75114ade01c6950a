package nodetest

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest" //nolint:depguard // test support of both roles
)

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

// Loaded is the configuration that the runtime loads from its directory.
type Loaded struct {
	File string
	*libcni.NetworkConfigList
}

// Types returns the plugins' types in the order of their execution.
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
	single, err := libcni.ConfFromFile(file) //nolint:staticcheck // as in runtimes
	if err != nil {
		return nil, err
	}
	if single.Network.Type == "" {
		return nil, errors.New("no type") //nolint:err113 // go-cni's own check
	}
	return libcni.ConfListFromConf(single) //nolint:staticcheck // as in runtimes
}

// NewPod creates a sandbox and adds the pod to the API server.
func (n *Node) NewPod(namespace, name string, describe func(*kubetest.Pod)) chaintest.Pod {
	n.tb.Helper()
	return chaintest.NewPod(n.tb, n.API, namespace, name, describe)
}

// runtimeDo runs do as the host's runtime.
func (n *Node) runtimeDo(do func(context.Context, *libcni.CNIConfig) error) error {
	var stderr agenttest.Buffer
	starter := &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: &stderr}, PluginDecoder: version.PluginDecoder{}}
	cni := libcni.NewCNIConfigWithCacheDir([]string{BinDir, chaintest.SystemPlugins}, filepath.Dir(CacheDir), starter)
	err := n.as(n.host, func() error { return do(context.WithoutCancel(n.tb.Context()), cni) })
	if err != nil && stderr.String() != "" {
		err = fmt.Errorf("%w; plugins said: %s", err, stderr.String())
	}
	return err
}

// Add loads the configuration and runs it for a pod.
func (n *Node) Add(p chaintest.Pod) (Loaded, error) {
	list, err := n.Load()
	if err != nil {
		return list, err
	}
	return list, n.runtimeDo(func(ctx context.Context, cni *libcni.CNIConfig) error {
		_, err := cni.AddNetworkList(ctx, list.NetworkConfigList, p.Runtime())
		return err
	})
}

// Del runs the configuration of the pod's ADD backwards, from libcni's cache, regardless of the directory's present content.
func (n *Node) Del(p chaintest.Pod, network string) error {
	return n.runtimeDo(func(ctx context.Context, cni *libcni.CNIConfig) error {
		named := &libcni.NetworkConfigList{Name: network}
		text, conf, err := cni.GetNetworkListCachedConfig(named, p.Runtime())
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
