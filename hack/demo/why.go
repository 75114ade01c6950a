package main

import (
	"fmt"
	"os/exec"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

// Exit codes of "istio-cni why".
const (
	asWanted = 0
	past     = 3
)

// explain asks istio-cni why about two of the connections, a pod without rules, and a rule of another program.
func (d *demo) explain(cart chaintest.Pod) {
	d.title("4. The pod is fine, but a packet goes past the mesh: the excluded port")
	d.why(past, "because excludeOutboundPorts=5432", "cart", "--to", at(database, excluded).String())
	d.title("5. A client's packet reaches the sidecar")
	d.why(asWanted, "is redirected to port 15006", "cart", "--from", at(service, 0).Addr().String(), "--port", "8080")
	d.title("6. shop/batch is outside of the mesh, which its live rules alone cannot tell")
	d.why(past, "no rules of the mesh", "batch")
	d.title("7. Another program inserts a rule into shop/cart: nothing fails, but ...")
	rule := []string{"-t", "nat", "-I", "OUTPUT", "-p", "tcp", "--dport", "80", "-j", "RETURN"}
	d.line("%s", d.bold("$ ip netns exec "+d.names["cart"]+" iptables "+strings.Join(rule, " ")))
	netnstest.Run(d.stage, cart.Netns, "iptables", rule...)
	d.send(question{"the app calls it again", d.app(cart), labtest.TCP, at(service, 80), labtest.ByPeer})
	d.why(past, "is not the mesh's", "cart", "--to", at(service, 80).String())
}

// why runs the command about a pod's namespace. Its output must have the text.
func (d *demo) why(code int, text, pod string, args ...string) {
	args = append([]string{"why", "--netns", d.names[pod]}, args...)
	d.line("%s", d.bold("$ istio-cni "+strings.Join(args, " ")))
	cmd := exec.CommandContext(d.Context(), d.program, args...) //nolint:gosec // the program that is shown
	out := d.show(cmd)
	if got := cmd.ProcessState.ExitCode(); got != code || !strings.Contains(strings.Join(strings.Fields(out), " "), text) {
		d.expect(false, fmt.Sprintf("wanted exit code %d and %q, got exit code %d", code, text, got))
	}
	d.line("%s", d.dim(fmt.Sprintf("exit code %d: %s", code, map[int]string{asWanted: "as the mesh wants it", past: "past the mesh"}[code])))
}
