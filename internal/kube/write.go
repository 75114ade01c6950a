package kube

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/readiness"
)

// operation is one operation of a JSON patch, RFC 6902.
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// PatchTaints removes the taints of a node for which drop returns true, and adds put unless it is nil or present by key and
// effect. Its JSON patch tests the UID and the taints as read: after a concurrent write it changes nothing, and the error
// satisfies [IsConflict]. All other taints stay unchanged, including their unknown fields. PatchTaints returns the node after
// the change. Without a change it sends no request, and sent is false.
func (c *Client) PatchTaints(
	ctx context.Context, n NodeState, put *readiness.Taint, drop func(readiness.Taint) bool,
) (after NodeState, sent bool, err error) {
	patch := taintPatch(n, put, drop)
	if patch == nil {
		return n, false, nil
	}
	after, err = c.patchNode(ctx, n, call{patch: types.JSONPatchType, body: patch}, n.Condition.Type)
	return after, true, err
}

// taintPatch returns operations that address taints by their index in the list, so that the patch does not write other taints.
// It returns nil without a change.
func taintPatch(n NodeState, put *readiness.Taint, drop func(readiness.Taint) bool) []operation {
	patch := []operation{{Op: "test", Path: "/metadata/uid", Value: n.UID}}
	for i, taint := range n.Taints {
		at := "/spec/taints/" + strconv.Itoa(i)
		patch = append(patch, operation{"test", at + "/key", taint.Key}, operation{"test", at + "/effect", taint.Effect})
		if taint.Value != "" {
			patch = append(patch, operation{"test", at + "/value", taint.Value})
		}
	}
	tests, dropped := len(patch), 0
	for i, taint := range slices.Backward(n.Taints) { // backward, so that the indexes of earlier taints stay valid
		if drop(taint) {
			patch = append(patch, operation{Op: "remove", Path: "/spec/taints/" + strconv.Itoa(i)})
			dropped++
		}
	}
	there := put != nil && slices.ContainsFunc(n.Taints, func(t readiness.Taint) bool {
		return t.Key == put.Key && t.Effect == put.Effect && !drop(t)
	})
	if put != nil && !there {
		taint := corev1.Taint{Key: put.Key, Value: put.Value, Effect: corev1.TaintEffect(put.Effect)}
		if len(n.Taints) == 0 {
			patch = append(patch, operation{Op: "test", Path: "/spec/taints"}, operation{"add", "/spec/taints", []corev1.Taint{taint}})
		} else {
			patch = append(patch, operation{"add", "/spec/taints/-", taint})
		}
	}
	if len(patch) == tests {
		return nil
	}
	return patch
}

// PatchCondition sets one condition of a node's status and leaves the others unchanged. now is the heartbeat. It returns the
// node after the change. If the node already has the condition, it sends no request, and sent is false.
func (c *Client) PatchCondition(
	ctx context.Context, n NodeState, want Condition, now time.Time,
) (after NodeState, sent bool, err error) {
	has := n.Condition
	if has.Says(want) {
		return n, false, nil
	}
	condition := corev1.NodeCondition{
		Type: corev1.NodeConditionType(want.Type), Status: corev1.ConditionStatus(want.Status), Reason: want.Reason,
		Message: want.Message, LastHeartbeatTime: metav1.NewTime(now), LastTransitionTime: metav1.NewTime(has.transition(want, now)),
	}
	after, err = c.patchNode(ctx, n, conditionPatch(n.UID, condition), want.Type)
	return after, true, err
}

// conditionPatch returns the patch that sets one condition of an object's status. The API server merges conditions by type.
func conditionPatch(uid string, condition any) call {
	return call{part: "status", patch: types.StrategicMergePatchType, body: map[string]any{
		"metadata": map[string]any{"uid": uid}, "status": map[string]any{"conditions": []any{condition}},
	}}
}

// patchNode sends a change and returns the node in the response or, after an error, the node before the change.
func (c *Client) patchNode(ctx context.Context, n NodeState, what call, condition string) (NodeState, error) {
	what.verb, what.resource, what.name = "patch", nodes(), n.Name
	node, err := fetch[*corev1.Node](ctx, c, &what)
	if err != nil {
		return n, err
	}
	return nodeOf(node, condition), nil
}

// PodRef identifies one version of a pod, so that a change cannot hit another pod of the same name.
type PodRef struct {
	Namespace, Name, UID string
	// Version is the resourceVersion.
	Version string
}

// DeletePod deletes a pod with its own grace period, at the version of ref: for another UID or resourceVersion the error
// satisfies [IsConflict], for a deleted pod it is NotFound. Success means that the API server accepted the deletion.
func (c *Client) DeletePod(ctx context.Context, ref PodRef) error {
	return c.changePod(ctx, ref, ref.Version, call{verb: "delete", body: &metav1.DeleteOptions{
		TypeMeta: metav1.TypeMeta{Kind: "DeleteOptions", APIVersion: "v1"}, Preconditions: ref.preconditions(),
	}})
}

// EvictPod evicts a pod with the preconditions of [Client.DeletePod]. If a PodDisruptionBudget forbids the eviction, the error
// is [ErrDisruptionBudget], and RetryAfter returns the server's Retry-After, if any.
func (c *Client) EvictPod(ctx context.Context, ref PodRef) error {
	return c.changePod(ctx, ref, ref.Version, call{verb: "create", part: "eviction", body: &policyv1.Eviction{
		TypeMeta:      metav1.TypeMeta{Kind: "Eviction", APIVersion: policyv1.SchemeGroupVersion.String()},
		ObjectMeta:    metav1.ObjectMeta{Namespace: ref.Namespace, Name: ref.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: ref.preconditions()},
	}})
}

// LabelPod sets a label of a pod through its status subresource, which needs no permission to change the pod. It ignores the
// version. For another UID the error satisfies [IsConflict].
func (c *Client) LabelPod(ctx context.Context, ref PodRef, key, value string) error {
	return c.mergeStatus(ctx, ref, map[string]any{"labels": map[string]string{key: value}})
}

// PatchRedirection sets [ambient.RedirectionKey] of a pod like [Client.LabelPod]; "" removes the annotation.
func (c *Client) PatchRedirection(ctx context.Context, ref PodRef, value string) error {
	var text any // null removes
	if value != "" {
		text = value
	}
	return c.mergeStatus(ctx, ref, map[string]any{"annotations": map[string]any{ambient.RedirectionKey: text}})
}

// mergeStatus merges metadata into a pod with the UID of ref through its status subresource.
func (c *Client) mergeStatus(ctx context.Context, ref PodRef, metadata map[string]any) error {
	metadata["uid"] = ref.UID
	body := map[string]any{"metadata": metadata}
	return c.changePod(ctx, ref, "any", call{verb: "patch", part: "status", patch: types.MergePatchType, body: body})
}

// SetPodCondition replaces the condition has of a pod's status with want, and leaves other conditions unchanged. It ignores the
// version. For another UID the error satisfies [IsConflict].
func (c *Client) SetPodCondition(ctx context.Context, ref PodRef, has, want Condition, now time.Time) error {
	what := conditionPatch(ref.UID, map[string]any{
		"type": want.Type, "status": want.Status, "reason": want.Reason, "message": want.Message,
		"lastTransitionTime": metav1.NewTime(has.transition(want, now)),
	})
	what.verb = "patch"
	return c.changePod(ctx, ref, "any", what)
}

// changePod sends a change of one pod, which ref must identify by UID.
func (c *Client) changePod(ctx context.Context, ref PodRef, version string, what call) error {
	what.resource, what.namespace, what.name = pods(), ref.Namespace, ref.Name
	switch {
	case !validName(ref.Namespace) || !validName(ref.Name):
		return c.invalid(&what, errNoSegment)
	case ref.UID == "" || version == "":
		return c.invalid(&what, fmt.Errorf("UID %q and resourceVersion %q do not identify a pod", ref.UID, ref.Version))
	}
	return c.act(ctx, &what)
}

func (r PodRef) preconditions() *metav1.Preconditions {
	return &metav1.Preconditions{UID: new(types.UID(r.UID)), ResourceVersion: &r.Version}
}
