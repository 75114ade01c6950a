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

// controller is a process of the program under test.
type controller struct {
	*program.Program
	fixture *fixture
	// account is the ServiceAccount of its requests.
	account string
}

// decision is a log line, with the fields of docs/reference.md.
type decision struct {
	Msg, Node, Action, Reason, Hold string
	// Fields of other lines.
	State, Holder, Error, Part string
}

// String returns the reason, and the reason for no action if there is one.
func (d decision) String() string {
	if d.Hold != "" && d.Hold != "in place" {
		return d.Reason + ", " + d.Hold
	}
	return d.Reason
}

// begin starts the program, by default without ports.
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

// stop sends SIGTERM, as the kubelet does, and checks that the exit status is 0.
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

// log returns the log lines so far.
func (c *controller) log() []decision {
	c.fixture.Helper()
	all, err := program.Records[decision](c.Program)
	c.fixture.Must(err)
	return all
}

// logged reports whether a log line has this message.
func (c *controller) logged(message string) bool {
	c.fixture.Helper()
	for _, line := range c.log() {
		if line.Msg == message {
			return true
		}
	}
	return false
}

// decided returns the last decision about a node.
func (c *controller) decided(node string) string {
	c.fixture.Helper()
	last := ""
	for _, line := range c.log() {
		if line.Msg == "taint decision" && line.Node == node {
			last = line.String()
		}
	}
	return last
}

// requests returns the requests of its ServiceAccount so far.
func (c *controller) requests() []cluster.Request {
	c.fixture.Helper()
	all, err := shared.Requests(c.fixture.mesh, c.account)
	c.fixture.Must(err)
	return all
}

// patches counts the successful patches of a node, or of all nodes if node is "".
func (c *controller) patches(node string) (count int) {
	c.fixture.Helper()
	for _, r := range c.requests() {
		if r.Verb == "patch" && r.Resource == "nodes" && r.Subresource == "" && r.Status == 200 && (node == "" || r.Name == node) {
			count++
		}
	}
	return count
}

// checkRequests checks that no request was forbidden or invalid, that nodes were only listed, watched and patched,
// and that no single pod was requested.
func (c *controller) checkRequests() {
	c.fixture.Helper()
	for _, r := range c.requests() {
		text := fmt.Sprintf("%s %s: %d", r.Verb, r.URI, r.Status)
		switch {
		case r.Status == 401 || r.Status == 403 || r.Status == 400:
			c.fixture.Errorf("forbidden or invalid: %s", text)
		case r.Resource == "nodes" && r.Verb != "list" && r.Verb != "watch" && r.Verb != "patch",
			r.Resource == "pods" && (r.Name != "" || r.Verb != "list" && r.Verb != "watch"):
			c.fixture.Errorf("a request that is not needed: %s", text)
		}
	}
}
