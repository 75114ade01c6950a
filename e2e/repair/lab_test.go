package repair

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	authorization "k8s.io/api/authorization/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/meshcni/istio-cni/e2e/lab"
)

// account is the name of the program's ServiceAccount.
const account = "istio-cni-repair"

// fixture holds a client of the shared cluster and the namespaces of one test.
type fixture struct {
	lab.Test
	client kubernetes.Interface
	// mesh is the namespace of the program, app the pods' namespace, other a second one of pods.
	mesh, app, other string
}

var fixtures atomic.Int64

// newFixture creates a fixture with namespaces of its own. The cluster has no pods.
func newFixture(t *testing.T) *fixture {
	t.Helper()
	n := fixtures.Add(1)
	l := &fixture{
		Test: lab.Test{T: t}, client: shared.Client(),
		mesh: fmt.Sprintf("mesh-%d", n), app: fmt.Sprintf("app-%d", n), other: fmt.Sprintf("other-%d", n),
	}
	l.Must(shared.Namespace(t.Context(), l.mesh, account))
	l.Must(shared.Namespace(t.Context(), l.app))
	l.Must(shared.Namespace(t.Context(), l.other))
	t.Cleanup(l.clear)
	return l
}

// clear deletes the pods with grace period 0, also those that are terminating.
func (l *fixture) clear() {
	l.Helper()
	now, ctx := int64(0), context.Background() // t.Context is cancelled before cleanups run
	for _, namespace := range []string{l.app, l.other} {
		l.Until("the pods to be deleted", func() bool { // a request about many pods can time out
			err := l.client.CoreV1().Pods(namespace).DeleteCollection(ctx, meta.DeleteOptions{GracePeriodSeconds: &now}, meta.ListOptions{})
			return err == nil
		})
	}
}

// right is an RBAC rule on one line: verbs and resource.
type right string

// The rules of all modes, and of each mode (docs/security.md).
const (
	mayWatch  right = "list,watch pods"
	mayReport right = "create,patch events"
	mayDelete right = "delete pods"
	mayEvict  right = "create pods/eviction"
	mayLabel  right = "patch pods/status"
)

func (r right) rule() rbac.PolicyRule {
	verbs, resource, _ := strings.Cut(string(r), " ")
	return rbac.PolicyRule{APIGroups: []string{""}, Resources: []string{resource}, Verbs: strings.Split(verbs, ",")}
}

// grant gives the ServiceAccount exactly these rules, cluster-wide, and returns the path of a kubeconfig with its
// token.
func (l *fixture) grant(rights ...right) string {
	l.Helper()
	role := rbac.Role{ObjectMeta: meta.ObjectMeta{Name: account + "-" + l.mesh}}
	for _, r := range rights {
		role.Rules = append(role.Rules, r.rule())
	}
	l.Bind(l.client, role, "", rbac.Subject{Kind: rbac.ServiceAccountKind, Namespace: l.mesh, Name: account})
	for _, r := range rights {
		l.Until("the API server to allow "+string(r), func() bool { return l.allowed(r) })
	}
	path, err := shared.AccountKubeconfig(l.Context(), l.mesh, account)
	l.Must(err)
	return path
}

// allowed reports whether the API server's authorizer allows a rule: it reads roles with a delay.
func (l *fixture) allowed(r right) bool {
	l.Helper()
	rule := r.rule()
	resource, subresource, _ := strings.Cut(rule.Resources[0], "/")
	for _, verb := range rule.Verbs {
		review, err := l.client.AuthorizationV1().SubjectAccessReviews().Create(l.Context(), &authorization.SubjectAccessReview{
			Spec: authorization.SubjectAccessReviewSpec{
				User: "system:serviceaccount:" + l.mesh + ":" + account,
				ResourceAttributes: &authorization.ResourceAttributes{
					Verb: verb, Resource: resource, Subresource: subresource, Namespace: meta.NamespaceAll,
				},
			},
		}, meta.CreateOptions{})
		l.Must(err)
		if !review.Status.Allowed {
			return false
		}
	}
	return true
}

// events returns the events of a pod as "REASON MESSAGE". Each must have type Warning and the reference's source
// component.
func (l *fixture) events(namespace, name string) (all []string) {
	l.Helper()
	list, err := l.client.CoreV1().Events(namespace).List(l.Context(), meta.ListOptions{})
	l.Must(err)
	for _, e := range list.Items {
		if e.InvolvedObject.Kind != "Pod" || e.InvolvedObject.Name != name {
			continue
		}
		if e.Source.Component != "cni-repair" || e.Type != core.EventTypeWarning || e.InvolvedObject.UID == "" {
			l.Errorf("event %q of %q, of type %q, about UID %q", e.Reason, e.Source.Component, e.Type, e.InvolvedObject.UID)
		}
		all = append(all, e.Reason+" "+e.Message)
	}
	return all
}

// event reports whether a pod has an event with this reason whose message contains all words.
func (l *fixture) event(namespace, name, reason string, words ...string) bool {
	l.Helper()
	return slices.ContainsFunc(l.events(namespace, name), func(text string) bool {
		return strings.HasPrefix(text, reason+" ") &&
			!slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(text, word) })
	})
}
