package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utiljson "k8s.io/apimachinery/pkg/util/json"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

const nodeText = `{"kind": "Node", "apiVersion": "v1", "metadata": {"name": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"},
	"spec": {"podCIDR": "10.0.0.0/24"%s}, "status": {"nodeInfo": {"bootID": "b"}, "conditions": [
		{"type": "MemoryPressure", "status": "True", "lastHeartbeatTime": "2026-01-09T00:00:00Z"},
		{"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-03T00:00:00Z", "lastTransitionTime": "2026-01-02T00:00:00Z"},
		{"type": "Mine", "status": "False", "reason": "R", "message": "M", "lastTransitionTime": "2026-01-04T00:00:00Z"}]}}`

const twoTaints = `, "taints": [{"key": "a", "value": "v", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z", "new": {"x": 1}},
	{"key": "ours", "effect": "NoSchedule"}]`

func day(n int) time.Time { return time.Date(2026, 1, n, 0, 0, 0, 0, time.UTC) }

// watchedOnce returns the first object that a watch delivers.
func watchedOnce[T any](t *testing.T, watch func(context.Context, Listener[T])) T {
	t.Helper()
	var found atomic.Pointer[T]
	listener := ignoring[T]()
	listener.OnUpdate = func(one T) { found.CompareAndSwap(nil, &one) }
	stop := agenttest.Go(t, func(ctx context.Context) { watch(ctx, listener) })
	agenttest.Eventually(t, "no update", func() bool { return found.Load() != nil })
	stop()
	return *found.Load()
}

func TestWatchNodes_ReducedNode(t *testing.T) {
	_, _, got := newNode(t, twoTaints, "Mine")
	want := NodeState{
		UID: "u", Condition: Condition{"Mine", "False", "R", "M", day(4)},
		Node: readiness.Node{
			Name: "n", Ready: true, ReadySince: day(2), Heartbeat: day(3), BootID: "b", Created: day(1),
			Taints: []readiness.Taint{{Key: "a", Value: "v", Effect: "NoExecute"}, {Key: "ours", Effect: "NoSchedule"}},
		},
	}
	check.Diff(t, "result", want, got, cmpopts.IgnoreUnexported(NodeState{}))
	for name, change := range map[string]func(*NodeState){
		"taints": func(n *NodeState) { n.Taints = n.Taints[:1] }, "boot": func(n *NodeState) { n.BootID = "c" },
		"ready": func(n *NodeState) { n.Ready = false }, "condition": func(n *NodeState) { n.Condition.Status = "True" },
		"uid": func(n *NodeState) { n.UID = "v" }, "since": func(n *NodeState) { n.ReadySince = day(8) },
	} {
		changed := got
		if change(&changed); got.SameBut(changed) {
			t.Errorf("%s makes no difference", name)
		}
	}
	beat := got
	beat.Heartbeat, beat.version = day(7), "9"
	check.Equal(t, got.SameBut(beat), true, "the same but for the heartbeat")
}

// newNode stores a node with taints, and returns the server, a client and the node as a watch delivers it.
func newNode(t *testing.T, taints, condition string) (*kubetest.Server, account, NodeState) {
	t.Helper()
	server := kubetest.NewServer(t)
	server.Set(fmt.Appendf(nil, nodeText, taints))
	api := connected(t, server, nil)
	return server, api, watchedOnce(t, func(ctx context.Context, l Listener[NodeState]) { api.WatchNodes(ctx, condition, l) })
}

func TestResource_Before(t *testing.T) {
	for _, test := range []struct {
		a, b string
		want bool
	}{
		{"9", "10", true}, {"10", "9", false}, {"10", "10", false}, {"a", "b", false}, {"", "1", false},
	} {
		check.Equal(t, (NodeState{version: test.a}).Before(NodeState{version: test.b}), test.want, test.a, "before", test.b)
	}
	if (NodeState{UID: "a", version: "1"}).Before(NodeState{UID: "b", version: "2"}) {
		t.Error("Before accepts another node of the same name")
	}
}

func TestPatchTaints(t *testing.T) {
	ours := func(taint readiness.Taint) bool { return taint.Key == "ours" }
	none := func(readiness.Taint) bool { return false }
	put := &readiness.Taint{Key: "ours", Value: "true", Effect: "NoSchedule"}
	for _, test := range []struct {
		name, taints string
		put          *readiness.Taint
		drop         func(readiness.Taint) bool
		want         string // spec.taints
		sent         bool
	}{
		{
			"removes one and keeps the others", twoTaints, nil, ours,
			`[{"key":"a","value":"v","effect":"NoExecute","timeAdded":"2026-01-01T00:00:00Z","new":{"x":1}}]`, true,
		},
		{"removes the only one", `, "taints": [{"key": "ours", "effect": "NoSchedule"}]`, nil, ours, ``, true},
		{"nothing to remove", `, "taints": []`, nil, ours, `[]`, false},
		{"nothing to remove from no list", ``, nil, ours, ``, false},
		{"adds to no list", ``, put, none, `[{"key":"ours","value":"true","effect":"NoSchedule"}]`, true},
		{"adds to null", `, "taints": null`, put, none, `[{"key":"ours","value":"true","effect":"NoSchedule"}]`, true},
		{
			"appends to others", `, "taints": [{"key":"b","effect":"NoSchedule","new":1}]`, &readiness.Taint{Key: "ours", Effect: "NoExecute"}, none,
			`[{"key":"b","effect":"NoSchedule","new":1},{"key":"ours","effect":"NoExecute"}]`, true,
		},
		{"is present already", `, "taints": [{"key":"ours","effect":"NoSchedule"}]`, put, none, `[{"key":"ours","effect":"NoSchedule"}]`, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			server, api, node := newNode(t, test.taints, "")
			patches := func() int {
				return len(slices.DeleteFunc(server.Requests(), func(r string) bool { return !strings.HasPrefix(r, "PATCH ") }))
			}
			after, sent, err := api.PatchTaints(t.Context(), node, test.put, test.drop)
			if err != nil || sent != test.sent {
				t.Fatalf("sent %t, %v", sent, err)
			}
			if requests := patches(); (requests == 1) != test.sent || requests > 1 {
				t.Errorf("%d requests", requests)
			}
			var whole struct {
				Spec struct {
					Taints any
					CIDR   string `json:"podCIDR"`
				}
			}
			check.OK(t, json.Unmarshal(server.Object("/api/v1/nodes/n"), &whole))
			var want any
			if test.want != "" {
				check.OK(t, json.Unmarshal([]byte(test.want), &want))
			}
			if diff := cmp.Diff(want, whole.Spec.Taints); diff != "" || whole.Spec.CIDR == "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if test.sent && (!node.Before(after) || slices.ContainsFunc(after.Taints, ours) != (test.put != nil)) {
				t.Errorf("after the change: %+v", after)
			}
		})
	}
}

func TestPatchTaints_TestsWhatWasRead(t *testing.T) {
	const one = `, "taints": [{"key": "b", "effect": "NoExecute"}]`
	for name, test := range map[string]struct{ before, between string }{
		"a first taint":         {"", fmt.Sprintf(nodeText, one)},
		"another taint":         {one, fmt.Sprintf(nodeText, twoTaints)},
		"no taints any more":    {one, fmt.Sprintf(nodeText, "")},
		"the taint itself":      {"", fmt.Sprintf(nodeText, `, "taints": [{"key": "ours", "effect": "NoSchedule"}]`)},
		"another node":          {"", strings.Replace(fmt.Sprintf(nodeText, ""), `"uid": "u"`, `"uid": "u2"`, 1)},
		"another node, tainted": {one, strings.Replace(fmt.Sprintf(nodeText, one), `"uid": "u"`, `"uid": "u2"`, 1)},
	} {
		t.Run(name, func(t *testing.T) {
			server, api, node := newNode(t, test.before, "")
			server.Set([]byte(test.between))
			was := string(server.Object("/api/v1/nodes/n"))
			put := &readiness.Taint{Key: "ours", Effect: "NoSchedule"}
			_, sent, err := api.PatchTaints(t.Context(), node, put, func(readiness.Taint) bool { return false })
			if !sent || !IsConflict(err) {
				t.Errorf("sent %t, %v", sent, err)
			}
			check.Equal(t, string(server.Object("/api/v1/nodes/n")), was, "the node is")
		})
	}
}

func TestPatchCondition(t *testing.T) {
	server, api, node := newNode(t, "", "Mine")
	for _, step := range []struct {
		want  Condition
		since time.Time
		sent  bool
	}{
		{Condition{Type: "Mine", Status: "False", Reason: "R", Message: "M"}, day(4), false},
		{Condition{Type: "Mine", Status: "False", Reason: "S", Message: "M"}, day(4), true},
		{Condition{Type: "Mine", Status: "True", Reason: "S", Message: "M"}, day(9), true},
	} {
		after, sent, err := api.PatchCondition(t.Context(), node, step.want, day(9))
		step.want.Since = step.since
		if err != nil || sent != step.sent || after.Condition != step.want {
			t.Fatalf("sent %t, %v, %+v, want %+v", sent, err, after.Condition, step.want)
		}
		node = after
	}
	check.Equal(t, strings.Count(string(server.Object("/api/v1/nodes/n")), `"type":`), 3, "conditions")
}

func TestLease_Conflicts(t *testing.T) {
	server := kubetest.NewServer(t)
	api := connected(t, server, nil)
	none, err := api.Lease(t.Context(), "ns", "lock")
	if err != nil || none.Exists() {
		t.Fatal(none, err)
	}
	mine := none
	mine.Holder, mine.Duration, mine.Acquired, mine.Renewed = "a", time.Minute, day(1), day(1)
	first, err := api.WriteLease(t.Context(), mine)
	if err != nil || !first.Exists() || first.Holder != "a" || first.Duration != time.Minute || !first.Renewed.Equal(day(1)) {
		t.Fatal(first, err)
	}
	// Two writers that found no lease, then two writers that read the same lease.
	check.Equal(t, IsConflict(check.Err(api.WriteLease(t.Context(), mine))), true, "a conflict of two creations")
	second, err := api.WriteLease(t.Context(), first)
	if err != nil || second.Same(first) {
		t.Fatal(err)
	}
	check.Equal(t, IsConflict(check.Err(api.WriteLease(t.Context(), first))), true, "a conflict with an old version")
	if read, readErr := api.Lease(t.Context(), "ns", "lock"); readErr != nil || !read.Same(second) {
		t.Errorf("%+v, %v", read, readErr)
	}
	server.FailOn("/leases/", kubetest.NotFoundPage, 1)
	if got, failed := api.Lease(t.Context(), "ns", "lock"); failed == nil {
		t.Errorf("a 404 of another server is read as a missing lease: %+v", got)
	}
}

// clientWith returns a client whose server always sends the same body.
func clientWith(body []byte) *Client {
	return clientOf(reply(http.StatusOK, body), Config{Kubeconfig: "/no/such/istio-cni-kubeconfig"})
}

// Facts returns the fields of a pod that a client keeps for decisions.
func Facts(document []byte) (sidecar.Facts, error) {
	pod, err := decodePod(document)
	return pod.Facts, err
}

// FuzzPod compares the client with the API's own types: both decode a document to the same facts, or both refuse it.
func FuzzPod(f *testing.F) {
	f.Add([]byte(`{"kind":"Pod","apiVersion":"v1","metadata":{"name":"cart","namespace":"shop","uid":"u"},"spec":{"hostNetwork":true,
		"securityContext":{"runAsUser":0},"initContainers":[{"name":"i","args":["x"],"securityContext":{"runAsGroup":7}}]}}`))
	const named = `"kind":"Pod","apiVersion":"v1","metadata":{"name":"cart","namespace":"shop"}`
	for _, document := range []string{
		`{` + named + `,"spec":{"containers":[null]}}`, `{` + named + `,"spec":{"securityContext":{"runAsUser":"root"}}}`,
		`[`, `null`, `{"kind":"Pod","apiVersion":"v1","metadata":{"na`, `{"kind":"Pod"}{"kind":"Pod"}`,
		`{"kinD":"Pod","apiVersion":"v1","metadata":{"name":"cart","namespace":"shop"}}`,
		`{"kind":"Pod","apiVersion":"v2","metadata":{"name":"cart","namespace":"shop"}}`,
		`{"kind":"Pod","apiVersion":"v1","metadata":{"namespace":"shop"}}`, `{"kind":"Pod","apiVersion":"v1","metadata":{"name":"cart"}}`,
	} {
		f.Add([]byte(document))
	}
	f.Fuzz(func(t *testing.T, document []byte) {
		got, err := clientWith(document).Pod(t.Context(), PodRef{Namespace: "shop", Name: "cart"})
		var pod corev1.Pod
		var kind metav1.TypeMeta // Kubernetes reads these keys in any case, and all others in their own
		isPod := json.Unmarshal(document, &kind) == nil && kind == metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"} &&
			utiljson.Unmarshal(document, &pod) == nil && pod.Name == "cart" && pod.Namespace == "shop"
		if want := map[bool]Class{false: Undecodable}[isPod]; ClassOf(err) != want {
			t.Fatalf("the API's types read the pod: %t; the client: %v", isPod, err)
		}
		if isPod && !cmp.Equal(factsOf(&pod), got.Facts) || !isPod && got.Facts.Name != "" {
			t.Errorf("facts (-API types +client):\n%s", cmp.Diff(factsOf(&pod), got.Facts))
		}
	})
}
