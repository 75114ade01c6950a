package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// brokenPod is the API object of a pod without redirection.
const brokenPod = `{"kind": "Pod", "apiVersion": "v1", "metadata": {"namespace": "shop", "name": "web-1", "uid": "u1",
	"deletionTimestamp": "2026-01-09T00:00:00Z", "labels": {"app": "web"}, "annotations": {"sidecar.istio.io/status": "{}"}},
	"spec": {"nodeName": "node-1", "restartPolicy": "Always", "hostNetwork": true, "securityContext": {"runAsUser": 0, "runAsGroup": 2000},
		"containers": [{"name": "web", "envFrom": [{"configMapRef": {"name": "X"}}], "securityContext": {"runAsUser": 0, "runAsGroup": 0},
				"env": [{"name": "K", "value": "v"}, {"name": "B"}, {"name": "K", "value": "w"},
				{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
			{"name": "group", "securityContext": {"runAsGroup": 1337}}, {"name": "other", "securityContext": null}],
		"initContainers": [{"name": "istio-validation", "args": ["a"]}, {"name": "istio-proxy", "restartPolicy": "Always"}]},
	"status": {"phase": "Pending", "podIP": "10.0.0.5", "podIPs": [{"ip": "10.0.0.5"}, {"ip": "fd00::5"}],
		"conditions": [{"type": "Initialized", "status": "False"},
			{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-04T00:00:00Z"}],
		"initContainerStatuses": [{"name": "istio-validation", "restartCount": 3,
			"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
			"lastState": {"terminated": {"exitCode": 126, "signal": 9, "reason": "Error", "message": "no redirection", "containerID": "c",
				"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-02T00:00:00Z"}}}],
		"containerStatuses": [{"name": "web", "ready": true, "state": {"running": {"startedAt": "2026-01-03T00:00:00Z"}}},
			{"name": "young", "state": {"running": {}}}, {"name": "other"}],
		"ephemeralContainerStatuses": [{"name": "debugger", "containerID": "containerd://d"}]}}`

// TestWatchPods_ReducedPod: init containers come first, user 0 differs from no user, and variables keep their order.
func TestWatchPods_ReducedPod(t *testing.T) {
	t.Parallel()
	server := kubetest.NewServer(t)
	server.Set([]byte(brokenPod))
	api := connected(t, server, nil)
	got := watchedOnce(t, func(ctx context.Context, l Listener[Pod]) { api.WatchPods(ctx, PodScope{Node: "node-1"}, l) })
	want := Pod{
		Facts: sidecar.Facts{
			Namespace: "shop", Name: "web-1", UID: "u1", Labels: map[string]string{"app": "web"},
			Annotations: map[string]string{"sidecar.istio.io/status": "{}"}, HostNetwork: true,
			RunAsUser: new(int64(0)), RunAsGroup: new(int64(2000)),
			Containers: []sidecar.Container{
				{Name: "istio-validation", Init: true, Args: []string{"a"}},
				{Name: "istio-proxy", Init: true},
				{
					Name: "web", RunAsUser: new(int64(0)), RunAsGroup: new(int64(0)),
					Env: []sidecar.EnvVar{{Name: "K", Value: "v"}, {Name: "B"}, {Name: "K", Value: "w"}, {Name: "POD_NAME"}},
				},
				{Name: "group", RunAsGroup: new(int64(1337))},
				{Name: "other"},
			},
		},
		Version: "2", NodeName: "node-1", Phase: "Pending", RestartPolicy: "Always", Deleting: true, Ready: true, ReadySince: day(4),
		Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.5"), netip.MustParseAddr("fd00::5")},
		Init: []repair.Container{{
			Name: "istio-validation", State: repair.State{Reason: "CrashLoopBackOff", Message: "back-off"},
			Last: repair.State{
				Terminated: true, Reason: "Error", Message: "no redirection", ExitCode: 126, Began: day(1), Finished: day(2),
			},
		}},
		Containers: []repair.Container{{Name: "web", State: repair.State{Running: true, Began: day(3)}}, {Name: "young", State: repair.State{Running: true}}, {Name: "other"}},
		Ephemeral:  []repair.Container{{Name: "debugger", ID: "d"}},
	}
	check.Diff(t, "result", want, got, cmpopts.EquateComparable(netip.Addr{}), cmpopts.IgnoreUnexported(Pod{}))
	wantRef := PodRef{Namespace: "shop", Name: "web-1", UID: "u1", Version: "2"}
	check.Equal(t, got.Ref(), wantRef, "its reference is")
	if facts, err := Facts([]byte(brokenPod)); err != nil || !cmp.Equal(facts, got.Facts) {
		t.Errorf("the plugin reads %+v (%v), the agent %+v", facts, err, got.Facts)
	}
}

func TestWatchPods_Addresses(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ status, want string }{
		{`{}`, "[]"},
		{`{"podIP": ""}`, "[]"},
		{`{"podIP": "10.0.0.5"}`, "[10.0.0.5]"},
		{`{"podIP": "10.0.0.5", "podIPs": []}`, "[10.0.0.5]"},
		{`{"podIP": "10.0.0.5", "podIPs": null}`, "[10.0.0.5]"},
		{`{"podIP": "10.0.0.4", "podIPs": [{"ip": "fd00::5"}, {"ip": "10.0.0.5"}]}`, "[fd00::5 10.0.0.5]"},
		{`{"podIPs": [{"ip": "10.0.0.05"}, {"ip": "::ffff:10.0.0.5"}, {"ip": "fd00:0:0::5"}, {}, {"ip": "x"}]}`, "[10.0.0.5 fd00::5]"},
	} {
		pod, err := decodePod(fmt.Appendf(nil, `{"metadata": {"name": "a", "namespace": "b"}, "status": %s}`, tc.status))
		if got := fmt.Sprint(pod.Addresses); err != nil || got != tc.want {
			t.Errorf("%s: got %s, %v, want %s", tc.status, got, err, tc.want)
		}
	}
}

func decodePod(document []byte) (Pod, error) {
	var p corev1.Pod
	err := json.Unmarshal(document, &p)
	return podOf(&p), err
}

// onNode returns a pod on a node, in a phase.
func onNode(t *testing.T, name, node, phase string) []byte {
	t.Helper()
	var pod corev1.Pod
	check.OK(t, json.Unmarshal([]byte(brokenPod), &pod))
	pod.Name, pod.UID, pod.Spec.NodeName, pod.Status.Phase = name, types.UID("u-"+name), node, corev1.PodPhase(phase)
	pod.DeletionTimestamp = nil
	data, err := json.Marshal(pod)
	check.OK(t, err)
	return data
}

func TestWatchPods_OfANode(t *testing.T) {
	t.Parallel()
	server := kubetest.NewServer(t)
	server.Set(onNode(t, "a", "node-1", "Pending"))
	server.Set(onNode(t, "b", "node-2", "Pending"))
	server.Set(onNode(t, "c", "", "Pending"))
	server.Set(onNode(t, "d", "node-1", "Failed"))
	api := connected(t, server, nil)
	h := &calls{t: t}
	scope := PodScope{Namespace: "shop", Node: "node-1", LabelSelector: "app", FieldSelector: "status.phase!=Failed", Transform: func(p *Pod) {
		p.Facts.Containers, p.Facts.Annotations = nil, nil
	}}
	agenttest.Go(t, func(ctx context.Context) {
		kept := func(what string, p Pod) {
			if p.Facts.Containers != nil || p.Facts.Annotations != nil {
				t.Errorf("%s still has fields that the transform drops", p.Facts.Name)
			}
			h.add(what + " " + p.Facts.Name + " on " + p.NodeName)
		}
		api.WatchPods(ctx, scope, Listener[Pod]{
			OnUpdate: func(p Pod) { kept("set", p) }, OnDelete: func(p Pod) { kept("gone", p) }, OnSync: func() { h.add("listed") },
			OnError: h.onError,
		})
	})
	watched(t, server)
	server.Set(onNode(t, "c", "node-1", "Pending")) // scheduled now
	server.Set(onNode(t, "b", "node-2", "Running"))
	server.Set(onNode(t, "e", "node-2", "Running"))
	server.Set(onNode(t, "a", "node-1", "Failed"))
	server.Delete("/api/v1/namespaces/shop/pods/b")
	server.Delete("/api/v1/namespaces/shop/pods/c")
	h.wants("set a on node-1", "listed", "set c on node-1", "gone a on node-1", "gone c on node-1")
	path, _, _ := strings.Cut(server.Requests()[0], "?")
	query := queryOf(t, server.Requests()[0])
	check.Equal(t, path, "GET /api/v1/namespaces/shop/pods")
	check.Equal(t, query.Get("labelSelector"), "app")
	check.Equal(t, query.Get("fieldSelector"), "status.phase!=Failed,spec.nodeName=node-1")
	for scope, want := range map[string]PodScope{"": {}, "spec.nodeName=n": {Node: "n"}, "status.phase=Pending": {FieldSelector: "status.phase=Pending"}} {
		check.Equal(t, want.fields(), scope, "fields")
	}
}

func TestWatchPods_BadSelector(t *testing.T) {
	t.Parallel()
	server := kubetest.NewServer(t)
	api := connected(t, server, nil)
	for _, node := range []string{"node-1,metadata.name=x", "node 1", "a=b", "../x", "Node-1"} {
		h := &calls{t: t}
		api.WatchPods(t.Context(), PodScope{Node: node}, Listener[Pod]{OnError: h.onError})
		check.Diff(t, node, []string{"error: " + string(InvalidKey)}, h.all())
	}
	check.Equal(t, len(server.Requests()), 0, "requests")
	h := &calls{t: t}
	agenttest.Go(t, func(ctx context.Context) {
		api.WatchPods(ctx, PodScope{FieldSelector: "spec.unknown=x"}, Listener[Pod]{OnError: h.onError})
	})
	h.wants("error: " + string(Rejected))
}
