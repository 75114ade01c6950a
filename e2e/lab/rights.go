package lab

import (
	"errors"

	rbac "k8s.io/api/rbac/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Bind gives a ServiceAccount the rules of a role in a namespace, or everywhere if in is "". It creates or replaces the role and
// its binding.
func (t Test) Bind(client kubernetes.Interface, role rbac.Role, in string, account rbac.Subject) {
	t.Helper()
	object, subjects := meta.ObjectMeta{Name: role.Name}, []rbac.Subject{account}
	ref := rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "Role", Name: role.Name}
	var err, bound error
	// For these kinds an update creates a missing object.
	if in == "" {
		ref.Kind = "ClusterRole"
		_, err = client.RbacV1().ClusterRoles().Update(t.Context(),
			&rbac.ClusterRole{ObjectMeta: object, Rules: role.Rules}, meta.UpdateOptions{})
		_, bound = client.RbacV1().ClusterRoleBindings().Update(t.Context(),
			&rbac.ClusterRoleBinding{ObjectMeta: object, RoleRef: ref, Subjects: subjects}, meta.UpdateOptions{})
	} else {
		_, err = client.RbacV1().Roles(in).Update(t.Context(), &rbac.Role{ObjectMeta: object, Rules: role.Rules}, meta.UpdateOptions{})
		_, bound = client.RbacV1().RoleBindings(in).Update(t.Context(),
			&rbac.RoleBinding{ObjectMeta: object, RoleRef: ref, Subjects: subjects}, meta.UpdateOptions{})
	}
	t.Must(errors.Join(err, bound))
}

// TaintAccount is the name of the taint controller's ServiceAccount.
const TaintAccount = "istio-cni-taint"
