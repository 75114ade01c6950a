package installation_test

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/installation"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

const (
	conflist = `{"cniVersion":"1.0.0","name":"net","plugins":[
  {"type":"bridge","n":12345678901234567890},
  {"type":"portmap"}
]}
`
	bridgeConf = "{\"cniVersion\":\"0.4.0\",\"name\":\"mynet\",\n\t\"type\":\"bridge\"}"
)

// fixture is a false root directory with the files of a kubelet and of a primary CNI.
type fixture struct {
	t      *testing.T
	root   string
	config installation.Config
	health *health.State
	// metrics are the agent's metrics.
	metrics *metrics.Metrics
	events  []string
	log     agenttest.Buffer
	clock   time.Time
	disk    hostfs.Disk
	// loose compares without white space: the agent replaces a stanza of Istio's agent in place, also if it was removed before.
	loose bool
}

func newFixture(t *testing.T, files ...string) *fixture {
	t.Helper()
	return newFixtureAt(t, t.TempDir(), files...)
}

// newFixtureAt is newFixture in a directory of the caller.
func newFixtureAt(t *testing.T, root string, files ...string) *fixture {
	t.Helper()
	n := &fixture{t: t, root: root, clock: time.Unix(1_800_000_000, 0), metrics: metrics.New("test")}
	n.health = health.NewState(health.Options{}, installation.PartBinaries, installation.PartKubeconfig, installation.PartConf)
	n.put("source/istio-cni", "program 1", 0o755)
	n.put("sa/token", "token-1", 0o600)
	n.put("sa/ca.crt", authority(), 0o600)
	for _, dir := range []string{"bin", "net.d", "cache/results", "netns"} {
		check.OK(t, os.MkdirAll(n.path(dir), 0o755))
	}
	for i := 0; i < len(files); i += 2 {
		n.put("net.d/"+files[i], files[i+1], 0o644)
	}
	n.config = installation.Config{
		Source: n.path("source/istio-cni"), BinDirs: []string{n.path("bin")}, Update: true, Reinstall: true,
		NetDir: n.path("net.d"), HostNetDir: "/etc/cni/net.d", RunDir: n.path("run"), RunDirMode: 0o700,
		Want: cniconf.Want{
			Stanza:    cniconf.Stanza{LogLevel: "info", RunDir: n.path("run"), ExcludeNamespaces: []string{"kube-system"}},
			OwnedName: cniconf.OwnedName, FileMode: 0o600,
		},
		Server: kube.Address{Host: "10.0.0.1", Port: "443"}, Token: n.path("sa/token"), CA: n.path("sa/ca.crt"), KubeconfigMode: 0o600,
		OldKubeconfig: n.path("net.d/ZZZ-istio-cni-kubeconfig"), CacheDir: n.path("cache/results"),
	}
	return n
}

// newInstalled is newFixture after an installation.
func newInstalled(t *testing.T, files ...string) (*fixture, *installation.Installation) {
	t.Helper()
	n := newFixture(t, files...)
	a := n.agent()
	check.OK(t, a.Reconcile())
	return n, a
}

func (n *fixture) path(name string) string { return filepath.Join(n.root, name) }

func (n *fixture) put(name, text string, mode fs.FileMode) {
	n.t.Helper()
	file := n.path(name)
	check.OK(n.t, os.MkdirAll(filepath.Dir(file), 0o755))
	// By rename, as careful programs do: the content that the agent reads must not depend on the test's timing.
	check.OK(n.t, os.WriteFile(file+".x", []byte(text), mode))
	check.OK(n.t, os.Chmod(file+".x", mode))
	check.OK(n.t, os.Rename(file+".x", file))
}

func (n *fixture) read(name string) string {
	n.t.Helper()
	data, err := os.ReadFile(n.path(name))
	check.OK(n.t, err)
	return string(data)
}

func (n *fixture) there(name string) bool {
	_, err := os.Lstat(n.path(name))
	return err == nil
}

// tree returns every file below a directory with mode and content.
func (n *fixture) tree(dir string) map[string]string {
	n.t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(n.path(dir), func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if d.Type()&fs.ModeSymlink != 0 {
			target, broken := os.Readlink(file)
			out[strings.TrimPrefix(file, n.root+"/")] = "-> " + target
			return broken
		}
		data, err := os.ReadFile(file)
		if n.loose {
			var b bytes.Buffer
			if json.Compact(&b, data) == nil {
				data = b.Bytes()
			}
		}
		out[strings.TrimPrefix(file, n.root+"/")] = fmt.Sprintf("%v %s", info.Mode(), data)
		return err
	})
	check.OK(n.t, err)
	return out
}

func (n *fixture) agent() *installation.Installation {
	return installation.New(slog.New(slog.NewTextHandler(&n.log, nil)), n.disk, n.config, installation.Report{
		Health: n.health, Metrics: n.metrics,
		Warn: func(reason kube.EventReason, message string) {
			n.events = append(n.events, string(reason)+": "+message)
		},
	}, func() time.Time { return n.clock })
}

// loaded returns the plugins that the runtime would run. A runtime lists the directory first and reads its files then; an event
// reports a file that was renamed in between, and the runtime reads the directory again.
func (n *fixture) loaded() []string {
	n.t.Helper()
	for {
		entries, err := os.ReadDir(n.path("net.d"))
		check.OK(n.t, err)
		d := cniconf.Dir{}
		for _, e := range entries {
			var text []byte
			if cniconf.Candidate(e.Name()) && err == nil {
				text, err = os.ReadFile(n.path("net.d/" + e.Name()))
				d[e.Name()] = cniconf.File{Data: text}
			}
		}
		_, loaded, _ := d.Loaded()
		if err == nil {
			return loaded.Types
		}
		if !errors.Is(err, fs.ErrNotExist) {
			n.t.Fatal(err)
		}
	}
}

func TestReconcile_WritesOnce(t *testing.T) {
	t.Parallel()
	n, a := newInstalled(t, "10-bridge.conflist", conflist)
	n.ends("bridge", "portmap")
	for _, link := range installation.Links() {
		if target, err := os.Readlink(n.path("bin/" + link)); err != nil || target != "istio-cni" {
			t.Errorf("link %s leads to %q, %v", link, target, err)
		}
	}
	if !n.asWanted() {
		t.Errorf("not as wanted: %+v\n%v", n.health.Snapshot(), n.tree("."))
	}
	check.OK(t, a.Reconcile())
	calls := hostfstest.Record(func(d hostfs.Disk) {
		n.disk = d
		check.OK(t, n.agent().Reconcile())
	})
	check.Equal(t, len(calls), 0, "changes of a node in its desired state", calls)
	check.Equal(t, agenttest.Metric(t, n.metrics.Text(), `istio_cni_installs_total{result="SUCCESS"}`), 1, "installs counted")
}

// TestReconcile_KilledAtEveryCall (W-4, W-5) stops the work at each call that changes a file, like SIGKILL or a loss of power,
// and examines the node then. Afterwards it uninstalls and it installs again: four combinations at every call.
func TestReconcile_KilledAtEveryCall(t *testing.T) {
	t.Parallel()
	files := listAndSingle()
	files["from Istio's agent"] = []string{"10-bridge.conflist", strings.Replace(conflist, `{"type":"portmap"}`, `{"type":"portmap"},{"type":"istio-cni"}`, 1)}
	files["single and garbage"] = []string{"00-x.conflist", "{", "10-bridge.conf", bridgeConf}
	for name, s := range situations(t, files) {
		for _, work := range []string{"installing", "healing", "uninstalling"} {
			t.Run(name+"/"+work, func(t *testing.T) {
				t.Parallel()
				at := 0
				for ; s.kill(t, work, hostfstest.KillAt, at, true); at++ {
					s.kill(t, work, hostfstest.KillAt, at, false)
					s.kill(t, work, hostfstest.PowerCutAt, at, true)
					s.kill(t, work, hostfstest.PowerCutAt, at, false)
				}
				if at < 5 {
					t.Errorf("only %d calls were made", at)
				}
			})
		}
	}
}

// kill stops the work, optionally installs again, and examines the node. It reports whether any work was stopped.
func (s situation) kill(t *testing.T, work string, stop func(int) *hostfstest.Faults, at int, again bool) bool {
	t.Helper()
	n := s.fixture(t)
	defer func() { check.OK(t, os.RemoveAll(n.root)) }()
	if work != "installing" {
		check.OK(t, n.agent().Reconcile())
	}
	if work == "healing" { // after changes by the primary and by the user
		n.put("net.d/"+s.files[len(s.files)-2], s.files[len(s.files)-1], 0o644)
		check.OK(t, os.Remove(n.path("bin/istio-cni")))
	}
	faults := stop(at)
	n.disk.Before = faults.Before
	if work == "uninstalling" {
		_ = n.agent().Uninstall(t.Context())
	} else {
		_ = n.agent().Reconcile()
	}
	n.disk.Before = nil
	log := faults.Log()
	n.intact()
	if got := slices.DeleteFunc(n.loaded(), isStanza); !slices.Equal(got, s.primary) {
		t.Fatalf("killed after %q: the runtime runs %q, want %q\n%v", log, got, s.primary, n.tree("net.d"))
	}
	if work != "healing" && slices.Contains(n.loaded(), "istio-cni") && !n.there("bin/istio-cni") {
		t.Fatalf("killed after %q: a stanza without a program", log)
	}
	if again {
		check.OK(t, n.agent().Reconcile())
		check.Diff(t, fmt.Sprintf("killed after %q, and started again", log), s.installed, n.conf())
	}
	n.uninstall(n.agent())
	check.Diff(t, fmt.Sprintf("killed after %q, and uninstalled", log), s.back, n.conf())
	return len(log) > at
}

// TestUninstall_LivingSandboxes: W-7.
func TestUninstall_LivingSandboxes(t *testing.T) {
	t.Parallel()
	const chained, bridge = `{"plugins":[{"type":"bridge"},{"type":"istio-cni"}]}`, `{"plugins":[{"type":"bridge"}]}`
	for name, tc := range map[string]struct {
		list, netns string // of the sandbox in the cache, "" for no entry
		alive       bool
		setup       func(n *fixture)
		stays       bool
	}{
		"no sandbox":                                   {},
		"no cache at all":                              {setup: func(n *fixture) { n.removeAll("cache") }},
		"a living sandbox that ran the plugin":         {list: chained, netns: "netns/a", alive: true, stays: true},
		"a sandbox that is gone":                       {list: chained, netns: "netns/a"},
		"a living sandbox that did not run the plugin": {list: bridge, netns: "netns/a", alive: true},
		"an entry without a namespace":                 {list: `{"type":"istio-cni"}`, stays: true},
		"in a container without access to the cache":   {setup: func(n *fixture) { n.config.HostRoots, n.config.CacheDir = []string{n.root}, "/somewhere/else/results" }, stays: true},
	} {
		n := newFixture(t, "10-bridge.conf", bridgeConf)
		before := n.tree("net.d")
		check.OK(t, n.agent().Reconcile())
		if tc.alive {
			n.put(tc.netns, "", 0o600)
		}
		if tc.list != "" {
			eth0 := map[string]any{"name": "eth0"}
			if tc.netns != "" {
				eth0["sandbox"] = n.path(tc.netns)
			}
			text, err := json.Marshal(map[string]any{
				"kind": "cniCacheV1", "containerId": "c1", "config": []byte(tc.list), "ifName": "eth0", "networkName": "net",
				"result": map[string]any{"interfaces": []any{map[string]any{"name": "br"}, eth0}},
			})
			check.OK(t, err)
			n.put("cache/results/net-c1-eth0", string(text), 0o600)
		}
		if tc.setup != nil {
			tc.setup(n)
		}
		n.uninstall(n.agent())
		check.Diff(t, name+": the node's configuration", before, n.tree("net.d"))
		if n.there("bin/istio-cni") != tc.stays || n.stays() != tc.stays {
			t.Errorf("%s: program there: %v, want %v\n%s", name, n.there("bin/istio-cni"), tc.stays, n.log.String())
		}
		check.Equal(t, n.there("run/istio-cni-kubeconfig"), false, name, "the kubeconfig stays")
	}
}

// stays reports whether an uninstallation logged that it keeps the program.
func (n *fixture) stays() bool {
	return strings.Contains(n.log.String(), `msg="keeping the plugin binary" files=[`+n.path("bin/istio-cni")+"]")
}

func TestReconcile_RewriteConflict(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, file, text, other string
		want                    string
	}{
		{"cilium", "05-cilium.conflist", `{"name":"cilium","plugins":[{"type":"cilium-cni"}]}`, "", "cni.exclusive=false"},
		{"cilium by its traces", "05-x.conflist", conflist, "10-old.conflist.cilium_bak", "cni.exclusive=false"},
		{"multus", "00-multus.conflist", `{"name":"m","plugins":[{"type":"multus"}]}`, "", "multus-conf-file"},
		{
			"second installer", "10-b.conflist", `{"name":"m","plugins":[{"type":"bridge"},{"type":"istio-cni","x":1}]}`, "",
			"another istio-cni node agent",
		},
		{"unknown", "10-b.conflist", conflist, "", "find the program"},
	} {
		n := newFixture(t)
		a := n.agent()
		if tc.other != "" {
			n.put("net.d/"+tc.other, "", 0o600)
		}
		rewrites := 0
		for range 20 {
			n.put("net.d/"+tc.file, tc.text, 0o644)
			err := a.Reconcile()
			if err == nil {
				rewrites++
			}
			n.clock = n.clock.Add(time.Second)
		}
		if rewrites > 10 || rewrites < 6 {
			t.Errorf("%s: %d rewrites in 20 s, want more than 5 and then a pause", tc.name, rewrites)
		}
		if len(n.events) == 0 || !strings.Contains(n.events[0], tc.want) || !strings.Contains(n.events[0], tc.file) {
			t.Errorf("%s: events %q, want one with %q", tc.name, n.events, tc.want)
		}
		n.clock = n.clock.Add(10 * time.Minute)
		check.OK(t, a.Reconcile(), tc.name, "after the pause")
	}
}

func TestRun_Heals(t *testing.T) {
	t.Parallel()
	tamper := map[string]func(n *fixture){
		"stanza taken out": func(n *fixture) { n.put("net.d/10-bridge.conflist", conflist, 0o644) },
		"configuration replaced": func(n *fixture) {
			n.put("net.d/10-bridge.conflist", strings.Replace(conflist, "portmap", "tuning", 1), 0o644)
		},
		"W-3 an earlier file":   func(n *fixture) { n.put("net.d/05-a.conflist", conflist, 0o644) },
		"W-15 renamed away":     func(n *fixture) { check.OK(n.t, os.Rename(n.path("bin/istio-cni"), n.path("bin/gone"))) },
		"W-15 chmod":            func(n *fixture) { check.OK(n.t, os.Chmod(n.path("bin/istio-cni"), 0o644)) },
		"program replaced":      func(n *fixture) { n.put("bin/istio-cni", "something else", 0o755) },
		"link removed":          func(n *fixture) { check.OK(n.t, os.Remove(n.path("bin/istio-iptables"))) },
		"kubeconfig removed":    func(n *fixture) { check.OK(n.t, os.Remove(n.path("run/istio-cni-kubeconfig"))) },
		"kubeconfig readable":   func(n *fixture) { check.OK(n.t, os.Chmod(n.path("run/istio-cni-kubeconfig"), 0o644)) },
		"run directory removed": func(n *fixture) { n.removeAll("run") },
		"W-14 token rotated":    func(n *fixture) { n.put("sa/token", "token-2", 0o600) },
		"W-15 directory made again": func(n *fixture) {
			n.removeAll("net.d")
			n.put("net.d/10-bridge.conflist", conflist, 0o644)
		},
		"W-15 program directory again": func(n *fixture) { n.removeAll("bin"); check.OK(n.t, os.Mkdir(n.path("bin"), 0o755)) },
		"W-22 half written": func(n *fixture) {
			n.put("net.d/10-bridge.conflist", conflist[:30], 0o644)
			n.put("net.d/10-bridge.conflist", conflist, 0o644)
		},
		"old kubeconfig comes":       func(n *fixture) { n.put("net.d/ZZZ-istio-cni-kubeconfig", "x", 0o600) },
		"a garbage file comes":       func(n *fixture) { n.put("net.d/00-a.conf", "{", 0o644) },
		"W-3 single beside our list": func(n *fixture) { n.put("net.d/10-bridge.conf", bridgeConf, 0o644) },
		"W-31 an earlier .json":      func(n *fixture) { n.put("net.d/01-x.json", bridgeConf, 0o644) },
	}
	for name, change := range tamper {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newFixture(t, "10-bridge.conflist", conflist)
			n.running(n.agent())
			n.until(n.asWanted)
			change(n)
			n.until(n.asWanted)
		})
	}
}

// asWanted reports whether the agent is ready and all that it installs is there and works.
func (n *fixture) asWanted() bool {
	n.t.Helper()
	config, _ := os.ReadFile(n.path("run/istio-cni-kubeconfig"))
	program, _ := os.ReadFile(n.path("bin/istio-cni"))
	info, err := os.Stat(n.path("bin/istio-cni"))
	secret, errSecret := os.Stat(n.path("run/istio-cni-kubeconfig"))
	link, _ := os.Readlink(n.path("bin/istio-iptables"))
	if err != nil || errSecret != nil || !n.there("net.d") || !n.health.Snapshot().Ready {
		return false
	}
	types := n.loaded()
	return bytes.Contains(config, []byte(strings.TrimSpace(n.read("sa/token")))) && string(program) == "program 1" &&
		info.Mode().Perm() == 0o755 && secret.Mode().Perm() == 0o600 && link == "istio-cni" && len(types) > 1 &&
		slices.Index(types, "istio-cni") == len(types)-1 && !n.there("net.d/ZZZ-istio-cni-kubeconfig")
}

// removeAll removes a directory even while the agent restores its files.
func (n *fixture) removeAll(dir string) {
	n.t.Helper()
	n.until(func() bool { return os.RemoveAll(n.path(dir)) == nil })
}

// until waits for a condition.
func (n *fixture) until(ok func() bool) {
	n.t.Helper()
	agenttest.Until(n.t, func() string { return fmt.Sprintf("%+v\n%v", n.health.Snapshot(), n.tree(".")) }, ok)
}

// authority is a PEM certificate with any name.
var authority = sync.OnceValue(func() string {
	server := httptest.NewTLSServer(nil)
	defer server.Close()
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
})

// TestUninstall_StanzaStays: a stanza that cannot be removed needs the program and the kubeconfig.
func TestUninstall_StanzaStays(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(n *fixture){
		"no JSON at the moment": func(n *fixture) {
			n.put("net.d/10-b.conflist", strings.Replace(n.read("net.d/10-b.conflist"), ",", ",,", 1), 0o644)
		},
		"within a meta plugin": func(n *fixture) {
			n.put("net.d/00-multus.conf", `{"type":"multus","delegates":[{"plugins":[{"type":"istio-cni"}]}]}`, 0o644)
		},
		"W-21 no file can be made": func(n *fixture) { n.disk.Before = refusing(n.path("net.d")) },
		"a file that cannot be read": func(n *fixture) {
			check.OK(n.t, os.WriteFile(n.path("net.d/20-big.conflist"), make([]byte, 5<<20), 0o600))
		},
	} {
		n, _ := newInstalled(t, "10-b.conflist", conflist)
		spoil(n)
		programs, kubeconfig := n.tree("bin"), n.tree("run")
		if err := n.agent().Uninstall(t.Context()); err == nil || !strings.Contains(err.Error(), n.path("net.d/")) || !n.stays() {
			t.Errorf("%s: error %v\n%s", name, err, n.log.String())
		}
		check.Diff(t, name+": the program", programs, n.tree("bin"))
		check.Diff(t, name+": the kubeconfig", kubeconfig, n.tree("run"))
	}
}

// TestUninstall_MalformedFile: a malformed file that does not name the plugin stays.
func TestUninstall_MalformedFile(t *testing.T) {
	t.Parallel()
	n, _ := newInstalled(t, "10-b.conflist", conflist)
	n.put("net.d/10-b.conflist", conflist[:50], 0o644)
	n.uninstall(n.agent())
	if n.there("run/istio-cni-kubeconfig") || n.there("bin/istio-cni") || !n.there("net.d/10-b.conflist") {
		t.Errorf("left: %v", n.tree("."))
	}
}

// TestReconcile_SkippedProgram: another program installs the program.
func TestReconcile_SkippedProgram(t *testing.T) {
	t.Parallel()
	n := newFixture(t, "10-b.conflist", conflist)
	n.config.Skip = []string{"istio-cni"}
	a := n.agent()
	if err := a.Reconcile(); err == nil || n.read("net.d/10-b.conflist") != conflist {
		t.Errorf("a stanza without a program: %v", err)
	}
	n.put("bin/istio-cni", "theirs", 0o755)
	check.OK(t, a.Reconcile())
	if err := a.Uninstall(t.Context()); err != nil || n.read("bin/istio-cni") != "theirs" {
		t.Errorf("a file of another program: %v", err)
	}
}

// TestReconcile_FailedPart: the token is renewed even if the program cannot be replaced. What lost its input stays.
func TestReconcile_FailedPart(t *testing.T) {
	t.Parallel()
	n, a := newInstalled(t, "10-b.conflist", conflist)
	check.OK(t, os.Remove(n.path("source/istio-cni")))
	n.put("sa/token", "token-2", 0o600)
	n.put("net.d/10-b.conflist", conflist, 0o644)
	if err := a.Reconcile(); err == nil {
		t.Error("no error")
	}
	if !strings.Contains(n.read("run/istio-cni-kubeconfig"), "token-2") || !slices.Contains(n.loaded(), "istio-cni") {
		t.Errorf("the others waited:\n%v", n.tree("."))
	}
	want := n.tree("run")
	for _, spoil := range []func() error{
		func() error { return os.WriteFile(n.path("sa/ca.crt"), []byte("garbage"), 0o600) },
		func() error { return os.Remove(n.path("sa/token")) },
		func() error { return os.RemoveAll(n.path("sa")) },
	} {
		check.OK(t, spoil())
		check.Fails(t, a.Reconcile(), "source/istio-cni")
		check.Diff(t, "without credentials", want, n.tree("run"))
	}
	check.Equal(t, n.read("bin/istio-cni"), "program 1", "without its source the program is")
}

// TestReconcile_MissingFileInConflict: a missing file is written at once because pods need it.
func TestReconcile_MissingFileInConflict(t *testing.T) {
	t.Parallel()
	for _, file := range []string{"bin/istio-cni", "bin/istio-iptables", "run/istio-cni-kubeconfig"} {
		n, a := newInstalled(t, "10-b.conflist", conflist)
		for range 20 {
			check.OK(t, os.Remove(n.path(file)))
			check.OK(t, a.Reconcile())
		}
	}
}
