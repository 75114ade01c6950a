package taint

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	rbac "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/meshcni/istio-cni/e2e/lab"
	"github.com/meshcni/istio-cni/e2e/rights"
)

// account is the name of the controller's ServiceAccount.
const account = "istio-cni-taint"

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
	for _, namespace := range []string{l.mesh, l.other} {
		l.Must(shared.Namespace(t.Context(), namespace, account))
	}
	// t.Context is cancelled before cleanups run.
	t.Cleanup(func() { l.clear(context.Background()) })
	return l
}

// clear deletes all nodes. Pods remain: no other fixture uses the same namespaces.
func (l *fixture) clear(ctx context.Context) {
	l.Helper()
	now := int64(0)
	err := l.client.CoreV1().Nodes().DeleteCollection(ctx, meta.DeleteOptions{GracePeriodSeconds: &now}, meta.ListOptions{})
	if err != nil {
		l.Errorf("clearing: %v", err)
	}
}

// permissions select the RBAC rules of a ServiceAccount of the fixture.
type permissions struct {
	rights.Taint
	leaseNamespace string
	// pods are the namespaces in which pods may be read, by default mesh.
	pods []string
	// account is the ServiceAccount, by default that of the chart.
	account string
	// without omits the rules for a resource.
	without string
}

// grant creates the roles and bindings of a ServiceAccount and returns the path of its kubeconfig.
func (l *fixture) grant(m permissions) string {
	l.Helper()
	if m.account == "" {
		m.account = account
	}
	if m.pods == nil {
		m.pods = []string{l.mesh}
	}
	if m.leaseNamespace == "" {
		m.leaseNamespace = l.mesh
	}
	l.Must(shared.Namespace(l.Context(), l.mesh, m.account))
	subject := []rbac.Subject{{Kind: rbac.ServiceAccountKind, Namespace: l.mesh, Name: m.account}}
	where := map[string][]string{
		rights.TaintNodes: {""}, rights.TaintPods: m.pods, rights.TaintLease: {m.leaseNamespace},
		rights.TaintEvents: {meta.NamespaceDefault}, rights.TaintConfig: {l.mesh},
	}
	for _, role := range l.roles(m) {
		for _, namespace := range where[role.Name] {
			l.bind(role, namespace, l.mesh+"-"+m.account, subject)
		}
	}
	path, err := shared.AccountKubeconfig(l.Context(), l.mesh, m.account)
	l.Must(err)
	return path
}

// roles returns the roles of the chart, except for the omitted rules.
func (l *fixture) roles(m permissions) []rbac.Role {
	l.Helper()
	all, err := m.Roles()
	l.Must(err)
	for i, role := range all {
		all[i].Rules = slices.DeleteFunc(role.Rules, func(rule rbac.PolicyRule) bool { return rule.Resources[0] == m.without })
	}
	return all
}

// bind creates a role and its binding under a name of the test's own, so that no test has the roles of another.
func (l *fixture) bind(role rbac.Role, namespace, suffix string, subjects []rbac.Subject) {
	l.Helper()
	name := role.Name + "-" + suffix
	var err, bound error
	if namespace == "" {
		ref := rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: name}
		_, err = l.client.RbacV1().ClusterRoles().Create(l.Context(),
			&rbac.ClusterRole{ObjectMeta: meta.ObjectMeta{Name: name}, Rules: role.Rules}, meta.CreateOptions{})
		_, bound = l.client.RbacV1().ClusterRoleBindings().Create(l.Context(),
			&rbac.ClusterRoleBinding{ObjectMeta: meta.ObjectMeta{Name: name}, RoleRef: ref, Subjects: subjects}, meta.CreateOptions{})
	} else {
		ref := rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "Role", Name: name}
		_, err = l.client.RbacV1().Roles(namespace).Create(l.Context(),
			&rbac.Role{ObjectMeta: meta.ObjectMeta{Name: name}, Rules: role.Rules}, meta.CreateOptions{})
		_, bound = l.client.RbacV1().RoleBindings(namespace).Create(l.Context(),
			&rbac.RoleBinding{ObjectMeta: meta.ObjectMeta{Name: name}, RoleRef: ref, Subjects: subjects}, meta.CreateOptions{})
	}
	for _, err := range []error{err, bound} {
		if err != nil && !apierrors.IsAlreadyExists(err) {
			l.Fatal(err)
		}
	}
}
