// Package teardown decides whether the end of the node agent is temporary (a restart, an upgrade, a drain, a reboot), so that
// the plugin stays installed, or a removal, so that the plugin must be uninstalled.
//
// It promises an answer within [Total] whatever the API server does, and that it keeps the installation if in doubt: a
// wrong "keep" leaves a plugin that can be removed by hand, a wrong "uninstall" leaves pods that bypass the mesh. Only
// answers of the API server itself are a reason to uninstall, never a missing answer. Each verdict has its reason.
//
// It never writes anything, neither on the node nor to the API server, and logs nothing.
//
// Start reading at [ShouldUninstall]; repeat.go repeats requests.
package teardown

import (
	"context"
	"errors"

	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/kube"
)

// Policy is the operator's setting (UNINSTALL_ON_EXIT).
type Policy string

// The policies.
const (
	Always Policy = "always"
	Never  Policy = "never"
	Auto   Policy = "auto" // depends on the API server's answers
)

// Self identifies the agent. Unknown fields are empty.
type Self struct {
	// Namespace and DaemonSet identify the agent's own DaemonSet; without either no request is sent.
	Namespace, DaemonSet string
	// NodeName is the agent's node; without it placement is not checked.
	NodeName string
	// PodName is the agent's own pod.
	PodName string
}

// Reason is a closed set; its text is for people.
type Reason string

// Reasons to uninstall.
const (
	PolicyAlways      Reason = "the policy is to uninstall always"
	DaemonSetGone     Reason = "the DaemonSet does not exist any more"
	DaemonSetDeleting Reason = "the DaemonSet is being deleted"
	NodeExcluded      Reason = "the DaemonSet is not meant for this node any more"
	AccountGone       Reason = "the API server does not accept the agent's credentials any more"
	PermissionsGone   Reason = "the agent's permissions or its pod were removed"
)

// Reasons to keep the installation.
const (
	PolicyNever      Reason = "the policy is to uninstall never"
	NotConfigured    Reason = "no API server, namespace or DaemonSet is known"
	DaemonSetPresent Reason = "the DaemonSet is there and wants a pod here"
	ReadForbidden    Reason = "the DaemonSet may not be read, the agent's pod may"
	NoAnswer         Reason = "the API server gave no answer to rely on"
)

// Verdict is the decision.
type Verdict struct {
	Uninstall bool
	Reason    Reason
	// Detail has evidence for the reason, such as the last error; it may be empty.
	Detail string
}

func keep(reason Reason, err error) Verdict { return Verdict{Reason: reason, Detail: err.Error()} }

func uninstall(reason Reason, err error) Verdict {
	return Verdict{Uninstall: true, Reason: reason, Detail: err.Error()}
}

// server is the part of [kube.Client] that a query uses.
type server interface {
	DaemonSet(ctx context.Context, namespace, name string) (*kube.DaemonSet, error)
	Node(ctx context.Context, name string) (*kube.Node, error)
	Pod(ctx context.Context, key kube.PodRef) (kube.Pod, error)
}

// ShouldUninstall decides whether the plugin must be uninstalled. A nil API answers no request. ctx must outlive the context that
// stopped the agent: when ctx ends, the answer is to keep.
func ShouldUninstall(ctx context.Context, api *kube.Client, self Self, policy Policy) Verdict {
	switch policy {
	case Always:
		return Verdict{Uninstall: true, Reason: PolicyAlways}
	case Never:
		return Verdict{Reason: PolicyNever}
	case Auto:
	}
	if api == nil || self.Namespace == "" || self.DaemonSet == "" {
		return Verdict{Reason: NotConfigured}
	}
	ctx, cancel := context.WithTimeout(ctx, Total)
	defer cancel()
	return query{api, self}.decide(ctx)
}

type query struct {
	server server
	self   Self
}

func (q query) decide(ctx context.Context) Verdict {
	// Without its own pod to request instead, a refusal of the DaemonSet must itself be confirmed.
	confirmed := []kube.Class{kube.Unauthorized}
	if q.self.PodName == "" {
		confirmed = append(confirmed, kube.Forbidden)
	}
	set, err := q.daemonSet(ctx, q.self.DaemonSet, confirmed)
	switch class := kube.ClassOf(err); {
	case err == nil:
		return q.present(ctx, set)
	case errors.Is(err, errUnconfirmed):
	case class == kube.NotFound:
		return q.missing(ctx, err)
	case class == kube.Unauthorized:
		return uninstall(AccountGone, err)
	case class == kube.Forbidden && q.self.PodName == "":
		return uninstall(PermissionsGone, err)
	case class == kube.Forbidden:
		return q.forbidden(ctx, err)
	}
	return keep(NoAnswer, err)
}

func (q query) daemonSet(ctx context.Context, name string, confirmed []kube.Class) (*kube.DaemonSet, error) {
	return repeat(ctx, confirmed, func(ctx context.Context) (*kube.DaemonSet, error) {
		return q.server.DaemonSet(ctx, q.self.Namespace, name)
	})
}

// pod requests the agent's own pod.
func (q query) pod(ctx context.Context) (kube.Pod, error) {
	return q.server.Pod(ctx, kube.PodRef{Namespace: q.self.Namespace, Name: q.self.PodName})
}

// missing decides when no DaemonSet has the configured name. The agent's own pod can name another DaemonSet: the name is a setting
// that can be wrong. An API server that knows no such pod, or refuses it twice because the permissions were removed as well,
// confirms the removal; any other failure keeps the installation.
func (q query) missing(ctx context.Context, notFound error) Verdict {
	if q.self.PodName == "" {
		return uninstall(DaemonSetGone, notFound)
	}
	pod, err := repeat(ctx, []kube.Class{kube.Unauthorized, kube.Forbidden}, q.pod)
	switch class := kube.ClassOf(err); {
	case errors.Is(err, errUnconfirmed):
		return keep(NoAnswer, err)
	case class == kube.NotFound || class == kube.Unauthorized || class == kube.Forbidden:
		return uninstall(DaemonSetGone, notFound)
	case err != nil:
		return keep(NoAnswer, err)
	case pod.DaemonSet == "" || pod.DaemonSet == q.self.DaemonSet:
		return uninstall(DaemonSetGone, notFound)
	}
	set, err := q.daemonSet(ctx, pod.DaemonSet, nil)
	switch {
	case err == nil:
		return q.present(ctx, set)
	case kube.ClassOf(err) == kube.NotFound:
		return uninstall(DaemonSetGone, notFound)
	}
	return keep(NoAnswer, err)
}

// present decides about a DaemonSet that exists.
func (q query) present(ctx context.Context, set *kube.DaemonSet) Verdict {
	if set.DeletionTimestamp != nil {
		return Verdict{Uninstall: true, Reason: DaemonSetDeleting}
	}
	if q.self.NodeName == "" {
		return Verdict{Reason: DaemonSetPresent}
	}
	node, err := repeat(ctx, nil, func(ctx context.Context) (*kube.Node, error) { return q.server.Node(ctx, q.self.NodeName) })
	if err != nil {
		return keep(DaemonSetPresent, err)
	}
	if fits, why := selector.Fits(set, node); !fits {
		return Verdict{Uninstall: true, Reason: NodeExcluded, Detail: why}
	}
	return Verdict{Reason: DaemonSetPresent}
}

// forbidden decides when the API server refuses to show the DaemonSet. Some roles never allow that, but all roles allow reading
// pods: if that is refused, too, the role, its binding or the account is gone. A 401 must come twice because a rotated token can
// arrive late. An uninstallation deletes the DaemonSet a moment before the role, so the request is repeated until ctx ends: a plugin
// whose credentials are revoked fails every pod of the node.
func (q query) forbidden(ctx context.Context, refusal error) Verdict {
	readable := false
	for {
		_, err := repeat(ctx, []kube.Class{kube.Unauthorized}, q.pod)
		switch class := kube.ClassOf(err); {
		case err == nil:
			readable = true
		case errors.Is(err, errUnconfirmed):
			return keep(NoAnswer, err)
		case class == kube.Forbidden || class == kube.Unauthorized || class == kube.NotFound:
			return uninstall(PermissionsGone, err)
		case !readable:
			return keep(NoAnswer, err)
		}
		if !sleep(ctx, pause) {
			return keep(ReadForbidden, refusal)
		}
	}
}
