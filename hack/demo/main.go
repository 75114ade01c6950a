// Command demo shows istio-cni on one machine, without a cluster: the built plugin runs last in a CNI chain, after
// the reference plugins bridge and host-local, with a fake HTTPS API server, and packets show which process answers.
// All of it runs in network namespaces that are removed at the end.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/libcni"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

func main() {
	if len(os.Args) != 2 || os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "usage (as root): demo PATH-OF-ISTIO-CNI")
		os.Exit(2) //nolint:forbidigo // this is a main.go, too
	}
	os.Exit(run(os.Args[1])) //nolint:forbidigo // this is a main.go, too
}

// Addresses outside of the pod, both in the node's namespace.
const (
	outside  = "203.0.113.10"
	excluded = "198.51.100.7"
)

// demo is one run of the program.
type demo struct {
	*stage
	printer
	log  strings.Builder // the plugin's stderr
	node *chaintest.Node
	list *libcni.NetworkConfigList
	bad  int
}

func run(program string) (code int) {
	s := newStage()
	defer s.close()
	defer func() {
		if r := recover(); r != nil {
			fmt.Fprintf(os.Stderr, "demo: %v\n", r)
			code = 1
		}
	}()
	d := &demo{stage: s, printer: newPrinter(os.Stdout)}
	program, err := filepath.Abs(program)
	if err != nil {
		panic(err)
	}
	d.title("A node")
	d.setUp(program)
	d.title("Three pods are added")
	mesh := d.pods()
	d.title("The rules in the injected pod, with their reasons")
	d.rules(mesh)
	d.title("Packets: source and responder")
	d.packets(mesh)
	d.title("The pod is deleted")
	if err := d.node.Del(d.list, mesh); err != nil {
		panic(err)
	}
	d.line("DEL done; the kernel removes the rules with the namespace")
	if d.bad > 0 {
		d.line("%s", d.red(fmt.Sprintf("%d answers were not as expected", d.bad)))
		return 1
	}
	d.line("%s", d.green("everything as expected"))
	return 0
}

// setUp creates the node and prints its CNI chain.
func (d *demo) setUp(program string) {
	d.node = chaintest.New(d.stage, program)
	d.node.Log = &d.log
	for _, address := range []string{outside, excluded} {
		netnstest.Run(d.stage, d.node.Netns, "ip", "addr", "add", address+"/32", "dev", "lo")
	}
	d.list = d.node.Chain("1.0.0", chaintest.Stanza{"exclude_namespaces": []string{"kube-system"}})
	d.line("a network namespace with an API server at %s and this CNI chain:", d.node.API.URL())
	for i, plugin := range d.list.Plugins {
		d.line("  %d. %s  %s", i+1, d.bold(plugin.Network.Type), d.dim(compact(plugin.Bytes)))
	}
}

func compact(text []byte) string {
	const most = 150
	if len(text) > most {
		return string(text[:most]) + "…"
	}
	return string(text)
}

// cart adds the annotations of the injected pod.
func cart(p *kubetest.Pod) {
	chaintest.Sidecar(p)
	p.Annotations[sidecar.OutboundExcludeKey] = "198.51.100.0/24"
}

// pods adds an injected pod and two others.
func (d *demo) pods() (mesh chaintest.Pod) {
	mesh = d.node.NewPod("shop", "cart", cart)
	for _, pod := range []chaintest.Pod{
		mesh,
		d.node.NewPod("shop", "batch", chaintest.PlainPod),
		d.node.NewPod("kube-system", "coredns", nil),
	} {
		requests := len(d.node.API.Requests())
		d.log.Reset()
		result, err := d.node.Add(d.list, pod)
		if err != nil {
			panic(err)
		}
		text, _ := json.Marshal(result)
		d.line("%s", d.bold(pod.Namespace+"/"+pod.Name))
		d.line("  ADD returned %s", d.dim(compact(text)))
		d.decision()
		d.line("  requests to the API server: %d", len(d.node.API.Requests())-requests)
	}
	return mesh
}

// decision prints the plugin's log line about the pod.
func (d *demo) decision() {
	for line := range strings.Lines(d.log.String()) {
		var record struct {
			Msg     string `json:"msg"`
			Capture bool   `json:"capture"`
			Reason  string `json:"reason"`
			Because string `json:"because"`
		}
		if json.Unmarshal([]byte(line), &record) != nil || record.Reason == "" {
			continue
		}
		verdict := d.dim("not captured")
		if record.Capture {
			verdict = d.green("captured")
		}
		d.line("  %s, reason %q: %s", verdict, record.Reason, record.Because)
	}
}

// rules prints the desired rules with their reasons, and checks that the kernel has exactly these.
func (d *demo) rules(pod chaintest.Pod) {
	described := kubetest.Pod{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}
	cart(&described)
	facts := sidecar.Facts{Namespace: pod.Namespace, Name: pod.Name, Annotations: described.Annotations}
	for _, c := range described.Containers {
		container := sidecar.Container{Name: c.Name, Args: c.Args}
		if c.SecurityContext != nil {
			container.RunAsUser, container.RunAsGroup = c.SecurityContext.RunAsUser, c.SecurityContext.RunAsGroup
		}
		facts.Containers = append(facts.Containers, container)
	}
	want := redirect.Rules(sidecar.Decide(facts, sidecar.Policy{}).Spec, ruleset.IPv4)
	for line := range strings.Lines(want.Explain()) {
		if strings.HasPrefix(line, "        ") {
			line = d.dim(line)
		}
		d.text(line)
	}
	have, err := ruleset.Parse(ruleset.IPv4, netnstest.Run(d.stage, pod.Netns, "iptables-save"))
	if err != nil {
		panic(err)
	}
	d.expect(have.Equal(want), "iptables-save of the namespace prints exactly these rules")
}

// packets sends requests as the app, the proxy and a client outside of the pod.
func (d *demo) packets(pod chaintest.Pod) {
	world := labtest.Actor{Name: "outside", Namespace: d.node.Netns}
	app := labtest.Actor{Name: "app", Namespace: pod.Netns, UID: labtest.AppUID, GID: labtest.AppUID}
	proxy := labtest.Actor{Name: "proxy", Namespace: pod.Netns, UID: redirect.DefaultID, GID: redirect.DefaultID}
	podIP := d.address(pod)
	labtest.Serve(d.stage, world,
		labtest.Service{By: labtest.ByPeer, Via: labtest.TCP, At: at(outside, 80)},
		labtest.Service{By: labtest.ByPeer, Via: labtest.UDP, At: at(outside, 5000)},
		labtest.Service{By: labtest.ByPeer, Via: labtest.TCP, At: at(excluded, 80)})
	labtest.Serve(d.stage, app, labtest.Service{By: labtest.ByApp, Via: labtest.TCP, At: at("0.0.0.0", 8080)})
	sidecarProxy := labtest.Proxy{
		Actor: proxy, Mode: redirect.Redirect, Families: []ruleset.Family{ruleset.IPv4},
		Resolver: func(ruleset.Family) netip.AddrPort { return at(outside, 53) },
	}
	sidecarProxy.Start(d.stage)
	for _, q := range []struct {
		text string
		labtest.Expectation
	}{
		{"the app calls a service: redirected to the proxy, which knows the original destination", question(app, labtest.TCP, at(outside, 80), labtest.ByOutbound)},
		{"the app calls an excluded network: not redirected", question(app, labtest.TCP, at(excluded, 80), labtest.ByPeer)},
		{"UDP is not redirected", question(app, labtest.UDP, at(outside, 5000), labtest.ByPeer)},
		{"the proxy's own connections are not redirected: no loop", question(proxy, labtest.TCP, at(outside, 80), labtest.ByPeer)},
		{"a client calls the app: redirected to the proxy", question(world, labtest.TCP, netip.AddrPortFrom(podIP, 8080), labtest.ByInbound)},
		{"health checks reach the sidecar's own port", question(world, labtest.TCP, netip.AddrPortFrom(podIP, 15021), labtest.ByStatus)},
		{"the app calls itself: not redirected", question(app, labtest.TCP, at("127.0.0.1", 8080), labtest.ByApp)},
	} {
		answer := q.Send(d.Context())
		err := q.Check(d.Context())
		d.line("%s", d.bold(q.text))
		d.line("  asked     %s", q.Request)
		d.line("  answered  %s", d.cyan(answer.String()))
		d.expect(err == nil, fmt.Sprintf("expected: %s", q.Want[0].By))
		if err != nil && !errors.As(err, new(*labtest.Wrong)) {
			d.line("  %v", err)
		}
	}
}

func question(from labtest.Actor, via labtest.Protocol, to netip.AddrPort, by string) labtest.Expectation {
	return labtest.Expectation{Request: labtest.Request{From: from, Via: via, To: to}, Want: []labtest.Hop{{By: by}}}
}

func at(address string, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(address), port)
}

// address returns the pod's IPv4 address.
func (d *demo) address(pod chaintest.Pod) netip.Addr {
	out := netnstest.Run(d.stage, pod.Netns, "ip", "-4", "-o", "addr", "show", "dev", "eth0")
	for field := range strings.FieldsSeq(out) {
		if p, err := netip.ParsePrefix(field); err == nil {
			return p.Addr()
		}
	}
	panic("the pod has no address: " + out)
}

// expect prints the result of a check.
func (d *demo) expect(ok bool, what string) {
	if ok {
		d.line("  %s %s", d.green("✓"), what)
		return
	}
	d.bad++
	d.line("  %s %s", d.red("✗"), what)
}
