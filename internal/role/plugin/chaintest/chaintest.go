// Package chaintest runs real CNI chains on a node that exists only for a test: a network namespace in which libcni
// starts Debian's bridge and host-local plugins and the program under test, last in the chain.
//
// It promises that nothing reaches the machine's own namespace. Start at New; trace.go counts system calls.
package chaintest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	corev1 "k8s.io/api/core/v1"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// SystemPlugins is where Debian keeps the reference plugins.
const SystemPlugins = "/usr/lib/cni"

// shared is the program that the tests of a package share, "" before its build.
var (
	built  sync.Once //nolint:gochecknoglobals // of the whole process
	shared string    //nolint:gochecknoglobals // of the whole process
)

// Program returns the path of the program under test. It is built once for all tests of a package, which [Main] runs.
func Program(tb testing.TB) string {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Skip("a node of its own needs root")
	}
	built.Do(func() {
		dir, err := os.MkdirTemp("", "istio-cni-test") //nolint:usetesting // it outlives the first test
		check.OK(tb, err)
		shared = Build(tb, dir)
	})
	if shared == "" {
		tb.Fatal("the program could not be built")
	}
	return shared
}

// measured makes a test binary the parent of a plugin: see [Node.Measured].
const measured = "CHAINTEST_MEASURED"

// Main runs the tests of a package, and removes their program.
func Main(m *testing.M) {
	if os.Getenv(measured) != "" { //nolint:forbidigo // set by Measured
		cmd := exec.Cmd{Path: os.Args[0], Stdin: os.Stdin, Stdout: os.Stdout}
		_ = cmd.Run()                                         // the exit code has the result
		used := cmd.ProcessState.SysUsage().(*syscall.Rusage) //nolint:forcetypeassert // of Linux
		_, _ = fmt.Fprint(os.Stderr, used.Maxrss)
		os.Exit(cmd.ProcessState.ExitCode()) //nolint:forbidigo // as below
	}
	code := m.Run()
	if shared != "" {
		_ = os.RemoveAll(filepath.Dir(shared))
	}
	os.Exit(code) //nolint:forbidigo // the end of a TestMain
}

// Build compiles the program with the flags of a release and returns its path.
func Build(tb testing.TB, dir string) string {
	tb.Helper()
	return BuildPackage(tb, filepath.Join(dir, "istio-cni"), "github.com/meshcni/istio-cni")
}

// BuildPackage compiles a program of this module with the same flags, and returns the file.
//
// The file is rewritten in one piece, like an installation: pages that the linker wrote through a mapping have the
// smallest size, which makes each start a fifth slower.
func BuildPackage(tb testing.TB, file, pkg string) string {
	tb.Helper()
	//nolint:gosec // the path is the test's
	cmd := exec.CommandContext(tb.Context(), "go", "build", "-buildvcs=false", "-trimpath", "-tags", "urfave_cli_no_docs",
		"-ldflags", "-s -w", "-o", file+".linked", pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0") //nolint:forbidigo // for the toolchain
	if out, err := cmd.CombinedOutput(); err != nil {
		tb.Fatalf("building the program: %v\n%s", err, out)
	}
	content, err := os.ReadFile(file + ".linked") //nolint:gosec // the path is the test's
	check.OK(tb, err)
	netnstest.WriteProgram(tb, file, content)
	return file
}

// Init is the initialisation of a package before main, as the Go runtime counts it.
type Init struct {
	Package       string
	Bytes, Allocs int
}

// Inits runs a command, which must succeed, and returns the initialised packages in their order.
func Inits(cmd *exec.Cmd) (all []Init, err error) {
	var stderr bytes.Buffer
	cmd.Env, cmd.Stderr = append(cmd.Env, "GODEBUG=inittrace=1"), &stderr
	if out, err := cmd.Output(); err != nil {
		return nil, fmt.Errorf("%w: %s%s", err, out, stderr.Bytes())
	}
	for line := range strings.Lines(stderr.String()) {
		var one Init
		var began, took float64
		_, err := fmt.Sscanf(line, "init %s @%f ms, %f ms clock, %d bytes, %d allocs", &one.Package, &began, &took, &one.Bytes, &one.Allocs)
		if err == nil {
			all = append(all, one)
		}
	}
	if len(all) < 10 {
		return nil, fmt.Errorf("%d packages are initialised: the runtime's trace is not read\n%s", len(all), stderr.Bytes())
	}
	return all, nil
}

// Node is a node with its own network namespace, API server and CNI directories.
type Node struct {
	tb testing.TB
	// Netns is the node's namespace, RunDir the node agent's directory with the kubeconfig.
	Netns, RunDir string
	API           *kubetest.Server
	// Log receives the plugins' stderr. It must be set before the first command; nothing by default.
	Log      io.Writer
	dir, bin string
}

// New creates a node on which the program is installed as istio-cni.
func New(tb testing.TB, program string) *Node {
	tb.Helper()
	n := &Node{tb: tb, Netns: netnstest.New(tb), dir: tb.TempDir(), Log: io.Discard}
	n.bin, n.RunDir = filepath.Join(n.dir, "bin"), filepath.Join(n.dir, "run")
	for _, d := range []string{n.bin, n.RunDir} {
		if err := os.Mkdir(d, 0o755); err != nil { //nolint:gosec // as on a node
			tb.Fatal(err)
		}
	}
	check.OK(tb, os.Symlink(program, filepath.Join(n.bin, "istio-cni")))
	n.adapter()
	netnstest.Run(tb, n.Netns, "ip", "link", "set", "lo", "up")
	check.OK(tb, netns.Do(n.Netns, func() error { n.API = kubetest.NewServer(tb); return nil }))
	n.API.WriteKubeconfig(tb, filepath.Join(n.RunDir, "istio-cni-kubeconfig"))
	return n
}

// adapter installs a replacement of Debian's bridge in the first directory. Debian's plugins end at CNI 1.0.0, so for a 1.1.0
// chain the replacement runs the real bridge with the version in its input and output changed.
func (n *Node) adapter() {
	script := `#!/bin/sh
case "$CNI_COMMAND" in
STATUS|GC) exit 0;;
VERSION) exec printf '{"cniVersion":"1.1.0","supportedVersions":["1.0.0","1.1.0"]}';;
esac
sed 's/"cniVersion": *"1.1.0"/"cniVersion":"1.0.0"/g' | ` + SystemPlugins + `/bridge | sed 's/"cniVersion": *"1.0.0"/"cniVersion":"1.1.0"/'
`
	netnstest.WriteProgram(n.tb, filepath.Join(n.bin, "bridge-1.1.0"), []byte(script))
}

// Stanza has the keys of the plugin configuration that a test chooses; Chain adds "cni_agent_run_dir".
type Stanza map[string]any

// Chain returns the list bridge, istio-cni for a version.
func (n *Node) Chain(version string, stanza Stanza) *libcni.NetworkConfigList {
	n.tb.Helper()
	ours := Stanza{"type": "istio-cni", "cni_agent_run_dir": n.RunDir, "plugin_log_level": "debug"}
	maps.Copy(ours, stanza)
	bridge := "bridge"
	if version == "1.1.0" {
		bridge = "bridge-1.1.0"
	}
	list := map[string]any{
		"cniVersion": version, "name": "chain",
		"plugins": []any{
			map[string]any{
				"type": bridge, "bridge": "cni0", "isGateway": true, "ipMasq": false,
				"ipam": map[string]any{
					"type": "host-local", "dataDir": filepath.Join(n.dir, "ipam"), "subnet": "10.77.0.0/16",
					"routes": []any{map[string]any{"dst": "0.0.0.0/0"}},
				},
			},
			ours,
		},
	}
	text, err := json.Marshal(list)
	check.OK(n.tb, err)
	parsed, err := libcni.NetworkConfFromBytes(text)
	check.OK(n.tb, err)
	return parsed
}

// Pod is a sandbox of the node.
type Pod struct {
	Namespace, Name, UID, Netns string
	// Annotations are passed by the runtime, as containerd does, unless nil.
	Annotations map[string]string
	id          string
}

// NewPod creates a sandbox, and, with a description, adds the pod to the API server.
func (n *Node) NewPod(namespace, name string, describe func(*kubetest.Pod)) Pod {
	n.tb.Helper()
	return NewPod(n.tb, n.API, namespace, name, describe)
}

// NewPod creates a sandbox, and, with a description, adds the pod to an API server.
func NewPod(tb testing.TB, api *kubetest.Server, namespace, name string, describe func(*kubetest.Pod)) Pod {
	tb.Helper()
	number := pods.Add(1)
	p := Pod{
		Namespace: namespace, Name: name, UID: fmt.Sprintf("00000000-0000-4000-8000-%012d", number),
		Netns: netnstest.New(tb), id: fmt.Sprintf("sandbox%d", number),
	}
	// Runtimes run the loopback plugin on every sandbox before the chain.
	netnstest.Run(tb, p.Netns, "ip", "link", "set", "lo", "up")
	if describe != nil {
		pod := kubetest.Pod{Namespace: namespace, Name: name, UID: p.UID}
		describe(&pod)
		api.SetPod(pod)
	}
	return p
}

// pods counts the pods of all nodes.
var pods atomic.Int64 //nolint:gochecknoglobals // their names are of the whole process, too

// Captured reports whether the pod's traffic goes to its sidecar.
func (p Pod) Captured(tb testing.TB) bool {
	tb.Helper()
	return strings.Contains(netnstest.Run(tb, p.Netns, "iptables-save"), "-A OUTPUT -j ISTIO_OUTPUT")
}

// Sidecar describes a pod with an injected sidecar.
func Sidecar(p *kubetest.Pod) {
	user := int64(1337)
	p.Annotations = map[string]string{"sidecar.istio.io/status": "{}"}
	identity := &corev1.SecurityContext{RunAsUser: &user, RunAsGroup: &user}
	p.Containers = []kubetest.Container{{Name: "app"}, {Name: "istio-proxy", Args: []string{"proxy", "sidecar"}, SecurityContext: identity}}
}

// PlainPod describes a pod outside the mesh.
func PlainPod(p *kubetest.Pod) { p.Containers = []kubetest.Container{{Name: "app"}} }

// Runtime returns the container runtime's parameters of a sandbox.
func (p Pod) Runtime() *libcni.RuntimeConf {
	var capabilities map[string]any
	if p.Annotations != nil {
		capabilities = map[string]any{"io.kubernetes.cri.pod-annotations": p.Annotations}
	}
	return &libcni.RuntimeConf{
		ContainerID: p.id, NetNS: p.Netns, IfName: "eth0", CapabilityArgs: capabilities,
		Args: [][2]string{
			{"IgnoreUnknown", "1"},
			{"K8S_POD_NAMESPACE", p.Namespace},
			{"K8S_POD_NAME", p.Name},
			{"K8S_POD_INFRA_CONTAINER_ID", p.id},
			{"K8S_POD_UID", p.UID},
		},
	}
}

// run runs do in the node's namespace, like the node's runtime.
func (n *Node) run(do func(context.Context, *libcni.CNIConfig) error) error {
	starter := &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: n.Log}, PluginDecoder: version.PluginDecoder{}}
	cni := libcni.NewCNIConfigWithCacheDir([]string{n.bin, SystemPlugins}, filepath.Join(n.dir, "cache"), starter)
	return netns.Do(n.Netns, func() error { return do(context.WithoutCancel(n.tb.Context()), cni) })
}

// Add runs the chain for a pod.
func (n *Node) Add(list *libcni.NetworkConfigList, p Pod) (result types.Result, err error) {
	failed := n.run(func(ctx context.Context, cni *libcni.CNIConfig) error {
		result, err = cni.AddNetworkList(ctx, list, p.Runtime())
		return err
	})
	return result, failed
}

// Del runs the chain backwards.
func (n *Node) Del(list *libcni.NetworkConfigList, p Pod) error {
	return n.run(func(ctx context.Context, cni *libcni.CNIConfig) error {
		return cni.DelNetworkList(ctx, list, p.Runtime())
	})
}

// Check runs CHECK.
func (n *Node) Check(list *libcni.NetworkConfigList, p Pod) error {
	return n.run(func(ctx context.Context, cni *libcni.CNIConfig) error {
		return cni.CheckNetworkList(ctx, list, p.Runtime())
	})
}

// Status runs STATUS.
func (n *Node) Status(list *libcni.NetworkConfigList) error {
	return n.run(func(ctx context.Context, cni *libcni.CNIConfig) error { return cni.GetStatusNetworkList(ctx, list) })
}

// GC runs GC with no sandbox left.
func (n *Node) GC(list *libcni.NetworkConfigList) error {
	return n.run(func(ctx context.Context, cni *libcni.CNIConfig) error {
		return cni.GCNetworkList(ctx, list, &libcni.GCArgs{})
	})
}

// Cached returns the JSON of the last plugin's result of an ADD in libcni's cache.
func (n *Node) Cached(list *libcni.NetworkConfigList, p Pod) (text []byte, err error) {
	failed := n.run(func(_ context.Context, cni *libcni.CNIConfig) error {
		var result types.Result
		if result, err = cni.GetNetworkListCachedResult(list, p.Runtime()); err == nil {
			text, err = json.Marshal(result)
		}
		return err
	})
	return text, failed
}

// Ours runs ADD of the last plugin of a list alone, on the given result, and returns its output.
func (n *Node) Ours(list *libcni.NetworkConfigList, p Pod, prevResult []byte, extra ...string) ([]byte, error) {
	input, err := Input(list, prevResult)
	if err != nil {
		return nil, err
	}
	return n.Exec("ADD", p, input, extra...)
}

// Input returns a runtime's stdin for the last plugin of a list, on the given result.
func Input(list *libcni.NetworkConfigList, prevResult []byte) ([]byte, error) {
	stanza := map[string]json.RawMessage{}
	if err := json.Unmarshal(list.Plugins[len(list.Plugins)-1].Bytes, &stanza); err != nil {
		return nil, err
	}
	stanza["cniVersion"], stanza["name"] = fmt.Appendf(nil, "%q", list.CNIVersion), fmt.Appendf(nil, "%q", list.Name)
	if prevResult != nil {
		stanza["prevResult"] = prevResult
	}
	return json.Marshal(stanza)
}

// Exec starts the program under test with a command and the unchanged input. The extra variables come last.
func (n *Node) Exec(command string, p Pod, input []byte, extra ...string) (stdout []byte, err error) {
	err = netns.Do(n.Netns, func() error {
		stdout, err = n.Command(command, p, input, extra...).Output()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, stdout)
		}
		return err
	})
	return stdout, err
}

// Command returns the command of Exec, which the caller starts in the node's namespace.
func (n *Node) Command(command string, p Pod, input []byte, extra ...string) *exec.Cmd {
	cmd := exec.CommandContext(n.tb.Context(), filepath.Join(n.bin, "istio-cni")) //nolint:gosec // the program under test
	//nolint:forbidigo // a runtime hands on its environment
	cmd.Env = append(append(os.Environ(), p.Environ(command, n.bin)...), extra...)
	cmd.Stdin = bytes.NewReader(input)
	return cmd
}

// Environ returns the variables with which a runtime starts a plugin for the sandbox.
func (p Pod) Environ(command, path string) []string {
	return []string{
		"CNI_COMMAND=" + command, "CNI_CONTAINERID=" + p.id, "CNI_NETNS=" + p.Netns, "CNI_IFNAME=eth0", "CNI_PATH=" + path,
		fmt.Sprintf("CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=%s;K8S_POD_NAME=%s;K8S_POD_UID=%s", p.Namespace, p.Name, p.UID),
	}
}

// Measured is Exec, and also returns the peak memory, in kB, of the program or of a process that it started. The kernel counts the memory
// of the parent process as well, so the parent is a small process and not the test's own.
func (n *Node) Measured(command string, p Pod, input []byte) (memory, code int, stdout []byte) {
	n.tb.Helper()
	var out, size bytes.Buffer
	err := netns.Do(n.Netns, func() error {
		cmd := n.Command(command, p, input, measured+"=yes")
		cmd.Path, cmd.Stdout, cmd.Stderr = "/proc/self/exe", &out, &size
		_ = cmd.Run() // the exit code is the program's
		code = cmd.ProcessState.ExitCode()
		_, err := fmt.Sscan(size.String(), &memory)
		return err
	})
	check.OK(n.tb, err, size.String())
	return memory, code, out.Bytes()
}

// Traced is Exec with a trace of its system calls, whether the command succeeds or not.
func (n *Node) Traced(command string, p Pod, input []byte, extra ...string) (*Record, []byte) {
	n.tb.Helper()
	var record *Record
	var stdout bytes.Buffer
	err := netns.Do(n.Netns, func() (err error) {
		cmd := n.Command(command, p, input, extra...)
		cmd.Stdout = &stdout
		record, err = Trace(cmd)
		return err
	})
	check.OK(n.tb, err)
	return record, stdout.Bytes()
}
