// Package departure decides what the end of the node agent means: that it comes back (a restart, an upgrade, a drain, a
// reboot), and the node must stay as it is, or that it was uninstalled, and the node must be given back.
//
// It promises an answer within its [Budget] whatever the API server does, and that the installation is kept if in doubt:
// a wrong "keep" leaves a plugin that can be removed by hand, a wrong "uninstall" leaves pods that bypass the mesh. Only
// answers of the API server itself count as a reason to uninstall, never the lack of one. Each verdict says why.
//
// It never writes anything, neither on the node nor to the API server, and logs nothing.
//
// Start reading at [Decide]; ask.go has how often the API server is asked.
package departure

import (
	"context"
	"errors"
	"time"

	"github.com/meshcni/istio-cni/internal/core/placement"
	"github.com/meshcni/istio-cni/internal/kube"
)

// Policy is the operator's wish (UNINSTALL_ON_EXIT).
type Policy string

// The policies.
const (
	Always Policy = "always" // whatever happens: the node is given back
	Never  Policy = "never"  // whatever happens: the node stays as it is
	Auto   Policy = "auto"   // as the API server's answers say
)

// Self is who asks. What is not known is empty.
type Self struct {
	// Namespace and DaemonSet are where the agent's own DaemonSet is; without either nothing is asked.
	Namespace, DaemonSet string
	// NodeName is the agent's node; without it nothing is decided by where pods may be.
	NodeName string
	// PodName is the agent's own pod.
	PodName string
}

// Reason is why. It is a closed set; its text is for people.
type Reason string

// Reasons to give the node back.
const (
	PolicyAlways     Reason = "the policy is to uninstall always"
	DaemonSetGone    Reason = "the DaemonSet does not exist any more"
	DaemonSetLeaving Reason = "the DaemonSet is being deleted"
	NodeNotMeant     Reason = "the DaemonSet is not meant for this node any more"
	AccountGone      Reason = "the API server does not accept our credentials any more"
	PermissionsGone  Reason = "our permissions or our pod were removed"
)

// Reasons to keep the node as it is.
const (
	PolicyNever      Reason = "the policy is to uninstall never"
	NobodyToAsk      Reason = "there is no API server, namespace or DaemonSet to ask about"
	DaemonSetPresent Reason = "the DaemonSet is there and wants a pod here"
	NeverAllowed     Reason = "we may not read the DaemonSet, but our pod"
	NoAnswer         Reason = "the API server gave no answer to rely on"
)

// Verdict is what to do.
type Verdict struct {
	Uninstall bool
	Reason    Reason
	// Detail is what the reason rests on, for instance the last error; it may be empty.
	Detail string
}

// server is the part of [kube.Client] that is asked.
type server interface {
	DaemonSet(ctx context.Context, namespace, name string) (kube.DaemonSet, error)
	Node(ctx context.Context, name string) (kube.Node, error)
	Pod(ctx context.Context, key kube.PodKey) (kube.Pod, error)
}

// Budget bounds the time. Zero fields take the defaults.
type Budget struct {
	// Total is the time for the whole decision; 5 s by default.
	Total time.Duration
	// Attempt is the time for one request, so that one that hangs leaves room for others; a third of Total by default.
	Attempt time.Duration
	// Pause is the time between two requests of the same; a tenth of Total by default.
	Pause time.Duration
	// Confirm is the time after which a refusal is asked about again: a token that was rotated just now has arrived by
	// then. A fifth of Total by default.
	Confirm time.Duration
}

func (b Budget) withDefaults() Budget {
	if b.Total <= 0 {
		b.Total = 5 * time.Second
	}
	if b.Attempt <= 0 {
		b.Attempt = b.Total / 3
	}
	if b.Pause <= 0 {
		b.Pause = b.Total / 10
	}
	if b.Confirm <= 0 {
		b.Confirm = b.Total / 5
	}
	return b
}

// Decide tells whether to give the node back. A nil API is none to ask. ctx is not the one whose end made the agent
// leave: when it ends, the answer is to keep.
func Decide(ctx context.Context, api *kube.Client, self Self, policy Policy, b Budget) Verdict {
	switch policy {
	case Always:
		return Verdict{Uninstall: true, Reason: PolicyAlways}
	case Never:
		return Verdict{Reason: PolicyNever}
	case Auto:
	}
	if api == nil || self.Namespace == "" || self.DaemonSet == "" {
		return Verdict{Reason: NobodyToAsk}
	}
	q := question{server: api, self: self, budget: b.withDefaults()}
	return q.decide(ctx)
}

type question struct {
	server server
	self   Self
	budget Budget
}

func (q *question) decide(parent context.Context) Verdict {
	ctx, cancel := context.WithTimeout(parent, q.budget.Total)
	defer cancel()
	// Without a pod to ask about, the DaemonSet's refusal must itself be confirmed.
	confirmed := []kube.Class{kube.Unauthorized}
	if q.self.PodName == "" {
		confirmed = append(confirmed, kube.Forbidden)
	}
	set, err := ask(ctx, q.budget, confirmed, func(ctx context.Context) (kube.DaemonSet, error) {
		return q.server.DaemonSet(ctx, q.self.Namespace, q.self.DaemonSet)
	})
	switch class := kube.ClassOf(err); {
	case err == nil:
		return q.present(ctx, set)
	case errors.Is(err, errUnconfirmed):
		return Verdict{Reason: NoAnswer, Detail: err.Error()}
	case class == kube.NotFound:
		return q.gone(ctx, err)
	case class == kube.Unauthorized:
		return Verdict{Uninstall: true, Reason: AccountGone, Detail: err.Error()}
	case class == kube.Forbidden && q.self.PodName == "":
		return Verdict{Uninstall: true, Reason: PermissionsGone, Detail: err.Error()}
	case class == kube.Forbidden:
		return q.forbidden(ctx, err)
	}
	return Verdict{Reason: NoAnswer, Detail: err.Error()}
}

// gone decides when there is no DaemonSet of the configured name. The agent's own pod may name another one, as the name is
// a setting that can be wrong. An API server that knows no such pod, or refuses it twice because the permissions were
// removed as well, confirms the removal; any other failure keeps the installation.
func (q *question) gone(ctx context.Context, missing error) Verdict {
	verdict := Verdict{Uninstall: true, Reason: DaemonSetGone, Detail: missing.Error()}
	if q.self.PodName == "" {
		return verdict
	}
	pod, err := ask(ctx, q.budget, []kube.Class{kube.Unauthorized, kube.Forbidden}, q.pod)
	switch class := kube.ClassOf(err); {
	case errors.Is(err, errUnconfirmed):
		return Verdict{Reason: NoAnswer, Detail: err.Error()}
	case class == kube.NotFound || class == kube.Unauthorized || class == kube.Forbidden:
		return verdict
	case err != nil:
		return Verdict{Reason: NoAnswer, Detail: err.Error()}
	case pod.DaemonSet == "" || pod.DaemonSet == q.self.DaemonSet:
		return verdict
	}
	set, err := ask(ctx, q.budget, nil, func(ctx context.Context) (kube.DaemonSet, error) {
		return q.server.DaemonSet(ctx, q.self.Namespace, pod.DaemonSet)
	})
	switch {
	case err == nil:
		return q.present(ctx, set)
	case kube.ClassOf(err) == kube.NotFound:
		return verdict
	}
	return Verdict{Reason: NoAnswer, Detail: err.Error()}
}

// pod asks for the agent's own pod.
func (q *question) pod(ctx context.Context) (kube.Pod, error) {
	return q.server.Pod(ctx, kube.PodKey{Namespace: q.self.Namespace, Name: q.self.PodName})
}

// present decides about a DaemonSet that exists.
func (q *question) present(ctx context.Context, set kube.DaemonSet) Verdict {
	if set.Deleting {
		return Verdict{Uninstall: true, Reason: DaemonSetLeaving}
	}
	if q.self.NodeName == "" {
		return Verdict{Reason: DaemonSetPresent}
	}
	node, err := ask(ctx, q.budget, nil, func(ctx context.Context) (kube.Node, error) {
		return q.server.Node(ctx, q.self.NodeName)
	})
	if err != nil {
		return Verdict{Reason: DaemonSetPresent, Detail: err.Error()}
	}
	if fits, why := placement.Fits(set.Template, node.Node); !fits {
		return Verdict{Uninstall: true, Reason: NodeNotMeant, Detail: why}
	}
	return Verdict{Reason: DaemonSetPresent}
}

// forbidden decides when the DaemonSet may not be read. Some roles never allow that, but all allow to read pods: if
// even that is refused, the role, its binding or the account is gone; a 401 has to come twice, as the token may have been
// rotated just now. Whoever uninstalls deletes the DaemonSet a moment
// before them, so the question is repeated for as long as there is time: to keep a plugin whose credentials are revoked
// fails every pod of the node.
func (q *question) forbidden(ctx context.Context, refusal error) Verdict {
	readable := false
	for {
		_, err := ask(ctx, q.budget, []kube.Class{kube.Unauthorized}, q.pod)
		switch class := kube.ClassOf(err); {
		case err == nil:
			readable = true
		case errors.Is(err, errUnconfirmed):
			return Verdict{Reason: NoAnswer, Detail: err.Error()}
		case class == kube.Forbidden || class == kube.Unauthorized || class == kube.NotFound:
			return Verdict{Uninstall: true, Reason: PermissionsGone, Detail: err.Error()}
		case !readable:
			return Verdict{Reason: NoAnswer, Detail: err.Error()}
		}
		if !sleep(ctx, q.budget.Pause) {
			return Verdict{Reason: NeverAllowed, Detail: refusal.Error()}
		}
	}
}
