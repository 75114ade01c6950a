package hostpath

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/test/check"
)

func mkdir(t *testing.T, parts ...string) string {
	t.Helper()
	dir := filepath.Join(parts...)
	check.OK(t, os.MkdirAll(dir, 0o700))
	return dir
}

func TestDetect_Container(t *testing.T) {
	t.Parallel()
	node := t.TempDir() // so that no path of the node exists on this machine
	absent, host := filepath.Join(node, "absent"), mkdir(t, node, "host")
	roots := []string{absent, host}
	if v := Detect(roots, node+"/proc"); v.Proc != "" || !slices.Equal(v.Roots, []string{host}) {
		t.Errorf("without the node's procfs: %+v", v)
	}
	mkdir(t, host, node, "proc/1/ns")
	v := Detect(roots, node+"/proc")
	if want := (View{Roots: []string{host}, Proc: host + node + "/proc"}); !cmp.Equal(v, want) {
		t.Fatalf("got %+v, want %+v", v, want)
	}
	for path, want := range map[string][]string{
		"/proc/7/ns/net":   {v.Proc + "/7/ns/net"},
		"/var/lib/cni/":    {host + "/var/lib/cni", v.Proc + "/1/root/var/lib/cni"},
		"/var/run/netns/a": {host + "/run/netns/a", host + "/var/run/netns/a", v.Proc + "/1/root/run/netns/a", v.Proc + "/1/root/var/run/netns/a"},
	} {
		check.Diff(t, path, want, v.Candidates(path))
	}
	if got := v.Existing(node + "/netns"); !slices.Equal(got, []string{node + "/netns"}) {
		t.Errorf("before the runtime creates its directory: %q", got)
	}
	both := []string{mkdir(t, host, node, "netns"), mkdir(t, node, "netns")}
	if got := v.Existing(node+"/netns", node+"/./netns"); !slices.Equal(got, both) {
		t.Errorf("got %q, want %q", got, both)
	}
}

func TestDetect_Node(t *testing.T) {
	t.Parallel()
	node := t.TempDir()
	mkdir(t, node, "proc/1/ns")
	v := Detect([]string{node + "/host"}, node+"/proc")
	if v.Proc != node+"/proc" || len(v.Roots) > 0 {
		t.Fatalf("got %+v", v)
	}
	if got := v.Candidates("/lib/cni"); !slices.Equal(got, []string{"/lib/cni", node + "/proc/1/root/lib/cni"}) {
		t.Errorf("got %q", got)
	}
}

func TestView_Find(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	if got, seen := (View{}).Find("/var/run/netns/a"); got != "/var/run/netns/a" || !seen {
		t.Errorf("without roots: got %q, %v", got, seen)
	}
	v := View{Roots: []string{root + "/none", root}}
	if got, seen := v.Find("/var/run/netns/a"); seen {
		t.Errorf("%q is visible without a view of the node", got)
	}
	dir := mkdir(t, root, "var/run/netns") // a mount of only this directory
	if got, seen := v.Find("/var/run/netns/a"); got != dir+"/a" || !seen {
		t.Errorf("got %q, %v", got, seen)
	}
	mkdir(t, root, "usr") // the whole file system, whose /var/run is a link to /run
	if got, seen := v.Find("/var/run/netns/a"); got != root+"/run/netns/a" || !seen {
		t.Errorf("got %q, %v", got, seen)
	}
}

func TestEachMount(t *testing.T) {
	t.Parallel()
	table := filepath.Join(t.TempDir(), "mountinfo")
	long := "50 1 0:50 / /overlay rw - overlay overlay rw,lowerdir=" + strings.Repeat("/a:", 100_000)
	text := strings.Join([]string{
		long, "91 25 0:4 net:[1] /run/netns/cni-1 rw shared:13 - nsfs nsfs rw", `91 25 0:4 / /run/a\040b\011c\012d\134e rw - tmpfs tmpfs rw`, "91 25 0:4", "",
	}, "\n")
	check.OK(t, os.WriteFile(table, []byte(text), 0o600))
	var got []Mount
	err := EachMount(table, func(m Mount) error { got = append(got, m); return nil })
	want := []Mount{
		{"0:50", "/", "/overlay", "overlay"}, {"0:4", "net:[1]", "/run/netns/cni-1", "nsfs"}, {"0:4", "/", "/run/a b\tc\nd\\e", "tmpfs"},
	}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	stop := errors.New("enough")
	if err := EachMount(table, func(Mount) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("EachMount continues after %v", err)
	}
	if err := EachMount(table+"x", nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no table: %v", err)
	}
}

// TestView_LinksStayBelowRoot: links lead where they lead on the node.
func TestView_LinksStayBelowRoot(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	mkdir(t, root, "run")
	mkdir(t, root, "data/rancher/k3s")
	mkdir(t, root, "var/lib")
	for link, target := range map[string]string{
		"var/run": "/run", "var/lib/rancher": "../../data/rancher", "out": "../../../../../../run", "var/lib/twice": "/var/lib/rancher", "loop": "loop",
	} {
		check.OK(t, os.Symlink(target, filepath.Join(root, link)))
	}
	for path, want := range map[string]string{
		"/": "/", "/run/a": "/run/a", "/var/run/x.sock": "/run/x.sock", "/var/lib/rancher/k3s/config.toml": "/data/rancher/k3s/config.toml",
		"/var/lib/twice/k3s": "/data/rancher/k3s", "/out": "/run", "/../../etc": "/etc", "relative/./path": "/relative/path", "/absent/a": "/absent/a",
	} {
		if got, err := Resolve(root, path); err != nil || got != filepath.Join(root, want) {
			t.Errorf("%s: got %q, %v, want %q", path, got, err, want)
		}
	}
	if _, err := Resolve(root, "/loop/a"); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("a loop: %v", err)
	}
}
