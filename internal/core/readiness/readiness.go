// Package readiness decides whether a node needs a taint because the CNI agent is not ready there.
//
// It promises one decision for each state of a node, its agent pods and its Memory, with a reason from a closed set; that
// only a readiness from this boot removes a taint; and that no taint is added while an agent may be absent for an update.
//
// It never reads a clock, sends no requests and has no state: Decide takes and returns a Memory.
//
// Start at Decide. boot.go decides whether a readiness is valid after a reboot.
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

// Node holds the fields of a node that decisions depend on.
type Node struct {
	Name   string
	Taints []Taint
	// Ready is set if the condition Ready is true; ReadySince is its last transition, in whole seconds.
	Ready      bool
	ReadySince time.Time
	// Heartbeat is the time of the kubelet's last report of that condition, by its own clock.
	Heartbeat time.Time
	// BootID changes with each boot of the node.
	BootID  string
	Created time.Time
}

// Pod is an agent pod on the node.
type Pod struct {
	// Ready is set if the condition Ready is true; Since is its last transition, by the kubelet's clock in whole seconds.
	Ready bool
	Since time.Time
	// Terminating is set if the pod has a deletion timestamp: the pod is ignored.
	Terminating bool
}

// Requirement is met on a node with at least one ready pod that the selector matches in one of the namespaces. An empty
// namespace means all namespaces.
type Requirement struct {
	Name       string
	Namespaces []string
	Selector   string
}

// Policy configures decisions.
type Policy struct {
	// Taint is the taint to add and remove.
	Taint Taint
	// AnyEffect removes taints with the key and any effect, as istiod does; otherwise the effect must be Taint's, as for the
	// legacy controller. The value is ignored.
	AnyEffect bool
	// AddTaint adds the taint to nodes that are not ready; the untaint controller of istiod only removes it.
	AddTaint bool
	// RequireNodeReady also requires the node's condition Ready, as the legacy controller does.
	RequireNodeReady bool
	// Requirements must all be met. An empty list is met.
	Requirements []Requirement
	// GracePeriod is the time that a formerly ready node may be unready before it is tainted.
	GracePeriod time.Duration
	// Settle is the time that a restarted kubelet may need to report the present state of its pods.
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

// The reasons: first the good reasons, then from weak to strong. The strongest reason of all requirements decides.
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

// AsWanted means that the taints need no change.
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
	// RecheckAt is the time of the next decision if nothing changes before, zero for never.
	RecheckAt time.Time
}

// Memory is the state of a node between two decisions. The zero value is for a new node.
type Memory struct {
	boot boot
	// trusted is set if the node was ready in this boot.
	trusted bool
	// unready is the time when the node became unready, zero while it is ready.
	unready time.Time
}
