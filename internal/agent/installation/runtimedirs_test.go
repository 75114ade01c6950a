package installation_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/installation"
	"github.com/meshcni/istio-cni/internal/agent/runtimedirs"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/test/check"
)

const (
	containerdFile = "/etc/containerd/config.toml"
	containerdSock = "/run/containerd/containerd.sock"
	k3sFile        = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"
	k3sSock        = "/run/k3s/containerd/containerd.sock"
	k3sConf        = "/var/lib/rancher/k3s/agent/etc/cni/net.d"
	ourProgram     = "/istio-cni"
)

// machine is a node as the agent sees it: the default directories are mounted below "mounts", and the whole file system is
// below the root directory of a process.
type machine struct {
	*fixture
}

// newMachine makes a node with these files. Content that begins with "->" makes a link, a name that ends with "/" a directory.
func newMachine(t *testing.T, files map[string]string) *machine {
	t.Helper()
	m := &machine{newFixture(t)}
	for _, dir := range []string{"/etc/cni/net.d", "/opt/cni/bin", "/usr", "/run"} {
		check.OK(t, os.MkdirAll(m.node(dir), 0o755))
	}
	for name, text := range files {
		if strings.HasSuffix(name, "/") {
			check.OK(t, os.MkdirAll(m.node(name), 0o755))
		} else {
			m.write(name, text)
		}
	}
	for _, dir := range []string{"/etc/cni/net.d", "/opt/cni/bin"} {
		check.OK(t, os.MkdirAll(filepath.Dir(m.path("mounts"+dir)), 0o755))
		check.OK(t, os.Symlink(m.node(dir), m.path("mounts"+dir))) // one directory at two places, like a mount
	}
	m.config.HostRoots = []string{m.path("mounts"), fmt.Sprintf("/proc/%d/root%s", os.Getpid(), m.path("node"))}
	m.config.NetDir, m.config.BinDirs = m.path("mounts/etc/cni/net.d"), []string{m.path("mounts/opt/cni/bin")}
	m.config.OldKubeconfig = m.config.NetDir + "/ZZZ-istio-cni-kubeconfig"
	m.config.Detect = runtimedirs.Detect{Net: true, Bin: true}
	return m
}

// newMachineAt makes a node whose containerd was started with directories below this one, with a pod network.
func newMachineAt(t *testing.T, dir string) *machine {
	t.Helper()
	m := newMachine(t, map[string]string{
		containerdFile: directories(dir+"/conf", dir+"/bin"), dir + "/bin/": "", dir + "/conf/10-net.conflist": conflist, "/two/bin/": "",
	})
	m.start(containerdSock)
	return m
}

func (m *machine) node(name string) string { return m.path("node" + name) }

func (m *machine) write(name, text string) {
	m.t.Helper()
	if target, link := strings.CutPrefix(text, "->"); link {
		check.OK(m.t, os.MkdirAll(filepath.Dir(m.node(name)), 0o755))
		_ = os.Remove(m.node(name))
		check.OK(m.t, os.Symlink(target, m.node(name)))
		return
	}
	m.put("node"+name, text, 0o644)
}

// start creates the runtime's socket again, more than one clock step of the file system later than its files.
func (m *machine) start(socket string) {
	m.t.Helper()
	time.Sleep(20 * time.Millisecond)
	_ = os.Remove(m.node(socket))
	m.write(socket, "")
}

// installedIn checks that only this directory of the node has the stanza, and only these and the mounted directory have the program.
func (m *machine) installedIn(conf string, bins ...string) {
	m.t.Helper()
	bins = append(bins, "/opt/cni/bin")
	for name, text := range m.tree("node") {
		name = strings.TrimPrefix(name, "node")
		if strings.Contains(text, `"istio-cni"`) && filepath.Dir(name) != conf {
			m.t.Errorf("the stanza is in %s, want it only in %s", name, conf)
		}
		if strings.HasPrefix(filepath.Base(name), "istio-cni") && !slices.Contains(bins, filepath.Dir(name)) {
			m.t.Errorf("the program is in %s, want it only in %s", name, bins)
		}
	}
	m.has(conf, bins...)
}

// installs reconciles, and checks with installedIn.
func (m *machine) installs(agent *installation.Installation, conf string, bins ...string) {
	m.t.Helper()
	check.OK(m.t, agent.Reconcile())
	m.installedIn(conf, bins...)
}

// has checks that these directories have the plugin.
func (m *machine) has(conf string, bins ...string) {
	m.t.Helper()
	for _, bin := range bins {
		if !m.there("node"+bin+ourProgram) || m.read("node"+bin+ourProgram) == "old" || !strings.Contains(m.read("node"+conf+"/10-net.conflist"), `"istio-cni"`) {
			m.t.Errorf("the plugin is not in %s and %s: %v\n%s", conf, bin, m.tree("node"), m.log.String())
		}
	}
}

// says checks that the log has a text exactly once.
func (m *machine) says(text string) {
	m.t.Helper()
	check.Equal(m.t, strings.Count(m.log.String(), text), 1, text, "in", m.log.String())
}

// directories returns a containerd configuration of version 3.
func directories(conf, bin string) string {
	return fmt.Sprintf("version = 3\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dirs = ['%s']\nconf_dir = '%s'\n", bin, conf)
}

// TestReconcile_RuntimeDirectories has the configuration files of each runtime. The uninstallation leaves nothing behind.
func TestReconcile_RuntimeDirectories(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		conf, bin string
		files     map[string]string
	}{
		"containerd by its defaults": {"/etc/cni/net.d", "/opt/cni/bin", map[string]string{containerdSock: ""}},
		"k3s since 1.31.2, whose data is on another disk": {"/data/rancher/k3s/agent/etc/cni/net.d", "/data/rancher/k3s/data/cni", map[string]string{
			"/var/lib/rancher": "->/data/rancher", "/data/rancher/k3s/agent/etc/containerd/config.toml": directories(k3sConf, "/var/lib/rancher/k3s/data/cni"),
			k3sSock: "", containerdSock: "", containerdFile: "disabled_plugins = [\"cri\"]\n",
		}},
		"MicroK8s": {"/var/snap/microk8s/7394/args/cni-network", "/var/snap/microk8s/7394/opt/cni/bin", map[string]string{
			"/var/snap/microk8s/current": "->7394", "/var/snap/microk8s/common/run/containerd.sock": "",
			"/var/snap/microk8s/7394/args/containerd.toml": "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\n" +
				"bin_dir = \"/var/snap/microk8s/7394/opt/cni/bin\"\nconf_dir = \"/var/snap/microk8s/7394/args/cni-network\"\n",
		}},
		"k0s": {"/etc/cni/net.d", "/opt/cni/bin", map[string]string{"/etc/k0s/containerd.toml": "version = 2\n", "/run/k0s/containerd.sock": ""}},
		"two directories, and an older program of the same name in the second": {"/etc/cni/net.d", "/first /second", map[string]string{
			containerdFile: "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dirs = ['/first', '/second']\n", "/second/istio-cni": "old",
			"/first/":      "",
			containerdSock: "",
		}},
		"links that lead out": {"/srv/conf", "/srv/bin", map[string]string{
			containerdFile: directories("/a", "/b"), "/a": "->../../../../../../../../../../srv/conf", "/b": "->/../srv/bin", containerdSock: "",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMachine(t, tc.files)
			bins := strings.Fields(tc.bin)
			check.OK(t, os.MkdirAll(m.node(bins[0]), 0o755))
			m.put("node"+tc.conf+"/10-net.conflist", conflist, 0o644)
			before := m.tree("node")
			m.installs(m.agent(), tc.conf, bins...)
			mounted := tc.conf == "/etc/cni/net.d" && tc.bin == "/opt/cni/bin"
			check.Equal(t, m.there("run/"+runtimedirs.RecordName), !mounted, "the record is there")
			check.Contains(t, m.log.String(), "installing where the runtime looks")
			check.OK(t, m.agent().Uninstall(t.Context()))
			delete(before, "node/second/istio-cni") // it was replaced
			check.Diff(t, "after the uninstallation,", before, m.tree("node"))
			check.Equal(t, m.there("run/"+runtimedirs.RecordName), false, "the record stays")
		})
	}
}

// TestReconcile_DirectoriesSetByUser: the user's directories win, and the log has a warning if the runtime does not look there.
func TestReconcile_DirectoriesSetByUser(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(m *machine){
		"both are set": func(m *machine) { m.config.Detect = runtimedirs.Detect{} },
		"others are mounted": func(m *machine) {
			for _, dir := range []string{"/etc/cni/net.d", "/opt/cni/bin"} {
				check.OK(m.t, os.Remove(m.path("mounts"+dir)))
				check.OK(m.t, os.MkdirAll(m.path("mounts"+dir), 0o755))
			}
			m.put("mounts/etc/cni/net.d/10-net.conflist", conflist, 0o644)
		},
	} {
		m := newMachineAt(t, "/srv")
		m.put("node/etc/cni/net.d/10-net.conflist", conflist, 0o644)
		spoil(m)
		agent := m.agent()
		check.OK(t, agent.Reconcile())
		check.OK(t, agent.Reconcile())
		if m.there("node/srv/bin"+ourProgram) || !m.there("mounts/opt/cni/bin"+ourProgram) {
			t.Errorf("%s: not in the directories that the user set: %v", name, m.tree("."))
		}
		m.says("the runtime looks in other directories than those that are set")
	}
}

// TestReconcile_StandaloneDirectories: the runtime does not read the configuration directory, but it runs the program.
func TestReconcile_StandaloneDirectories(t *testing.T) {
	t.Parallel()
	m := newMachineAt(t, "/srv")
	m.config.Want.Mode = cniconf.Standalone
	before := m.tree(".")
	plan, err := m.agent().Plan()
	if err != nil || !strings.Contains(strings.Join(plan, "\n"), "/srv/bin/istio-cni") {
		t.Errorf("%v, the plan is %q", err, plan)
	}
	check.Diff(t, "after a dry run", before, m.tree("."))
	check.OK(t, m.agent().Reconcile())
	if !m.there("node/etc/cni/net.d/"+cniconf.StandaloneName) || !m.there("node/srv/bin"+ourProgram) || m.read("node/srv/conf/10-net.conflist") != conflist {
		t.Errorf("installed:\n%v", m.tree("node"))
	}
}

// TestReconcile_RuntimeInDoubt installs into the default directories, and logs the reason once.
func TestReconcile_RuntimeInDoubt(t *testing.T) {
	t.Parallel()
	for reason, spoil := range map[string]func(m *machine){
		"the node's file system is not seen here":   func(m *machine) { m.config.HostRoots = m.config.HostRoots[:1] },
		"neither a socket nor a configuration file": func(m *machine) { _ = os.RemoveAll(m.node("/etc/containerd")); _ = os.RemoveAll(m.node("/run")) },
		"several runtimes are on this node: " + containerdFile: func(m *machine) {
			m.write("/run/k0s/containerd.sock", "")
			m.write("/etc/k0s/containerd.toml", "version = 2\n")
			m.write("/run/crio/crio.sock", "")
		},
		"containerd's CRI plugin is switched off": func(m *machine) {
			m.write(containerdFile, "disabled_plugins = ['io.containerd.grpc.v1.cri']\n"+directories("/srv/conf", "/srv/bin"))
			m.start(containerdSock)
		},
		"the runtime's configuration cannot be read": func(m *machine) { m.write(containerdFile, "imports = \n") },
		"every user of the node may write to":        func(m *machine) { check.OK(m.t, os.Chmod(m.node("/srv"), 0o777)) },
	} {
		m := newMachineAt(t, "/srv")
		m.put("node/etc/cni/net.d/10-net.conflist", conflist, 0o644)
		spoil(m)
		bins := "" // if the runtime is known but may not be the kubelet's
		if strings.Contains(reason, "plugin") {
			bins = "/srv/bin"
		}
		agent := m.agent()
		check.OK(t, agent.Reconcile())
		m.installs(agent, "/etc/cni/net.d", strings.Fields(bins)...)
		reason, _, _ = strings.Cut(reason, ": /")
		if log := m.log.String(); strings.Count(log, "where the runtime looks is not known") != 1 || !strings.Contains(log, reason) {
			t.Errorf("want %q once: %s", reason, log)
		}
	}
}

// TestReconcile_RuntimeMoves: the old directories stay in use until the runtime restarts with the new ones, also after a restart of
// the agent. An uninstallation in between restores both.
func TestReconcile_RuntimeMoves(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]string{"": "start", "uninstall": "uninstall"} {
		for _, restarted := range []bool{false, true} {
			m := newMachineAt(t, "/one")
			m.put("node/two/conf/10-net.conflist", conflist, 0o644)
			one, two := m.tree("node/one"), m.tree("node/two")
			agent := m.agent()
			m.installs(agent, "/one/conf", "/one/bin")

			time.Sleep(20 * time.Millisecond)
			m.write(containerdFile, directories("/two/conf", "/two/bin"))
			if restarted {
				agent = m.agent()
			}
			check.OK(t, agent.Reconcile())
			for _, dir := range []string{"/one", "/two"} {
				if !m.there("node"+dir+"/bin"+ourProgram) || !strings.Contains(m.read("node"+dir+"/conf/10-net.conflist"), `"istio-cni"`) {
					t.Errorf("%s, restarted %v: %s is without the plugin, and the runtime may look there:\n%s", name, restarted, dir, m.log.String())
				}
			}
			if restarted {
				agent = m.agent()
			}
			if end == "uninstall" {
				check.OK(t, agent.Uninstall(t.Context()))
				check.Diff(t, fmt.Sprintf("%s, restarted %v: after the uninstallation,", name, restarted), two, m.tree("node/two"))
			} else {
				m.start(containerdSock)
				m.installs(agent, "/two/conf", "/two/bin")
				check.Contains(t, m.log.String(), "in which the runtime does not look any more")
			}
			check.Diff(t, fmt.Sprintf("%s, restarted %v: the first directories,", name, restarted), one, m.tree("node/one"))
		}
	}
}

// TestReconcile_LinkMoves: k3s before 1.31.2 has a directory for each version, and starts its runtime with a new file.
func TestReconcile_LinkMoves(t *testing.T) {
	t.Parallel()
	const data = "/var/lib/rancher/k3s/data/"
	m := newMachine(t, map[string]string{
		k3sFile: directories(k3sConf, data+"current/bin"), data + "current": "->" + data + "1a", data + "1a/bin/": "", data + "2b/bin/": "",
	})
	m.put("node"+k3sConf+"/10-net.conflist", conflist, 0o644)
	m.start(k3sSock)
	agent := m.agent()
	m.installs(agent, k3sConf, data+"1a/bin")
	m.write(data+"current", "->"+data+"2b")
	m.start(k3sSock)
	m.installs(agent, k3sConf, data+"2b/bin")
	check.OK(t, os.RemoveAll(m.node(data+"2b/bin"))) // and the directory itself may be replaced
	check.OK(t, os.MkdirAll(m.node(data+"2b/bin"), 0o755))
	m.installs(agent, k3sConf, data+"2b/bin")
}

// TestReconcile_WithoutRecord cleans the default directories: an agent that does not ask the runtime has installed there, or a reboot
// removed the record.
func TestReconcile_WithoutRecord(t *testing.T) {
	t.Parallel()
	m := newMachine(t, map[string]string{"/srv/bin/": ""})
	m.put("node/etc/cni/net.d/10-net.conflist", conflist, 0o644)
	m.put("node/srv/conf/10-net.conflist", conflist, 0o644)
	m.config.Detect = runtimedirs.Detect{}
	m.installs(m.agent(), "/etc/cni/net.d", "/opt/cni/bin")
	m.config.Detect = runtimedirs.Detect{Net: true, Bin: true}
	m.write(containerdFile, directories("/srv/conf", "/srv/bin"))
	m.start(containerdSock)
	m.installs(m.agent(), "/srv/conf", "/srv/bin")

	m.config.Detect = runtimedirs.Detect{} // and the opposite move, set by the user
	m.installs(m.agent(), "/etc/cni/net.d", "/opt/cni/bin")
	check.Equal(t, m.there("run/"+runtimedirs.RecordName), false, "the record stays")
}

// TestReconcile_DamagedRecord: a damaged record is a warning.
func TestReconcile_DamagedRecord(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"{", `[{"configuration":"../x"}]`, `[{}]`, strings.Repeat(" ", 2<<20)} {
		m := newMachine(t, map[string]string{containerdSock: ""})
		m.put("node/etc/cni/net.d/10-net.conflist", conflist, 0o644)
		m.put("run/"+runtimedirs.RecordName, text, 0o600)
		m.installs(m.agent(), "/etc/cni/net.d", "/opt/cni/bin")
		check.OK(t, m.agent().Uninstall(t.Context()))
		check.Equal(t, m.there("run/"+runtimedirs.RecordName), false, "the record stays")
	}
}

// TestUninstall_OutsideContainer finds the directories that the agent took from the runtime, regardless of the flags.
func TestUninstall_OutsideContainer(t *testing.T) {
	t.Parallel()
	n, _ := newInstalled(t, "10-net.conflist", conflist)
	n.put("run/"+runtimedirs.RecordName, fmt.Sprintf(`[{"configuration":%q,"programs":[%q]}]`, n.path("net.d"), n.path("bin")), 0o600)
	n.config.NetDir, n.config.BinDirs = n.path("usual/net.d"), []string{n.path("usual/bin")}
	plan, err := n.agent().PlanUninstall()
	if text := strings.Join(plan, "\n"); err != nil || !strings.Contains(text, n.path("bin/istio-cni")) || !strings.Contains(text, "10-net.conflist") {
		t.Errorf("%v, the plan is\n%s", err, text)
	}
	check.OK(t, n.agent().Uninstall(t.Context()))
	for name, text := range n.tree(".") {
		if strings.Contains(text, `"istio-cni"`) || strings.HasPrefix(name, "bin/") || strings.HasPrefix(name, "run/") {
			t.Errorf("%s stays: %s", name, text)
		}
	}
}

// TestRun_RuntimeMoves follows events of files below another root directory.
func TestRun_RuntimeMoves(t *testing.T) {
	t.Parallel()
	m := newMachineAt(t, "/one")
	m.running(m.agent())
	installed := func(dir string) func() bool {
		return func() bool {
			text, _ := os.ReadFile(m.node(dir + "/conf/10-net.conflist"))
			return m.there("node"+dir+"/bin"+ourProgram) && strings.Contains(string(text), `"istio-cni"`)
		}
	}
	m.until(installed("/one"))
	m.removeAll("node/one") // no mount holds it
	check.OK(t, os.MkdirAll(m.node("/one/bin"), 0o755))
	m.put("node/one/conf/10-net.conflist", conflist, 0o644)
	m.until(installed("/one"))

	m.write(containerdFile, directories("/two/conf", "/two/bin"))
	m.until(func() bool {
		return strings.Contains(m.log.String(), "waiting for the directory") || m.there("node/two/bin"+ourProgram)
	})
	m.put("node/two/conf/10-net.conflist", conflist, 0o644) // the pod network's program comes later
	m.until(installed("/two"))
	if !installed("/one")() {
		t.Error("the plugin left the directories in which the runtime looks until it is started again")
	}
	m.start(containerdSock)
	m.until(func() bool { return !m.there("node/one/bin"+ourProgram) && !installed("/one")() })
}

// TestReconcile_RuntimeNotReadable: if the runtime's files become unreadable, the runtime continues with the old ones. The
// plugin stays there and up to date, also with the next agent.
func TestReconcile_RuntimeNotReadable(t *testing.T) {
	t.Parallel()
	const dropIn = "/etc/containerd/conf.d/cni.toml"
	for name, spoil := range map[string]func(m *machine) error{
		"broken":                   func(m *machine) error { m.write(containerdFile, "version = 3\nx = \n"); return nil },
		"a loop of links":          func(m *machine) error { m.write(containerdFile, "->"+containerdFile); return nil },
		"an import is missing":     func(m *machine) error { m.write(containerdFile, "version = 3\nimports = ['x.toml']\n"); return nil },
		"removed":                  func(m *machine) error { return os.Remove(m.node(containerdFile)) },
		"drop-in file removed":     func(m *machine) error { return os.Remove(m.node(dropIn)) },
		"all of its files removed": func(m *machine) error { return os.RemoveAll(m.node("/etc/containerd")) },
	} {
		m := newMachine(t, map[string]string{
			containerdFile: "version = 3\nimports = ['conf.d/*.toml']\n", dropIn: directories("/one/conf", "/one/bin"), "/one/bin/": "",
		})
		m.put("node/one/conf/10-net.conflist", conflist, 0o644)
		m.put("node/etc/cni/net.d/10-net.conflist", conflist, 0o644)
		m.start(containerdSock)
		agent := m.agent()
		m.installs(agent, "/one/conf", "/one/bin")

		time.Sleep(20 * time.Millisecond)
		check.OK(t, spoil(m))
		for range 2 {
			m.put("node/one/conf/10-net.conflist", conflist, 0o644) // the pod network writes it again
			m.put("node/one/bin"+ourProgram, "old", 0o755)
			m.installs(agent, "/one/conf", "/one/bin")
		}
		m.says("where the runtime looks is not known any more")
		if !strings.Contains(name, "removed") {
			agent = m.agent()
		}
		m.installs(agent, "/one/conf", "/one/bin")
		for _, next := range []*installation.Installation{m.agent(), agent} { // without the earlier state
			m.put("node/one/conf/10-net.conflist", conflist, 0o644)
			check.OK(t, next.Reconcile())
			m.has("/one/conf", "/one/bin")
		}

		check.OK(t, os.RemoveAll(m.node("/etc/containerd")))
		m.write(containerdFile, directories("/etc/cni/net.d", "/opt/cni/bin"))
		check.OK(t, agent.Reconcile())
		m.has("/one/conf", "/one/bin")
		m.start(containerdSock)
		m.installs(agent, "/etc/cni/net.d")
		if t.Failed() {
			t.Fatal(name)
		}
	}
}

// TestReconcile_SecondRuntime: the kubelet can use either runtime.
func TestReconcile_SecondRuntime(t *testing.T) {
	t.Parallel()
	m := newMachineAt(t, "/one")
	agent := m.agent()
	check.OK(t, agent.Reconcile())
	m.write("/run/cri-dockerd.sock", "")
	m.installs(agent, "/one/conf", "/one/bin")
	m.says("where the runtime looks is not known any more")
	m.put("node/etc/cni/net.d/10-net.conflist", conflist, 0o644)
	for _, next := range []*installation.Installation{agent, m.agent()} {
		check.OK(t, next.Reconcile())
		m.has("/one/conf", "/one/bin")
		m.has("/etc/cni/net.d", "/opt/cni/bin")
	}
	check.OK(t, os.Remove(m.node("/run/cri-dockerd.sock")))
	m.installs(agent, "/one/conf", "/one/bin")
}

// TestReconcile_TwoPossibleDirectories: the runtime may look in the default directories, or in those of its file.
func TestReconcile_TwoPossibleDirectories(t *testing.T) {
	t.Parallel()
	const nvidia = "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd]\ndefault_runtime_name = 'nvidia'\n"
	for name, write := range map[string]func(m *machine){
		"written after the runtime's start": func(m *machine) {
			m.start(containerdSock)
			time.Sleep(20 * time.Millisecond)
			m.write(containerdFile, directories("/srv/conf", "/srv/bin"))
		},
		"an import replaces the section, whose directories containerd 1 does not keep": func(m *machine) {
			m.write(containerdFile, "imports = ['conf.d/*']\n"+directories("/srv/conf", "/srv/bin"))
			m.write("/etc/containerd/conf.d/99-nvidia.toml", nvidia)
			m.start(containerdSock)
		},
	} {
		m := newMachine(t, map[string]string{"/srv/bin/": "", "/srv/conf/10-net.conflist": conflist, "/etc/cni/net.d/10-net.conflist": conflist})
		write(m)
		agent := m.agent()
		for range 3 {
			m.put("node/etc/cni/net.d/10-net.conflist", conflist, 0o644)
			check.OK(t, agent.Reconcile(), name)
			m.has("/etc/cni/net.d", "/opt/cni/bin")
			m.has("/srv/conf", "/srv/bin")
		}
		m.says("the runtime may look in other directories until it is started again")
		m.write(containerdFile, directories("/srv/conf", "/srv/bin"))
		m.start(containerdSock)
		m.installs(agent, "/srv/conf", "/srv/bin")
	}
}

// TestReconcile_MountedDirectoryMissing does not wait for a directory in which no runtime looks.
func TestReconcile_MountedDirectoryMissing(t *testing.T) {
	t.Parallel()
	m := newMachine(t, map[string]string{containerdFile: directories("/etc/cni/net.d", "/srv/bin"), "/srv/bin/": ""})
	check.OK(t, os.Remove(m.node("/opt/cni/bin")))
	m.put("node/etc/cni/net.d/10-net.conflist", conflist, 0o644)
	m.start(containerdSock)
	check.OK(t, m.agent().Reconcile())
	m.has("/etc/cni/net.d", "/srv/bin")
}
