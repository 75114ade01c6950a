package page

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/lab"
	"github.com/meshcni/istio-cni/e2e/program"
)

const nodeName = "node-1"

// node is a node agent as a real process, with an API server of a few lines: names that no API server accepts are a part of the
// test. The sandboxes of its pods are real, and the plugin redirects them.
type node struct {
	lab.Test
	dir, bin string
	agent    *program.Program
	origin   string

	mu     sync.Mutex
	pods   []core.Pod
	events chan event
	// version is the last one of an object.
	version int
}

// event is what the API server's watch of pods delivers.
type event struct {
	Type   string   `json:"type"`
	Object core.Pod `json:"object"`
}

func newNode(t *testing.T, pods ...core.Pod) *node {
	t.Helper()
	n := &node{Test: lab.Test{T: t}, pods: pods, events: make(chan event), version: 1}
	bin, err := artifacts.FindProgram()
	n.Must(err)
	dir := t.TempDir()
	n.bin, n.dir = bin, dir
	for _, name := range []string{"net.d", "bin", "run", "results", "account", "proc/1/ns"} {
		n.Must(os.MkdirAll(filepath.Join(dir, name), 0o700))
	}
	n.write("net.d/10-net.conflist", `{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"bridge"}]}`)
	n.write("account/token", "t")
	// The node's namespace is the test's, and is kept by a process: a thread of this one enters others.
	first := n.hold("sleep", "1000")
	n.write("proc/1/mountinfo", "")
	n.Must(os.Symlink(first+"/ns/net", filepath.Join(dir, "proc/1/ns/net")))
	return n
}

func (n *node) write(name, text string) {
	n.Helper()
	n.Must(os.WriteFile(filepath.Join(n.dir, name), []byte(text), 0o600))
}

// start starts the agent, and waits until it is ready.
func (n *node) start(env ...string) {
	n.Helper()
	api := httptest.NewTLSServer(http.HandlerFunc(n.api))
	n.Cleanup(func() { api.CloseClientConnections(); api.Close() })
	n.write("account/ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: api.Certificate().Raw})))
	host, port, _ := strings.Cut(strings.TrimPrefix(api.URL, "https://"), ":")
	env = append([]string{
		"KUBERNETES_SERVICE_HOST=" + host, "KUBERNETES_SERVICE_PORT=" + port,
		"SERVICE_ACCOUNT_DIR=" + n.dir + "/account", "MOUNTED_CNI_NET_DIR=" + n.dir + "/net.d", "MOUNTED_CNI_BIN_DIRS=" + n.dir + "/bin",
		"CNI_AGENT_RUN_DIR=" + n.dir + "/run", "CNI_CACHE_DIR=" + n.dir + "/results", "NETNS_DIRS=" + n.dir + "/netns", "HOST_ROOTS=/none", "HOST_PROC=" + n.dir + "/proc",
		"NODE_NAME=" + nodeName, "POD_NAMESPACE=istio-system", "POD_NAME=istio-cni-node-x", "UNINSTALL_ON_EXIT=never", "EXCLUDE_NAMESPACES=batch", "CNI_CONF_MODE=inline",
	}, env...)
	agent, err := program.Start(env, n.bin, "install")
	n.Must(err)
	n.agent, n.origin = agent, "http://localhost:9876"
	n.Cleanup(func() {
		agent.Signal(unix.SIGKILL)
		<-agent.Ended() // its port is free for the next test
		if n.Failed() {
			n.Log(strings.Join(agent.Lines(), "\n"))
		}
	})
	n.OnTimeout = func() { n.Log(n.answer("/readyz")) }
	n.Until("the agent", func() bool {
		known := strings.Contains(strings.Join(agent.Lines(), "\n"), "the node's pods are synced") // else an ADD asks the API server, which has no single pods
		return known && strings.HasPrefix(n.answer("/readyz"), `{"ready":true`)
	})
	n.OnTimeout = nil
}

// answer is the agent's answer to a request.
func (n *node) answer(path string) string {
	response, err := http.Get(n.origin + path) //nolint:noctx // the client ends with the test
	if err != nil {
		return err.Error()
	}
	defer func() { _ = response.Body.Close() }()
	text, _ := io.ReadAll(response.Body)
	return string(text)
}

// api is the API server: it lists the pods, follows them until one changes or goes, takes the annotations of pods, and has no other
// object.
func (n *node) api(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	answer := func(status int, object any) {
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(object)
	}
	kind := meta.TypeMeta{Kind: "Pod", APIVersion: "v1"}
	query := r.URL.Query()
	switch {
	case r.Method == http.MethodGet && r.URL.Path == "/api/v1/pods" && query.Get("watch") == "":
		n.mu.Lock()
		defer n.mu.Unlock()
		answer(http.StatusOK, core.PodList{TypeMeta: meta.TypeMeta{Kind: "PodList", APIVersion: "v1"}, ListMeta: meta.ListMeta{ResourceVersion: "1"}, Items: n.pods})
	case r.Method == http.MethodGet && r.URL.Path == "/api/v1/pods" && query.Get("sendInitialEvents") == "":
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		select {
		case e := <-n.events:
			e.Object.TypeMeta = kind
			_ = json.NewEncoder(w).Encode(e)
		case <-r.Context().Done():
		}
	case r.Method == http.MethodGet && r.URL.Path == "/api/v1/namespaces" && query.Get("watch") == "":
		answer(http.StatusOK, n.namespaces())
	case r.Method == http.MethodGet && r.URL.Path == "/api/v1/namespaces" && query.Get("sendInitialEvents") == "":
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	case r.Method == http.MethodPatch:
		answer(http.StatusOK, n.annotate(r))
	case query.Get("sendInitialEvents") != "":
		answer(http.StatusUnprocessableEntity, meta.Status{TypeMeta: meta.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: meta.StatusFailure, Reason: meta.StatusReasonInvalid, Code: http.StatusUnprocessableEntity})
	case r.Method == http.MethodPost:
		text, _ := io.ReadAll(r.Body)
		w.WriteHeader(http.StatusCreated)
		_, _ = w.Write(text)
	default:
		answer(http.StatusNotFound, meta.Status{TypeMeta: meta.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: meta.StatusFailure, Reason: meta.StatusReasonNotFound, Code: http.StatusNotFound})
	}
}

// namespaces are those of the pods.
func (n *node) namespaces() core.NamespaceList {
	list := core.NamespaceList{TypeMeta: meta.TypeMeta{Kind: "NamespaceList", APIVersion: "v1"}, ListMeta: meta.ListMeta{ResourceVersion: "1"}}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, p := range n.pods {
		if !slices.ContainsFunc(list.Items, func(one core.Namespace) bool { return one.Name == p.Namespace }) {
			list.Items = append(list.Items, core.Namespace{ObjectMeta: meta.ObjectMeta{Name: p.Namespace, UID: types.UID(p.Namespace), ResourceVersion: "1"}})
		}
	}
	return list
}

// annotate takes the annotations of a patch of a pod.
func (n *node) annotate(r *http.Request) core.Pod {
	var patch core.Pod
	_ = json.NewDecoder(r.Body).Decode(&patch)
	n.mu.Lock()
	defer n.mu.Unlock()
	i := slices.IndexFunc(n.pods, func(p core.Pod) bool { return p.UID == patch.UID })
	if i < 0 {
		return patch
	}
	p := &n.pods[i]
	p.Annotations = maps.Clone(p.Annotations)
	if p.Annotations == nil {
		p.Annotations = map[string]string{}
	}
	maps.Copy(p.Annotations, patch.Annotations)
	n.version++
	p.ResourceVersion = strconv.Itoa(n.version)
	changed := event{"MODIFIED", *p}
	go func() { n.events <- changed }()
	return core.Pod{TypeMeta: meta.TypeMeta{Kind: "Pod", APIVersion: "v1"}, ObjectMeta: p.ObjectMeta, Spec: p.Spec, Status: p.Status}
}

// remove deletes a pod.
func (n *node) remove(name string) {
	n.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, p := range n.pods {
		if p.Name == name {
			n.pods = append(n.pods[:i:i], n.pods[i+1:]...)
			n.events <- event{"DELETED", p}
			return
		}
	}
}

// plain is a pod without a sidecar.
func plain(namespace, name string) core.Pod {
	return core.Pod{
		ObjectMeta: meta.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("uid-" + name), ResourceVersion: "1"},
		Spec:       core.PodSpec{NodeName: nodeName, Containers: []core.Container{{Name: "app"}}},
		Status:     core.PodStatus{Phase: core.PodRunning},
	}
}

// injected is a pod of the mesh with an address, whose proxy has run for a while if proxy is set.
func injected(namespace, name, address string, proxy bool, annotations map[string]string) core.Pod {
	p := plain(namespace, name)
	p.Annotations = map[string]string{"sidecar.istio.io/status": `{"containers":["istio-proxy"]}`}
	for key, value := range annotations {
		p.Annotations["traffic.sidecar.istio.io/"+key] = value
	}
	p.Spec.Containers = append(p.Spec.Containers, core.Container{Name: "istio-proxy", Args: []string{"proxy", "sidecar"}})
	p.Status.PodIP, p.Status.PodIPs = address, []core.PodIP{{IP: address}}
	if proxy {
		p.Status.ContainerStatuses = []core.ContainerStatus{{Name: "istio-proxy", State: core.ContainerState{
			Running: &core.ContainerStateRunning{StartedAt: meta.Unix(1700000000, 0)},
		}}}
	}
	return p
}

// hold starts a process that ends with the test, and returns its directory in /proc.
func (n *node) hold(name string, args ...string) string {
	n.Helper()
	holder, err := program.Start(nil, "/usr/bin/"+name, args...)
	n.Must(err)
	n.Cleanup(func() { holder.Signal(unix.SIGKILL) })
	return fmt.Sprint("/proc/", holder.PID())
}

// sandbox makes the network namespace of a pod, which ends with the test, and returns its path.
func (n *node) sandbox(p core.Pod) string {
	n.Helper()
	process := n.hold("unshare", "--net", "--", "sleep", "1000")
	path := process + "/ns/net"
	// Not /proc/self, which shows the first thread: that one stays in a pod's namespace if listen ran on it.
	own, err := os.Readlink(filepath.Join(n.dir, "proc/1/ns/net"))
	n.Must(err)
	own, err = os.Readlink(own)
	n.Must(err)
	n.Until("a namespace", func() bool {
		its, failed := os.Readlink(path)
		return failed == nil && its != own
	})
	n.Must(os.Symlink(process, filepath.Join(n.dir, process)))
	// The kernel removes the devices of an earlier test's sandboxes some time after their processes: no name is used twice.
	n.run("ip", "link", "add", "veth"+filepath.Base(process), "up", "type", "veth", "peer", "name", "eth0", "netns", filepath.Base(process))
	n.inside(path, "ip link set lo up && ip link set eth0 up && ip address add "+p.Status.PodIP+"/16 dev eth0 && ip route add default via 10.88.0.1")
	entry, err := json.Marshal(map[string]any{
		"kind": "cniCacheV1", "containerId": p.Name, "config": []byte(`{"name":"net","plugins":[{"type":"bridge"}]}`), "ifName": "eth0",
		"networkName": "net", "netns": path, "cniArgs": args(p),
	})
	n.Must(err)
	n.write("results/net-"+string(p.UID)+"-eth0", string(entry))
	return path
}

func args(p core.Pod) [][2]string {
	return [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", p.Namespace}, {"K8S_POD_NAME", p.Name}, {"K8S_POD_UID", string(p.UID)}}
}

func (n *node) run(name string, args ...string) {
	n.Helper()
	if out, err := exec.CommandContext(n.Context(), name, args...).CombinedOutput(); err != nil {
		n.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
}

// inside runs a script in a namespace.
func (n *node) inside(path, script string) {
	n.Helper()
	n.run("nsenter", "--net="+path, "sh", "-c", script)
}

// add calls the plugin as the runtime does, with the configuration that the agent has written.
func (n *node) add(p core.Pod) string {
	n.Helper()
	path := n.sandbox(p)
	var list struct {
		Plugins []map[string]any `json:"plugins"`
	}
	text, err := os.ReadFile(filepath.Join(n.dir, "net.d/10-net.conflist"))
	n.Must(err)
	n.Must(json.Unmarshal(text, &list))
	stanza := list.Plugins[len(list.Plugins)-1]
	stanza["cniVersion"], stanza["name"] = "1.0.0", "net"
	stanza["prevResult"] = map[string]any{
		"cniVersion": "1.0.0", "interfaces": []any{map[string]any{"name": "eth0", "sandbox": path}},
		"ips": []any{map[string]any{"address": p.Status.PodIP + "/16", "interface": 0}},
	}
	input, err := json.Marshal(stanza)
	n.Must(err)
	var pairs []string
	for _, pair := range args(p) {
		pairs = append(pairs, pair[0]+"="+pair[1])
	}
	command := exec.CommandContext(n.Context(), filepath.Join(n.dir, "bin/istio-cni"))
	command.Stdin = strings.NewReader(string(input))
	command.Env = []string{
		"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "CNI_COMMAND=ADD", "CNI_CONTAINERID=" + p.Name, "CNI_NETNS=" + path, "CNI_IFNAME=eth0", "CNI_PATH=" + n.dir + "/bin",
		"CNI_ARGS=" + strings.Join(pairs, ";"),
	}
	if out, err := command.CombinedOutput(); err != nil {
		n.Fatalf("ADD of %s: %v: %s", p.Name, err, out)
	}
	return path
}

// listen listens in a namespace as its proxy does.
func (n *node) listen(path string, ports ...string) {
	n.Helper()
	failed := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		failed <- func() error {
			file, err := os.Open(path)
			if err != nil {
				return err
			}
			defer func() { _ = file.Close() }()
			if err := unix.Setns(int(file.Fd()), unix.CLONE_NEWNET); err != nil {
				return err
			}
			for _, port := range ports {
				socket, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp4", "0.0.0.0:"+port)
				if err != nil {
					return err
				}
				n.Cleanup(func() { _ = socket.Close() })
			}
			return nil
		}()
	}()
	n.Must(<-failed)
}
