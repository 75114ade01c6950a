package plugin_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// bareRunDir is the agent's directory on a bare node.
const bareRunDir = "/run/istio-cni"

// bare is a node on which the program is the only file of a file system, with the agent's directory and an empty /proc where the
// kernel's procfs is mounted. It has no iptables, nft, ip, nsenter, shell or library.
type bare struct {
	*chaintest.Node

	root  string
	binds []netns.Bind
}

func newBare(t *testing.T) bare {
	t.Helper()
	b := bare{Node: chaintest.New(t, chaintest.Program(t)), root: t.TempDir()}
	b.binds = []netns.Bind{{Source: "/proc", Target: filepath.Join(b.root, "proc")}}
	for _, dir := range []string{"/proc", bareRunDir} {
		check.OK(t, os.MkdirAll(filepath.Join(b.root, dir), 0o755))
	}
	// A file that was just written may still be open for writing in a process that another test is starting.
	check.OK(t, os.Link(chaintest.Program(t), filepath.Join(b.root, "istio-cni")))
	// The agent's directory is at the path of a real node, and here as well: a chroot has its own paths.
	b.API.WriteKubeconfig(t, filepath.Join(b.root, bareRunDir, "istio-cni-kubeconfig"))
	return b
}

// pod creates a sandbox, and returns the runtime's input for it.
func (b bare) pod(t *testing.T, backend string, describe func(*kubetest.Pod)) (pod chaintest.Pod, input []byte) {
	t.Helper()
	pod = b.NewPod("shop", "web", describe)
	addressed(t, pod)
	input, err := chaintest.Input(b.Chain("1.1.0", chaintest.Stanza{"cni_agent_run_dir": bareRunDir, "backend": backend}), nil)
	check.OK(t, err)
	return pod, input
}

// run traces the program with only the given environment.
func (b bare) run(t *testing.T, input []byte, environment []string, args ...string) (record *chaintest.Record, output string) {
	t.Helper()
	var out bytes.Buffer
	cmd := exec.CommandContext(t.Context(), "chroot", append([]string{b.root, "/istio-cni"}, args...)...)
	cmd.Env, cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr = append(environment, "PATH="), "/", bytes.NewReader(input), &out, &out
	isolation, err := netnstest.Isolated(b.Netns, b.binds, func() (err error) {
		record, err = chaintest.Trace(cmd)
		return err
	})
	if err != nil || isolation != nil {
		t.Fatal(err, isolation)
	}
	return record, out.String()
}

// TestAdd_NothingOfTheHost: every command of the plugin and of the redirector works without any program of the node,
// and starts none.
func TestAdd_NothingOfTheHost(t *testing.T) {
	for _, backend := range []string{"auto", "netlink", "native"} {
		for mode, describe := range map[string]func(*kubetest.Pod){"REDIRECT": chaintest.Sidecar, "TPROXY": byTPROXY, "dual stack": dualStack} {
			t.Run(backend+" "+mode, func(t *testing.T) {
				t.Parallel()
				b := newBare(t)
				pod, input := b.pod(t, backend, describe)
				for _, command := range []string{"ADD", "ADD", "CHECK", "STATUS", "DEL", "VERSION"} {
					b.must(t, 0, input, pod.Environ(command, "/"))
					if all := everyRule(t, pod.Netns); !strings.Contains(strings.ToLower(all), "istio") {
						t.Fatalf("after %s the pod is not captured:\n%s", command, all)
					}
				}
			})
		}
		t.Run(backend+" iptables", func(t *testing.T) {
			t.Parallel()
			b := newBare(t)
			pod := b.NewPod("shop", "web", nil)
			addressed(t, pod)
			b.redirector(t, pod, backend)
		})
	}
}

// must checks that a run ends with an exit code and starts no process.
func (b bare) must(t *testing.T, code int, input []byte, environment []string, args ...string) {
	t.Helper()
	r, out := b.run(t, input, environment, args...)
	if r.Code != code || r.Processes() > 0 {
		t.Fatalf("%q %q: exit code %d, want %d; %d processes were started: %s", environment, args, r.Code, code, r.Processes(), out)
	}
}

// redirector runs the commands of a namespace's life with the role iptables.
func (b bare) redirector(t *testing.T, pod chaintest.Pod, backend string) {
	t.Helper()
	const differs = 3
	call := func(code int, args ...string) {
		t.Helper()
		b.must(t, code, nil, nil, append([]string{
			"iptables", "--network-namespace", pod.Netns, "--backend", backend, "-u", "1337", "-b", "*", "-i", "*", "-d", "15090,15021",
		}, args...)...)
	}
	empty := everyRule(t, pod.Netns)
	call(differs, "--verify")
	call(0)
	if all := everyRule(t, pod.Netns); !strings.Contains(strings.ToLower(all), "istio") {
		t.Fatalf("nothing is captured:\n%s", all)
	}
	call(0, "--verify")
	call(0)
	call(differs, "--verify", "-m", "TPROXY")
	call(0, "--reconcile", "-m", "TPROXY")
	call(0, "--verify", "-m", "TPROXY")
	call(0, "--cleanup-only")
	call(differs, "--verify")
	if all := everyRule(t, pod.Netns); strings.Contains(strings.ToLower(all), "istio") {
		t.Errorf("after cleaning there is\n%s\nbefore there was\n%s", all, empty)
	}
}

// everyRule returns nft's listing of a namespace.
func everyRule(t *testing.T, ns string) string {
	t.Helper()
	return netnstest.Run(t, ns, "nft", "list", "ruleset")
}

// TestAdd_BackendIptablesWithoutPrograms proves the test above: in the same file system the backend
// that starts programs fails, with an error that names the missing programs.
func TestAdd_BackendIptablesWithoutPrograms(t *testing.T) {
	b := newBare(t)
	pod, input := b.pod(t, "iptables", chaintest.Sidecar)
	r, out := b.run(t, input, pod.Environ("ADD", "/"))
	if r.Code != 1 || !strings.Contains(out, "no usable iptables") {
		t.Errorf("exit code %d: %s", r.Code, out)
	}
}

// TestAdd_WithoutProc: the program needs nothing but /proc. Without it, a pod of the
// mesh is refused.
func TestAdd_WithoutProc(t *testing.T) {
	b := newBare(t)
	pod, input := b.pod(t, "auto", chaintest.Sidecar)
	// The namespace's file is mounted, like a runtime's.
	file := filepath.Join(b.root, "netns")
	check.OK(t, os.WriteFile(file, nil, 0o644))
	b.binds = []netns.Bind{{Source: pod.Netns, Target: file}}
	inRoot := pod
	inRoot.Netns = "/netns"
	if r, out := b.run(t, input, inRoot.Environ("ADD", "/")); r.Code != 1 || !strings.Contains(out, `"code"`) {
		t.Errorf("exit code %d: %s", r.Code, out)
	}
	check.Equal(t, everyRule(t, pod.Netns), "", "rules are there")
}
