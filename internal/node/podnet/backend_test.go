package podnet_test

import (
	"fmt"
	"log/slog"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/referencetest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/podnet"
)

// with is the code under test with a backend.
func (p pod) with(b redirect.Backend) podnet.Namespace {
	return podnet.Namespace{NetNS: netnstest.At(string(p)), Backend: b, Log: slog.New(slog.DiscardHandler)}
}

// everything is all that any tool knows of the namespace's rules.
func (p pod) everything(t *testing.T) string {
	t.Helper()
	return filled(p.saves(t)) + p.run(t, "nft", "list", "ruleset", "inet")
}

// Whatever wrote the rules of the mesh, each backend moves them over in full and leaves nothing of the others.
func TestEveryBackendTakesOverFromEveryOther(t *testing.T) {
	t.Parallel()
	backends := []redirect.Backend{redirect.Netlink, redirect.Native, redirect.Tools, redirect.Auto}
	spec, before := dual(), dual(byTPROXY)
	for _, to := range backends {
		fresh := dualPod(t)
		mustApply(t, fresh.with(to), spec)
		want := fresh.everything(t)
		for _, from := range backends {
			t.Run(fmt.Sprintf("%s to %s", from, to), func(t *testing.T) {
				t.Parallel()
				p := dualPod(t)
				mustApply(t, p.with(from), before)
				mustApply(t, p.with(to), spec)
				equal(t, "not as on a fresh pod", want, p.everything(t))
				verified(t, p.with(to), spec)
				if r := mustApply(t, p.with(to), spec); len(r.Programs) > 0 {
					t.Errorf("a second Apply changes rules: %v", r.Programs)
				}
			})
		}
		t.Run(fmt.Sprintf("legacy to %s", to), func(t *testing.T) {
			t.Parallel()
			p := dualPod(t)
			p.reference(t, iptables.Legacy, before, families...)
			mustApply(t, p.with(to), spec)
			if legacy := filled(p.rules(t, iptables.Legacy)); to != redirect.Tools && strings.Contains(legacy, "ISTIO") {
				t.Errorf("legacy rules stay:\n%s", legacy)
			}
			verified(t, p.with(to), spec)
		})
		t.Run(fmt.Sprintf("cleaned by %s", to), func(t *testing.T) {
			t.Parallel()
			for _, from := range backends {
				p := dualPod(t)
				mustApply(t, p.with(from), before)
				if ours, err := p.with(to).HasRules(t.Context()); err != nil || !ours {
					t.Errorf("rules of %s: ours %v, %v", from, ours, err)
				}
				if _, err := p.with(to).Clean(t.Context(), before); err != nil {
					t.Fatal(err)
				}
				if all := p.everything(t); strings.Contains(all, "ISTIO") || strings.Contains(all, "istio") {
					t.Errorf("rules of %s stay:\n%s", from, all)
				}
			}
		})
	}
}

// What the reference's native mode left is seen, and not stacked upon.
func TestNativeTablesOfTheReferenceAreMovedOver(t *testing.T) {
	t.Parallel()
	const theirs = `table inet istio-proxy-nat {
	chain istio-redirect {
		meta l4proto tcp counter redirect to :15001
	}
	chain output {
		type nat hook output priority -100; policy accept;
		jump istio-redirect
	}
}
`
	p := dualPod(t)
	p.feed(t, theirs, "nft", "-f", "-")
	r, err := p.with("").Verify(t.Context(), dual())
	if err != nil || !r.Mesh || r.Clean() {
		t.Errorf("mesh %v, clean %v, %v", r.Mesh, r.Clean(), err)
	}
	if _, err := p.with("").Apply(t.Context(), dual(), podnet.FailOnConflict); err == nil {
		t.Error("Refuse replaced native tables")
	}
	mustApply(t, p.with(""), dual())
	if left := p.run(t, "nft", "list", "ruleset", "inet"); left != "" {
		t.Errorf("they stay:\n%s", left)
	}
	verified(t, p.with(""), dual())
}

// ofOtherUsers is a namespace that belongs to a user namespace of its own, as that of a pod with hostUsers: false.
func ofOtherUsers(t *testing.T) pod {
	t.Helper()

	cmd := exec.CommandContext(t.Context(), "sh", "-c", "ip link set lo up && ip link add eth0 type veth peer name peer0 && ip addr add 10.30.0.2/24 dev eth0 && echo up && exec sleep 1000")
	const others = 100000
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: others, Size: 65536}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET, UidMappings: ids, GidMappings: ids, Pdeathsig: syscall.SIGKILL,
		Credential: &syscall.Credential{Uid: 0, Gid: 0},
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	started, ended := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(ended)
		// The kernel sends Pdeathsig when the thread ends that forked, and threads of other tests do end.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		problem := cmd.Start()
		started <- problem
		if problem == nil {
			_ = cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-ended })
	if _, err := out.Read(make([]byte, 3)); err != nil {
		t.Fatalf("the namespace was not made: %v", err)
	}
	path := fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid)
	netnstest.Open(t, path)
	return pod(path)
}

// The kernel refuses iptables' owner match there (net/netfilter/xt_owner.c), so nobody has to say that native tables are
// needed.
func TestPodWithUsersOfItsOwn(t *testing.T) {
	t.Parallel()
	p := ofOtherUsers(t)
	spec := redirect.Default()
	if _, err := p.with(redirect.Netlink).Apply(t.Context(), spec, podnet.Reconcile); err == nil {
		t.Error("the kernel takes the owner match: this test shows nothing")
	}
	r := mustApply(t, p.with(""), spec)
	if len(r.Tools) != 1 || r.Tools[0] != "native" {
		t.Errorf("the tools are %q", r.Tools)
	}
	verified(t, p.with(""), spec)
	if text := p.run(t, "nft", "list", "ruleset"); !strings.Contains(text, "istio-proxy-nat") || !strings.Contains(text, "skuid 1337") {
		t.Errorf("got:\n%s", text)
	}
}

// Nothing is written, and nothing deleted, that need not be.
func TestNoToolOfTheHostIsNeeded(t *testing.T) {
	t.Parallel()
	for _, b := range []redirect.Backend{"", redirect.Netlink, redirect.Native} {
		p := dualPod(t)
		n := p.with(b)
		n.Tools = iptables.Host{Path: "/nonexistent"}
		r := mustApply(t, n, dual(byTPROXY))
		if r.Processes != 0 {
			t.Errorf("%q: %d processes", b, r.Processes)
		}
		if again := mustApply(t, n, dual(byTPROXY)); again.Processes != 0 || len(again.Programs) != 0 {
			t.Errorf("%q: again %d processes, %v", b, again.Processes, again.Programs)
		}
		for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
			if b != redirect.Native {
				equal(t, string(b), redirect.Rules(dual(byTPROXY), f).String(), filled(p.save(t, iptables.NFT, f)))
			}
		}
	}
}

// Legacy rules that no tool can take away are not added to, and not taken for nothing.
func TestLegacyRulesAreNeverDoubled(t *testing.T) {
	// The tools are saved from the directory that is covered, for the test alone.
	dir, inside := inMounts(t, `cp /usr/sbin/xtables-*-multi "$2" && mount -t tmpfs none /usr/sbin`)
	if !inside {
		return
	}
	b := newToolbox(t).add(t, iptables.Legacy, filepath.Join(dir, "xtables-legacy-multi"), "", "iptables-", "ip6tables-")
	for _, f := range families {
		p := dualPod(t)
		for _, family := range []ruleset.Family{f} {
			p.feed(t, referencetest.Restore(dual(byTPROXY), family), filepath.Join(b.dir, program(iptables.Legacy, family, "-restore")), "--noflush")
		}
		n := p.with("")
		_, applied := n.Apply(t.Context(), dual(), podnet.Reconcile)
		_, verified := n.Verify(t.Context(), dual())
		_, cleaned := n.Clean(t.Context(), dual())
		for what, err := range map[string]error{"Apply": applied, "Verify": verified, "Clean": cleaned} {
			if err == nil || !strings.Contains(err.Error(), "in the legacy iptables tables") {
				t.Errorf("%s of %s: %v", what, f, err)
			}
		}
	}
}

// Tables of somebody else cost nothing and need no tool.
func TestForeignLegacyTablesNeedNoTool(t *testing.T) {
	t.Parallel()
	p := dualPod(t)
	for _, f := range families {
		p.iptables(t, iptables.Legacy, f, "-t nat -N DOCKER", "-t mangle -A OUTPUT -p tcp -j ACCEPT", "-A INPUT -p tcp -j ACCEPT")
	}
	n := p.with("")
	n.Tools = iptables.Host{Path: "/nonexistent"}
	if r := mustApply(t, n, dual()); r.Processes != 0 || len(r.Notes) != 0 {
		t.Errorf("%d processes, notes %q", r.Processes, r.Notes)
	}
	for _, f := range families {
		if !strings.Contains(p.save(t, iptables.Legacy, f), "DOCKER") {
			t.Error("foreign rules are gone")
		}
	}
}
