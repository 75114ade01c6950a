package main

import (
	"os"
	"path/filepath"

	"github.com/meshcni/istio-cni/internal/agent/ztunnels/ztunneltest"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

// selectors are the chart's: a label of the pod, or of its namespace.
const selectors = `
- podSelector: {matchLabels: {istio.io/dataplane-mode: ambient}}
- podSelector: {matchExpressions: [{key: istio.io/dataplane-mode, operator: NotIn, values: [none]}]}
  namespaceSelector: {matchLabels: {istio.io/dataplane-mode: ambient}}
`

// ambient adds a pod with and one without a sidecar to a node whose agent serves ambient mode, with a stand-in for ztunnel.
func (d *demo) ambient() {
	d.title("8. Ambient mode on another node: shop/api has no sidecar, shop/web has one")
	n := nodetest.New(d.stage, d.program)
	n.StartAPI()
	n.GrantAccess()
	n.Put(nodetest.NetDir+"/10-bridge.conflist", nodetest.BridgeList)
	n.API.Set(kubetest.Namespace("shop", map[string]string{"istio.io/dataplane-mode": "ambient"}))
	n.Start("AMBIENT_ENABLED=true", "AMBIENT_ENABLEMENT_SELECTOR="+selectors, "ZTUNNEL_UDS_ADDRESS=/var"+nodetest.RunDir+"/z.sock").AwaitReady()
	run := filepath.Join(d.TempDir(), "run") // short, for a socket
	if err := os.Symlink(n.Path(nodetest.RunDir), run); err != nil {
		panic(err)
	}
	z := ztunneltest.New(run+"/z.sock", ztunneltest.Options{Bind: true})
	d.Cleanup(z.Close)
	pods := map[string]chaintest.Pod{"api": n.NewPod("shop", "api", chaintest.PlainPod), "web": n.NewPod("shop", "web", chaintest.Sidecar)}
	for name, pod := range pods {
		n.API.Set(n.API.Object("/api/v1/namespaces/shop/pods/" + name)) // tells the agent's watch
		if _, err := n.Add(pod); err != nil {
			panic(err)
		}
		d.name(pod)
	}
	_, api := z.Pods()[pods["api"].UID]
	_, web := z.Pods()[pods["web"].UID]
	d.expect(api && !web, "ztunnel serves shop/api from within its network namespace, not shop/web")
	proxy := labtest.Actor{Name: "proxy", Namespace: pods["web"].Netns, UID: redirect.DefaultID, GID: redirect.DefaultID}
	labtest.Serve(d.stage, proxy, labtest.Service{By: labtest.ByOutbound, Via: labtest.TCP, At: at("0.0.0.0", redirect.OutboundPort)})
	netnstest.Run(d.stage, n.Netns, "ip", "addr", "add", service+"/32", "dev", "lo")
	labtest.Serve(d.stage, labtest.Actor{Name: "outside", Namespace: n.Netns}, labtest.Service{By: labtest.ByPeer, Via: labtest.TCP, At: at(service, 80)})
	d.why(asWanted, "is redirected to port 15001", "api", "--to", at(service, 80).String())
	d.why(asWanted, "is redirected to port 15001", "web", "--to", at(service, 80).String())
}
