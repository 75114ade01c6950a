package taint

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/program"
)

// controller is the program under test.
type controller struct {
	*program.Program
	fixture *fixture
	// account is whose requests it sends.
	account string
}

// decision is a line of its log about a node, with what stands in docs/operations.md.
type decision struct {
	Msg, Node, Action, Reason, Hold string
	// Of other lines.
	State, Holder, Error, Part string
}

// String is the form of tests: the reason, and why nothing is done about it if something might be.
func (d decision) String() string {
	if d.Hold != "" && d.Hold != "in place" {
		return d.Reason + ", " + d.Hold
	}
	return d.Reason
}

// begin runs the program, without ports and alone unless args say so.
func (l *fixture) begin(kubeconfig string, args ...string) *controller {
	l.Helper()
	all := append([]string{
		"taint", "--kubeconfig=" + kubeconfig, "--log_as_json", "--log_output_level=debug",
	}, args...)
	p, err := program.Start([]string{"TAINT_HEALTH_PORT=0", "TAINT_MONITORING_PORT=0"}, shared.IstioCNI, all...)
	l.Must(err)
	name := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(kubeconfig), "account-"+l.mesh+"-"), ".kubeconfig")
	c := &controller{Program: p, fixture: l, account: name}
	l.Cleanup(func() {
		p.Signal(os.Kill)
		<-p.Ended()
		if l.Failed() {
			l.Logf("the log of %q:\n%s", strings.Join(args, " "), strings.Join(p.Lines(), "\n"))
		}
	})
	return c
}

// stop ends it as a kubelet does. It must end by itself, well.
func (c *controller) stop() {
	c.fixture.Helper()
	c.Signal(syscall.SIGTERM)
	c.fixture.Until("the controller's end", func() bool {
		select {
		case <-c.Ended():
			return true
		default:
			return false
		}
	})
	if status := c.Status(); status != 0 {
		c.fixture.Errorf("exit status %d", status)
	}
}

// log is what it said so far, line by line.
func (c *controller) log() []decision {
	c.fixture.Helper()
	all, err := program.Records[decision](c.Program)
	c.fixture.Must(err)
	return all
}

// says reports whether there is a line with this message.
func (c *controller) logged(message string) bool {
	c.fixture.Helper()
	for _, line := range c.log() {
		if line.Msg == message {
			return true
		}
	}
	return false
}

// decided is what it last thought of a node.
func (c *controller) decided(node string) string {
	c.fixture.Helper()
	last := ""
	for _, line := range c.log() {
		if line.Msg == "decided" && line.Node == node {
			last = line.String()
		}
	}
	return last
}

// requests are what its account asked of the API server so far. None may have been forbidden.
func (c *controller) requests() []cluster.Request {
	c.fixture.Helper()
	all, err := shared.Requests(c.fixture.mesh, c.account)
	c.fixture.Must(err)
	return all
}

// patches are those that were done, of a node (empty: of all).
func (c *controller) patches(node string) (count int) {
	c.fixture.Helper()
	for _, r := range c.requests() {
		if r.Verb == "patch" && r.Resource == "nodes" && r.Subresource == "" && r.Status == 200 && (node == "" || r.Name == node) {
			count++
		}
	}
	return count
}

// checkRequests holds all requests to what the controller may need: nothing forbidden or invalid, no update of a node, no
// request about a single pod.
func (c *controller) checkRequests() {
	c.fixture.Helper()
	for _, r := range c.requests() {
		text := fmt.Sprintf("%s %s: %d", r.Verb, r.URI, r.Status)
		switch {
		case r.Status == 401 || r.Status == 403 || r.Status == 400:
			c.fixture.Errorf("refused: %s", text)
		case r.Resource == "nodes" && r.Verb != "list" && r.Verb != "watch" && r.Verb != "patch",
			r.Resource == "pods" && (r.Name != "" || r.Verb != "list" && r.Verb != "watch"):
			c.fixture.Errorf("a request that is not needed: %s", text)
		}
	}
}
