// Command demo shows istio-cni on one machine, without a cluster: the built plugin runs last in a CNI chain, after
// the reference plugins bridge and host-local, with a fake HTTPS API server; packets show which process answers, and
// "istio-cni why" explains them. All of it runs in network namespaces that are removed at the end.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/libcni"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
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
	service  = "203.0.113.10"
	database = "198.51.100.7"
	// excluded is the port that an annotation of the pod leaves out.
	excluded = 5432
)

// demo is one run of the program.
type demo struct {
	*stage
	printer
	program string
	log     strings.Builder // the plugin's stderr
	node    *chaintest.Node
	list    *libcni.NetworkConfigList
	names   map[string]string // of the pods' namespaces, as for ip netns
	bad     int
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
	d := &demo{stage: s, printer: newPrinter(os.Stdout), names: map[string]string{}}
	var err error
	if d.program, err = filepath.Abs(program); err != nil {
		panic(err)
	}
	d.setUp()
	cart := d.pods()
	d.packets(cart)
	d.explain(cart)
	d.ambient()
	if err := d.node.Del(d.list, cart); err != nil {
		panic(err)
	}
	if d.bad > 0 {
		d.line("\n%s", d.red(fmt.Sprintf("%d results are not as expected", d.bad)))
		return 1
	}
	d.line("\n%s Everything above is removed again.", d.green("All results are as expected."))
	d.line("next: docs/quickstart.md")
	return 0
}

// setUp creates the node and prints its CNI chain.
func (d *demo) setUp() {
	d.title("1. A node without a cluster: its CNI chain, and a small API server")
	d.node = chaintest.New(d.stage, d.program)
	d.node.Log = &d.log
	for _, address := range []string{service, database} {
		netnstest.Run(d.stage, d.node.Netns, "ip", "addr", "add", address+"/32", "dev", "lo")
	}
	d.list = d.node.Chain("1.0.0", chaintest.Stanza{"exclude_namespaces": []string{"kube-system"}})
	for _, plugin := range d.list.Plugins {
		d.text("  → " + d.bold(plugin.Network.Type))
	}
	d.line("   %s", d.dim("run for each pod by the container runtime"))
}

// sidecarOf describes the injected pod.
func sidecarOf(p *kubetest.Pod) {
	chaintest.Sidecar(p)
	p.Annotations[sidecar.OutboundPortsExcludeKey] = fmt.Sprint(excluded)
}

// pods adds an injected pod and two others, and names their namespaces.
func (d *demo) pods() (cart chaintest.Pod) {
	d.title("2. Three pods start. Which are redirected to their sidecar, and why?")
	cart = d.node.NewPod("shop", "cart", sidecarOf)
	batch := d.node.NewPod("shop", "batch", chaintest.PlainPod)
	for _, pod := range []chaintest.Pod{cart, batch, d.node.NewPod("kube-system", "coredns", nil)} {
		d.log.Reset()
		if _, err := d.node.Add(d.list, pod); err != nil {
			panic(err)
		}
		d.decision(pod)
		d.name(pod)
	}
	d.rules(cart)
	return cart
}

// name names a pod's namespace for ip netns until the end of the demo. The namespace of a process that was killed is a link to nothing.
func (d *demo) name(pod chaintest.Pod) {
	if err := os.MkdirAll(netns.NamedDir, 0o755); err != nil { //nolint:gosec // as ip netns makes it
		panic(err)
	}
	name := pod.Name
	for n := 2; ; n++ {
		link := filepath.Join(netns.NamedDir, name)
		if _, err := os.Stat(link); errors.Is(err, fs.ErrNotExist) {
			_ = os.Remove(link)
		}
		err := os.Symlink(pod.Netns, link)
		if err == nil {
			d.names[pod.Name] = name
			d.Cleanup(func() { _ = os.Remove(link) })
			return
		}
		if !errors.Is(err, fs.ErrExist) {
			panic(err)
		}
		name = fmt.Sprintf("%s-%d", pod.Name, n)
	}
}

// decision prints the plugin's log line about the pod.
func (d *demo) decision(pod chaintest.Pod) {
	for line := range strings.Lines(d.log.String()) {
		var record struct {
			Capture bool   `json:"capture"`
			Reason  string `json:"reason"`
			Because string `json:"because"`
		}
		if json.Unmarshal([]byte(line), &record) != nil || record.Reason == "" {
			continue
		}
		verdict := "outside"
		if record.Capture {
			verdict = "redirected"
		}
		d.expect(record.Capture == (pod.Name == "cart"), fmt.Sprintf("%-19s %s\n      because %s", pod.Namespace+"/"+pod.Name, d.bold(verdict), record.Because))
	}
}

// rules checks that the kernel has exactly the desired rules.
func (d *demo) rules(pod chaintest.Pod) {
	described := kubetest.Pod{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}
	sidecarOf(&described)
	facts := sidecar.Facts{Namespace: pod.Namespace, Name: pod.Name, Annotations: described.Annotations}
	for _, c := range described.Containers {
		container := sidecar.Container{Name: c.Name, Args: c.Args}
		if c.SecurityContext != nil {
			container.RunAsUser, container.RunAsGroup = c.SecurityContext.RunAsUser, c.SecurityContext.RunAsGroup
		}
		facts.Containers = append(facts.Containers, container)
	}
	want := redirect.Rules(sidecar.Decide(facts, sidecar.Policy{}).Spec, ruleset.IPv4)
	saved := netnstest.Run(d.stage, pod.Netns, "iptables-save")
	have, err := ruleset.Parse(ruleset.IPv4, saved)
	if err != nil {
		panic(err)
	}
	d.expect(have.Equal(want), fmt.Sprintf("iptables-save shows the %d wanted rules in shop/cart, written over netlink",
		strings.Count(saved, "\n-A ")))
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
