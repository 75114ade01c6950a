package installer_test

import (
	"context"
	"encoding/json"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/ztunnels/ztunneltest"
	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/probeset"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// chartSelectors are the chart's AMBIENT_ENABLEMENT_SELECTOR.
const chartSelectors = `
- podSelector: {matchLabels: {istio.io/dataplane-mode: ambient}}
- podSelector: {matchExpressions: [{key: istio.io/dataplane-mode, operator: NotIn, values: [none]}]}
  namespaceSelector: {matchLabels: {istio.io/dataplane-mode: ambient}}
`

// ambientNode is a node with an agent in ambient mode and a ztunnel.
type ambientNode struct {
	*nodetest.Node

	t      *testing.T
	socket string
}

func newAmbientNode(t *testing.T) *ambientNode {
	t.Helper()
	n := &ambientNode{Node: newNode(t), t: t}
	n.API.Set(kubetest.Namespace("apps", map[string]string{"istio.io/dataplane-mode": "ambient"}))
	n.API.Set(kubetest.Namespace("sidecars", nil))
	// A socket's path has at most 107 bytes.
	n.socket = filepath.Join(agenttest.SocketDir(t), "run")
	check.OK(t, os.Symlink(n.Path(nodetest.RunDir), n.socket))
	n.socket += "/ztunnel.sock"
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(strings.Join(n.API.Requests(), "\n"))
		}
	})
	return n
}

// start starts an agent with the settings of Istio's chart.
func (n *ambientNode) start(args ...string) *nodetest.Agent {
	n.t.Helper()
	return n.Start(append([]string{
		"AMBIENT_ENABLED=true", "AMBIENT_ENABLEMENT_SELECTOR=" + chartSelectors, "AMBIENT_DNS_CAPTURE=true", "AMBIENT_IPV6=true",
		"AMBIENT_RECONCILE_POD_RULES_ON_STARTUP=true", "ALLOW_SWITCH_TO_HOST_NS=false", "ZTUNNEL_UDS_ADDRESS=/var" + nodetest.RunDir + "/ztunnel.sock",
		"REPAIR_ENABLED=true",
	}, args...)...)
}

// pod makes a sandbox and tells the watches of its pod.
func (n *ambientNode) pod(namespace, name string, describe func(*kubetest.Pod)) chaintest.Pod {
	n.t.Helper()
	p := n.NewPod(namespace, name, describe)
	n.API.Set(n.API.Object("/api/v1/namespaces/" + namespace + "/pods/" + name))
	return p
}

// publish makes the API server tell the pod's address, as the kubelet does after ADD.
func (n *ambientNode) publish(p chaintest.Pod) {
	n.t.Helper()
	var object map[string]any
	check.OK(n.t, json.Unmarshal(n.API.Object("/api/v1/namespaces/"+p.Namespace+"/pods/"+p.Name), &object))
	eth0 := netip.MustParsePrefix(strings.Fields(netnstest.Run(n.t, p.Netns, "ip", "-4", "-o", "address", "show", "dev", "eth0"))[3])
	address := eth0.Addr().String()
	object["status"] = map[string]any{"phase": "Running", "podIP": address, "podIPs": []any{map[string]any{"ip": address}}}
	text, err := json.Marshal(object)
	check.OK(n.t, err)
	n.API.Set(text)
}

// probes returns the addresses in the node's table of probes, with their pods.
func (n *ambientNode) probes() (map[netip.Addr]string, error) {
	host, err := netns.Open(n.Netns)
	if err != nil {
		return nil, err
	}
	defer host.Close()
	return probeset.Read(host)
}

// problem says what is missing of an enrolled pod.
func (n *ambientNode) problem(p chaintest.Pod, z *ztunneltest.Ztunnel) error {
	config := ambient.DefaultConfig()
	config.DNSCapture, config.IPv6 = true, true
	spec, _ := ambient.Of(config, nil)
	space, err := netns.Open(p.Netns)
	if err != nil {
		return err
	}
	defer space.Close()
	report, err := (redirection.Namespace{NetNS: space}).Verify(context.WithoutCancel(n.t.Context()), spec)
	switch inode := z.Pods()[p.UID]; {
	case err != nil:
		return err
	case !report.Clean():
		return notYet("rules: %v %v", report.Diffs, report.Routing)
	case inode != space.Inode():
		return notYet("ztunnel has it in %v", inode)
	case !strings.Contains(string(n.API.Object("/api/v1/namespaces/"+p.Namespace+"/pods/"+p.Name)), `"ambient.istio.io/redirection":"enabled"`):
		return notYet("no annotation")
	}
	all, err := n.probes()
	for _, uid := range all {
		if uid == p.UID {
			return err
		}
	}
	return notYet("the probe set has %v, %v", all, err)
}

// TestAgent_Ambient takes pods of both modes through the plugin and an agent, and kills and replaces the agent. Packets by these rules and
// this table are in node/redirection and node/probeset.
func TestAgent_Ambient(t *testing.T) {
	t.Parallel()
	n := newAmbientNode(t)
	a := n.start()
	a.AwaitReady()
	z := ztunneltest.Start(t, n.socket, ztunneltest.Options{Reconnect: true})
	a.Await("a snapshot of ztunnel", z.Ready)
	web, sidecar := n.pod("apps", "web", chaintest.PlainPod), n.pod("apps", "sidecar", chaintest.Sidecar)
	outside := n.pod("sidecars", "outside", chaintest.PlainPod)
	for _, p := range []chaintest.Pod{web, sidecar, outside} {
		check.OK(t, check.Err(n.Add(p)), "ADD of pod", p.Name)
	}
	check.OK(t, n.problem(web, z), "right after ADD")
	if !sidecar.Captured(t) || outside.Captured(t) {
		t.Errorf("captured: sidecar %v, outside %v", sidecar.Captured(t), outside.Captured(t))
	}
	n.publish(web)
	a.Kill()
	check.OK(t, n.problem(web, z), "without an agent")
	late := n.pod("apps", "late", chaintest.PlainPod)
	check.Fails(t, check.Err(n.Add(late)), "node agent")
	a = n.start()
	a.AwaitReady()
	nodetest.Await(t, "the next agent", func() error { return n.problem(web, z) })
	a.Terminate() // the DaemonSet is there: an upgrade
	a.Wait()
	check.OK(t, n.problem(web, z), "during an upgrade")
	n.API.Delete(nodetest.DaemonSetPath)
	a = n.start()
	a.AwaitReady()
	nodetest.Await(t, "the last agent", func() error { return n.problem(web, z) })
	a.Terminate()
	a.Wait()
	if left, err := n.probes(); err != nil || len(left) > 0 {
		t.Errorf("after the removal the node's table has %v, %v", left, err)
	}
	without := map[string]bool{"Live": true, "Repair": true, "Audit": true}
	with := maps.Clone(without)
	with["Ambient"] = true
	used, allowed, more := asked(t, n.API), kubetest.AgentRights(t, with), kubetest.AgentRights(t, without)
	for _, right := range allowed {
		if !slices.Contains(more, right) && !used[right] {
			t.Errorf("ambient mode does not use the right to %s", right)
		}
	}
	for right := range used {
		if !slices.Contains(allowed, right) {
			t.Errorf("there is no right to %s", right)
		}
	}
}
