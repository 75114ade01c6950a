package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// confined runs the program as UID 0 with exactly these capabilities, as a container runtime does.
func confined(t *testing.T, env []string, capabilities []corev1.Capability, args ...string) (text string, code int) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("needs root: capabilities are taken away from it")
	}
	set := "-all"
	for _, c := range capabilities {
		set += ",+" + strings.ToLower(string(c))
	}
	confine := []string{"--bounding-set=" + set, "--inh-caps=-all", "--no-new-privs", product(t)}
	return output(t, env, nil, "setpriv", slices.Concat(confine, args)...)
}

// capabilities returns the agent's capabilities with these values.
func capabilities(t *testing.T, text string) []corev1.Capability {
	t.Helper()
	return agent(t, mustRender(t, text)).Spec.Template.Spec.Containers[0].SecurityContext.Capabilities.Add
}

// TestTheAgentNeedsItsCapabilities installs on nodes whose directories belong to root, and to another user.
func TestTheAgentNeedsItsCapabilities(t *testing.T) {
	t.Parallel()
	const own, foreign = `{foreignOwners: false, audit: {interval: 0}, repair: {repairPods: false}}`,
		`{audit: {interval: 0}, repair: {repairPods: false}}`
	const otherUser = 4711
	install := func(t *testing.T, owner int, have []corev1.Capability) (dir, text string, code int) {
		t.Helper()
		dir, flags := node(t)
		for _, name := range []string{"net", "bin", "net/10-bridge.conflist"} {
			noError(t, os.Chown(filepath.Join(dir, name), owner, owner))
		}
		args := slices.Concat([]string{"install", "--once", "--uninstall-on-exit=never"}, flags)
		text, code = confined(t, environment(t, mustRender(t, own)), have, args...)
		return dir, text, code
	}
	if got := capabilities(t, own); len(got) != 0 {
		t.Fatalf("root's own directories: capabilities %q", got)
	}
	if _, text, code := install(t, 0, nil); code != 0 {
		t.Errorf("root's own directories without a capability: exit %d\n%s", code, text)
	}
	dir, text, code := install(t, otherUser, capabilities(t, foreign))
	equal(t, code, 0, "another user's directories: exit", text)
	equal(t, owner(t, filepath.Join(dir, "net/10-bridge.conflist")), fmt.Sprint(otherUser), "the edited file belongs to")
	if _, text, code := install(t, otherUser, nil); code == 0 {
		t.Errorf("the install succeeds without a capability, so none is needed:\n%s", text)
	}
}

func owner(t *testing.T, path string) string {
	t.Helper()
	text, code := output(t, nil, nil, "stat", "-c", "%u", path)
	if code != 0 {
		t.Fatalf("%s: %s", path, text)
	}
	return strings.TrimSpace(text)
}

// TestRepairAndAuditNeedTheirCapabilities writes rules into the network namespace of another process and reads them, with
// the chart's capabilities and without each of them.
func TestRepairAndAuditNeedTheirCapabilities(t *testing.T) {
	t.Parallel()
	for _, variant := range []string{"", "nft", "legacy"} {
		all := capabilities(t, fmt.Sprintf(`{foreignOwners: false, forceIptablesBinary: %q}`, variant))
		audit := capabilities(t, fmt.Sprintf(`{foreignOwners: false, repair: {enabled: false}, forceIptablesBinary: %q}`, variant))
		same(t, "capabilities of the audit", all, audit)
		command := func(have []corev1.Capability, pod string, more ...string) (text string, code int) {
			return confined(t, []string{"FORCE_IPTABLES_BINARY=" + variant}, have, append([]string{
				"iptables", "--network-namespace", pod,
				"--istio-service-cidr", "*", "--istio-inbound-ports", "*",
			}, more...)...)
		}
		written := pod(t)
		if text, code := command(all, written); code != 0 {
			t.Errorf("%q: exit %d\n%s", variant, code, text)
		}
		if text, code := command(all, written, "--verify"); code != 0 {
			t.Errorf("%q: reading: exit %d\n%s", variant, code, text)
		}
		for i, missing := range all {
			have := slices.Delete(slices.Clone(all), i, i+1)
			if text, code := command(have, pod(t)); code == 0 {
				t.Errorf("%q succeeds without %s, so it is not needed:\n%s", variant, missing, text)
			}
			if text, code := command(have, written, "--verify"); code == 0 {
				t.Errorf("%q reads without %s, so it is not needed:\n%s", variant, missing, text)
			}
		}
	}
}

// pod starts a process in a network namespace with an address, and returns the path of the namespace.
func pod(t *testing.T) string {
	t.Helper()
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	command := exec.CommandContext(ctx, "unshare", "--net", "--", "sh", "-c", `ip link set lo up &&
ip link add eth0 type veth peer name eth1 && ip address add 10.1.1.1/24 dev eth0 &&
ip link set eth0 up && echo ready && exec sleep 600`)
	command.Env = []string{"PATH=/usr/sbin:/sbin:" + os.Getenv("PATH")}
	out, err := command.StdoutPipe()
	noError(t, err)
	noError(t, command.Start())
	t.Cleanup(func() {
		stop()
		_ = command.Wait() // the process was killed
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("making a namespace: %q, %v", line, err)
	}
	return fmt.Sprintf("/proc/%d/ns/net", command.Process.Pid)
}
