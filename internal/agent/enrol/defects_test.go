package enrol_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/enrol"
	"github.com/meshcni/istio-cni/internal/agent/probes"
	"github.com/meshcni/istio-cni/internal/agent/ztunnels/ztunneltest"
	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sandbox/sandboxtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// Each test is about a defect of Istio's node agent.

// hide removes the pod's last process, by which alone its namespace is found; the result brings it back.
func (p *pod) hide() (show func()) {
	p.f.Helper()
	pid := fmt.Sprint(1000 + p.f.processes)
	p.f.Do(os.RemoveAll(filepath.Join(p.f.Proc, pid)))
	return func() { p.f.Process(pid, p.path, p.uid) }
}

// program writes the pod's rules as an earlier agent has.
func (p *pod) program() {
	p.f.Helper()
	check.OK(p.f.T, check.Err(p.space().Apply(p.f.Context(), p.spec(), redirection.Reconcile)))
}

// TestStart_FoundLater: Istio's agent never looks again for the namespace of an enrolled pod that it does not find at its start.
func TestStart_FoundLater(t *testing.T) {
	f := newParallel(t)
	p := f.pod("web", labelled, was(enabled))
	show := p.hide()
	_, z := f.mesh()
	if sent := z.Requests()[0].Kind.String(); sent != "keep" {
		t.Errorf("the snapshot begins with %q, want a Keep", sent)
	}
	show()
	p.enrolled(z)
}

// TestStart_Rebooted: after a restart of the node the annotation is there, and neither rules nor a sandbox.
func TestStart_Rebooted(t *testing.T) {
	f := newParallel(t)
	p := f.pod("web", labelled, was(enabled))
	p.hide()
	a, z := f.mesh()
	agenttest.Eventually(t, "it is not searched", func() bool { return a.pods.Searching() == 1 })
	p.address = "10.99.0.1" // its status has the one before for now
	p.sandbox()
	check.OK(t, a.pods.Add(t.Context(), p.event()))
	check.Equal(t, a.pods.Searching(), 0, "searched namespaces")
	check.Equal(t, p.problem(z), "", "after ADD")
}

// TestStart_AddressReused: after a restart of the node a pod in creation has the address that the API server still shows for
// another one. Its namespace has no process and no record, and is not the other pod's.
func TestStart_AddressReused(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"start", "later"} {
		t.Run(at, func(t *testing.T) {
			f := newParallel(t)
			p := f.pod("web", labelled, was(enabled))
			p.hide()
			f.IP(p.path, "address flush dev eth0")
			var in netns.Inode
			create := func() {
				path := f.Sandbox(p.address + "/24")
				f.Mount(path, "cni-other")
				in = sandboxtest.Inode(t, path)
			}
			if at == "start" {
				create()
			}
			a, z := f.mesh()
			if at == "later" {
				create()
			}
			agenttest.Until(t, func() string { return p.missing(a) }, func() bool {
				return z.Pods()[p.uid] == in || strings.Contains(p.missing(a), "a pod in creation")
			})
			if z.Pods()[p.uid] == in {
				t.Error("ztunnel got the other pod's namespace")
			}
		})
	}
}

// TestRelease_NamespaceNotFound: Istio's agent takes the annotation and leaves the rules, behind which nobody listens.
func TestRelease_NamespaceNotFound(t *testing.T) {
	f := newParallel(t)
	p := f.pod("web", was(enabled))
	p.program()
	show := p.hide()
	_, z := f.mesh()
	agenttest.Eventually(t, "it is still enabled", func() bool { return p.annotation() == pending })
	if !p.rules() {
		t.Fatal("the rules are gone")
	}
	show()
	p.released(z)
}

// TestStart_ProbeSetFails: an error of the host's table empties the snapshot of Istio's agent, so that ztunnel stops all proxies.
func TestStart_ProbeSetFails(t *testing.T) {
	f := newParallel(t)
	p := f.pod("web", labelled, was(enabled))
	p.program()
	closed, err := netns.Open(f.Host)
	check.OK(t, err)
	closed.Close()
	f.agent(func(o *enrol.Options) {
		config := ambient.DefaultConfig()
		o.Probes = probes.New(probes.Options{Host: closed, V4: config.ProbeV4, V6: config.ProbeV6, Log: o.Log, Changed: func(string) {}})
	})
	z := f.ztunnel(ztunneltest.Options{})
	agenttest.Eventually(t, "no snapshot", z.Ready)
	check.Equal(t, z.Pods()[p.uid], p.space().NetNS.Inode(), "the pod's namespace in the snapshot")
}
