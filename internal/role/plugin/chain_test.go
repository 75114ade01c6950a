package plugin_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestMain(m *testing.M) { chaintest.Main(m) }

// rules returns iptables-save's output for a pod.
func rules(t *testing.T, p chaintest.Pod) string {
	t.Helper()
	return netnstest.Run(t, p.Netns, "iptables-save")
}

// passesOn runs a list for a pod. The result equals that of the list's first plugin alone, which is returned.
func passesOn(t *testing.T, n *chaintest.Node, list *libcni.NetworkConfigList, p chaintest.Pod) (first *libcni.NetworkConfigList, result []byte) {
	t.Helper()
	short := *list
	short.Plugins = list.Plugins[:1]
	check.OK(t, check.Err(n.Add(&short, p)))
	before, err := n.Cached(&short, p)
	check.OK(t, err)
	after, err := n.Ours(list, p, before)
	check.OK(t, err, "ADD of", p.Name)
	var want, got any
	check.OK(t, errors.Join(json.Unmarshal(before, &want), json.Unmarshal(after, &got)))
	check.Diff(t, "the result of bridge, and of the chain", want, got)
	return &short, before
}

// TestChain_EveryVersion: the mesh pod is captured, the result equals the bridge's, and CHECK, which exists since 0.4.0, sees a difference.
func TestChain_EveryVersion(t *testing.T) {
	t.Parallel()
	for at, version := range cniconf.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			node := chaintest.New(t, chaintest.Program(t))
			list := node.Chain(version, chaintest.Stanza{"api_timeout": "2s"})
			mesh := node.NewPod("apps", "mesh", chaintest.Sidecar)
			plain := node.NewPod("apps", "plain", chaintest.PlainPod)
			_, before := passesOn(t, node, list, mesh)
			check.Contains(t, rules(t, mesh), "-A OUTPUT -j ISTIO_OUTPUT")
			result, err := node.Add(list, plain)
			if err != nil || result.Version() != version {
				t.Fatalf("ADD of a plain pod: %v, version %v", err, result)
			}
			if text := rules(t, plain); strings.Contains(text, "ISTIO") {
				t.Errorf("plain pod is captured:\n%s", text)
			}
			check.Equal(t, len(node.API.Requests()), 2, node.API.Requests())
			if at >= slices.Index(cniconf.Versions(), "0.4.0") {
				checkDiffers(t, node, list, mesh, plain, before)
			}
			for _, pod := range []chaintest.Pod{mesh, plain, mesh} {
				check.OK(t, node.Del(list, pod), "DEL")
			}
		})
	}
}

// checkDiffers takes a rule from a pod of the mesh, and then the API server from the node.
func checkDiffers(t *testing.T, node *chaintest.Node, list *libcni.NetworkConfigList, mesh, plain chaintest.Pod, before []byte) {
	t.Helper()
	for _, pod := range []chaintest.Pod{mesh, plain} {
		check.OK(t, node.Check(list, pod), "CHECK right after ADD")
	}
	netnstest.Run(t, mesh.Netns, "iptables", "-t", "nat", "-D", "OUTPUT", "-j", "ISTIO_OUTPUT")
	err := node.Check(list, mesh)
	var failed *types.Error
	if !errors.As(err, &failed) || failed.Code != 102 || !strings.Contains(failed.Details, `missing "-A OUTPUT -j ISTIO_OUTPUT"`) {
		t.Errorf("CHECK of a pod without its jump: %v", err)
	}
	check.OK(t, check.Err(node.Ours(list, mesh, before)), "ADD of istio-cni again")
	check.OK(t, node.Check(list, mesh), "CHECK after the repair")
	// Neither source answers any more: CHECK passes for a pod that was never captured, and fails for a captured pod.
	node.API.Stop()
	check.OK(t, node.Check(list, plain), "CHECK of a plain pod without API server")
	check.Fails(t, node.Check(list, mesh), "apps/mesh")
}

// TestStandalone_EveryVersion runs the agent's file for multus, which runs the plugin alone, without a previous result.
func TestStandalone_EveryVersion(t *testing.T) {
	t.Parallel()
	for at, version := range cniconf.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			node := chaintest.New(t, chaintest.Program(t))
			text := cniconf.Stanza{CNIVersion: version, RunDir: node.RunDir, LogLevel: "debug"}.Single()
			text, err := cniconf.Convert(text)
			check.OK(t, err)
			list, err := libcni.NetworkConfFromBytes(text)
			check.OK(t, err)
			mesh := node.NewPod("apps", "mesh", chaintest.Sidecar)
			addressed(t, mesh)
			result, err := node.Add(list, mesh)
			if err != nil || result.Version() != version {
				t.Fatalf("ADD: %v, result %v", err, result)
			}
			if !mesh.Captured(t) {
				t.Errorf("the pod is not captured:\n%s", rules(t, mesh))
			}
			if err := node.Check(list, mesh); (err == nil) != (at >= slices.Index(cniconf.Versions(), "0.4.0")) {
				t.Errorf("CHECK, which exists since 0.4.0: %v", err)
			}
			if version == "1.1.0" {
				check.OK(t, errors.Join(node.Status(list), node.GC(list)), "STATUS and GC")
			}
			check.OK(t, node.Del(list, mesh), "DEL")
		})
	}
}

// TestNode_CannotServeTheMesh: after a failed STATUS the runtime reports the network as not ready, and then no pod on it starts, not even
// the node agent. So STATUS succeeds, and a pod starts that its name excludes, above all the agent's. A pod that may be in the mesh waits
// because it must not start without redirection. The run directory, on a tmpfs, is empty after a boot until the agent has started, or has
// an empty file after a loss of power.
func TestNode_CannotServeTheMesh(t *testing.T) {
	t.Parallel()
	const kubeconfig = "istio-cni-kubeconfig"
	file := func(n *chaintest.Node) string { return filepath.Join(n.RunDir, kubeconfig) }
	stanza := func(more chaintest.Stanza) chaintest.Stanza {
		all := chaintest.Stanza{"exclude_namespaces": []string{"kube-system"}, "pod_namespace": "istio-system", "api_timeout": "1s"}
		maps.Copy(all, more)
		return all
	}
	ambient := ambientStanza(chaintest.Stanza{"api_timeout": "1s"})
	maps.Copy(ambient, delivered(`{}`))
	for name, tc := range map[string]struct {
		spoil  func(*chaintest.Node) error
		stanza chaintest.Stanza
		text   string
	}{
		"no kubeconfig":     {func(n *chaintest.Node) error { return os.Remove(file(n)) }, nil, kubeconfig},
		"no run directory":  {func(n *chaintest.Node) error { return os.RemoveAll(n.RunDir) }, nil, kubeconfig},
		"an empty file":     {func(n *chaintest.Node) error { return os.Truncate(file(n), 0) }, nil, kubeconfig},
		"ambient mode":      {func(n *chaintest.Node) error { return os.Remove(file(n)) }, ambient, "cannot tell whether pod apps/web is in the mesh"},
		"no API server":     {func(n *chaintest.Node) error { n.API.Stop(); return nil }, nil, "connection refused"},
		"a failed test":     {func(n *chaintest.Node) error { recordFailure(t, n, "it does not come out"); return nil }, nil, "it does not come out"},
		"an invalid stanza": {nil, chaintest.Stanza{"second_ip_family": "maybe", "api_timeout": "never", "backend": 7}, "second_ip_family"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			node := chaintest.New(t, chaintest.Program(t))
			mesh := node.NewPod("apps", "web", chaintest.Sidecar)
			if tc.spoil != nil {
				check.OK(t, tc.spoil(node))
			}
			list := node.Chain("1.1.0", stanza(tc.stanza))
			check.OK(t, errors.Join(node.Status(list), node.GC(list), node.Status(list)), "STATUS, GC, STATUS")
			for _, pod := range []chaintest.Pod{
				node.NewPod("kube-system", "coredns", nil), node.NewPod("istio-system", "istio-cni-node-x2x4", nil), node.NewPod("", "", nil),
			} {
				check.OK(t, check.Err(node.Add(list, pod)), "ADD of", pod.Namespace, pod.Name)
			}
			check.Equal(t, len(node.API.Requests()), 0, "requests for pods that need no request")
			check.Fails(t, check.Err(node.Add(list, mesh)), tc.text)
		})
	}
}

func TestAdd_APIServerFaults(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		fault kubetest.Fault
		text  string
		most  int // requests
	}{
		{kubetest.Forbidden, "forbidden (403)", 2},
		{kubetest.NotFound, "not found (404)", 100},
		{kubetest.ServerError, "server error (500)", 100},
		{kubetest.Hang, "no response in time", 100},
		{kubetest.Reset, "connection lost", 100},
		{kubetest.WrongUID, "another pod", 100},
		{kubetest.UnknownCA, "unknown authority", 2},
	} {
		t.Run(string(tc.fault), func(t *testing.T) {
			t.Parallel()
			node := chaintest.New(t, chaintest.Program(t))
			node.API.Fail(tc.fault, kubetest.Forever)
			list := node.Chain("1.0.0", chaintest.Stanza{"api_timeout": "2s"})
			pod := node.NewPod("apps", "mesh", chaintest.Sidecar)
			_, err := node.Add(list, pod)
			var failed *types.Error
			if !errors.As(err, &failed) || failed.Code != types.ErrTryAgainLater {
				t.Fatalf("ADD: %v, want code %d", err, types.ErrTryAgainLater)
			}
			check.Contains(t, err.Error(), "apps/mesh", tc.text, node.API.URL(), "Remedy: ")
			if strings.Contains(err.Error(), node.API.Token()) {
				t.Errorf("error has the token: %v", err)
			}
			if n := len(node.API.Requests()); n > tc.most {
				t.Errorf("%d requests, want at most %d", n, tc.most)
			}
			if text := rules(t, pod); strings.Contains(text, "ISTIO") {
				t.Errorf("rules although the ADD failed:\n%s", text)
			}
			check.OK(t, node.Del(list, pod), "DEL after it")
		})
	}
}

// answer is the output of one run of the program with exactly this environment and input.
type answer struct {
	stdout, stderr string
	code           int
}

func ask(t *testing.T, input string, env ...string) answer {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), chaintest.Program(t))
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = env, strings.NewReader(input), &stdout, &stderr
	_ = cmd.Run()
	return answer{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

func TestDelAndGC_Succeed(t *testing.T) {
	t.Parallel()
	for _, command := range []string{"DEL", "GC"} {
		for name, tc := range map[string]struct {
			input string
			env   []string
		}{
			"nothing at all":         {},
			"garbage for a stanza":   {"{{{", []string{"CNI_CONTAINERID=c", "CNI_IFNAME=eth0", "CNI_PATH=/nowhere"}},
			"a namespace that ended": {`{"cniVersion":"1.0.0","name":"n"}`, []string{"CNI_CONTAINERID=c", "CNI_NETNS=/run/netns/gone", "CNI_IFNAME=eth0", "CNI_PATH=/x"}},
			"an unknown version":     {`{"cniVersion":"9.9.9","name":"n"}`, []string{"CNI_CONTAINERID=c", "CNI_IFNAME=eth0", "CNI_PATH=/x"}},
			"unknown arguments":      {`{"cniVersion":"0.4.0","name":"n"}`, []string{"CNI_CONTAINERID=c", "CNI_IFNAME=eth0", "CNI_PATH=/x", "CNI_ARGS=a=b=c;;"}},
		} {
			t.Run(command+"/"+name, func(t *testing.T) {
				t.Parallel()
				got := ask(t, tc.input, slices.Concat(tc.env, []string{"CNI_COMMAND=" + command})...)
				if got.code != 0 || got.stdout != "" {
					t.Errorf("exit %d, stdout %q, stderr %q", got.code, got.stdout, got.stderr)
				}
			})
		}
	}
}

func TestErrors_OneCNIObject(t *testing.T) {
	t.Parallel()
	required := []string{"CNI_CONTAINERID=c", "CNI_NETNS=/run/netns/gone", "CNI_IFNAME=eth0", "CNI_PATH=/x"}
	for _, tc := range []struct {
		name, command, input string
		env                  []string
		code                 uint
		text                 string
	}{
		{"a stanza that is not JSON", "ADD", "{", required, 6, ""},
		{"a stanza without a name", "ADD", `{"cniVersion":"1.0.0"}`, required, 7, "missing network name"},
		{"an unknown version", "ADD", `{"cniVersion":"9.9.9","name":"n"}`, required, 1, "incompatible"},
		{"a missing variable", "ADD", `{"cniVersion":"1.0.0","name":"n"}`, required[:1], 4, "CNI_NETNS"},
		{"an unknown command", "FLY", `{"cniVersion":"1.0.0","name":"n"}`, required, 4, "FLY"},
		{"CHECK before 0.4.0", "CHECK", `{"cniVersion":"0.3.1","name":"n"}`, required, 1, ""},
		{"STATUS before 1.1.0", "STATUS", `{"cniVersion":"1.0.0","name":"n"}`, required, 1, ""},
		{"a broken prevResult", "ADD", `{"cniVersion":"1.0.0","name":"n","prevResult":{"ips":"no"}}`, required, 6, "prevResult"},
		{"an argument without value", "ADD", `{"cniVersion":"1.0.0","name":"n"}`, slices.Concat(required, []string{"CNI_ARGS=IgnoreUnknown"}), 4, "CNI_ARGS"},
		{"an unknown argument", "ADD", `{"cniVersion":"1.0.0","name":"n"}`, slices.Concat(required, []string{"CNI_ARGS=FOO=1"}), 4, "FOO"},
		// The CNI library checks the namespace after the command has run: stdout must have its error and no result.
		{
			"the plugin's own namespace", "ADD", `{"cniVersion":"1.0.0","name":"n"}`,
			[]string{"CNI_CONTAINERID=c", "CNI_NETNS=/proc/self/ns/net", "CNI_IFNAME=eth0", "CNI_PATH=/x"},
			8, "",
		},
		{
			"no kubeconfig", "ADD", `{"cniVersion":"1.0.0","name":"n","cni_agent_run_dir":"/nonexistent"}`,
			slices.Concat(required, []string{"CNI_ARGS=K8S_POD_NAMESPACE=apps;K8S_POD_NAME=web"}), 5, "/nonexistent/istio-cni-kubeconfig",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got := ask(t, tc.input, slices.Concat(tc.env, []string{"CNI_COMMAND=" + tc.command})...)
			var object struct {
				Code    uint   `json:"code"`
				Msg     string `json:"msg"`
				Details string `json:"details"`
			}
			if err := json.Unmarshal([]byte(got.stdout), &object); err != nil || got.code != 1 {
				t.Fatalf("exit %d, stdout is not one object (%v): %q", got.code, err, got.stdout)
			}
			if object.Code != tc.code || !strings.Contains(object.Msg+object.Details, tc.text) {
				t.Errorf("got %+v, want code %d and %q", object, tc.code, tc.text)
			}
			for line := range strings.Lines(got.stderr) {
				if !json.Valid([]byte(line)) {
					t.Errorf("stderr line is not JSON: %q", line)
				}
			}
		})
	}
}

// TestAdd_NetnsResolvedOnce: with every backend, one system call gets the path, and all others use the open
// file, so that the checked and the programmed namespace are the same even if the path changes. The same holds for the command
// iptables. The library resolves the path once more after ADD if the runtime does not allow the plugin's own namespace.
func TestAdd_NetnsResolvedOnce(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"auto", "netlink", "native", "iptables"} {
		n := chaintest.New(t, chaintest.Program(t))
		pod := n.NewPod("shop", "web", chaintest.Sidecar)
		addressed(t, pod)
		link := filepath.Join(t.TempDir(), "resolved-once")
		check.OK(t, os.Symlink(pod.Netns, link))
		pod.Netns = link
		input, err := chaintest.Input(n.Chain("1.0.0", chaintest.Stanza{"backend": backend}), nil)
		check.OK(t, err)
		once := func(call string, want int, r *chaintest.Record, out []byte) {
			t.Helper()
			if uses := r.Under("resolved-once"); r.Code != 0 || len(uses) != want {
				t.Errorf("%s, %s: exit code %d; the path is resolved by %q, want %d times: %s", backend, call, r.Code, uses, want, out)
			}
		}
		for _, call := range []string{"ADD", "CHECK", "DEL"} {
			r, out := n.Traced(call, pod, input, "CNI_NETNS_OVERRIDE=1")
			once(call, map[string]int{"ADD": 1, "CHECK": 1}[call], r, out)
		}
		for _, mode := range []string{"REDIRECT", "TPROXY"} {
			check.OK(t, netns.Do(n.Netns, func() error {
				r, err := chaintest.Trace(exec.CommandContext(t.Context(), chaintest.Program(t), "iptables", "--reconcile", "--backend", backend,
					"-b", "*", "-m", mode, "--network-namespace", link))
				once("iptables "+mode, 1, r, nil)
				return err
			}))
		}
	}
}
