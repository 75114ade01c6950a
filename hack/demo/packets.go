package main

import (
	"fmt"
	"net/netip"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

// question is a connection with the listener that has to answer.
type question struct {
	text string
	from labtest.Actor
	via  labtest.Protocol
	to   netip.AddrPort
	by   string
}

// answers names the listeners.
var answers = map[string]string{ //nolint:gochecknoglobals // a constant table
	labtest.ByOutbound: "sidecar, port 15001",
	labtest.ByInbound:  "sidecar, port 15006",
	labtest.ByStatus:   "sidecar's health port",
	labtest.ByPeer:     "the peer itself",
	labtest.ByApp:      "the app itself",
}

// packets sends requests as the app, the proxy and a client outside of the pod.
func (d *demo) packets(pod chaintest.Pod) {
	d.title("3. Packets of shop/cart: which process answers?")
	world := labtest.Actor{Name: "outside", Namespace: d.node.Netns}
	app := d.app(pod)
	proxy := labtest.Actor{Name: "proxy", Namespace: pod.Netns, UID: redirect.DefaultID, GID: redirect.DefaultID}
	podIP := d.address(pod)
	labtest.Serve(d.stage, world,
		labtest.Service{By: labtest.ByPeer, Via: labtest.TCP, At: at(service, 80)},
		labtest.Service{By: labtest.ByPeer, Via: labtest.UDP, At: at(service, 5000)},
		labtest.Service{By: labtest.ByPeer, Via: labtest.TCP, At: at(database, excluded)})
	labtest.Serve(d.stage, app, labtest.Service{By: labtest.ByApp, Via: labtest.TCP, At: at("0.0.0.0", 8080)})
	sidecarProxy := labtest.Proxy{
		Actor: proxy, Mode: redirect.Redirect, Families: []ruleset.Family{ruleset.IPv4},
		Resolver: func(ruleset.Family) netip.AddrPort { return at(service, 53) },
	}
	sidecarProxy.Start(d.stage)
	for _, q := range []question{
		{"the app calls a service", app, labtest.TCP, at(service, 80), labtest.ByOutbound},
		{"the app calls an excluded port", app, labtest.TCP, at(database, excluded), labtest.ByPeer},
		{"the app sends UDP", app, labtest.UDP, at(service, 5000), labtest.ByPeer},
		{"the app calls itself", app, labtest.TCP, at("127.0.0.1", 8080), labtest.ByApp},
		{"the sidecar calls a service", proxy, labtest.TCP, at(service, 80), labtest.ByPeer},
		{"a client calls the app", world, labtest.TCP, netip.AddrPortFrom(podIP, 8080), labtest.ByInbound},
		{"a health check", world, labtest.TCP, netip.AddrPortFrom(podIP, 15021), labtest.ByStatus},
	} {
		d.send(q)
	}
}

// app is the application of a pod.
func (d *demo) app(pod chaintest.Pod) labtest.Actor {
	return labtest.Actor{Name: "app", Namespace: pod.Netns, UID: labtest.AppUID, GID: labtest.AppUID}
}

// send sends a request and compares the answer.
func (d *demo) send(q question) {
	e := labtest.Expectation{Request: labtest.Request{From: q.from, Via: q.via, To: q.to}, Want: []labtest.Hop{{By: q.by}}}
	answer := e.Send(d.Context())
	result := answers[q.by]
	err := e.Compare(answer)
	if err != nil {
		result = fmt.Sprintf("wanted %s, got %s", result, answer)
	}
	d.expect(err == nil, fmt.Sprintf("%-30s %-3s %-17s → %s", q.text, q.via, q.to, d.bold(result)))
}

func at(address string, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(address), port)
}
