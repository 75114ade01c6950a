package ambient

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
	"github.com/meshcni/istio-cni/e2e/program"
)

// Names in the cluster: the agent's namespace and account, and the pods' namespace. selectors are the chart's default.
const (
	mesh, account, app = "istio-system", "istio-cni", "app"

	modeLabel      = "istio.io/dataplane-mode"
	pluginName     = "istio-cni"
	redirection    = "ambient.istio.io/redirection"
	accountingFile = "/run/accounting"
	selectors      = `
- podSelector: {matchLabels: {istio.io/dataplane-mode: ambient}}
- podSelector: {matchExpressions: [{key: istio.io/dataplane-mode, operator: NotIn, values: [none]}]}
  namespaceSelector: {matchLabels: {istio.io/dataplane-mode: ambient}}
`
)

// root is the root directory of the agent's container on the machine.
const root = "/run/agent"

// node is a machine with a control plane, and an agent in a root directory like its container's.
type node struct {
	lab.Test
	*cluster.Cluster

	kubeconfig string
	more       []string // of the agent's environment
	ztunnel    *ztunnel
	agent      process
	launched   *program.Program
	started    []*program.Program
	agents     map[uint32]bool // the PIDs of all of them in the machine's PID namespace

	mu      sync.Mutex
	enabled map[string]bool // the pods with the annotation
	news    chan struct{}   // holds one after a change
}

// pod is a pod of the API with a network namespace and a process.
type pod struct {
	*core.Pod

	netns, address, container string
}

func uids(all []pod) (uids []string) {
	for _, p := range all {
		uids = append(uids, string(p.UID))
	}
	return uids
}

// newNode starts a control plane and makes the directories of an agent.
func newNode(t *testing.T, found artifacts.Ambient, agent, plugin string, environment ...string) *node {
	t.Helper()
	c, err := cluster.Start(t.Context(), cluster.Options{Kube: found.Kube, Tier: cluster.ControlPlane, Log: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	n := &node{Test: lab.Test{T: t}, Cluster: c, more: environment, agents: map[uint32]bool{}, enabled: map[string]bool{}, news: make(chan struct{}, 1)}
	t.Cleanup(func() {
		n.logs(found, filepath.Base(t.Name()))
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
		n.removeCgroups()
	})
	n.objects()
	n.directories(agent, plugin, found.Metered)
	n.ztunnel = &ztunnel{path: n.file("/run/ztunnel/ztunnel.sock"), news: make(chan struct{}, 1)}
	n.ztunnel.forget()
	ended := make(chan struct{})
	t.Cleanup(func() { close(ended) })
	go n.ztunnel.run(ended)
	n.watch()
	return n
}

// file returns the path of a machine's file for this process.
func (n *node) file(path string) string { return fmt.Sprintf("/proc/%d/root%s", n.Pid(), path) }

// objects creates what an installation has in the API: the account, the agent's DaemonSet, the node, and the pods' namespace.
func (n *node) objects() {
	n.Helper()
	ctx, api := n.Context(), n.Client()
	n.Must(n.Namespace(ctx, mesh, account))
	n.Must(n.Namespace(ctx, app))
	_, err := api.RbacV1().ClusterRoleBindings().Create(ctx, &rbac.ClusterRoleBinding{
		ObjectMeta: meta.ObjectMeta{Name: account}, RoleRef: rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbac.Subject{{Kind: rbac.ServiceAccountKind, Namespace: mesh, Name: account}},
	}, meta.CreateOptions{})
	n.Must(err)
	_, err = api.CoreV1().Nodes().Create(ctx, &core.Node{ObjectMeta: meta.ObjectMeta{Name: cluster.NodeName}}, meta.CreateOptions{})
	n.Must(err)
	labels := map[string]string{"k8s-app": "istio-cni-node"}
	_, err = api.AppsV1().DaemonSets(mesh).Create(ctx, &apps.DaemonSet{
		ObjectMeta: meta.ObjectMeta{Name: "istio-cni-node"},
		Spec: apps.DaemonSetSpec{Selector: &meta.LabelSelector{MatchLabels: labels}, Template: core.PodTemplateSpec{
			ObjectMeta: meta.ObjectMeta{Labels: labels}, Spec: core.PodSpec{Containers: []core.Container{{Name: "install-cni", Image: "none"}}},
		}},
	}, meta.CreateOptions{})
	n.Must(err)
	n.kubeconfig, err = n.AccountKubeconfig(ctx, mesh, account)
	n.Must(err)
}

// directories mounts the directories of a node and of the agent's container, which the chart mounts.
func (n *node) directories(agent, plugin, metered string) {
	n.Helper()
	lines := []string{
		"for d in /run /opt /var/lib; do mount -t tmpfs -o mode=755 tmpfs $d; done",
		"mkdir -p /run/netns /run/istio-cni /run/ztunnel /run/lock /opt/cni/bin /opt/cni/metered /run/net.d /var/lib/cni/results " + root,
		"mount --bind /run/netns /run/netns; mount --make-shared /run/netns",
		"cd " + root,
		"mkdir -p usr etc proc sys dev tmp var run/istio-cni run/ztunnel run/secrets/kubernetes.io/serviceaccount opt/cni/bin " +
			"host/proc host/opt/cni/bin host/etc/cni/net.d host/var/run/netns",
		"ln -s ../run var/run; for d in bin sbin lib lib64; do ln -s usr/$d $d; done",
		"for d in usr etc proc sys dev; do mount --rbind /$d $d; done",
		"mount --rbind /proc host/proc; mount --bind /run/netns host/var/run/netns",
		"mount --bind /opt/cni/bin host/opt/cni/bin; mount --bind /run/net.d host/etc/cni/net.d",
		"mount --bind /run/istio-cni run/istio-cni; mount --bind /run/ztunnel run/ztunnel",
		"touch install-cni opt/cni/bin/istio-cni",
		"mount --bind " + agent + " install-cni; mount --bind " + plugin + " opt/cni/bin/istio-cni",
		"cp " + metered + " /opt/cni/metered/istio-cni; touch " + accountingFile,
	}
	n.shell("set -e\n" + strings.Join(lines, "\n"))
	self, err := os.Executable()
	n.Must(err)
	turnOn := n.Command(n.Context(), self)
	turnOn.Env = append(os.Environ(), accounting+"="+accountingFile)
	text, err := turnOn.CombinedOutput()
	if err != nil {
		n.Fatalf("accounting: %v: %s", err, text)
	}
	n.write(root+"/host/etc/cni/net.d/10-net.conflist", []byte(`{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"bridge"}]}`))
	var config struct {
		Clusters []struct {
			Cluster struct {
				CA []byte `json:"certificate-authority-data"`
			} `json:"cluster"`
		} `json:"clusters"`
		Users []struct {
			User struct {
				Token string `json:"token"`
			} `json:"user"`
		} `json:"users"`
	}
	text, err = os.ReadFile(n.kubeconfig)
	n.Must(err)
	n.Must(yaml.Unmarshal(text, &config))
	const secrets = root + "/run/secrets/kubernetes.io/serviceaccount/"
	for name, text := range map[string][]byte{
		"token": []byte(config.Users[0].User.Token), "ca.crt": config.Clusters[0].Cluster.CA, "namespace": []byte(mesh),
	} {
		n.write(secrets+name, text)
	}
}

func (n *node) write(path string, text []byte) {
	n.Helper()
	n.Must(os.WriteFile(n.file(path), text, 0o600))
}

// shell runs a script on the machine.
func (n *node) shell(script string) {
	n.Helper()
	command := n.Command(n.Context(), "sh", "-s")
	command.Stdin = strings.NewReader(script)
	if text, err := command.CombinedOutput(); err != nil {
		n.Fatalf("a script on the machine: %v: %s", err, text)
	}
}

// server is the address of the machine.
func (n *node) server() string {
	return strings.TrimSuffix(strings.TrimPrefix(n.REST().Host, "https://"), ":443")
}

// environment is the agent's, as the chart sets it with ambient.enabled, and what the agent needs besides.
func (n *node) environment() []string {
	return append([]string{
		"KUBERNETES_SERVICE_HOST=" + n.server(), "KUBERNETES_SERVICE_PORT=443",
		"AMBIENT_ENABLED=true", "AMBIENT_ENABLEMENT_SELECTOR=" + selectors, "AMBIENT_DNS_CAPTURE=true", "AMBIENT_IPV6=true",
		"AMBIENT_RECONCILE_POD_RULES_ON_STARTUP=true", "ENABLE_AMBIENT_DETECTION_RETRY=false", "ISTIO_OWNED_CNI_CONFIG=false",
		"CHAINED_CNI_PLUGIN=true", "EXCLUDE_NAMESPACES=kube-system", "REPAIR_ENABLED=true", "REPAIR_LABEL_PODS=false",
		"REPAIR_DELETE_PODS=false", "REPAIR_REPAIR_PODS=true", "REPAIR_INIT_CONTAINER_NAME=istio-validation",
		"REPAIR_BROKEN_POD_LABEL_KEY=cni.istio.io/uninitialized", "REPAIR_BROKEN_POD_LABEL_VALUE=true", "NATIVE_NFTABLES=false",
		"REPAIR_NODE_NAME=" + cluster.NodeName, "REPAIR_RUN_AS_DAEMON=true", "REPAIR_SIDECAR_ANNOTATION=sidecar.istio.io/status",
		"ALLOW_SWITCH_TO_HOST_NS=true", "NODE_NAME=" + cluster.NodeName, "POD_NAME=istio-cni-node-x", "POD_NAMESPACE=" + mesh,
	}, n.more...)
}

// launch starts the agent without waiting.
func (n *node) launch() {
	n.Helper()
	command := n.Command(n.Context(), "chroot", root, "/install-cni", "--log_output_level=default:info")
	var err error
	n.launched, err = program.Start(n.environment(), command.Path, command.Args[1:]...)
	n.Must(err)
	n.started = append(n.started, n.launched)
	// nsenter has one child, which becomes the agent.
	children := fmt.Sprintf("/proc/%d/task/%d/children", n.launched.PID(), n.launched.PID())
	n.agent = process{node: n}
	n.Until("the agent's process", func() bool {
		text, _ := os.ReadFile(children)
		n.agent.pid, _ = strconv.Atoi(strings.TrimSpace(string(text)))
		return n.agent.pid > 0
	})
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", n.agent.pid))
	n.Must(err)
	for line := range strings.Lines(string(status)) {
		if fields := strings.Fields(line); fields[0] == "NSpid:" {
			inside, err := strconv.ParseUint(fields[len(fields)-1], 10, 32)
			n.Must(err)
			n.agents[uint32(inside)] = true
		}
	}
}

// start starts the agent and waits until it is ready and ztunnel is connected.
func (n *node) start() {
	n.Helper()
	n.launch()
	n.ready()
	n.await("ztunnel's first snapshot", n.ztunnel.news, func() bool { empty, _ := n.ztunnel.has(nil); return empty })
	n.settle()
}

func (n *node) ready() {
	n.Helper()
	n.Until("the agent's readiness", func() bool {
		select {
		case <-n.launched.Ended():
			n.Fatalf("the agent has ended: %s", strings.Join(n.launched.Lines(), "\n"))
		default:
		}
		request, err := http.NewRequestWithContext(n.Context(), http.MethodGet, "http://"+n.server()+":8000/readyz", nil)
		n.Must(err)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return false
		}
		return response.Body.Close() == nil && response.StatusCode == http.StatusOK
	})
}

// stop ends the agent as the kubelet does.
func (n *node) stop() {
	n.Helper()
	n.Must(unix.Kill(n.agent.pid, unix.SIGTERM))
	n.End(n.launched)
}

// settle waits until the agent has used no CPU time for a while.
func (n *node) settle() {
	n.Helper()
	const quiet = time.Second
	for last := time.Duration(-1); last != n.agent.cpu(); {
		last = n.agent.cpu()
		time.Sleep(quiet)
	}
}

// await waits for a condition, which is asked again after each news.
func (n *node) await(what string, news <-chan struct{}, holds func() bool) {
	n.Helper()
	const most = 10 * time.Minute // the reference releases 250 pods in half a minute to three
	ctx, cancel := context.WithTimeout(n.Context(), most)
	defer cancel()
	for !holds() {
		select {
		case <-news:
		case <-ctx.Done():
			n.Fatalf("waiting for %s: %v", what, ctx.Err())
		}
	}
}

// step measures what the agent uses while do runs.
func (n *node) step(do func()) (r result) {
	n.Helper()
	n.settle()
	cpu, requests, programs, began := n.agent.cpu(), n.requests(), len(n.programs()), time.Now()
	do()
	r.wall, r.cpu = time.Since(began), n.agent.cpu()-cpu
	n.settle()
	r.requests, r.programs = n.requests()-requests, n.programs()[programs:]
	return r
}

// requests returns the number of requests of the agent and the plugin so far, without watches, which the API server ends at any time.
func (n *node) requests() int {
	n.Helper()
	all, err := n.Requests(mesh, account)
	n.Must(err)
	return len(slices.DeleteFunc(all, func(r cluster.Request) bool { return r.Verb == "watch" }))
}

// watch keeps the set of pods with the annotation.
func (n *node) watch() {
	n.Helper()
	events, err := n.Client().CoreV1().Pods(app).Watch(n.Context(), meta.ListOptions{})
	n.Must(err)
	go func() {
		for event := range events.ResultChan() {
			p, ok := event.Object.(*core.Pod)
			if !ok {
				continue
			}
			n.mu.Lock()
			if p.Annotations[redirection] == "enabled" {
				n.enabled[p.Name] = true
			} else {
				delete(n.enabled, p.Name)
			}
			n.mu.Unlock()
			announce(n.news)
		}
	}()
}

// annotated waits until a number of pods have the annotation.
func (n *node) annotated(want int) {
	n.Helper()
	n.await(fmt.Sprintf("%d pods with the annotation", want), n.news, func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return len(n.enabled) == want
	})
}

// label sets the label of the pods' namespace.
func (n *node) label(value string) {
	n.Helper()
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, modeLabel, value)
	_, err := n.Client().CoreV1().Namespaces().Patch(n.Context(), app, types.MergePatchType, []byte(patch), meta.PatchOptions{})
	n.Must(err)
}

// populate creates pods with a network namespace, a process in a pod's cgroup, and an entry of libcni's cache. Those to be added have no
// address in the API and no process yet.
func (n *node) populate(kind string, count int) (all []pod) {
	n.Helper()
	second := map[string]int{"run": 66, "add": 67}[kind]
	all = make([]pod, count)
	lab.InParallel(count, func(i int) {
		name := fmt.Sprintf("%s-%d", kind, i)
		created, err := n.Client().CoreV1().Pods(app).Create(n.Context(), &core.Pod{
			ObjectMeta: meta.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
			Spec:       core.PodSpec{NodeName: cluster.NodeName, Containers: []core.Container{{Name: "app", Image: "none"}}},
		}, meta.CreateOptions{})
		if err != nil {
			n.Error(err)
			return
		}
		all[i] = pod{created, "cni-" + name, fmt.Sprintf("10.%d.%d.%d", second, i/250, i%250+1), fmt.Sprintf("%x", sha256.Sum256([]byte(name)))}
		if kind != "run" {
			return
		}
		created.Status.Phase, created.Status.PodIP = core.PodRunning, all[i].address
		created.Status.PodIPs = []core.PodIP{{IP: all[i].address}}
		if _, err = n.Client().CoreV1().Pods(app).UpdateStatus(n.Context(), created, meta.UpdateOptions{}); err != nil {
			n.Error(err)
		}
	})
	if n.Failed() {
		n.FailNow()
	}
	n.namespaces(all, kind == "run")
	return all
}

// namespaces makes the network namespaces, with the other end of their interfaces on the node, and starts the processes.
func (n *node) namespaces(all []pod, running bool) {
	n.Helper()
	var script, links strings.Builder
	script.WriteString("set -e\n")
	for i, p := range all {
		fmt.Fprintf(&script, "ip netns add %s\n", p.netns)
		fmt.Fprintf(&links, "link add v%d-%s up type veth peer name eth0 netns %s\n", i, p.address[3:5], p.netns)
	}
	fmt.Fprintf(&script, "ip -batch - <<END\n%sEND\n", links.String())
	for _, p := range all {
		fmt.Fprintf(&script, "ip -n %s -batch - <<END\nlink set lo up\nlink set eth0 up\naddress add %s/8 dev eth0\nEND\n", p.netns, p.address)
		if running {
			group := filepath.Join(cgroups(), "kubepods/besteffort", "pod"+string(p.UID), p.container)
			n.Must(os.MkdirAll(group, 0o755))
			fmt.Fprintf(&script, "nsenter --net=/run/netns/%s sleep 100000 </dev/null >/dev/null 2>&1 &\necho $! >%s/cgroup.procs\n", p.netns, group)
			n.cache(p)
		}
	}
	n.shell(script.String())
}

// cache writes the entry of libcni's cache that a runtime leaves.
func (n *node) cache(p pod) {
	n.Helper()
	entry, err := json.Marshal(map[string]any{
		"kind": "cniCacheV1", "containerId": p.container, "config": []byte(`{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"bridge"}]}`),
		"ifName": "eth0", "networkName": "net", "netns": "/var/run/netns/" + p.netns, "cniArgs": [][2]string{
			{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", app}, {"K8S_POD_NAME", p.Name}, {"K8S_POD_UID", string(p.UID)},
		},
	})
	n.Must(err)
	n.write(fmt.Sprintf("/var/lib/cni/results/net-%s-eth0", p.container), entry)
}

// cgroups is the directory of the pods' cgroups, in version 2 or in the hierarchy of version 1 without a controller.
func cgroups() string {
	top := "/sys/fs/cgroup"
	if _, err := os.Stat(top + "/systemd/cgroup.procs"); err == nil {
		top += "/systemd"
	}
	return filepath.Join(top, "e2e-ambient-"+strconv.Itoa(os.Getpid()))
}

func (n *node) removeCgroups() {
	n.Helper()
	n.Until("the end of the pods' cgroups", func() bool {
		var all []string
		_ = filepath.WalkDir(cgroups(), func(path string, entry os.DirEntry, err error) error {
			if err == nil && entry.IsDir() {
				all = append(all, path)
			}
			return nil
		})
		for i := range all {
			_ = unix.Rmdir(all[len(all)-1-i])
		}
		_, err := os.Stat(cgroups())
		return os.IsNotExist(err)
	})
}

// call is what a call of the plugin took.
type call struct{ cpu, took time.Duration }

// add calls the plugin for a pod as a runtime does, after the plugin before it in the chain.
func (n *node) add(p pod) (c call) {
	n.Helper()
	text, err := os.ReadFile(n.file("/run/net.d/10-net.conflist"))
	n.Must(err)
	var list struct {
		Plugins []map[string]any `json:"plugins"`
	}
	n.Must(json.Unmarshal(text, &list))
	stanza := list.Plugins[len(list.Plugins)-1]
	stanza["cniVersion"], stanza["name"] = "1.0.0", "net"
	stanza["prevResult"] = map[string]any{
		"cniVersion": "1.0.0", "interfaces": []map[string]string{{"name": "eth0", "sandbox": "/var/run/netns/" + p.netns}},
		"ips": []map[string]any{{"interface": 0, "address": p.address + "/8"}},
	}
	input, err := json.Marshal(stanza)
	n.Must(err)
	command := n.Command(n.Context(), "/opt/cni/metered/istio-cni")
	command.Env = []string{
		"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "CNI_COMMAND=ADD", "CNI_CONTAINERID=" + p.container, "CNI_NETNS=/var/run/netns/" + p.netns, "CNI_IFNAME=eth0",
		"CNI_PATH=/opt/cni/bin", "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=" + app + ";K8S_POD_NAME=" + p.Name +
			";K8S_POD_INFRA_CONTAINER_ID=" + p.container + ";K8S_POD_UID=" + string(p.UID),
	}
	command.Stdin = strings.NewReader(string(input))
	if text, err = command.CombinedOutput(); err != nil {
		n.Fatalf("ADD of %s: %v: %s", p.Name, err, text)
	}
	lines, err := os.ReadFile(n.file("/run/metered"))
	n.Must(err)
	all := strings.Split(strings.TrimSpace(string(lines)), "\n")
	var cpu, took int64
	var verb string
	_, err = fmt.Sscan(all[len(all)-1], &verb, &cpu, &took)
	n.Must(err)
	return call{time.Duration(cpu) * time.Microsecond, time.Duration(took) * time.Microsecond}
}
