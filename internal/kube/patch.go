package kube

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/meshcni/istio-cni/internal/core/readiness"
)

// jsonPatch is a list of operations, RFC 6902.
type jsonPatch []operation

type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// strategicPatch is merged with lists that have a key, such as conditions by their type.
type strategicPatch map[string]any

// IsConflict tells whether a change was refused because the object was not any more what it was made for: 409 for a
// resourceVersion, 422 for the test of a JSON patch. A patch that the API server finds invalid is 422 as well.
func IsConflict(err error) bool {
	failed, ok := errors.AsType[*CallError](err)
	return ok && (failed.Status == http.StatusConflict || failed.Status == http.StatusUnprocessableEntity)
}

// PatchTaints takes the taints from the node that drop picks and puts one there, unless nil, that is not there yet by key
// and effect. It sends a JSON patch that tests UID and taints as they were read, so that it changes nothing when somebody
// else did meanwhile: that is an error of [IsConflict]. All other taints stay as they are, with what is not known here. It
// gives the node as it is then. When there is nothing to do nothing is sent, and sent is false.
func (a *API) PatchTaints(
	ctx context.Context, n NodeState, put *readiness.Taint, drop func(readiness.Taint) bool,
) (after NodeState, sent bool, err error) {
	c := call{verb: "patch", resource: nodes(), name: n.Name}
	wanted, changed, err := n.taintsAfter(put, drop)
	if err != nil {
		return n, false, a.failed(&c, "", &failure{class: Undecodable, err: err})
	}
	if !changed {
		return n, false, nil
	}
	patch := jsonPatch{{"test", "/metadata/uid", n.UID}}
	if n.taints == "" {
		patch = append(patch, operation{"test", "/spec/taints", nil}, operation{"add", "/spec/taints", wanted})
	} else {
		patch = append(patch, operation{"test", "/spec/taints", json.RawMessage(n.taints)},
			operation{"replace", "/spec/taints", wanted})
	}
	c.body = patch
	after, err = a.changedNode(ctx, &c, n.Condition.Type)
	if err != nil {
		return n, true, err
	}
	return after, true, nil
}

// taintsAfter is the list that is wanted. It is never nil: an empty list is one.
func (n NodeState) taintsAfter(
	put *readiness.Taint, drop func(readiness.Taint) bool,
) (list []json.RawMessage, changed bool, err error) {
	raw, understood, err := n.taintList()
	if err != nil {
		return nil, false, err
	}
	list = []json.RawMessage{}
	for i, taint := range understood {
		if drop(taint) {
			changed = true
			continue
		}
		list = append(list, raw[i])
	}
	there := put != nil && slices.ContainsFunc(understood, func(t readiness.Taint) bool {
		return t.Key == put.Key && t.Effect == put.Effect && !drop(t)
	})
	if put == nil || there {
		return list, changed, nil
	}
	one, err := json.Marshal(struct {
		Key    string `json:"key"`
		Value  string `json:"value,omitempty"`
		Effect string `json:"effect"`
	}(*put))
	return append(list, one), true, err
}

// PatchCondition sets one condition of a node's status, the others are not touched. now is when the kubelet would say it
// looked. It gives the node as it is then; when it has the condition already nothing is sent, and sent is false.
func (a *API) PatchCondition(
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
	wire := wireNodeCondition{
		Type: want.Type, Status: want.Status, Reason: want.Reason, Message: want.Message,
		Heartbeat: now.UTC().Truncate(time.Second), Since: since.UTC().Truncate(time.Second),
	}
	after, err = a.changedNode(ctx, &call{
		verb: "patch", resource: nodes(), name: n.Name, part: "status", body: strategicPatch{
			"metadata": map[string]any{"uid": n.UID},
			"status":   map[string]any{"conditions": []wireNodeCondition{wire}},
		},
	}, want.Type)
	if err != nil {
		return n, true, err
	}
	return after, true, nil
}

// changedNode sends a change and reads the node that the API server answers with.
func (a *API) changedNode(ctx context.Context, c *call, condition string) (NodeState, error) {
	body, err := a.send(ctx, c)
	if err != nil {
		return NodeState{}, err
	}
	var head wireObject
	err = json.Unmarshal(body, &head)
	if err == nil && !head.is(c) {
		err = errors.New("the answer is about something else")
	}
	var after NodeState
	if err == nil {
		after, err = decodeNode(body, condition)
	}
	if err != nil {
		return NodeState{}, a.failed(c, "", &failure{class: Undecodable, status: http.StatusOK, err: err})
	}
	return after, nil
}
