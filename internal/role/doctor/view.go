package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/racerepair"
	"github.com/meshcni/istio-cni/internal/agent/runtimedirs"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/node/runtimeconf"
)

// view has the inputs of the checks, several of which share them.
type view struct {
	config

	// root is this process's path of the node's file system, "" if it is not accessible.
	root string
	// proc is this process's procfs.
	proc string
	// searchPath is $PATH, for iptables.
	searchPath string
	// api has this process's identity or, without one, the agent's; agent has the agent's. noAPI and noAgent are the reasons for nil.
	api, agent     *kube.Client
	noAPI, noAgent error
	kubeconfig     string
	// features are the agent's if isAgent is set, else they come from this environment and the defaults.
	features features
	isAgent  bool
	runtime  func() runtimeconf.Config
	network  func() network
	cilium   func() cilium
	agentErr func() error
}

// features are the agent's settings that determine its rights, from its environment.
type features struct {
	// observe is set for an agent beside another plugin's agent.
	observe           bool
	repairEnabled     bool
	ambient           bool
	ambientPods       string
	repair            racerepair.Settings
	audit             auditor.Settings
	configMap, daemon string
}

func (f *features) rows() []settings.Setting {
	rows := []settings.Setting{
		{Name: "cni-observe", Default: "false", Value: settings.Bool(&f.observe)},
		{Name: "ambient-enabled", Default: "false", Value: settings.Bool(&f.ambient)},
		{Name: "ambient-pods", Value: settings.Text(&f.ambientPods, nil)},
		{Name: "repair-enabled", Default: "true", Value: settings.Bool(&f.repairEnabled)},
		{Name: "config-map", Default: "istio-cni-config", Value: settings.Text(&f.configMap, nil)},
		{Name: "daemonset-name", Default: "istio-cni-node", Value: settings.Text(&f.daemon, nil)},
	}
	for _, row := range racerepair.Rows(&f.repair) {
		row.Name = "repair-" + row.Name
		rows = append(rows, row)
	}
	return settings.Named("", append(rows, auditor.Rows(&f.audit)...)...)
}

func newView(c config, getenv func(string) (string, bool)) *view {
	v := &view{config: c, proc: "/proc"}
	v.readFeatures(getenv)
	v.searchPath, _ = getenv("PATH")
	host, _ := getenv("KUBERNETES_SERVICE_HOST")
	port, _ := getenv("KUBERNETES_SERVICE_PORT")
	v.root = c.findRoot(host != "")
	if v.features.observe && v.HostRoot == "" { // the observed directories are another agent's, and not mounted
		v.HostRoot = v.root
	}
	v.RunDir = v.seen(c.RunDir)
	v.readDirs()
	if v.Node == "" {
		v.Node, _ = os.Hostname()
	}
	v.clients(kube.Config{
		Server: kube.Address{Host: host, Port: port}, TokenFile: filepath.Join(c.ServiceAccount, "token"), CAFile: filepath.Join(c.ServiceAccount, "ca.crt"),
	})
	v.runtime = sync.OnceValue(func() runtimeconf.Config { return runtimeconf.Read(v.root) })
	v.network = sync.OnceValue(func() network {
		if v.root != "" && v.runtime().Runtime != "" {
			return v.readNetwork(v.below(v.runtime().ConfDir))
		}
		return v.readNetwork(v.seen(v.NetDir))
	})
	v.cilium = sync.OnceValue(v.readCilium)
	v.agentErr = sync.OnceValue(v.dialAgent)
	return v
}

// readDirs replaces the directories of the agent's settings with the directories that the agent has found on the node.
func (v *view) readDirs() {
	recorded, _ := runtimedirs.ReadRecord(v.RunDir) // a damaged record is in the agent's log
	if len(recorded) == 0 || v.root == "" {
		return
	}
	v.NetDir, v.BinDirs = recorded[0].Net, recorded[0].Bins
	if v.HostRoot == "" && v.root != "/" { // paths are in the agent's container
		v.NetDir = filepath.Join(v.root, v.NetDir)
		for i, dir := range v.BinDirs {
			v.BinDirs[i] = filepath.Join(v.root, dir)
		}
	}
}

// readFeatures reads the agent's settings: in its container they are in the environment and in the arguments of the first
// process. It accepts other flags of the agent, and leaves the report of invalid values to the agent.
func (v *view) readFeatures(getenv func(string) (string, bool)) {
	text, _, _ := hostfs.ReadFile(v.proc+"/1/cmdline", maxConf) // NUL-terminated arguments, proc_pid_cmdline(5)
	args := strings.Split(strings.TrimSuffix(string(text), "\x00"), "\x00")
	switch name := filepath.Base(args[0]); {
	case name == "install-cni":
		args, v.isAgent = args[1:], true
	case name == cniconf.PluginType && len(args) > 1 && args[1] == "install":
		args, v.isAgent = args[2:], true
	default:
		args = nil
	}
	rows := v.features.rows()
	if in, err := settings.Parse(rows, args, getenv); err == nil {
		_, _ = in.Read(rows)
	}
	f := &v.features
	f.ambient = f.ambient && f.ambientPods != "ignore"
	f.repairEnabled, f.audit.PodCondition = f.repairEnabled && !f.observe, f.audit.PodCondition && !f.observe
}

// findRoot returns the path of the node's file system, "" if it is not accessible. It is the root directory of the node's first process.
func (c *config) findRoot(container bool) string {
	if c.HostRoot != "" {
		return c.HostRoot
	}
	if !container {
		return "/"
	}
	return hostpath.Whole("/host", "/host/proc/1/root")
}

// below returns this process's path of a path of the node.
func (v *view) below(path string) string {
	seen, err := hostpath.Resolve(v.root, path)
	if err != nil {
		return filepath.Join(v.root, path)
	}
	return seen
}

// seen returns this process's path of a path of the agent's container. On a node, or with its root mounted, that is the node's path:
// the container's path without /host.
func (v *view) seen(path string) string {
	if v.HostRoot == "" && v.root != "/" {
		return path
	}
	return v.below(strings.TrimPrefix(path, "/host"))
}

// shown returns the node's path for messages. A path that only the container has stays unchanged.
func (v *view) shown(path string) string {
	if rest, below := strings.CutPrefix(path, strings.TrimSuffix(v.root, "/")+"/"); below {
		return "/" + rest
	}
	return path
}

// installs names the agent's directories.
func (v *view) installs() string {
	dirs := []string{v.shown(v.seen(v.NetDir))}
	for _, dir := range v.BinDirs {
		dirs = append(dirs, v.shown(v.seen(dir)))
	}
	text := dirs[0] + " and " + strings.Join(dirs[1:], ", ")
	if v.HostRoot == "" && v.root != "/" {
		text += ", as mounted in its container"
	}
	return text
}

const maxRequest = 5 * time.Second

// clients creates the clients of the API server.
func (v *view) clients(account kube.Config) {
	v.kubeconfig = filepath.Join(v.RunDir, cniconf.KubeconfigName)
	v.agent, v.noAgent = kube.NewClient(kube.Config{Kubeconfig: v.kubeconfig, Timeout: maxRequest})
	if errors.Is(v.noAgent, fs.ErrNotExist) {
		v.noAgent = fmt.Errorf("the agent has written no kubeconfig %q", v.shown(v.kubeconfig))
	}
	v.api, v.noAPI = v.agent, v.noAgent
	if _, err := os.Stat(account.TokenFile); account.Server.Host == "" || err != nil {
		return
	}
	account.Timeout = maxRequest
	if own, err := kube.NewClient(account); err == nil {
		v.api, v.noAPI = own, nil
	}
}

func (v *view) close() {
	for _, c := range []*kube.Client{v.api, v.agent} {
		if c != nil {
			c.Close()
		}
	}
}

// noCluster is the result of a check that needs the API server.
func noCluster(err error) document.Check {
	return warn("run it in the agent's container (kubectl istio-cni doctor) or as the Job of manifests/examples/doctor.yaml",
		"the API server cannot be asked: %v", err)
}

// dialAgent returns nil if the node agent answers on its socket.
func (v *view) dialAgent() error {
	ctx, cancel := context.WithTimeout(context.Background(), maxRequest)
	defer cancel()
	_, err := agentapi.Ask(ctx, filepath.Join(v.RunDir, agentapi.SocketName), "", func(*agentapi.Agent) (bool, error) { return true, nil })
	return err
}

// network is a configuration directory.
type network struct {
	dir string
	err error
	// names are all files, files only those that runtimes read.
	names []string
	files cniconf.Dir
	// primary is the file that the runtime loads, "" if it loads none.
	primary string
	loaded  cniconf.Network
	skipped []error
}

const maxConf = 4 << 20 // as the agent

func (v *view) readNetwork(dir string) network {
	n, unread := network{dir: dir, files: cniconf.Dir{}}, map[string]error{}
	read := func(name string) {
		if text, err := v.readConf(filepath.Join(n.dir, name)); err == nil {
			n.files[name] = cniconf.File{Data: text}
		} else { // the runtime skips the file, unless the runtime has more rights than this process
			unread[name] = err
		}
	}
	entries, err := os.ReadDir(n.dir)
	n.err = err
	for _, e := range entries {
		n.names = append(n.names, e.Name())
		if cniconf.Candidate(e.Name()) {
			read(e.Name())
		} else if e.IsDir() {
			list, _ := hostfs.List(filepath.Join(n.dir, e.Name()), func(name string) bool { return filepath.Ext(name) == ".conf" })
			for _, name := range list {
				read(e.Name() + "/" + name)
			}
		}
	}
	n.primary, n.loaded, n.skipped = n.files.Loaded()
	for _, name := range slices.Sorted(maps.Keys(unread)) {
		if cniconf.Candidate(name) && (n.primary == "" || name < n.primary) {
			n.skipped = append(n.skipped, unread[name])
		}
	}
	return n
}

// readConf reads a configuration file. It follows links like the node.
func (v *view) readConf(file string) ([]byte, error) {
	if v.root != "" {
		if rest, err := filepath.Rel(v.root, file); err == nil && filepath.IsLocal(rest) {
			file = v.below(rest)
		}
	}
	text, _, err := hostfs.ReadFile(file, maxConf)
	return text, err
}
