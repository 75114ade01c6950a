// Package readiness decides whether a node has a taint because the plugin's agent is not ready there.
//
// It promises one decision for each state of a node, its agent pods and its Memory, with a reason of a closed set; that
// it removes a taint only for a readiness of this boot; and that it adds no taint as long as an agent may be absent for an
// update.
//
// It never reads a clock, sends no request and has no state: a Memory goes in and comes out.
//
// Start reading at Decide. boot.go has which readiness is believed after a reboot.
package readiness

import (
	"slices"
	"time"
)

// Effects of a taint (k8s.io/api/core/v1.TaintEffect).
const (
	NoSchedule       = "NoSchedule"
	PreferNoSchedule = "PreferNoSchedule"
	NoExecute        = "NoExecute"
)

// Names of the legacy taint controller (Istio 1.8 to 1.17: LegacyKey) and of the untaint controller of istiod since 1.22
// (the others).
const (
	LegacyKey     = "NodeReadiness"
	UntaintKey    = "cni.istio.io/not-ready"
	UntaintValue  = "true"
	AgentSelector = "k8s-app=istio-cni-node"
)

// Taint keeps pods from a node.
type Taint struct{ Key, Value, Effect string }

// Node holds the fields of a node that a decision depends on.
type Node struct {
	Name   string
	Taints []Taint
	// Ready is the condition of that name, true or not; since ReadySince, which has whole seconds.
	Ready      bool
	ReadySince time.Time
	// Heartbeat is when the kubelet last reported that condition, by its own clock.
	Heartbeat time.Time
	// BootID is another one after each start of the node's kernel.
	BootID  string
	Created time.Time
}

// Pod is an agent pod on the node.
type Pod struct {
	// Ready is the condition of that name; since Since, by the kubelet's clock in whole seconds.
	Ready bool
	Since time.Time
	// Terminating pods do not count.
	Terminating bool
}

// Requirement is met on a node where at least one pod that the selector matches in one of the namespaces is ready. No
// namespace, or an empty one, means all namespaces.
type Requirement struct {
	Name       string
	Namespaces []string
	Selector   string
}

// Adding says whether taints are put on nodes as well as taken away.
type Adding uint8

// The untaint controller of istiod never adds.
const (
	NeverAdd Adding = iota
	AddWhenUnready
)

// NodeReadiness says whether the node itself must be ready.
type NodeReadiness uint8

// The legacy controller requires it.
const (
	NodeReadinessIgnored NodeReadiness = iota
	NodeReadinessRequired
)

// Policy is the configuration of decisions.
type Policy struct {
	// Taint is the one that is put on a node.
	Taint Taint
	// Effects says which taints are ours: those of the key, whatever their effect, or those of the key and effect.
	// The value does not matter.
	Effects Effects
	Adding  Adding
	// Node says whether the node itself must be ready.
	Node NodeReadiness
	// Requirements must all be met. An empty list is met.
	Requirements []Requirement
	// GracePeriod is for how long a node that was ready may be unready before it is tainted.
	GracePeriod time.Duration
	// Settle is the time that a restarted kubelet may take to report the present state of its pods.
	Settle time.Duration
}

// Effects says which taints of the key are ours.
type Effects uint8

// istiod removes taints of any effect, the legacy controller only those of the effect that it adds.
const (
	OwnEffect Effects = iota
	AnyEffect
)

// Ours reports whether a taint is one that is taken away.
func (p Policy) Ours(t Taint) bool {
	return t.Key == p.Taint.Key && (p.Effects == AnyEffect || t.Effect == p.Taint.Effect)
}

func (p Policy) tainted(n Node) bool { return slices.ContainsFunc(n.Taints, p.Ours) }

// Action is the change of the taint.
type Action string

// Keep changes nothing.
const (
	Keep   Action = "keep"
	Add    Action = "add"
	Remove Action = "remove"
)

// Actions returns all actions.
func Actions() []Action { return []Action{Keep, Add, Remove} }

// Reason is why a node counts as ready or not. It is one CamelCase word, as events and conditions require.
type Reason string

// The reasons: the good ones first, then from the weakest to the strongest. Of several requirements the one with the
// strongest reason decides.
const (
	AgentReady      Reason = "AgentReady"
	NothingRequired Reason = "NothingRequired"
	// MaybeRebooted means that the agent's readiness is older than the node's return, and no report shows whether the
	// node was rebooted meanwhile. It keeps a taint and adds none.
	MaybeRebooted Reason = "MaybeRebooted"
	// Rebooted means that the agent's readiness is older than a reboot that reports show.
	Rebooted     Reason = "Rebooted"
	AgentUnready Reason = "AgentUnready"
	NoAgent      Reason = "NoAgent"
	NodeUnready  Reason = "NodeUnready"
)

// Reasons returns all reasons in the order of their weight.
func Reasons() []Reason {
	return []Reason{AgentReady, NothingRequired, MaybeRebooted, Rebooted, AgentUnready, NoAgent, NodeUnready}
}

// Good reports whether a node with this reason is ready.
func (r Reason) Good() bool { return r == AgentReady || r == NothingRequired }

// Sentence explains the reason to a person.
func (r Reason) Sentence() string {
	switch r {
	case AgentReady:
		return "the CNI agent is ready"
	case NothingRequired:
		return "nothing is required of nodes"
	case MaybeRebooted:
		return "the CNI agent's readiness is older than the node's return and not confirmed yet"
	case Rebooted:
		return "the node was rebooted and its CNI agent is not ready again"
	case AgentUnready:
		return "the CNI agent is not ready"
	case NoAgent:
		return "there is no CNI agent on the node"
	case NodeUnready:
		return "the node is not ready"
	}
	return string(r)
}

// NoActionReason is the reason for Keep; it is empty for an action.
type NoActionReason string

// AsWanted is a node whose taints need no change.
const (
	AsWanted          NoActionReason = "in place"
	NoAdding          NoActionReason = "taints are not added"
	RebootSuspected   NoActionReason = "only a suspicion"
	WithinGracePeriod NoActionReason = "unready for a short time"
)

// NoActionReasons returns all of them.
func NoActionReasons() []NoActionReason {
	return []NoActionReason{AsWanted, NoAdding, RebootSuspected, WithinGracePeriod}
}

// ConditionStatus is that of the node condition, which a short absence of the agent does not change.
type ConditionStatus uint8

// ConditionUnchanged leaves the last status.
const (
	ConditionUnchanged ConditionStatus = iota
	ConditionTrue
	ConditionFalse
)

// Decision is the result for a node.
type Decision struct {
	Action Action
	Reason Reason
	// Requirement is the name of the requirement that is not met, if any.
	Requirement     string
	NoActionReason  NoActionReason
	ConditionStatus ConditionStatus
	// RecheckAt is when to decide again even if nothing changes; zero for never.
	RecheckAt time.Time
}

// Memory is the state of a node between two decisions. The zero value is that of a new node.
type Memory struct {
	boot boot
	// trusted says that the node was ready in this boot.
	trusted bool
	// unready is the time since when the node is not ready, zero while it is ready.
	unready time.Time
}
