package installation_test

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/agent/installation"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/node/hostfs/hostfstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// situation is a node and a mode, and the results of an installation and of its removal without a fault.
type situation struct {
	mode  cniconf.Mode
	files []string
	// reference is set if Istio's agent prepared the node, see fixture.loose.
	reference bool
	// primary are the plugins that the runtime runs besides the stanza.
	primary []string
	// installed and back are the configuration after the installation and after its removal.
	installed, back map[string]string
}

func newSituation(t *testing.T, mode cniconf.Mode, files ...string) situation {
	t.Helper()
	s := situation{mode: mode, files: files, reference: strings.Contains(strings.Join(files, ""), "istio-cni")}
	n := s.fixture(t)
	s.primary = slices.DeleteFunc(n.loaded(), isStanza)
	check.OK(t, n.agent().Reconcile())
	s.installed = n.conf()
	n.uninstall(n.agent())
	s.back = n.conf()
	return s
}

// situations are the modes combined with these files, by name, where the combination exists.
func situations(t *testing.T, files map[string][]string) map[string]situation {
	t.Helper()
	out := map[string]situation{}
	for _, mode := range modes() {
		for name, files := range files {
			if mode != cniconf.DropIn || !strings.HasPrefix(name, "single") {
				out[string(mode)+"/"+name] = newSituation(t, mode, files...)
			}
		}
	}
	return out
}

func listAndSingle() map[string][]string {
	return map[string][]string{"list": {"10-bridge.conflist", conflist}, "single": {"10-bridge.conf", bridgeConf}}
}

func (s situation) fixture(t *testing.T) *fixture {
	t.Helper()
	n := newFixtureAt(t, hostfstest.Memory(t), s.files...)
	n.config.Want.Mode = s.mode
	if n.loose = s.reference; n.loose {
		n.put("bin/istio-cni", "the reference's", 0o755)
	}
	return n
}

// conf returns the configuration directory in a form that is comparable between nodes.
func (n *fixture) conf() map[string]string {
	n.t.Helper()
	out := n.tree("net.d")
	for name, text := range out {
		out[name] = strings.ReplaceAll(text, n.root, "")
	}
	return out
}

// remedies are texts that the error has for the user, besides the file.
func remedies() map[syscall.Errno]string {
	return map[syscall.Errno]string{
		syscall.ENOSPC: "make room", syscall.EROFS: "read-only", syscall.EACCES: "SELinux", syscall.EIO: "input/output error",
	}
}

var temporaryName = regexp.MustCompile(`\.istio-cni\.tmp\.[0-9]+`)

// fault is one call that failed, and the calls after it.
type fault struct {
	call  string
	after []string
	errno syscall.Errno
}

// file is the file of the call; for a rename, the old name.
func (f fault) file() string {
	words := strings.Fields(f.call)
	file := words[1]
	if words[0] == "symlink" || words[0] == "rename" && temporaryName.MatchString(file) {
		file = words[2]
	}
	return temporaryName.ReplaceAllString(file, "")
}

// harmless reports a call whose failure leaves only a temporary file until the next reconciliation.
func (f fault) harmless() bool {
	return strings.HasPrefix(f.call, "remove ") && temporaryName.MatchString(f.call)
}

// reported asserts that the error names cause, file and remedy.
func (f fault) reported(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, f.errno) {
		t.Errorf("%v at %q: error %v", f.errno, f.call, err)
		return
	}
	check.Contains(t, err.Error(), f.file(), remedies()[f.errno])
}

// intact asserts that a file of this program is complete if it exists.
func (n *fixture) intact() {
	n.t.Helper()
	for name, want := range map[string][]string{
		"bin/istio-cni": {"program 1", "the reference's"}, "run/" + cniconf.KubeconfigName: {"token: token-1\n"},
	} {
		complete := func(end string) bool { return strings.HasSuffix(n.read(name), end) }
		if n.there(name) && !slices.ContainsFunc(want, complete) {
			n.t.Errorf("%s has the content %q", name, n.read(name))
		}
	}
}

// safe asserts that the node works: the runtime loads the same plugins as before, and their programs exist.
func (n *fixture) safe(s situation, f fault) {
	n.t.Helper()
	n.intact()
	got := n.loaded()
	if !slices.Equal(slices.DeleteFunc(slices.Clone(got), isStanza), s.primary) {
		n.t.Fatalf("%v at %q: the runtime runs %q, want %q\n%v", f.errno, f.call, got, s.primary, n.tree("net.d"))
	}
	stanza := slices.ContainsFunc(got, isStanza) || n.there("net.d/net/"+cniconf.DropInName) || n.there("net.d/"+cniconf.StandaloneName)
	if stanza && (!n.there("bin/istio-cni") || !n.there("run/"+cniconf.KubeconfigName)) {
		n.t.Errorf("%v at %q: a stanza without program or kubeconfig", f.errno, f.call)
	}
}

func isStanza(plugin string) bool { return plugin == "istio-cni" }

// temps returns the temporary files anywhere on the node.
func (n *fixture) temps() []string {
	n.t.Helper()
	var out []string
	for name := range n.tree(".") {
		if temporaryName.MatchString(name) {
			out = append(out, name)
		}
	}
	return out
}

// everyFault runs a piece of work on a fresh node for each of its calls and each errno; only that call fails. The check gets
// the agent that did the work.
func everyFault(t *testing.T, prepare func() *fixture, work func(*fixture, *installation.Installation) error,
	check func(*fixture, *installation.Installation, fault, error),
) {
	t.Helper()
	for errno := range remedies() {
		for at := 0; ; at++ {
			n := prepare()
			faults := hostfstest.FailAt(at, errno)
			n.disk.Before = faults.Before
			a := n.agent()
			err := work(n, a)
			if log := faults.Log(); len(log) > at {
				check(n, a, fault{log[at], log[at+1:], errno}, err)
				continue
			}
			if err != nil || at < 5 {
				t.Errorf("without a fault: %v after %d calls", err, at)
			}
			break
		}
	}
}

func TestReconcile_EveryFault(t *testing.T) {
	t.Parallel()
	for name, s := range situations(t, listAndSingle()) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			install := func(_ *fixture, a *installation.Installation) error { return a.Reconcile() }
			everyFault(t, func() *fixture { return s.fixture(t) }, install, func(n *fixture, a *installation.Installation, f fault, err error) {
				n.safe(s, f)
				if f.harmless() {
					check.OK(t, err)
				} else {
					f.reported(t, err)
					check.Contains(t, fmt.Sprintf("%+v", n.health.Snapshot()), f.file())
					if left := n.temps(); len(left) > 0 {
						t.Errorf("%v at %q: left %q", f.errno, f.call, left)
					}
				}
				if f.errno == syscall.EIO { // W-20: a file that was written despite the error is removed
					n.uninstall(a)
					check.Diff(t, fmt.Sprintf("%v at %q, and then uninstalled", f.errno, f.call), s.back, n.conf())
					return
				}
				check.OK(t, a.Reconcile())
				if diff := cmp.Diff(s.installed, n.conf()); diff != "" || len(n.temps()) > 0 {
					t.Errorf("%v at %q, after a second try: temporary files %q\n%s", f.errno, f.call, n.temps(), diff)
				}
				n.safe(s, f)
			})
		})
	}
}

// TestUninstall_EveryFault: all files that can be restored are restored, and the error reports the others.
func TestUninstall_EveryFault(t *testing.T) {
	t.Parallel()
	for name, s := range situations(t, listAndSingle()) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			everyFault(t, func() *fixture {
				n := s.fixture(t)
				check.OK(t, n.agent().Reconcile())
				n.put("old/ZZZ-istio-cni-kubeconfig", "x", 0o600)
				n.config.OldKubeconfig = n.path("old/ZZZ-istio-cni-kubeconfig")
				return n
			}, func(_ *fixture, a *installation.Installation) error {
				return a.Uninstall(t.Context())
			}, func(n *fixture, a *installation.Installation, f fault, err error) {
				n.safe(s, f)
				// W-5: a change that a retry finds done may not be on the disk yet.
				if f.call == "syncdir "+n.path("net.d") && !slices.Contains(f.after, f.call) && (err == nil || !n.there("bin/istio-cni")) {
					t.Errorf("%v at %q: the stanza may come back without its program: %v\n%q", f.errno, f.call, err, f.after)
				}
				// A failure in the configuration is retried at once.
				again := strings.HasPrefix(f.file(), n.path("net.d"))
				if !again && !f.harmless() {
					f.reported(t, err)
				}
				n.only(f)
				if err := a.Uninstall(t.Context()); err != nil {
					t.Errorf("%v at %q, after a second try: %v", f.errno, f.call, err)
				}
				if diff := cmp.Diff(s.back, n.conf()); diff != "" || len(n.tree("bin"))+len(n.tree("run")) > 0 {
					t.Errorf("%v at %q, after a second try: %v\n%s", f.errno, f.call, n.tree("."), diff)
				}
			})
		})
	}
}

// only asserts that no file of this program is left except the file of the fault.
func (n *fixture) only(f fault) {
	n.t.Helper()
	ours := []string{"old/ZZZ-istio-cni-kubeconfig", "run/istio-cni-kubeconfig", "bin/istio-cni"}
	for _, link := range installation.Links() {
		ours = append(ours, "bin/"+link)
	}
	for _, name := range ours {
		if n.there(name) && f.file() != n.path(name) {
			n.t.Errorf("%v at %q: %s is left", f.errno, f.call, name)
		}
	}
	if slices.ContainsFunc(n.loaded(), isStanza) {
		n.t.Errorf("%v at %q: the stanza is left", f.errno, f.call)
	}
}
