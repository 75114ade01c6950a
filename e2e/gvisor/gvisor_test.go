// Package gvisor runs gVisor's runsc on an OCI bundle in a network namespace with the rules of a mesh pod, and shows for which rules and
// flags its traffic is redirected. docs/bypass.md has the result. There is no Kubernetes.
//
// Start reading at TestRedirection.
package gvisor

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/lab"
)

const (
	podIP, peerIP = "10.7.0.2", "10.7.0.1"
	proxyID       = "1337:1337"
)

// pod is a sandbox with the programs of an injected pod, beside a peer.
type pod struct {
	lab.Test
	artifacts.Sandbox

	// netns are the paths of the namespaces of pod and peer, dir has the bundle and runsc's state.
	netns, peer, dir string
	flags            []string
}

// flow reports whether a pod's traffic passes its proxy.
type flow struct{ out, in bool }

// TestRedirection: a sandbox gets the rules of iptables-nft with reproduce-nftables, those of legacy tables with reproduce-nat as well,
// and native ones never.
func TestRedirection(t *testing.T) {
	const nftables, nat = "--reproduce-nftables", "--reproduce-nat"
	legacy := []string{"--backend=iptables", "--force-iptables-binary=legacy"}
	for _, test := range []struct {
		name         string
		rules, flags []string
		want         flow
	}{
		{"netlink", []string{"--backend=netlink"}, nil, flow{}},
		{"netlink, reproduce-nat", []string{"--backend=netlink"}, []string{nat}, flow{}},
		{"netlink, reproduce-nftables", []string{"--backend=netlink"}, []string{nftables}, flow{true, true}},
		{"legacy, reproduce-nat", legacy, []string{nat}, flow{true, true}},
		{"legacy, reproduce-nftables", legacy, []string{nftables}, flow{true, true}},
		{"native, reproduce-nftables", []string{"--backend=native"}, []string{nftables}, flow{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := newPod(t, test.flags)
			p.redirect(test.rules...)
			p.start()
			p.flows(test.want)
			p.explained(strings.Contains(test.name, "native"))
		})
	}
}

// TestRedirection_Later: rules that are written when the sandbox runs have no effect, so that a repair in place cannot help.
func TestRedirection_Later(t *testing.T) {
	p := newPod(t, []string{"--reproduce-nftables"})
	p.start()
	p.ip(p.netns, "address", "add", podIP+"/24", "dev", "eth0") // which the sandbox has taken
	p.redirect("--backend=netlink")
	p.ip(p.netns, "address", "del", podIP+"/24", "dev", "eth0")
	p.flows(flow{})
}

// newPod makes the namespaces and the bundle.
func newPod(t *testing.T, flags []string) *pod {
	t.Helper()
	p := &pod{Test: lab.Test{T: t}, dir: t.TempDir(), flags: flags}
	var err error
	p.Sandbox, err = artifacts.FindSandbox()
	p.Must(err)
	p.netns, p.peer = p.namespace(), p.namespace()
	p.ip(p.netns, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", p.peer)
	for path, address := range map[string]string{p.netns: podIP, p.peer: peerIP} {
		for _, command := range []string{"address add " + address + "/24 dev eth0", "link set lo up", "link set eth0 up"} {
			p.ip(path, strings.Fields(command)...)
		}
	}
	p.ip(p.netns, "route", "add", "default", "via", peerIP)
	p.Must(os.MkdirAll(filepath.Join(p.dir, "root"), 0o755))
	program, err := os.ReadFile(p.Box)
	p.Must(err)
	p.Must(os.WriteFile(filepath.Join(p.dir, "root/box"), program, 0o755))
	p.Must(os.WriteFile(filepath.Join(p.dir, "config.json"), p.config(), 0o600))
	return p
}

// namespace returns the path of a new network namespace, which ends with the test.
func (p *pod) namespace() string {
	p.Helper()
	holder := p.Start(nil, "unshare", "--net", "sleep", "1000")
	path, own := fmt.Sprintf("/proc/%d/ns/net", holder.PID()), ""
	p.Until("a network namespace", func() bool {
		mine, err := os.Readlink("/proc/self/ns/net")
		p.Must(err)
		own, err = os.Readlink(path)
		return err == nil && own != mine
	})
	return path
}

// config is the bundle's configuration.
func (p *pod) config() []byte {
	type object = map[string]any
	text, err := json.Marshal(object{
		"ociVersion": "1.0.2", "hostname": "web", "root": object{"path": filepath.Join(p.dir, "root")},
		"process": object{"user": object{}, "cwd": "/", "args": []string{"/box", "pause"}},
		"mounts":  []object{{"destination": "/proc", "type": "proc", "source": "proc"}},
		"linux":   object{"namespaces": []object{{"type": "pid"}, {"type": "mount"}, {"type": "network", "path": p.netns}}},
	})
	p.Must(err)
	return text
}

// redirect writes the rules of a pod whose traffic is all redirected.
func (p *pod) redirect(backend ...string) {
	p.Helper()
	all := []string{"iptables", "--network-namespace", p.netns, "--istio-inbound-ports=*", "--istio-service-cidr=*"}
	p.run(p.IstioCNI, append(all, backend...)...)
}

// start starts the sandbox, in it the proxy and the application, and the application of the peer.
func (p *pod) start() {
	p.Helper()
	// runsc keeps a mount in its directory.
	run := append([]string{"--mount", p.Runsc}, p.command("run", "--bundle", p.dir, "web")...)
	sandbox := p.Start(nil, "unshare", run...)
	p.Cleanup(func() { // else the output of runsc has no end
		_ = exec.CommandContext(context.Background(), p.Runsc, p.command("kill", "web", "KILL")...).Run()
	})
	p.Until("the sandbox", func() bool {
		select {
		case <-sandbox.Ended():
			p.Fatal("runsc has ended")
		default:
		}
		state, err := exec.CommandContext(p.Context(), p.Runsc, p.command("state", "web")...).Output()
		return err == nil && strings.Contains(string(state), `"running"`)
	})
	for _, args := range [][]string{{"--user=" + proxyID, "web", "/box", "proxy", "sidecar"}, {"web", "/box", "serve", ":8080"}} {
		p.Must(exec.CommandContext(p.Context(), p.Runsc, p.command("exec", append([]string{"--detach"}, args...)...)...).Run())
	}
	p.Start(nil, "nsenter", "--net="+p.peer, p.Box, "serve", ":80")
	p.Until("the proxy", func() bool {
		text, err := p.get(proxyID, "http://127.0.0.1:15001/")
		return err != nil && strings.Contains(text, "502")
	})
	p.Until("the applications", func() bool {
		_, own := p.get(proxyID, "http://127.0.0.1:8080/")
		_, other := p.get(proxyID, "http://"+peerIP+"/")
		return own == nil && other == nil
	})
}

// command returns the arguments of a command of runsc.
func (p *pod) command(name string, args ...string) []string {
	return slices.Concat([]string{"--root", filepath.Join(p.dir, "state"), "--ignore-cgroups"}, p.flags, []string{name}, args)
}

// get asks a URL as a user in the sandbox or, without a user, as the peer.
func (p *pod) get(user, url string) (string, error) {
	ctx, cancel := context.WithTimeout(p.Context(), 30*time.Second)
	defer cancel()
	command := exec.CommandContext(ctx, "nsenter", "--net="+p.peer, p.Box, "get", url)
	if user != "" {
		command = exec.CommandContext(ctx, p.Runsc, p.command("exec", "--user="+user, "web", "/box", "get", url)...)
	}
	text, err := command.CombinedOutput()
	return string(text), err
}

// flows checks which way traffic goes: that of the application and of root alike, and that of the proxy past itself.
func (p *pod) flows(want flow) {
	p.Helper()
	for _, user := range []string{"0:0", "1000:1000", proxyID} {
		text, err := p.get(user, "http://"+peerIP+"/")
		redirected := want.out && user != proxyID
		if err != nil || strings.Contains(text, "via outbound web") != redirected || !strings.Contains(text, "hello from") {
			p.Errorf("user %s: %v, %q, want redirected %v", user, err, text, redirected)
		}
	}
	text, err := p.get("", "http://"+podIP+":8080/")
	if err != nil || strings.Contains(text, "via inbound web") != want.in || !strings.Contains(text, "hello from web") {
		p.Errorf("inbound: %v, %q, want redirected %v", err, text, want.in)
	}
}

// explained: why says of the namespace that it is a sandbox's, and which flag copies its rules.
func (p *pod) explained(native bool) {
	p.Helper()
	command := exec.CommandContext(p.Context(), p.IstioCNI, "why", "--netns", p.netns, "--rules", "--to", peerIP+":80")
	text, _ := command.CombinedOutput()
	const unknown = 4
	never := strings.Contains(string(text), "rules of backend native are never copied")
	if command.ProcessState.ExitCode() != unknown || !strings.Contains(string(text), ": SANDBOXED") || never != native {
		p.Errorf("why: %v\n%s", command.ProcessState, text)
	}
}

// ip runs the program ip in a network namespace.
func (p *pod) ip(netns string, args ...string) {
	p.Helper()
	p.run("nsenter", append([]string{"--net=" + netns, "ip"}, args...)...)
}

// run runs a command, which must succeed.
func (p *pod) run(name string, args ...string) {
	p.Helper()
	if out, err := exec.CommandContext(p.Context(), name, args...).CombinedOutput(); err != nil {
		p.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
}
