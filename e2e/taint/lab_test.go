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

// account is the name of the controller's service account.
const account = "istio-cni-taint"

// fixture is what a test has.
type fixture struct {
	lab.Test
	client kubernetes.Interface
	// mesh is the namespace of the agents and of the controller, other another one.
	mesh, other string
}

var fixtures atomic.Int64

// newFixture has namespaces of its own and no nodes.
func newFixture(t *testing.T) *fixture {
	t.Helper()
	n := fixtures.Add(1)
	l := &fixture{Test: lab.Test{T: t}, client: shared.Client(), mesh: fmt.Sprintf("mesh-%d", n), other: fmt.Sprintf("other-%d", n)}
	for _, namespace := range []string{l.mesh, l.other} {
		l.Must(shared.Namespace(t.Context(), namespace, account))
	}
	// Cleanup has no t.Context any more.
	t.Cleanup(func() { l.clear(context.Background()) })
	return l
}

// clear removes all nodes. Pods stay: nobody asks for those of another fixture's namespaces.
func (l *fixture) clear(ctx context.Context) {
	l.Helper()
	now := int64(0)
	err := l.client.CoreV1().Nodes().DeleteCollection(ctx, meta.DeleteOptions{GracePeriodSeconds: &now}, meta.ListOptions{})
	if err != nil {
		l.Errorf("clearing: %v", err)
	}
}

// may is what an account of the fixture may do, and where.
type permissions struct {
	rights.Taint
	leaseNamespace string
	// pods are the namespaces of agents, the mesh's unless given.
	pods []string
	// account is another one than that of the chart, in the same namespace.
	account string
	// without leaves a rule out, by its resource.
	without string
}

// grant gives an account what it may do, and gives the path of a kubeconfig for it.
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

// roles are those of the chart, but for what is left out.
func (l *fixture) roles(m permissions) []rbac.Role {
	l.Helper()
	all, err := m.Roles()
	l.Must(err)
	for i, role := range all {
		all[i].Rules = slices.DeleteFunc(role.Rules, func(rule rbac.PolicyRule) bool { return rule.Resources[0] == m.without })
	}
	return all
}

// bind makes a role under a name of its own, so that tests do not get each other's rights.
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
