package bundle

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/command"
	"github.com/meshcni/istio-cni/internal/core/archive/archivetest"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestMain(m *testing.M) { chaintest.Main(m) }

// run runs the role and unpacks its output.
func run(t *testing.T, args ...string) (code int, files map[string]string, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = Run(applet.Call{Args: args, Stdout: &out, Stderr: &errs, Getenv: func(string) (string, bool) { return "", false }})
	if out.Len() > 0 {
		files, _ = archivetest.Unpack(t, &out)
	}
	return code, files, errs.String()
}

const planted = "pl4nted-0123456789"

// TestBundle_OfANode checks every file of a real agent, and that none has a planted secret.
func TestBundle_OfANode(t *testing.T) {
	n := nodetest.New(t, chaintest.Program(t))
	n.StartAPI()
	n.API.SetToken(planted + "-token")
	n.GrantAccess()
	n.Put(nodetest.NetDir+"/10-bridge.conflist", strings.Replace(nodetest.BridgeList, `"sysctl": {}`,
		`"sysctl": {}, "etcd_password": "`+planted+`", "env": [{"name": "SOME_TOKEN", "value": "`+planted+`"}]`, 1))
	n.Put(nodetest.NetDir+"/90-bro\x1bken.conf", "password: "+planted+"\n\x1b[2J")
	n.Put(nodetest.NetDir+"/calico-kubeconfig", "token: "+planted)
	a := n.Start(`CNI_NETWORK_CONFIG={"type":"istio-cni","plugin_log_level":"info","etcd_key":"`+secretPart+`"}`, "--log_as_json")
	a.AwaitReady()
	mesh := n.NewPod("apps", "mesh", chaintest.Sidecar)
	check.OK(t, check.Err(n.Add(mesh)))
	annotations := map[string]string{
		"sidecar.istio.io/status": `{"revision":"default","volumes":["` + secretPart + `"]}`, "traffic.sidecar.istio.io/excludeOutboundPorts": "5432",
		"example.com/private": planted, "example.com/note": "PSK " + secretPart,
	}
	annotated, _ := json.Marshal(annotations)
	n.API.Set(fmt.Appendf(nil, `{"kind":"Pod","apiVersion":"v1","metadata":{"namespace":"apps","name":"mesh","uid":%q,"annotations":%s},"spec":{"nodeName":%q,
		"containers":[{"name":"istio-proxy","args":["proxy","sidecar"]}]},
		"status":{"phase":"Running","startTime":"2026-01-02T03:04:05Z","podIP":"10.77.0.2"}}`, mesh.UID, annotated, nodetest.NodeName))
	relay(t, n.Path(nodetest.RunDir)+"/log.sock", "the token is "+planted+"-token and 'Authorization: Bearer "+planted+"'")
	a.AwaitLog("the token is")
	socket := n.Path(nodetest.RunDir) + "/" + agentapi.SocketName
	var code int
	var files map[string]string
	var stderr string
	nodetest.Await(t, "the bundle with the audit's first results", func() error {
		code, files, stderr = run(t, "apps/mesh", "--socket="+socket, "--net-dir="+n.Path(nodetest.NetDir))
		if !strings.Contains(files["audit.json"], `"drifted"`) {
			return fmt.Errorf("audit %s, %s", files["audit.json"], files["missing.txt"]) //nolint:err113 // for the test's reader
		}
		return nil
	})
	broken, cluster, _ := strings.Cut(files["missing.txt"], "\n")
	if code != applet.ExitOK || stderr != "" || broken != "cni/90-bro_ken.conf: left out, 33 bytes: not valid JSON: an error at byte 1" ||
		strings.Count("\n"+cluster, "\ncluster/") != strings.Count(cluster, "\n") || strings.Contains(cluster, planted) {
		t.Fatalf("exit code %d, %s, missing %s", code, stderr, files["missing.txt"])
	}
	delete(files, "missing.txt")
	for name, want := range map[string]string{
		"README.txt": "missing.txt", "version.txt": "version", "agent.json": `"etcd_key": "string of 33 bytes"`, "readiness.json": `"ready": true`,
		"selftest.json": `"choice"`, "cni-dir.txt": "calico-kubeconfig", "cni/10-bridge.conflist": `"etcd_password": "string of 18 bytes"`,
		"kubeconfig.yaml": "current-context: istio-cni-context", "audit.json": `"drifted"`, "pods/apps_mesh.json": "--dport 5432 -j RETURN", "decisions.json": `"mesh"`, "agent.log": "the node's pods are synced", "metrics.txt": "istio_cni_add_total",
		"plugin.log": "redirected the pod",
	} {
		check.Contains(t, files[name], want)
		if strings.Contains(files[name], planted) || strings.Contains(files[name], secretPart) {
			t.Errorf("a secret is in %s", name)
		}
		delete(files, name)
	}
	if len(files) > 0 {
		t.Errorf("further files: %q", slices.Sorted(maps.Keys(files)))
	}
}

// TestBundle_OwnRights: the bundle has the objects that the agent may read, without secrets, and names the others.
func TestBundle_OwnRights(t *testing.T) {
	api := kubetest.NewServer(t)
	api.Set(fmt.Appendf(nil, `{"kind":"Pod","apiVersion":"v1","metadata":{"namespace":"apps","name":"mesh","uid":"u","annotations":{"a":%q}},
		"spec":{"nodeName":"n","containers":[{"name":"istio-proxy","args":[%[1]q],"env":[{"name":"KEY","value":%[1]q}]}]}}`, planted))
	api.Set(kubetest.DaemonSet("istio-system", "istio-cni-node", ""))
	api.Deny("get configmaps")
	socket := fake(t, map[string]string{
		"/v1/bundle/agent": `{"namespace":"istio-system","settings":[{"name":"--daemonset-name","value":"istio-cni-node"},{"name":"--config-map","value":"istio-cni-config"}]}`,
	})
	kubeconfig, err := os.ReadFile(api.Kubeconfig(t))
	check.OK(t, err)
	put(t, filepath.Join(filepath.Dir(socket), cniconf.KubeconfigName), string(kubeconfig))
	_, files, _ := run(t, "apps/mesh", "--socket="+socket, "--net-dir="+t.TempDir())
	if !strings.Contains(files["cluster/pods.json"], `"nodeName": "n"`) || !strings.Contains(files["cluster/pods.json"], `"value": "string of 18 bytes"`) ||
		!strings.Contains(files["cluster/daemonsets.json"], `"name": "istio-cni-node"`) {
		t.Errorf("pod %s, DaemonSet %s", files["cluster/pods.json"], files["cluster/daemonsets.json"])
	}
	check.Contains(t, files["missing.txt"], "cluster/: the agent has no right to read events, webhook", "cluster/configmaps.json: get configmaps istio-system/istio-cni-config")
	for name, text := range files {
		if strings.Contains(text, planted) {
			t.Errorf("a secret is in %s", name)
		}
	}
}

// relay sends a record to the agent's log like a plugin.
func relay(t *testing.T, socket, message string) {
	t.Helper()
	agent, err := agentapi.Dial(t.Context(), socket)
	check.OK(t, err)
	defer agent.Close() //nolint:errcheck // the request has ended
	line, err := json.Marshal(map[string]string{"level": "info", "time": time.Now().Format(time.RFC3339Nano), "msg": message})
	if err == nil {
		err = agent.Log(t.Context(), []string{string(line)})
	}
	check.OK(t, err)
}

// fake is an agent with the given answers by path.
func fake(t *testing.T, answers map[string]string) (socket string) {
	t.Helper()
	return agenttest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, has := answers[r.URL.Path]
		if !has {
			http.Error(w, "no such \x1b path", http.StatusNotFound)
			return
		}
		_, _ = w.Write([]byte(text))
	}), nil).Path
}

// TestBundle_HostileNames: a pod or a file with any name is a single file of the bundle.
func TestBundle_HostileNames(t *testing.T) {
	var all []audit.Status
	for _, name := range []string{"../../etc/passwd", "\x1b[2J", "a b\n", strings.Repeat("x", 5000), "", "..", "web", "web"} {
		all = append(all, audit.Status{Namespace: name, Pod: name, State: audit.Bypassed})
	}
	text, _ := json.Marshal(all)
	answers := map[string]string{
		"/v1/audit/web/web": `{"a":"b"}`, "/v1/bundle/metrics": strings.Repeat("x", agentapi.MaxPart+1), "/v1/decisions": "[]", "/v1/audit": string(text),
	}
	code, files, stderr := run(t, "--socket="+fake(t, answers), "--net-dir="+t.TempDir(), "--node-name=../node\x1b")
	var pods []string
	for name := range files {
		if strings.HasPrefix(name, "pods/") {
			pods = append(pods, name)
		}
	}
	slices.Sort(pods)
	if code != applet.ExitOK || stderr != "" || !slices.Equal(pods, []string{"pods/web_web-2.json", "pods/web_web.json"}) {
		t.Errorf("exit code %d, %s, %d pods %q", code, stderr, len(pods), pods)
	}
	check.Contains(t, files["missing.txt"], "metrics.txt: ", "kubeconfig.yaml: ", "agent.json: ")
}

// TestBundle_ManyPods: all pods are in the bundle, after the other parts, which they cannot displace.
func TestBundle_ManyPods(t *testing.T) {
	const pods = 100
	var all []audit.Status
	answers := map[string]string{"/v1/decisions": "[]"}
	for i := range pods {
		all = append(all, audit.Status{Namespace: "shop", Pod: fmt.Sprint(i), State: audit.Drifted})
		answers[fmt.Sprint("/v1/audit/shop/", i)] = "{}"
	}
	text, _ := json.Marshal(all)
	answers["/v1/audit"] = string(text)
	var out bytes.Buffer
	check.OK(t, check.Err(write(t.Context(), &out, config{Bundle: command.Bundle{Socket: fake(t, answers), NetDir: t.TempDir()}})))
	_, names := archivetest.Unpack(t, &out)
	names = slices.DeleteFunc(names, func(name string) bool { return name == "missing.txt" })
	first := slices.IndexFunc(names, func(name string) bool { return strings.HasPrefix(name, "pods/") })
	check.Equal(t, len(names)-first, pods, "files from the first pod on")
}

func TestBundle_NoAgent(t *testing.T) {
	dir := agenttest.SocketDir(t)
	net := t.TempDir()
	for file, text := range map[string]string{
		dir + "/selftest.json": `{"choice":"netlink"}`, net + "/10-x.conf": `{"type":"bridge"}`,
		dir + "/istio-cni-kubeconfig": "not YAML: [ " + planted,
	} {
		check.OK(t, os.WriteFile(file, []byte(text), 0o600))
	}
	code, files, stderr := run(t, "--socket="+dir+"/pods.sock", "--net-dir="+net)
	if code != applet.ExitError || !strings.Contains(stderr, "connecting to the node agent") || files["selftest.json"] == "" || files["cni/10-x.conf"] == "" {
		t.Errorf("exit code %d, %s, files %q", code, stderr, slices.Sorted(maps.Keys(files)))
	}
	missing := files["missing.txt"]
	if strings.Contains(missing, planted) || !strings.Contains(missing, "agent.json: connecting") || !strings.Contains(missing, "kubeconfig.yaml: decoding") {
		t.Error(missing)
	}
}

// TestBundle_AgentHangs: the command takes its full time, and writes the node's own parts.
func TestBundle_AgentHangs(t *testing.T) {
	socket := filepath.Join(agenttest.SocketDir(t), agentapi.SocketName)
	agenttest.Listen(t, socket)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	var out bytes.Buffer
	answered, err := write(ctx, &out, config{Bundle: command.Bundle{Socket: socket, NetDir: t.TempDir()}})
	if files, _ := archivetest.Unpack(t, &out); answered == nil || err != nil || files["README.txt"] == "" || !strings.Contains(files["missing.txt"], "agent.json") {
		t.Errorf("%v, %v, %q", answered, err, files)
	}
}

// TestBundle_AgentAnswersGarbage: the error names the invalid answer.
func TestBundle_AgentAnswersGarbage(t *testing.T) {
	socket := fake(t, map[string]string{"/v1/bundle/agent": "<html>"})
	code, files, stderr := run(t, "--socket="+socket, "--net-dir="+t.TempDir())
	if want := "asking the node agent for its agent: invalid character"; code != applet.ExitError || !strings.Contains(stderr, want) ||
		!strings.Contains(files["missing.txt"], want) {
		t.Errorf("exit code %d, %s: %s", code, stderr, files["missing.txt"])
	}
}

func TestRun_Usage(t *testing.T) {
	for _, args := range [][]string{{"web"}, {"a/b/c"}, {"/b"}, {"--since=soon"}, {"--none"}} {
		if code, files, stderr := run(t, args...); code != applet.ExitUsage || files != nil || stderr == "" {
			t.Errorf("%q: exit code %d, %s", args, code, stderr)
		}
	}
	var errs bytes.Buffer
	code := Run(applet.Call{
		Stdout: failing{}, Stderr: &errs, Getenv: func(string) (string, bool) { return "", false }, Terminal: func() int { return 80 },
	})
	if code != applet.ExitUsage || !strings.Contains(errs.String(), "redirect the standard output") {
		t.Errorf("on a terminal: exit code %d, %s", code, errs.String())
	}
	errs.Reset()
	code = Run(applet.Call{
		Args: []string{"--socket=" + t.TempDir() + "/none"}, Stdout: failing{}, Stderr: &errs, Getenv: func(string) (string, bool) { return "", false },
	})
	if code != applet.ExitError || errs.String() != "error: writing the bundle: full\n" {
		t.Errorf("a full disk: exit code %d, %s", code, errs.String())
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errors.New("full") } //nolint:err113 // for the test

// secretPart is in what other programs wrote.
const secretPart = "pl4nted0123456789abcdefABCDEF0123"

// TestSecrets_OfOtherPrograms: whatever another program wrote, and whether its file is valid or not, only the values of known keys are shown.
func TestSecrets_OfOtherPrograms(t *testing.T) {
	const members = `"args": ["--token", "` + secretPart + `"], "auth": {"ipam": {"name": "` + secretPart + `"}}, "headers": ["Authorization", "` + secretPart + `"],
		"` + secretPart + `": 1, "text": "{\"a\": \"` + secretPart + `\"}", "runtimeConfig": {"io.kubernetes.cri.pod-annotations": {"example.com/a": "` + secretPart + `"}}`
	const valid = `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "bridge", "bridge": "cni0", ` + members + `}]}`
	const log = `{"time":"2026-05-04T03:02:01.000001Z","level":"info","msg":"pod captured"}` + "\n" + members + "\n{" + members + "}\n"
	dir, netDir := agenttest.SocketDir(t), t.TempDir()
	put(t, filepath.Join(dir, pluginsFile), log)
	for name, text := range map[string]string{
		"a.conflist": valid, "b.conflist": strings.TrimSuffix(valid, "]}"), "c.conf": "password: |\n  " + secretPart, pluginsFile: log, "other.log": log,
	} {
		put(t, filepath.Join(netDir, name), text)
	}
	_, files, _ := run(t, "--socket="+dir+"/pods.sock", "--net-dir="+netDir)
	var confs []string
	for name, text := range files {
		if strings.Contains(name+text, secretPart) {
			t.Errorf("a secret is in %s", name)
		}
		if strings.HasPrefix(name, "cni/") {
			confs = append(confs, name)
		}
	}
	check.Diff(t, "configurations", []string{"cni/a.conflist"}, confs)
	check.Contains(t, files["cni/a.conflist"], `"bridge": "cni0"`)
	check.Contains(t, files["plugin.log"], "pod captured", "left out: 4 lines")
	check.Contains(t, files["missing.txt"], "cni/b.conflist: left out, ", "cni/c.conf: left out, ", " bytes: not valid JSON: an error at byte ")
}

func put(t *testing.T, file, text string) {
	t.Helper()
	check.OK(t, os.WriteFile(file, []byte(text), 0o600))
}
