package pages_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/hack/pages"
	"github.com/meshcni/istio-cni/internal/test/check"
)

const root = "../.."

// world makes the machine of a page: a network namespace, /etc, /opt/cni, /run and a home directory of its own; nothing stays. Pages
// with more, such as a pod's network namespace, make it by a block.
const world = `
mount --make-rprivate /
ip link set lo up
cp -a /etc "$OWN/etc"
mount --bind "$OWN/etc" /etc
mkdir -p /opt/cni
mount -t tmpfs tmpfs /opt
mount -t tmpfs tmpfs /run
mkdir -p /run/netns /etc/cni/net.d /opt/cni/bin "$HOME"
rm -rf /etc/cni/net.d/*
cp /usr/lib/cni/* /opt/cni/bin/
`

// fixtures are what pages show commands about and do not make themselves: a network namespace with the rules of a pod.
var fixtures = map[string]string{
	"docs/bypass.md": pod("web", "10.1.0.2", "15020,443"),
}

func pod(name, address, excluded string) string {
	return strings.NewReplacer("NAME", name, "ADDRESS", address, "EXCLUDED", excluded).Replace(`
ip netns add NAME
ip -n NAME link set lo up
ip -n NAME link add eth0 type veth peer name veth0
ip -n NAME link set veth0 up
ip -n NAME link set eth0 up
ip -n NAME addr add ADDRESS/24 dev eth0
ip -n NAME route add default dev eth0
istio-cni iptables --network-namespace /run/netns/NAME -b '*' -d 15020,15021,15090 -i '*' -o EXCLUDED
`)
}

// TestHost runs the commands of the runner host, page by page.
func TestHost(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("the commands program network namespaces and need root")
	}
	all, err := pages.Read(root)
	check.OK(t, err)
	bin := build(t)
	blocks := pages.Of(all, "host")
	if len(blocks) == 0 {
		t.Fatal("no page has commands to run")
	}
	for name, blocks := range blocks {
		t.Run(filepath.Base(name), func(t *testing.T) {
			own := t.TempDir()
			work := filepath.Join(own, "work")
			check.OK(t, os.Mkdir(work, 0o755))
			tree, err := filepath.Abs(root)
			check.OK(t, err)
			for _, dir := range []string{"manifests", "hack", "docs"} {
				if err = os.Symlink(filepath.Join(tree, dir), filepath.Join(work, dir)); err != nil {
					t.Fatal(err)
				}
			}
			began := time.Now()
			shell := pages.Shell{
				Start: []string{"unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "bash"},
				Env:   []string{"PATH=" + bin + ":" + os.Getenv("PATH"), "HOME=" + filepath.Join(own, "home"), "OWN=" + own, "LANG=C.UTF-8"},
				Dir:   work, Setup: world + fixtures[name],
			}
			results, err := shell.Run(t.Context(), own, blocks)
			check.OK(t, err)
			for _, r := range results {
				check.Equal(t, r.Fault, "", name, r.Command.Line, r.Command.Text)
			}
			t.Logf("%d commands in %s", len(results), time.Since(began).Round(time.Millisecond))
		})
	}
}

// build builds the program and returns the directory with it, by each of its names.
func build(t *testing.T) string {
	t.Helper()
	bin := t.TempDir()
	command := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-o", filepath.Join(bin, "istio-cni"), ".")
	command.Dir = root
	command.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	for _, name := range []string{"istio-iptables", "install-cni", "istio-cni-taint", "istio-cni-repair"} {
		check.OK(t, os.Symlink("istio-cni", filepath.Join(bin, name)))
	}
	return bin
}

var (
	// spoken is a command of the program in a sentence.
	spoken = regexp.MustCompile(`^(?:kubectl istio-cni|istio-cni) ([a-z]+)\b(.*)$`)
	flag   = regexp.MustCompile(`(?:^|[\s\[])(--[a-z][a-z0-9_-]*)`)
)

// sentences begin the texts of the plugin's errors.
var sentences = []string{"cannot", "refuses", "panicked", "failed"}

// TestSpokenCommands: commands in sentences and tables, whose blocks no runner has, are commands of the program, and their flags are
// in the help.
func TestSpokenCommands(t *testing.T) {
	all, err := pages.Read(root)
	check.OK(t, err)
	program := filepath.Join(build(t), "istio-cni")
	help := map[string]string{}
	checked := 0
	for _, page := range all {
		if page.Name == "docs/changelog.md" {
			continue // has commands of the past
		}
		for _, span := range page.Spans {
			m := spoken.FindStringSubmatch(span.Text)
			if m == nil || slices.Contains(sentences, m[1]) {
				continue
			}
			if help[m[1]] == "" {
				text, _ := exec.CommandContext(t.Context(), program, m[1], "--help").CombinedOutput()
				help[m[1]] = string(text)
			}
			checked++
			if strings.Contains(help[m[1]], "unknown command") {
				t.Errorf("%s:%d: %s: there is no such command", page.Name, span.Line, span.Text)
			}
			for _, f := range flag.FindAllStringSubmatch(m[2], -1) {
				if !strings.Contains(help[m[1]], strings.TrimLeft(f[1], "-")) {
					t.Errorf("%s:%d: %s: %s is not in the help", page.Name, span.Line, span.Text, f[1])
				}
			}
		}
	}
	if checked < 50 {
		t.Errorf("%d commands: the search does not find them", checked)
	}
}
