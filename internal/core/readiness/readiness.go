// Package readiness decides whether a node has a taint because the plugin's agent is not ready there.
//
// It promises one decision for each state of a node, its agent pods and its Memory, with a reason of a closed set; that a taint
// is removed only for a readiness of this boot; and that no taint is added while an agent may be absent for an update.
//
// It never reads a clock, sends no request and has no state: a Memory goes in and comes out.
//
// Start reading at Decide. boot.go decides whether a readiness counts after a reboot.
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
	// Ready reports that the condition Ready is true; ReadySince is its last transition, in whole seconds.
	Ready      bool
	ReadySince time.Time
	// Heartbeat is the time at which the kubelet last reported that condition, by its own clock.
	Heartbeat time.Time
	// BootID changes with each start of the node's kernel.
	BootID  string
	Created time.Time
}

// Pod is an agent pod on the node.
type Pod struct {
	// Ready reports that the condition Ready is true; Since is its last transition, by the kubelet's clock in whole seconds.
	Ready bool
	Since time.Time
	// Terminating reports a deletion timestamp: the pod does not count.
	Terminating bool
}

// Requirement is met on a node where at least one pod that the selector matches in one of the namespaces is ready. An
// empty namespace means all namespaces.
type Requirement struct {
	Name       string
	Namespaces []string
	Selector   string
}

// Policy is the configuration of decisions.
type Policy struct {
	// Taint is added to a node, and removed from it.
	Taint Taint
	// AnyEffect removes taints of the key with any effect, as istiod does; without it the effect must be Taint's, as for the
	// legacy controller. The value does not matter.
	AnyEffect bool
	// AddTaint adds the taint to nodes that are not ready; the untaint controller of istiod only removes it.
	AddTaint bool
	// RequireNodeReady requires the condition Ready of the node itself, as the legacy controller does.
	RequireNodeReady bool
	// Requirements must all be met. An empty list is met.
	Requirements []Requirement
	// GracePeriod is the time for which a node that was ready may be unready before it is tainted.
	GracePeriod time.Duration
	// Settle is the time that a restarted kubelet may take to report the present state of its pods.
	Settle time.Duration
}

// Ours reports whether this policy removes a taint.
func (p Policy) Ours(t Taint) bool {
	return t.Key == p.Taint.Key && (p.AnyEffect || t.Effect == p.Taint.Effect)
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

// Reason explains the readiness of a node. It is one CamelCase word, as events and conditions require.
type Reason string

// The reasons: the good ones first, then from the weakest to the strongest. The strongest reason of all requirements decides.
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
	return map[Reason]string{
		AgentReady:      "the CNI agent is ready",
		NothingRequired: "nothing is required of nodes",
		MaybeRebooted:   "the CNI agent's readiness is older than the node's return and not confirmed yet",
		Rebooted:        "the node was rebooted and its CNI agent is not ready again",
		AgentUnready:    "the CNI agent is not ready",
		NoAgent:         "there is no CNI agent on the node",
		NodeUnready:     "the node is not ready",
	}[r]
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

// ConditionStatus is the status of the node condition, which a short absence of the agent does not change.
type ConditionStatus string

// ConditionUnchanged leaves the last status.
const (
	ConditionUnchanged ConditionStatus = ""
	ConditionTrue      ConditionStatus = "True"
	ConditionFalse     ConditionStatus = "False"
)

// Decision is the result for a node.
type Decision struct {
	Action Action
	Reason Reason
	// Requirement is the name of the requirement that is not met, if any.
	Requirement     string
	NoActionReason  NoActionReason
	ConditionStatus ConditionStatus
	// RecheckAt is the time of the next decision if nothing changes before, zero for none.
	RecheckAt time.Time
}

// Memory is the state of a node between two decisions. The zero value is that of a new node.
type Memory struct {
	boot boot
	// trusted reports that the node was ready in this boot.
	trusted bool
	// unready is the start of the time without readiness, zero while the node is ready.
	unready time.Time
}
