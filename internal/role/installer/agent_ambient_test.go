package installer_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/ztunnels/ztunneltest"
	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/netns"
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
	// heard has the original destinations of the connections that ztunnel accepted, by pod and port.
	heard chan string
}

func newAmbientNode(t *testing.T) *ambientNode {
	t.Helper()
	n := &ambientNode{Node: newNode(t), t: t, heard: make(chan string, 100)}
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

// ztunnel starts a ztunnel with sockets in the pods.
func (n *ambientNode) ztunnel() *ztunneltest.Ztunnel {
	n.t.Helper()
	return ztunneltest.Start(n.t, n.socket, ztunneltest.Options{Reconnect: true, Bind: true, Handle: func(uid string, port int, conn net.Conn) {
		raw, err := conn.(*net.TCPConn).SyscallConn()
		check.OK(n.t, err)
		_ = raw.Control(func(fd uintptr) {
			to := "itself"
			if m, err := unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, unix.SO_ORIGINAL_DST); err == nil { // a sockaddr_in
				to = fmt.Sprintf("%d.%d.%d.%d:%d", m.Multiaddr[4], m.Multiaddr[5], m.Multiaddr[6], m.Multiaddr[7], int(m.Multiaddr[2])<<8|int(m.Multiaddr[3]))
			}
			n.heard <- fmt.Sprintf("%s %d %s", uid, port, to)
		})
	}})
}

// dial connects from a namespace, and returns what ztunnel hears, or the first line that the other end says.
func (n *ambientNode) dial(from, to string) string {
	n.t.Helper()
	conn, err := netns.In(open(n.t, from), func() (net.Conn, error) {
		return (&net.Dialer{Timeout: 5 * time.Second}).DialContext(context.WithoutCancel(n.t.Context()), "tcp", to)
	})
	if err != nil {
		return err.Error()
	}
	defer conn.Close() //nolint:errcheck // nothing to lose
	said := make(chan string, 1)
	go func() {
		buffer := make([]byte, 100)
		count, _ := conn.Read(buffer)
		said <- string(buffer[:count])
	}()
	select {
	case heard := <-n.heard:
		return heard
	case text := <-said:
		if text != "" {
			return text
		}
		return <-n.heard
	}
}

func open(t *testing.T, path string) *netns.Namespace {
	t.Helper()
	space, err := netns.Open(path)
	check.OK(t, err)
	t.Cleanup(space.Close)
	return space
}

// app starts a server in a pod, which tells a client its address.
func (n *ambientNode) app(p chaintest.Pod) (address netip.Addr) {
	n.t.Helper()
	space := open(n.t, p.Netns)
	check.OK(n.t, space.Do(func() error {
		l, err := net.Listen("tcp", ":8080") //nolint:noctx // in a test's namespace
		check.OK(n.t, err)
		n.t.Cleanup(func() { _ = l.Close() })
		go func() {
			for {
				conn, ended := l.Accept()
				if ended != nil {
					return
				}
				_, _ = fmt.Fprint(conn, "app sees ", netip.MustParseAddrPort(conn.RemoteAddr().String()).Addr().Unmap())
				_ = conn.Close()
			}
		}()
		eth0, err := net.InterfaceByName("eth0")
		check.OK(n.t, err)
		all, err := eth0.Addrs()
		check.OK(n.t, err)
		address = netip.MustParsePrefix(all[0].String()).Addr()
		return nil
	}))
	return address
}

// pod makes a sandbox and tells the watches of its pod.
func (n *ambientNode) pod(namespace, name string, describe func(*kubetest.Pod)) chaintest.Pod {
	n.t.Helper()
	p := n.NewPod(namespace, name, describe)
	n.API.Set(n.API.Object("/api/v1/namespaces/" + namespace + "/pods/" + name))
	return p
}

// publish makes the API server tell the pod's address, as the kubelet does after ADD.
func (n *ambientNode) publish(p chaintest.Pod, address netip.Addr) {
	n.t.Helper()
	var object map[string]any
	check.OK(n.t, json.Unmarshal(n.API.Object("/api/v1/namespaces/"+p.Namespace+"/pods/"+p.Name), &object))
	object["status"] = map[string]any{"phase": "Running", "podIP": address.String(), "podIPs": []any{map[string]any{"ip": address.String()}}}
	text, err := json.Marshal(object)
	check.OK(n.t, err)
	n.API.Set(text)
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
	host, err := netns.Open(n.Netns)
	if err != nil {
		return err
	}
	defer host.Close()
	all, err := probeset.Read(host)
	for _, uid := range all {
		if uid == p.UID {
			return err
		}
	}
	return notYet("the probe set has %v, %v", all, err)
}

// TestAgent_Ambient takes pods of both modes through the plugin and an agent, sends packets, and kills and replaces the agent.
func TestAgent_Ambient(t *testing.T) {
	t.Parallel()
	n := newAmbientNode(t)
	a := n.start()
	a.AwaitReady()
	z := n.ztunnel()
	a.Await("a snapshot of ztunnel", z.Ready)
	web, sidecar := n.pod("apps", "web", chaintest.PlainPod), n.pod("apps", "sidecar", chaintest.Sidecar)
	outside, client := n.pod("sidecars", "outside", chaintest.PlainPod), n.pod("apps", "client", chaintest.PlainPod)
	for _, p := range []chaintest.Pod{web, sidecar, outside, client} {
		check.OK(t, check.Err(n.Add(p)), "ADD of pod", p.Name)
	}
	check.OK(t, n.problem(web, z), "right after ADD")
	if !sidecar.Captured(t) || outside.Captured(t) {
		t.Errorf("captured: sidecar %v, outside %v", sidecar.Captured(t), outside.Captured(t))
	}
	address := n.app(web)
	packets := func(when string) {
		t.Helper()
		to := fmt.Sprintf("%s:8080", address)
		for name, way := range map[string]struct{ from, want string }{
			"a client in the mesh":     {client.Netns, client.UID + " 15001 " + to},
			"a client outside":         {outside.Netns, web.UID + " 15006 " + to},
			"the node, like a probe":   {n.Netns, "app sees 169.254.7.127"},
			"the pod itself, directly": {web.Netns, "app sees " + address.String()},
		} {
			check.Equal(t, n.dial(way.from, to), way.want, when, name)
		}
	}
	packets("after ADD")
	n.publish(web, address)
	a.Kill()
	packets("without an agent")
	late := n.pod("apps", "late", chaintest.PlainPod)
	check.Fails(t, check.Err(n.Add(late)), "node agent")
	a = n.start()
	a.AwaitReady()
	nodetest.Await(t, "the next agent", func() error { return n.problem(web, z) })
	packets("after kill -9")
	a.Terminate() // the DaemonSet is there: an upgrade
	a.Wait()
	packets("during an upgrade")
	n.API.Delete(nodetest.DaemonSetPath)
	a = n.start()
	a.AwaitReady()
	nodetest.Await(t, "the last agent", func() error { return n.problem(web, z) })
	a.Terminate()
	a.Wait()
	if left, err := probeset.Read(open(t, n.Netns)); err != nil || len(left) > 0 {
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
