package redirection_test

import (
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// The processes for programming a pod have a budget: at most 4 for an IPv4 pod, 6 for both families.

// toolbox is a directory of scripts that replace the iptables programs. Each logs its arguments, and then executes the real
// program.
type toolbox struct {
	dir, log string
	copies   bool // of the scripts instead of links to them: their path does not show the variant
}

// standIn is the text of a script; REAL is the multi-call program, which takes the name as its first argument. The script
// logs if the program could query the name service, or would wait for the lock of the node.
const standIn = `#!/bin/sh
name=${0##*/}
echo "$name${*:+ $*}" >>LOG
if [ -s /etc/nsswitch.conf ]; then echo "$name sees nsswitch.conf" >>LOG; fi
if [ "$1" != --version ] && [ -z "$XTABLES_LOCKFILE" ]; then echo "$name has no lock of its own" >>LOG; fi
EXTRA
exec REAL "$name" "$@"
`

func newToolbox(t *testing.T) toolbox {
	t.Helper()
	return toolbox{dir: t.TempDir(), log: filepath.Join(t.TempDir(), "log")}
}

// add writes the scripts of one variant for programs with the given names; it appends the variant to a name that ends with
// a dash. The scripts are links to a file with the name of the real program.
func (b toolbox) add(t *testing.T, v iptables.Variant, multi, extra string, names ...string) toolbox {
	t.Helper()
	file := filepath.Join(b.dir, "xtables-"+string(v)+"-multi")
	text := []byte(strings.NewReplacer("LOG", b.log, "REAL", multi, "EXTRA", extra).Replace(standIn))
	netnstest.WriteProgram(t, file, text)
	for _, name := range names {
		if strings.HasSuffix(name, "-") {
			name += string(v)
		}
		for _, suffix := range []string{"", "-save", "-restore"} {
			if b.copies {
				netnstest.WriteProgram(t, filepath.Join(b.dir, name+suffix), text)
			} else if err := os.Symlink(file, filepath.Join(b.dir, name+suffix)); err != nil {
				t.Fatal(err)
			}
		}
	}
	return b
}

// started returns the lines logged since the last call.
func (b toolbox) started(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile(b.log)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	check.OK(t, os.RemoveAll(b.log))
	if len(text) == 0 {
		return nil
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// multi returns the path of the program of a variant.
func multi(t *testing.T, v iptables.Variant) string {
	t.Helper()
	link, err := exec.LookPath(program(v, ruleset.IPv4, "-restore"))
	if err == nil {
		link, err = filepath.EvalSymlinks(link)
	}
	check.OK(t, err)
	return link
}

// budget has the processes for a pod of one family or of both: for one without rules, and again for one with rules.
type budget struct {
	both         bool
	first, again []string
}

// budgetOf returns the budget for programs whose names end with the suffix. Legacy tools run with --version
// once before they write because old ones have no --wait.
func budgetOf(v iptables.Variant, suffix string, both bool) budget {
	want, wait, names := budget{both: both}, "", []string{"iptables", "ip6tables"}
	if v == iptables.Legacy {
		want.first, wait = []string{"iptables" + suffix + " --version"}, " --wait=30"
	}
	if !both {
		names = names[:1]
	}
	for _, name := range names {
		want.first, want.again = append(want.first, name+suffix+"-restore --noflush"+wait), append(want.again, name+suffix+"-save")
	}
	return want
}

// check applies a Spec twice to a fresh pod, then verifies it.
func (want budget) check(t *testing.T, host iptables.Host, backend redirect.Backend, b toolbox) {
	t.Helper()
	p := newPod(t, "10.20.0.2/24")
	if want.both {
		p = dualPod(t)
	}
	n := p.namespace("")
	n.Tools, n.Backend = host, backend
	spec := dual(byTPROXY)
	spec.DualStack = want.both
	for _, step := range []struct {
		name string
		do   func() error
		want []string
	}{
		{"the first Apply", func() error { _, err := n.Apply(t.Context(), spec, 0); return err }, want.first},
		{"the second Apply", func() error { _, err := n.Apply(t.Context(), spec, 0); return err }, want.again},
		{"Verify", func() error { verified(t, n, spec); return nil }, want.again},
	} {
		check.OK(t, step.do())
		check.Diff(t, fmt.Sprintf("%s of a pod with both families: %t starts", step.name, want.both), step.want, b.started(t))
	}
}

// With variants in the program names, a fresh pod costs one process per family, and so does a pod without a difference.
func TestProcesses_NoneNeedless(t *testing.T) {
	t.Parallel()
	b := newToolbox(t)
	for _, v := range variants {
		b.add(t, v, multi(t, v), "", "iptables-", "ip6tables-")
	}
	for _, test := range []struct {
		name          string
		force, starts iptables.Variant // "" starts none
		backend       redirect.Backend
	}{
		{"nft", iptables.NFT, iptables.NFT, ""},
		{"legacy", iptables.Legacy, iptables.Legacy, ""},
		{"tools, nothing forced", "", iptables.NFT, redirect.Tools},
		{"no backend and no variant", "", "", ""},
		{"netlink", "", "", redirect.Netlink},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, both := range []bool{false, true} {
				want := budget{both: both}
				if test.starts != "" {
					want = budgetOf(test.starts, "-"+string(test.starts), both)
				}
				want.check(t, iptables.Host{Path: b.dir, Force: test.force}, test.backend, b)
			}
		})
	}
}

// With only plain names, the target of a link shows the variant; a program that is not a link runs with --version.
func TestProcesses_PlainNamesOnly(t *testing.T) {
	dir, inside := inMounts(t, `cp /usr/sbin/xtables-*-multi "$2" && mount -t tmpfs none /usr/sbin`)
	if !inside {
		return
	}
	versions := []string{"iptables-restore --version", "ip6tables-restore --version"}
	for _, v := range variants {
		multi := filepath.Join(dir, "xtables-"+string(v)+"-multi")
		links := newToolbox(t).add(t, v, multi, "", "iptables", "ip6tables")
		copies := newToolbox(t)
		copies.copies = true
		copies.add(t, v, multi, "", "iptables", "ip6tables")
		for _, both := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, both families %t", v, both), func(t *testing.T) {
				want := budgetOf(v, "", both)
				want.check(t, iptables.Host{Path: links.dir}, redirect.Tools, links)
				want.first = slices.Concat(versions, want.first)
				want.again = slices.Concat(versions[:1], want.again[:1], versions[1:], want.again[1:])
				want.check(t, iptables.Host{Path: copies.dir}, redirect.Tools, copies)
			})
		}
	}
}

// inMounts runs the calling test again, in a process with its own mounts made by a script, and reports whether this is
// that process. The directory, $2 of the script, is shared by both.
func inMounts(t *testing.T, script string) (dir string, inside bool) {
	t.Helper()
	const variable = "PODNET_TEST_DIR"
	self, err := os.Executable()
	check.OK(t, err)
	dir = t.TempDir()
	inside = netnstest.Inside(t, func(cmd *exec.Cmd) {
		script += ` && exec "$0" -test.v -test.run="^$1\$"`
		wrapped := exec.CommandContext(t.Context(), "unshare", "--mount", "--propagation", "private", "sh", "-ec", script, self, t.Name(), dir)
		cmd.Path, cmd.Args, cmd.Env = wrapped.Path, wrapped.Args, append(cmd.Env, variable+"="+dir)
	})
	if inside {
		dir = os.Getenv(variable)
	}
	return dir, inside
}

// Legacy tools lock a file for the whole node. A process that holds it while it writes the node's own rules must not delay
// pods.
func TestApply_LockOfTheNode(t *testing.T) {
	// This test uses its own lock: the node's real one would stop other processes on this machine.
	if _, inside := inMounts(t, "mount -t tmpfs none /run && : >/run/xtables.lock"); !inside {
		return
	}
	lock, err := os.Open("/run/xtables.lock")
	check.OK(t, err)
	defer lock.Close() //nolint:errcheck // a test
	check.OK(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
	held := func() {
		t.Helper()
		const list = "! env -u XTABLES_LOCKFILE iptables-legacy --wait=1 -L 2>&1"
		check.Contains(t, emptyPod(t).run(t, "sh", "-c", list), "xtables lock")
	}
	held()
	const pods = 50
	// Programs before 1.8.6 do not know the variable for the lock file; for them a mount covers the file.
	old := newToolbox(t).add(t, iptables.Legacy, multi(t, iptables.Legacy), "unset XTABLES_LOCKFILE", "iptables-", "ip6tables-")
	for name, path := range map[string]string{"programs of today": "", "programs without XTABLES_LOCKFILE": old.dir} {
		var all sync.WaitGroup
		spec := dual(byTPROXY)
		for range pods {
			p := dualPod(t)
			all.Go(func() {
				n := p.namespace(iptables.Legacy)
				n.Tools.Path = path
				if _, err := n.Apply(t.Context(), spec, 0); err != nil {
					t.Errorf("%s: %v", name, err)
					return
				}
				for _, f := range families {
					equal(t, name, redirect.Rules(spec, f).String(), p.save(t, iptables.Legacy, f))
				}
			})
		}
		all.Wait()
	}
	held()
}

// Runs that overlap in one namespace must not add their rules to each other's.
func TestApply_Concurrent(t *testing.T) {
	eachVariant(t, func(t *testing.T, v iptables.Variant) {
		n, spec := dualPod(t).namespace(v), dual(byTPROXY)
		var runs sync.WaitGroup
		for range 6 {
			runs.Go(func() {
				if _, err := n.Apply(t.Context(), spec, redirection.Reconcile); err != nil {
					t.Error(err)
				}
			})
		}
		runs.Wait()
		verified(t, n, spec)
	})
}

// A tool whose parent was killed must have ended before the next run begins. The tool here is a script that takes a second;
// the parent is a process of this test binary.
func TestApply_KilledRun(t *testing.T) {
	if os.Getenv("PODNET_TEST_APPLY") != "" {
		n := redirection.Namespace{NetNS: netnstest.Open(t, os.Getenv("PODNET_TEST_APPLY")), Backend: redirect.Tools, Tools: iptables.Host{Path: os.Getenv("PODNET_TEST_PATH")}, Log: slog.New(slog.DiscardHandler)}
		_, _ = n.Apply(t.Context(), redirect.Default(), redirection.Reconcile)
		return
	}
	t.Parallel()
	p, started := newPod(t, "10.1.0.2/24"), filepath.Join(t.TempDir(), "started")
	n := p.namespace(iptables.NFT)
	slow := newToolbox(t).add(t, iptables.NFT, multi(t, iptables.NFT), "case $name in *-restore) touch "+started+"; sleep 1;; esac", "iptables-")
	first := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestApply_KilledRun$")
	first.Env = append(os.Environ(), "PODNET_TEST_APPLY="+n.NetNS.Path(), "PODNET_TEST_PATH="+slow.dir)
	check.OK(t, first.Start())
	agenttest.Eventually(t, "the start of the tool", func() bool { _, err := os.Stat(started); return err == nil })
	check.OK(t, first.Process.Kill())
	_ = first.Wait()
	mustApply(t, n, redirect.Default())
	time.Sleep(1500 * time.Millisecond) // long enough for an orphaned tool to write its rules
	rules := p.save(t, iptables.NFT, ruleset.IPv4)
	check.Equal(t, strings.Count(rules, "-A OUTPUT -j ISTIO_OUTPUT"), 1, "jumps", rules)
}
