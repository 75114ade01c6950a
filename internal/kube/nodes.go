package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/core/readiness"
)

// Listener is told about a collection of objects. All functions are called from the goroutine that follows, one after
// the other, and following waits for them; none may be nil. What they are told must not be changed.
type Listener[T any] struct {
	// Set is told of an object that is new or has changed, Gone of one that is no more, as it was known last.
	Set, Gone func(T)
	// Listed is told after a list: what was told is the whole of it then.
	Listed func()
	// Trouble is told once when following has begun to fail, once more when it fails in another way, and nil when it goes
	// well again.
	Trouble func(error)
}

func (l Listener[T]) changes() changes[T] {
	return changes[T]{
		set: func(_ objectKey, object T) { l.Set(object) }, gone: func(_ objectKey, object T) { l.Gone(object) },
		listed: l.Listed, trouble: l.Trouble,
	}
}

// NodeState is a node as far as a taint controller looks at it.
type NodeState struct {
	readiness.Node
	UID string
	// Condition is the one that was asked for, zero when the node has none of that type.
	Condition NodeCondition

	// version is the resourceVersion.
	version string
	// taints is the list as the API server sent it, with all that is not known here; empty when there is none.
	taints string
}

// NodeCondition is a condition of a node (k8s.io/api/core/v1.NodeCondition).
type NodeCondition struct {
	Type, Status, Reason, Message string
	// Since is when the status became what it is.
	Since time.Time
}

// SameBut tells whether nothing else changed than the heartbeat.
func (n NodeState) SameBut(other NodeState) bool {
	return n.UID == other.UID && n.taints == other.taints && n.Condition == other.Condition && n.Ready == other.Ready &&
		n.ReadySince.Equal(other.ReadySince) && n.BootID == other.BootID && n.Created.Equal(other.Created)
}

// Before tells whether this is an earlier state of the same node. Resource versions are numbers that grow, of any length
// (k8s.io/apimachinery/pkg/util/resourceversion); of others nothing is said.
func (n NodeState) Before(other NodeState) bool {
	a, b := n.version, other.version
	if n.UID != other.UID || strings.Trim(a+b, "0123456789") != "" {
		return false
	}
	return len(a) < len(b) || len(a) == len(b) && a < b
}

// AgentPod is a pod of the node agent, or whatever else is required on nodes.
type AgentPod struct {
	readiness.Pod
	Namespace, Name, UID, NodeName string
}

// FollowNodes keeps all nodes in sight until ctx ends. condition is the type of the condition that is kept, or empty.
func (a *API) FollowNodes(ctx context.Context, condition string, tell Listener[NodeState]) {
	decode := func(object []byte) (NodeState, error) { return decodeNode(object, condition) }
	follow(ctx, a, collection{resource: nodes()}, decode, tell.changes())
}

// FollowPods keeps the pods of a namespace (empty: of all) in sight that a label selector picks, until ctx ends. It is the
// API server that selects: no other pod is ever sent.
func (a *API) FollowPods(ctx context.Context, namespace, selector string, tell Listener[AgentPod]) {
	from := collection{resource: pods(), namespace: namespace, selection: url.Values{}}
	if selector != "" {
		from.selection.Set("labelSelector", selector)
	}
	follow(ctx, a, from, decodeAgentPod, tell.changes())
}

type wireNodeCondition struct {
	Type      string    `json:"type"`
	Status    string    `json:"status"`
	Reason    string    `json:"reason"`
	Message   string    `json:"message"`
	Heartbeat time.Time `json:"lastHeartbeatTime,omitzero"`
	Since     time.Time `json:"lastTransitionTime,omitzero"`
}

// readyCondition is the condition that nodes and pods have in common.
const (
	readyCondition = "Ready"
	conditionTrue  = "True"
)

func decodeNode(object []byte, condition string) (NodeState, error) {
	var wire struct {
		Metadata struct {
			Name    string    `json:"name"`
			UID     string    `json:"uid"`
			Version string    `json:"resourceVersion"`
			Created time.Time `json:"creationTimestamp"`
		} `json:"metadata"`
		Spec struct {
			Taints json.RawMessage `json:"taints"`
		} `json:"spec"`
		Status struct {
			Conditions []wireNodeCondition `json:"conditions"`
			Info       struct {
				BootID string `json:"bootID"`
			} `json:"nodeInfo"`
		} `json:"status"`
	}
	if err := json.Unmarshal(object, &wire); err != nil {
		return NodeState{}, err
	}
	state := NodeState{
		Node: readiness.Node{Name: wire.Metadata.Name, Created: wire.Metadata.Created, BootID: wire.Status.Info.BootID},
		UID:  wire.Metadata.UID, version: wire.Metadata.Version,
	}
	if string(wire.Spec.Taints) != "null" {
		state.taints = string(wire.Spec.Taints)
	}
	_, taints, err := state.taintList()
	if err != nil {
		return NodeState{}, err
	}
	state.Taints = taints
	for _, c := range wire.Status.Conditions {
		if c.Type == readyCondition {
			state.Ready, state.ReadySince, state.Heartbeat = c.Status == conditionTrue, c.Since, c.Heartbeat
		}
		if c.Type == condition {
			state.Condition = NodeCondition{Type: c.Type, Status: c.Status, Reason: c.Reason, Message: c.Message, Since: c.Since}
		}
	}
	return state, nil
}

// taintList gives the taints as they were sent and as they are understood.
func (n NodeState) taintList() (raw []json.RawMessage, understood []readiness.Taint, err error) {
	if n.taints == "" {
		return nil, nil, nil
	}
	if err := json.Unmarshal([]byte(n.taints), &raw); err != nil {
		return nil, nil, fmt.Errorf("reading taints: %w", err)
	}
	for _, one := range raw {
		var wire Taint
		if err := json.Unmarshal(one, &wire); err != nil {
			return nil, nil, fmt.Errorf("reading a taint: %w", err)
		}
		understood = append(understood, readiness.Taint(wire))
	}
	return raw, understood, nil
}

func decodeAgentPod(object []byte) (AgentPod, error) {
	var wire struct {
		Metadata wireObjectMeta `json:"metadata"`
		Spec     struct {
			NodeName string `json:"nodeName"`
		} `json:"spec"`
		Status struct {
			Conditions []wireNodeCondition `json:"conditions"`
		} `json:"status"`
	}
	if err := json.Unmarshal(object, &wire); err != nil {
		return AgentPod{}, err
	}
	pod := AgentPod{
		Namespace: wire.Metadata.Namespace, Name: wire.Metadata.Name, UID: wire.Metadata.UID, NodeName: wire.Spec.NodeName,
	}
	pod.Leaving = wire.Metadata.DeletionTimestamp != ""
	for _, c := range wire.Status.Conditions {
		if c.Type == readyCondition {
			pod.Ready, pod.Since = c.Status == conditionTrue, c.Since
		}
	}
	return pod, nil
}
