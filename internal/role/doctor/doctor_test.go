package doctor

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/racerepair"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/command"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
	"github.com/meshcni/istio-cni/internal/test/documenttest"
)

// world is a healthy node and its API server.
type world struct {
	t    *testing.T
	root string
	api  *kubetest.Server
	env  map[string]string
	args []string
}

const (
	bridgeList = `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge"}, {"type": "istio-cni"}]}`
	pureList   = `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge"}]}`
	listFile   = "/etc/cni/net.d/10-bridge.conflist"
	tomlFile   = "/etc/containerd/config.toml"
	runDir     = "/run/istio-cni"
)

func newWorld(t *testing.T) *world {
	t.Helper()
	root, err := os.MkdirTemp("", "node") //nolint:usetesting // a short path, for the socket
	check.OK(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	w := &world{t: t, root: root, api: kubetest.NewServer(t), env: map[string]string{}}
	w.put(listFile, bridgeList)
	w.put(tomlFile, "version = 2\n")
	w.put("/etc/passwd", "")
	w.must(os.MkdirAll(w.path("/usr"), 0o700), os.MkdirAll(w.path("/var"), 0o700), os.Symlink("/run", w.path("/var/run")))
	verdict("netlink", `{"backend": "netlink"}`)(w)
	w.token(time.Now().Add(time.Hour))
	w.agent()
	w.pod("web", "istio-validation")
	return w
}

func (w *world) must(errs ...error) {
	w.t.Helper()
	check.OK(w.t, errors.Join(errs...))
}

func (w *world) path(name string) string { return filepath.Join(w.root, name) }

func (w *world) put(name, text string) {
	w.t.Helper()
	w.must(os.MkdirAll(filepath.Dir(w.path(name)), 0o700), os.WriteFile(w.path(name), []byte(text), 0o600))
}

// puts is put for a table's row.
func puts(name, text string) func(*world) { return func(w *world) { w.put(name, text) } }

// elsewhere gives the runtime directories below /srv.
func elsewhere(more func(*world)) func(*world) {
	return func(w *world) {
		w.put(tomlFile, "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dirs = ['/srv/bin']\nconf_dir = '/srv/conf'\n")
		w.must(os.MkdirAll(w.path("/srv/bin"), 0o700), os.MkdirAll(w.path("/srv/conf"), 0o700))
		more(w)
	}
}

// openShift has multus in one directory, and its networks in another one.
func openShift(w *world) {
	w.remove("/etc/cni/net.d")
	w.put("/etc/crio/crio.conf.d/00-default", "[crio.network]\nnetwork_dir = \"/etc/kubernetes/cni/net.d\"\nplugin_dirs = [\"/var/lib/cni/bin\", \"/opt/cni/bin\"]\n")
	w.put("/run/crio/crio.sock", "")
	w.put("/etc/kubernetes/cni/net.d/00-multus.conf", `{"cniVersion": "0.3.1", "name": "m", "type": "multus-shim"}`)
	w.put("/etc/cni/multus/net.d/istio-cni.conf", `{"cniVersion": "0.3.1", "name": "istio-cni", "type": "istio-cni"}`)
	w.env["MOUNTED_CNI_NET_DIR"] = "/host/etc/cni/multus/net.d"
}

// verdict writes what the self-test chose, and its results, on this kernel.
func verdict(choice, results string) func(*world) {
	return func(w *world) {
		release, err := os.ReadFile("/proc/sys/kernel/osrelease")
		w.must(err)
		w.put(runDir+"/selftest.json", fmt.Sprintf(`{"version": 1, "kernel": %q, "results": [%s], "choice": %q}`, strings.TrimSpace(string(release)), results, choice))
	}
}

// ciliumState makes the agent of Cilium show its settings on the node alone.
func ciliumState(settings string) func(*world) {
	return func(w *world) {
		w.cilium(nil)
		w.put("/run/cilium/state/agent-runtime-config.json", settings)
	}
}

func (w *world) remove(name string) { w.must(os.RemoveAll(w.path(name))) }

// token sets the expiry of the agent's token.
func (w *world) token(expires time.Time) {
	claims := fmt.Sprintf(`{"sub":"system:serviceaccount:istio-system:istio-cni","exp":%d}`, expires.Unix())
	w.api.SetToken("e30." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".c2ln")
	w.api.WriteKubeconfig(w.t, w.path(runDir+"/istio-cni-kubeconfig"))
}

// agent listens on the node agent's socket.
func (w *world) agent() {
	w.t.Helper()
	listener, err := new(net.ListenConfig).Listen(w.t.Context(), "unix", w.path(runDir+"/pods.sock"))
	w.must(err)
	w.t.Cleanup(func() { _ = listener.Close() })
}

func (w *world) pod(name, init string) {
	w.api.Set(fmt.Appendf(nil, `{"kind": "Pod", "apiVersion": "v1", "metadata": {"namespace": "shop", "name": %q},
		"spec": {"nodeName": "node-1", "initContainers": [{"name": %q}], "containers": [{"name": "istio-proxy"}]}}`, name, init))
}

func (w *world) cilium(data map[string]string) {
	w.put("/etc/cni/net.d/05-cilium.conflist", `{"cniVersion": "0.3.1", "name": "cilium", "plugins": [{"type": "cilium-cni"}, {"type": "istio-cni"}]}`)
	if data != nil {
		w.api.Set(kubetest.ConfigMap("kube-system", "cilium-config", data))
	}
}

// run calls the command.
func (w *world) run(args ...string) (code int, stdout, stderr string) {
	w.t.Helper()
	var out, errs bytes.Buffer
	code = Run(applet.Call{
		Args: append(append([]string{"--host-root", w.root, "--node-name", "node-1"}, w.args...), args...), Stdout: &out, Stderr: &errs,
		Getenv: func(name string) (string, bool) { text, set := w.env[name]; return text, set },
	})
	return code, out.String(), errs.String()
}

// checks are the checks of the JSON output, by name.
func (w *world) checks() (code int, all map[string]document.Check) {
	w.t.Helper()
	code, text, stderr := w.run("-o", "json")
	var list document.DoctorReport
	if err := json.Unmarshal([]byte(text), &list); err != nil || list.Node != "node-1" {
		w.t.Fatalf("%v: %s%s", err, text, stderr)
	}
	documenttest.Valid(w.t, "DoctorReport", text)
	all = map[string]document.Check{}
	for _, c := range list.Items {
		all[c.Name] = c
	}
	return code, all
}

// TestDoctor_NodeInOrder: all checks pass on a node in order, and none fails without an agent, an API server and files of a node.
func TestDoctor_NodeInOrder(t *testing.T) {
	t.Parallel()
	for _, seen := range []bool{true, false} {
		w := newWorld(t)
		if !seen {
			w.root = t.TempDir()
		}
		code, all := w.checks()
		for name, c := range all {
			if c.Text == "" || c.Result == document.Fail || (c.Result == document.Warn) != (c.Remedy != "") || seen && c.Result != document.OK {
				t.Errorf("%s: %+v", name, c)
			}
		}
		if code != applet.ExitOK || len(all) != len(checks()) {
			t.Errorf("exit code %d, %d checks", code, len(all))
		}
	}
}

// TestDoctor_Faults checks the result of each fault, its remedy, and the exit code of a failure.
func TestDoctor_Faults(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		happen       func(*world)
		result       string // of a check
		text, remedy string
	}{
		"another plugin directory": {
			puts(tomlFile, "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/usr/lib/cni\"\n"),
			"directories fail", "plugins in /usr/lib/cni; the agent installs into /etc/cni/net.d and /opt/cni/bin", "cniBinDir=/usr/lib/cni",
		},
		"another configuration directory": {
			puts(tomlFile, "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nconf_dir = '/etc/x'\n"),
			"directories fail", "reads configuration in /etc/x", "cniConfDir=/etc/x",
		},
		"Docker's configuration":           {puts(tomlFile, "disabled_plugins = [\"cri\"]\n"), "directories warn", "CRI plugin is switched off", "docs/errors.md"},
		"no runtime":                       {func(w *world) { w.remove(tomlFile) }, "directories warn", "neither a socket nor", "cniConfDir"},
		"no configuration":                 {func(w *world) { w.remove(listFile) }, "primary warn", "no valid CNI configuration", "install the pod network"},
		"not installed":                    {func(w *world) { w.put(listFile, pureList); w.remove(runDir) }, "primary warn", "not installed yet", "install the chart"},
		"not installed by a running agent": {puts(listFile, pureList), "primary fail", "although the agent runs", "readiness"},
		"a file that sorts first": {
			puts("/etc/cni/net.d/00-other.conflist", pureList), "primary fail",
			"the runtime loads 00-other.conflist with bridge, and the plugin is in 10-bridge.conflist", "cniConfFileName",
		},
		"a broken file that sorts first": {puts("/etc/cni/net.d/00-other.conflist", "{"), "primary warn", "00-other.conflist", "correct or remove"},
		"multus": {
			func(w *world) {
				w.put("/etc/cni/net.d/00-multus.conf", `{"cniVersion": "0.3.1", "name": "m", "type": "multus-shim"}`)
				w.put(listFile, pureList)
			},
			"primary warn", "multus delegates", "values-multus.yaml",
		},
		"multus and a file of this program": {
			puts("/etc/cni/net.d/00-multus.conf", `{"cniVersion": "0.3.1", "name": "m", "type": "multus"}`),
			"primary ok", "the plugin is in one of them", "",
		},
		"directories in the agent's record": {
			elsewhere(puts(runDir+"/directories.json", `[{"configuration":"/srv/conf","programs":["/srv/bin"]},{"configuration":"/etc/cni/net.d","programs":[]}]`)),
			"directories ok", "/srv/bin, where the agent installs", "",
		},
		"directories before the installation": {
			elsewhere(func(w *world) { w.remove(runDir) }),
			"directories ok", "where an agent without cniConfDir and cniBinDir installs", "",
		},
		"other directories are set": {
			elsewhere(func(w *world) {
				w.remove(runDir)
				w.env["MOUNTED_CNI_BIN_DIRS"] = "/host/other"
			}),
			"directories fail", "the agent installs into /etc/cni/net.d and /other", "",
		},
		"OpenShift":                 {openShift, "directories ok", "cri-o (/etc/crio/crio.conf.d/00-default) reads configuration in /etc/kubernetes/cni/net.d", ""},
		"OpenShift's second plugin": {openShift, "primary ok", "", ""},
		"Cilium alone in the directory": {
			func(w *world) {
				w.cilium(map[string]string{"cni-exclusive": "true"})
				w.put("/etc/cni/net.d/10-b.conflist.cilium_bak", "")
			},
			"primary warn", "renames what others write: 10-b.conflist.cilium_bak", "cni.exclusive=false",
		},
		"Cilium has removed the plugin": {
			func(w *world) {
				w.cilium(map[string]string{})
				w.put("/etc/cni/net.d/05-cilium.conflist", `{"cniVersion": "0.3.1", "name": "cilium", "plugins": [{"type": "cilium-cni"}]}`)
			},
			"primary fail", "Cilium keeps the directory to itself", "cni.exclusive=false",
		},
		"Cilium beside others": {
			func(w *world) { w.cilium(map[string]string{"cni-exclusive": "false", "bpf-lb-sock": "false"}) }, "primary ok", "cilium-cni", "",
		},
		"Cilium's socket load balancing": {
			func(w *world) { w.cilium(map[string]string{"kube-proxy-replacement": "true"}) }, "socket-lb fail", "kube-proxy-replacement=true", "socketLB.hostNamespaceOnly=true",
		},
		"Cilium's socket load balancing for the node alone": {
			func(w *world) {
				w.cilium(map[string]string{"kube-proxy-replacement": "true", "bpf-lb-sock-hostns-only": "true"})
			}, "socket-lb ok", "leaves the sockets", "",
		},
		"Cilium's settings on the node": {
			ciliumState(`{"EnableSocketLB": true, "BPFSocketLBHostnsOnly": false}`), "socket-lb fail", "bpf-lb-sock=true", "socketLB.hostNamespaceOnly=true",
		},
		"Cilium's settings on the node, in order": {ciliumState(`{"BPFSocketLBHostnsOnly": true}`), "socket-lb ok", "leaves the sockets", ""},
		"Cilium's settings on the node, of a later release": {
			ciliumState(`{"BPFSocketLBHostnsOnly": false}`), "socket-lb warn", "is not known", "kubectl -n kube-system get configmap",
		},
		"Cilium without its ConfigMap": {func(w *world) { w.cilium(nil) }, "socket-lb warn", "is not known", "kubectl -n kube-system get configmap"},
		"a pipe as the first configuration": {
			func(w *world) { w.must(syscall.Mkfifo(w.path("/etc/cni/net.d/00-a.conf"), 0o600)) },
			"primary warn", "cannot be used (reading", "correct or remove",
		},
		"a kernel without NAT": {
			verdict("", `{"backend": "netlink", "problems": [{"family": "IPv4", "mode": "REDIRECT", "text": "the kernel needs CONFIG_NFT_NAT"}]}`),
			"self-test fail", "the kernel needs CONFIG_NFT_NAT", "load the modules",
		},
		"a kernel without nft_compat": {
			verdict("native", `{"backend": "netlink", "problems": [{"family": "IPv4", "mode": "REDIRECT", "text": "the kernel needs CONFIG_NFT_COMPAT (nft_compat)"}]}, {"backend": "native"}`),
			"self-test warn", "redirected by native; not everything works: netlink: IPv4 REDIRECT: the kernel needs CONFIG_NFT_COMPAT", "load the modules",
		},
		"an expired token":  {func(w *world) { w.token(time.Now().Add(-time.Minute)) }, "token fail", "has expired", "the agent's log"},
		"a token that ends": {func(w *world) { w.token(time.Now().Add(time.Minute)) }, "token warn", "expires in", "the agent's log"},
		"a refused token":   {func(w *world) { w.api.SetToken("another") }, "token fail", "refuses the token", "the agent's log"},
		"no kubeconfig":     {func(w *world) { w.remove(runDir + "/istio-cni-kubeconfig") }, "token warn", "has written no kubeconfig", "before the installation"},
		"a damaged kubeconfig": {
			func(w *world) { w.put(runDir+"/istio-cni-kubeconfig", "{") }, "token fail", "the plugin cannot use the kubeconfig", "the agent's log",
		},
		"a right that is missing, for unknown settings": {
			func(w *world) { w.api.Deny("watch pods") }, "rights warn", "may not: watch pods, and whether", "kubectl istio-cni doctor",
		},
		"a right of a feature that is off": {func(w *world) { w.api.Deny("delete pods") }, "rights ok", "rights that its features need", ""},
		"an API server that hangs":         {func(w *world) { w.api.Fail(kubetest.Hang, kubetest.Forever) }, "injection warn", "the API server cannot be asked", "run it"},
		"no API server":                    {func(w *world) { w.api.Stop() }, "rights warn", "cannot be reviewed", "reaches the API server"},
		"pilot.cni.enabled is off":         {func(w *world) { w.pod("web", "istio-init") }, "injection fail", "shop/web", "pilot.cni.enabled=true"},
		"an older pod": {
			func(w *world) { w.pod("old", "istio-init") }, "injection warn", "1 pod injected with pilot.cni.enabled, and 1 without it: shop/old", "restart these pods",
		},
		"an older pod that has ended": {
			func(w *world) {
				w.api.Set([]byte(`{"kind": "Pod", "apiVersion": "v1", "metadata": {"namespace": "shop", "name": "job"}, "status": {"phase": "Succeeded"},
					"spec": {"nodeName": "node-1", "initContainers": [{"name": "istio-init"}], "containers": [{"name": "istio-proxy"}]}}`))
			},
			"injection ok", "as of 1 pod", "",
		},
		"no pod of the mesh": {func(w *world) { w.pod("web", "app-init") }, "injection warn", "does not show", "start a pod"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			tc.happen(w)
			code, all := w.checks()
			name, result, _ := strings.Cut(tc.result, " ")
			got := all[name]
			if string(got.Result) != result || !strings.Contains(got.Text, tc.text) || !strings.Contains(got.Remedy, tc.remedy) || (got.Remedy == "") != (result == "ok") {
				t.Errorf("got %+v", got)
			}
			if result == "fail" && code != applet.ExitError {
				t.Errorf("exit code %d", code)
			}
		})
	}
}

// TestDoctor_Observer: the directories, the kubeconfig and the plugin belong to another agent.
func TestDoctor_Observer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.env["CNI_OBSERVE"] = "true"
	w.put(tomlFile, "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/usr/lib/cni\"\n")
	w.remove(runDir + "/selftest.json")
	w.api.Deny("get nodes")
	_, all := w.checks()
	for _, c := range all {
		if c.Result != document.OK || strings.Contains(c.Text, "agent installs") {
			t.Errorf("%+v", c)
		}
	}
	w.put(listFile, pureList)
	if _, all := w.checks(); all["primary"].Result != document.Fail || !strings.Contains(all["primary"].Remedy, "Istio's agent") {
		t.Errorf("%+v", all["primary"])
	}
}

// TestDirectories_MountedElsewhere: the agent's container mounts the directories under other names.
func TestDirectories_MountedElsewhere(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.put(tomlFile, "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/var/lib/rancher/k3s/data/cni\"\n")
	w.must(os.MkdirAll(w.path("/var/lib/rancher/k3s/data/cni"), 0o700), os.Mkdir(w.path("/mounted"), 0o700),
		os.Symlink("../var/lib/rancher/k3s/data/cni", w.path("/mounted/bin")), os.Symlink("../etc/cni/net.d", w.path("/mounted/net")))
	v := newView(config{command.Doctor{HostRoot: w.root, NetDir: w.path("/mounted/net"), BinDirs: []string{w.path("/mounted/bin")}}}, func(string) (string, bool) { return "", false })
	v.HostRoot = "" // the node's file system is accessible through the first process of the node
	if c := directories(t.Context(), v); c.Result != document.OK {
		t.Errorf("%+v", c)
	}
	v.BinDirs = []string{w.path("/opt/cni/bin")}
	if c := directories(t.Context(), v); c.Result != document.Fail || !strings.HasSuffix(c.Text, "as mounted in its container") {
		t.Errorf("%+v", c)
	}
}

func TestDoctor_Table(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.pod("web", "istio-init")
	code, text, _ := w.run()
	lines := strings.Split(strings.TrimSpace(text), "\n")
	check.Contains(t, "\n"+text, "\n✓ directories: containerd (/etc/containerd/config.toml) reads", "\n✗ injection: istiod injects istio-init",
		"\n  set pilot.cni.enabled=true", "\n  https://github.com/meshcni/istio-cni/blob/main/docs/install.md#before\n", "\nnode\n----\n✓ directories")
	if last := lines[len(lines)-1]; last != "7 checks: 1 failed, 0 need a look" || code != applet.ExitError {
		t.Errorf("exit code %d, last line %q", code, last)
	}
	if code, text, _ = w.run("-o", "yaml"); code != applet.ExitError || !strings.Contains(text, "- name: directories\n  result: ok\n") {
		t.Errorf("yaml: exit code %d\n%s", code, text)
	}
	documenttest.Valid(t, "DoctorReport", text)
	for _, args := range [][]string{{"-o", "xml"}, {"--host-root", "/no/such/directory"}, {"--host-root", "host"}, {"surplus"}} {
		if code, _, stderr := w.run(args...); code != applet.ExitUsage || stderr == "" {
			t.Errorf("%q: exit code %d, %q", args, code, stderr)
		}
	}
}

// TestRun_HangingCheck also checks that a tenant's text is escaped.
func TestRun_HangingCheck(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	hang := make(chan struct{})
	defer close(hang)
	all := run(ctx, ctx, nil, []named{{"hang", func(context.Context, *view) document.Check { <-hang; return document.Check{} }}})
	if len(all) != 1 || all[0].Result != document.Warn || all[0].Name != "hang" || all[0].Remedy == "" {
		t.Errorf("got %+v", all)
	}
	all = run(t.Context(), t.Context(), nil, []named{{"evil", func(context.Context, *view) document.Check { return ok("pod \x1b[31m\n%s", strings.Repeat("x", 1<<20)) }}})
	if strings.ContainsAny(all[0].Text, "\x1b\n") || len(all[0].Text) > 2*maxText {
		t.Errorf("got %.100q of %d bytes", all[0].Text, len(all[0].Text))
	}
}

// TestRights_ThoseOfTheAgent compares the reviewed rights with e2e/rights/agent.yaml, which other tests compare with the agent's
// requests and the chart.
func TestRights_ThoseOfTheAgent(t *testing.T) {
	t.Parallel()
	type ways = racerepair.Settings
	for granted, f := range map[string]features{
		"":                {},
		"Live":            {configMap: "istio-cni-config"},
		"Repair":          {repairEnabled: true},
		"Repair Delete":   {repairEnabled: true, repair: ways{Switches: repair.Switches{Delete: true, Label: true}}},
		"Repair Evict":    {repairEnabled: true, repair: ways{Switches: repair.Switches{Delete: true}, Evict: true}},
		"Repair Label":    {repairEnabled: true, repair: ways{Switches: repair.Switches{Label: true}}},
		"Ambient":         {ambient: true},
		" ":               {repair: ways{Switches: repair.Switches{Delete: true}}}, // of a feature that is off
		"Audit":           {audit: auditor.Settings{Interval: time.Minute}},
		"Audit Condition": {audit: auditor.Settings{Interval: time.Minute, PodCondition: true}},
	} {
		t.Run(granted, func(t *testing.T) {
			t.Parallel()
			grants := map[string]bool{}
			for name := range strings.FieldsSeq(granted) {
				grants[name] = true
			}
			f.daemon = "istio-cni-node"
			var got []string
			for _, r := range f.wanted("istio-system") {
				text := r.Verb + " " + r.Group + "/" + strings.TrimSuffix(r.Resource+"/"+r.Subresource, "/")
				if r.Name != "" {
					text += ":" + r.Name
				}
				got = append(got, text)
			}
			slices.Sort(got)
			check.Diff(t, "rights", kubetest.AgentRights(t, grants), slices.Compact(got))
		})
	}
}

// TestRights_InTheAgentsContainer takes the agent's settings from the first process, which is the agent there.
func TestRights_InTheAgentsContainer(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		args, env, denied string
		want              document.Result
		text              string
	}{
		"a right that is missing":         {"install-cni", "", "list configmaps", document.Fail, "(system:serviceaccount:istio-system:istio-cni) may not: list configmaps istio-cni-config in namespace istio-system"},
		"without live settings":           {"/usr/local/bin/install-cni --log_output_level=debug --config-map=", "", "list configmaps", document.OK, "rights that its features need"},
		"the right of a feature":          {"istio-cni install", "REPAIR_DELETE_PODS", "delete pods", document.Fail, "may not: delete pods"},
		"a feature that is off":           {"istio-cni install", "", "delete pods", document.OK, "rights that its features need"},
		"an observer":                     {"install-cni", "CNI_OBSERVE", "get daemonsets", document.OK, "has the 8 rights"},
		"another program's first process": {"/sbin/init", "REPAIR_DELETE_PODS", "delete pods", document.Warn, "may not: delete pods, and whether"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.api.Deny(tc.denied)
			w.put("/p/1/cmdline", strings.ReplaceAll(tc.args, " ", "\x00")+"\x00")
			v := newView(config{command.Doctor{HostRoot: w.root, RunDir: "/var/run/istio-cni"}}, func(string) (string, bool) { return "", false })
			defer v.close()
			v.proc = w.path("/p")
			v.readFeatures(func(name string) (string, bool) { return map[string]string{tc.env: "true"}[name], name == tc.env })
			if got := rights(t.Context(), v); got.Result != tc.want || !strings.Contains(got.Text, tc.text) {
				t.Errorf("got %+v", got)
			}
		})
	}
}

// TestDoctor_AsAJob: before the installation the command has its own account's rights.
func TestDoctor_AsAJob(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.remove(runDir + "/istio-cni-kubeconfig")
	w.put("/account/token", w.api.Token())
	w.put("/account/ca.crt", string(w.api.CA()))
	w.env["KUBERNETES_SERVICE_HOST"], w.env["KUBERNETES_SERVICE_PORT"] = w.api.Address()
	w.args = []string{"--service-account-dir", w.path("/account")}
	code, all := w.checks()
	for name, want := range map[string]document.Result{"token": document.Warn, "rights": document.Warn, "injection": document.OK, "socket-lb": document.OK} {
		check.Equal(t, all[name].Result, want, all[name])
	}
	check.Equal(t, code, applet.ExitOK, "exit code")
}

// TestDoctor_ForAmbient: what ambient mode needs is checked on request, and if the agent serves it.
func TestDoctor_ForAmbient(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if _, all := w.checks(); all["ambient"].Name != "" {
		t.Errorf("without ambient mode: %+v", all["ambient"])
	}
	w.args = []string{"--for=ambient"}
	w.api.Set([]byte(`{"kind": "Pod", "apiVersion": "v1", "metadata": {"namespace": "istio-system", "name": "ztunnel-x", "labels": {"app": "ztunnel"}},
		"spec": {"nodeName": "node-1", "containers": [{"name": "istio-proxy"}]}}`))
	for metric, want := range map[string]struct {
		result document.Result
		text   string
	}{
		"ztunnel_connected 1\n": {document.OK, "connections of ztunnel: 1 (istio-system/ztunnel-x, ready: false)"},
		"ztunnel_connected 0\n": {document.Fail, "no ztunnel is connected to the agent (istio-system/ztunnel-x, ready: false)"},
		"":                      {document.Warn, "the agent does not serve ambient mode"},
	} {
		w.remove(runDir + "/pods.sock")
		listener, err := new(net.ListenConfig).Listen(t.Context(), "unix", w.path(runDir+"/pods.sock"))
		w.must(err)
		server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, metric) })}
		go func() { _ = server.Serve(listener) }()
		_, all := w.checks()
		w.must(server.Close())
		if got := all["ambient"]; got.Result != want.result || !strings.Contains(got.Text, want.text) {
			t.Errorf("%q: %+v", metric, got)
		}
		if all["ambient-kernel"].Result != document.OK || all["ambient-policies"].Result != document.Warn || all["ambient-limits"].Text == "" {
			t.Errorf("%+v", all)
		}
	}
}

// TestChecks_Hints: each check is in a group, with a page about it.
func TestChecks_Hints(t *testing.T) {
	t.Parallel()
	for _, one := range append(checks(), ambientChecks()...) {
		if !slices.ContainsFunc(output.Groups(), func(g output.Group) bool { return g.Hints[one.name] != "" }) {
			t.Errorf("check %s has no group and no hint", one.name)
		}
	}
}
