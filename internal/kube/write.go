package kube

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

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
	after, err = c.changedNode(ctx, &call{
		verb: "patch", resource: nodes(), name: n.Name, patch: types.JSONPatchType, body: patch,
	}, n.Condition.Type)
	if err != nil {
		return n, true, err
	}
	return after, true, nil
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
	after, err = c.changedNode(ctx, &call{
		verb: "patch", resource: nodes(), name: n.Name, part: "status", patch: types.StrategicMergePatchType, body: map[string]any{
			"metadata": map[string]any{"uid": n.UID},
			"status":   map[string]any{"conditions": []corev1.NodeCondition{condition}},
		},
	}, want.Type)
	if err != nil {
		return n, true, err
	}
	return after, true, nil
}

// changedNode sends a change and reads the node that the API server answers with.
func (c *Client) changedNode(ctx context.Context, what *call, condition string) (NodeState, error) {
	node, err := ask[*corev1.Node](ctx, c, what)
	if err != nil {
		return NodeState{}, err
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
// UID or resourceVersion is an error of [IsConflict]. A pod that is no more is NotFound. That it was asked for, and not that the
// pod is gone, is success.
func (c *Client) DeletePod(ctx context.Context, ref PodRef) error {
	what := podCall("delete", ref, "")
	if err := ref.check(ref.Version); err != nil {
		return c.invalid(what, err)
	}
	what.body = &metav1.DeleteOptions{
		TypeMeta: metav1.TypeMeta{Kind: "DeleteOptions", APIVersion: "v1"}, Preconditions: ref.preconditions(),
	}
	return c.act(ctx, what)
}

// EvictPod does as [Client.DeletePod] if no PodDisruptionBudget stands against it, which is an error of
// [ErrDisruptionBudget] with the time in RetryAfter for which it will not change, if the server says so.
func (c *Client) EvictPod(ctx context.Context, ref PodRef) error {
	what := podCall("create", ref, "eviction")
	if err := ref.check(ref.Version); err != nil {
		return c.invalid(what, err)
	}
	what.body = &policyv1.Eviction{
		TypeMeta:      metav1.TypeMeta{Kind: "Eviction", APIVersion: policyv1.SchemeGroupVersion.String()},
		ObjectMeta:    metav1.ObjectMeta{Namespace: ref.Namespace, Name: ref.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: ref.preconditions()},
	}
	return c.act(ctx, what)
}

// LabelPod gives a pod a label or another value of it, by way of its status: that needs no permission to change the pod.
// The version does not matter; another UID is an error of [IsConflict]. A label that cannot be one is not sent.
func (c *Client) LabelPod(ctx context.Context, ref PodRef, key, value string) error {
	what := podCall("patch", ref, "status")
	if err := errors.Join(ref.check(), checkLabel(key, value)); err != nil {
		return c.invalid(what, err)
	}
	what.patch = types.MergePatchType
	what.body = map[string]any{"metadata": map[string]any{"uid": ref.UID, "labels": map[string]string{key: value}}}
	return c.act(ctx, what)
}

func checkLabel(key, value string) error {
	if problems := append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...); len(problems) > 0 {
		return fmt.Errorf("label %q=%q: %s", clean(key), clean(value), problems[0])
	}
	return nil
}

func podCall(verb string, ref PodRef, part string) *call {
	return &call{verb: verb, resource: pods(), namespace: ref.Namespace, name: ref.Name, part: part}
}

// check refuses a reference that would not say which pod, or that lacks one of the other texts that are needed.
func (r PodRef) check(needed ...string) error {
	if r.Namespace == "" || r.Name == "" {
		return errNoSegment
	}
	if r.UID == "" || slices.Contains(needed, "") {
		return fmt.Errorf("pod %s/%s: UID %q and resourceVersion %q do not say which pod is meant", r.Namespace, r.Name, r.UID,
			r.Version)
	}
	return nil
}

func (r PodRef) preconditions() *metav1.Preconditions {
	uid := types.UID(r.UID)
	return &metav1.Preconditions{UID: &uid, ResourceVersion: &r.Version}
}
