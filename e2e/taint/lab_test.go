package taint

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	rbac "k8s.io/api/rbac/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/meshcni/istio-cni/e2e/lab"
	"github.com/meshcni/istio-cni/e2e/rights"
)

// fixture holds a client of the shared cluster and the namespaces of one test.
type fixture struct {
	lab.Test
	client kubernetes.Interface
	// mesh is the namespace of the agents and of the controller, other is a second namespace.
	mesh, other string
}

var fixtures atomic.Int64

// newFixture creates a fixture with namespaces of its own. The cluster has no nodes.
func newFixture(t *testing.T) *fixture {
	t.Helper()
	n := fixtures.Add(1)
	l := &fixture{Test: lab.Test{T: t}, client: shared.Client(), mesh: fmt.Sprintf("mesh-%d", n), other: fmt.Sprintf("other-%d", n)}
	l.Must(shared.Namespace(t.Context(), l.mesh, lab.TaintAccount))
	l.Must(shared.Namespace(t.Context(), l.other))
	t.Cleanup(l.clear)
	return l
}

// clear deletes all nodes. Pods remain: no other fixture uses the same namespaces.
func (l *fixture) clear() {
	l.Helper()
	now := int64(0)
	// t.Context is cancelled before cleanups run.
	err := l.client.CoreV1().Nodes().DeleteCollection(context.Background(), meta.DeleteOptions{GracePeriodSeconds: &now}, meta.ListOptions{})
	if err != nil {
		l.Errorf("clearing: %v", err)
	}
}

// grant gives the controller's ServiceAccount its rights, those for pods in more namespaces, too. It returns the path of a
// kubeconfig.
func (l *fixture) grant(of rights.Taint, pods ...string) string {
	l.Helper()
	roles, err := of.Roles()
	l.Must(err)
	where := map[string][]string{
		rights.TaintNodes: {""}, rights.TaintPods: append(pods, l.mesh), rights.TaintEvents: {meta.NamespaceDefault},
	}
	for _, role := range roles {
		namespaces, found := where[role.Name]
		if !found {
			namespaces = []string{l.mesh}
		}
		role.Name += "-" + l.mesh // no test has the roles of another
		for _, in := range namespaces {
			l.Bind(l.client, role, in, rbac.Subject{Kind: rbac.ServiceAccountKind, Namespace: l.mesh, Name: lab.TaintAccount})
		}
	}
	path, err := shared.AccountKubeconfig(l.Context(), l.mesh, lab.TaintAccount)
	l.Must(err)
	return path
}
