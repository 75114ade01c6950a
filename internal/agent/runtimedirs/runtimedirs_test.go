package runtimedirs_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/runtimedirs"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// node is the file system of a node, which the agent sees below one root. Its default directories are mounted elsewhere as well.
type node struct {
	t        *testing.T
	root     string
	settings runtimedirs.Settings
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{t: t, root: t.TempDir()}
	mounts := t.TempDir()
	n.mkdir("/usr", "/etc/cni/net.d", "/opt/cni/bin", "/a/conf", "/a/bin", "/b/conf", "/b/bin")
	n.settings = runtimedirs.Settings{
		Mounted: runtimedirs.Dirs{Net: mounts + "/conf", Bins: []string{mounts + "/bin"}}, HostNet: "/etc/cni/net.d",
		Detect: runtimedirs.Detect{Net: true, Bin: true}, Host: hostpath.View{Roots: []string{n.root}}, RunDir: t.TempDir(), RunDirMode: 0o700,
	}
	for link, dir := range map[string]string{n.settings.Mounted.Net: "/etc/cni/net.d", n.settings.Mounted.Bins[0]: "/opt/cni/bin"} {
		check.OK(t, os.Symlink(n.root+dir, link))
	}
	n.configure("/a")
	n.start()
	return n
}

func (n *node) mkdir(dirs ...string) {
	n.t.Helper()
	for _, dir := range dirs {
		check.OK(n.t, os.MkdirAll(n.root+dir, 0o755))
	}
}

func (n *node) write(file, text string) {
	n.t.Helper()
	n.mkdir(filepath.Dir(file))
	check.OK(n.t, os.WriteFile(n.root+file, []byte(text), 0o600))
	time.Sleep(20 * time.Millisecond) // more than a step of the file system's clock
}

// configure writes a configuration of containerd with the directories conf and bin below a directory.
func (n *node) configure(dir string) {
	n.t.Helper()
	n.write("/etc/containerd/config.toml", strings.ReplaceAll(
		"version = 3\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dirs = ['DIR/bin']\nconf_dir = 'DIR/conf'\n", "DIR", dir))
}

// start makes the socket of containerd anew.
func (n *node) start() {
	n.t.Helper()
	_ = os.Remove(n.root + "/run/containerd/containerd.sock")
	n.write("/run/containerd/containerd.sock", "")
}

func (n *node) finder() *runtimedirs.Finder {
	return runtimedirs.NewFinder(slog.New(slog.DiscardHandler), hostfs.Disk{}, n.settings)
}

// dirs are the directories conf and bin below a directory of the node, with the mounted program directory before them.
func (n *node) dirs(dir string) runtimedirs.Dirs {
	return runtimedirs.Dirs{Net: n.root + dir + "/conf", Bins: []string{n.settings.Mounted.Bins[0], n.root + dir + "/bin"}}
}

func TestFinder_Find(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		set  func(n *node)
		want func(n *node) runtimedirs.Dirs
	}{
		"by default": {func(*node) {}, func(n *node) runtimedirs.Dirs { return n.dirs("/a") }},
		"standalone": {func(n *node) { n.settings.Standalone = true }, func(n *node) runtimedirs.Dirs {
			return runtimedirs.Dirs{Net: n.settings.Mounted.Net, Bins: n.dirs("/a").Bins}
		}},
		"set by the user":       {func(n *node) { n.settings.Detect = runtimedirs.Detect{} }, func(n *node) runtimedirs.Dirs { return n.settings.Mounted }},
		"outside a container":   {func(n *node) { n.settings.Host = hostpath.View{} }, func(n *node) runtimedirs.Dirs { return n.settings.Mounted }},
		"the default directory": {func(n *node) { n.configure("/opt/cni") }, func(n *node) runtimedirs.Dirs { return n.settings.Mounted }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.mkdir("/opt/cni")
			_ = os.Symlink("/etc/cni/net.d", n.root+"/opt/cni/conf")
			tc.set(n)
			f := n.finder()
			check.Diff(t, "result", tc.want(n), f.Find().Dirs)
			if _, err := os.Stat(n.settings.RunDir + "/" + runtimedirs.RecordName); err == nil {
				t.Error("Find has written the record")
			}
		})
	}
}
