package taint

import (
	"fmt"
	"slices"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
	"github.com/meshcni/istio-cni/e2e/program"
)

// controller is a process of the program under test.
type controller struct {
	*program.Program
	fixture *fixture
}

// decision is a log line, with the fields of docs/reference.md.
type decision struct {
	Msg, Node, Reason, Hold string
	// Fields of other lines.
	State, Holder string
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
	all := append([]string{"taint", "--kubeconfig=" + kubeconfig, "--log_as_json", "--log_output_level=debug"}, args...)
	return &controller{l.Start([]string{"TAINT_HEALTH_PORT=0", "TAINT_MONITORING_PORT=0"}, shared.IstioCNI, all...), l}
}

// logged reports whether a log line of the program, from line number first on, is like this.
func (c *controller) logged(first int, like func(decision) bool) bool {
	c.fixture.Helper()
	all, err := program.Records[decision](c.Program)
	c.fixture.Must(err)
	return slices.ContainsFunc(all[first:], like)
}

// decided returns the last decision about a node.
func (c *controller) decided(node string) (last string) {
	c.fixture.Helper()
	c.logged(0, func(d decision) bool {
		if d.Msg == "taint decision" && d.Node == node {
			last = d.String()
		}
		return false
	})
	return last
}

// leads reports whether the replica is the leader, from its log. A failed renewal does not end the leadership.
func (c *controller) leads() (leads bool) {
	c.fixture.Helper()
	c.logged(0, func(d decision) bool {
		if d.Msg == "election" && (d.State == "leading" || d.State == "the lease is lost") {
			leads = d.State == "leading"
		}
		return false
	})
	return leads
}

// requests returns the requests of the fixture's ServiceAccount so far.
func (l *fixture) requests() []cluster.Request {
	l.Helper()
	all, err := shared.Requests(l.mesh, lab.TaintAccount)
	l.Must(err)
	return all
}

// patches counts the successful patches of a node, or of all nodes if node is "".
func (l *fixture) patches(node string) (count int) {
	l.Helper()
	for _, r := range l.requests() {
		if r.Verb == "patch" && r.Resource == "nodes" && r.Subresource == "" && r.Status == 200 && (node == "" || r.Name == node) {
			count++
		}
	}
	return count
}

// checkRequests checks that no request was forbidden or invalid, that nodes were only listed, watched and patched,
// and that no single pod was requested.
func (l *fixture) checkRequests() {
	l.Helper()
	for _, r := range l.requests() {
		text := fmt.Sprintf("%s %s: %d", r.Verb, r.URI, r.Status)
		switch {
		case r.Status == 401 || r.Status == 403 || r.Status == 400:
			l.Errorf("forbidden or invalid: %s", text)
		case r.Resource == "nodes" && r.Verb != "list" && r.Verb != "watch" && r.Verb != "patch",
			r.Resource == "pods" && (r.Name != "" || r.Verb != "list" && r.Verb != "watch"):
			l.Errorf("a request that is not needed: %s", text)
		}
	}
}
