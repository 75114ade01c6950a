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

	"github.com/meshcni/istio-cni/internal/core/readiness"
)

// operation is one of a JSON patch, RFC 6902.
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// PatchTaints takes the taints from the node that drop picks and puts one there, unless nil, that is not there yet by key
// and effect. It sends a JSON patch that tests UID and taints as they were read, so that it changes nothing when another
// writer did meanwhile: that is an error of [IsConflict]. All other taints stay as they are, with fields that are not known
// here. It gives the node as it is then. When there is nothing to do nothing is sent, and sent is false.
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

// taintPatch works on the places of the taints in the list, so that the others are not written. It is nil when there is
// nothing to do.
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
	for i, taint := range slices.Backward(n.Taints) { // backward, so that the places of those before stay
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

// PatchCondition sets one condition of a node's status, the others are not touched. now is the heartbeat. It gives the node
// as it is then; when it has the condition already nothing is sent, and sent is false.
func (c *Client) PatchCondition(
	ctx context.Context, n NodeState, want NodeCondition, now time.Time,
) (after NodeState, sent bool, err error) {
	has := n.Condition
	if has.Type == want.Type && has.Status == want.Status && has.Reason == want.Reason && has.Message == want.Message {
		return n, false, nil
	}
	since := now
	if has.Type == want.Type && has.Status == want.Status {
		since = has.Since
	}
	condition := corev1.NodeCondition{
		Type: corev1.NodeConditionType(want.Type), Status: corev1.ConditionStatus(want.Status), Reason: want.Reason,
		Message: want.Message, LastHeartbeatTime: metav1.NewTime(now), LastTransitionTime: metav1.NewTime(since),
	}
	after, err = c.patchNode(ctx, n, call{part: "status", patch: types.StrategicMergePatchType, body: map[string]any{
		"metadata": map[string]any{"uid": n.UID},
		"status":   map[string]any{"conditions": []corev1.NodeCondition{condition}},
	}}, want.Type)
	return after, true, err
}

// patchNode sends a change and gives the node that the API server answers with, or as it was before an error.
func (c *Client) patchNode(ctx context.Context, n NodeState, what call, condition string) (NodeState, error) {
	what.verb, what.resource, what.name = "patch", nodes(), n.Name
	node, err := ask[*corev1.Node](ctx, c, &what)
	if err != nil {
		return n, err
	}
	return nodeOf(node, condition), nil
}

// PodRef names one pod as it was seen, so that no other one of its name is changed.
type PodRef struct {
	Namespace, Name, UID string
	// Version is the resourceVersion.
	Version string
}

// DeletePod deletes a pod, with the time to end that it has by its own settings, if it is still as it was seen: another
// UID or resourceVersion is an error of [IsConflict]. A deleted pod is NotFound. Success means that the API server accepted
// it, not that the pod is gone.
func (c *Client) DeletePod(ctx context.Context, ref PodRef) error {
	return c.changePod(ctx, ref, ref.Version, call{verb: "delete", body: &metav1.DeleteOptions{
		TypeMeta: metav1.TypeMeta{Kind: "DeleteOptions", APIVersion: "v1"}, Preconditions: ref.preconditions(),
	}})
}

// EvictPod does as [Client.DeletePod] if no PodDisruptionBudget forbids it, which is an error of [ErrDisruptionBudget] with the time
// in RetryAfter for which it will not change, if the server sends that.
func (c *Client) EvictPod(ctx context.Context, ref PodRef) error {
	return c.changePod(ctx, ref, ref.Version, call{verb: "create", part: "eviction", body: &policyv1.Eviction{
		TypeMeta:      metav1.TypeMeta{Kind: "Eviction", APIVersion: policyv1.SchemeGroupVersion.String()},
		ObjectMeta:    metav1.ObjectMeta{Namespace: ref.Namespace, Name: ref.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: ref.preconditions()},
	}})
}

// LabelPod sets a label of a pod, by way of its status: that needs no permission to change the pod. The version does not matter;
// another UID is an error of [IsConflict].
func (c *Client) LabelPod(ctx context.Context, ref PodRef, key, value string) error {
	return c.changePod(ctx, ref, "any", call{verb: "patch", part: "status", patch: types.MergePatchType, body: map[string]any{
		"metadata": map[string]any{"uid": ref.UID, "labels": map[string]string{key: value}},
	}})
}

// changePod sends a change of one pod, which must be named without doubt.
func (c *Client) changePod(ctx context.Context, ref PodRef, version string, what call) error {
	what.resource, what.namespace, what.name = pods(), ref.Namespace, ref.Name
	switch {
	case !validName(ref.Namespace) || !validName(ref.Name):
		return c.invalid(&what, errNoSegment)
	case ref.UID == "" || version == "":
		return c.invalid(&what, fmt.Errorf("UID %q and resourceVersion %q do not say which pod is meant", ref.UID, ref.Version))
	}
	return c.act(ctx, &what)
}

func (r PodRef) preconditions() *metav1.Preconditions {
	uid := types.UID(r.UID)
	return &metav1.Preconditions{UID: &uid, ResourceVersion: &r.Version}
}
