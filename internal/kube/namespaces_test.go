package kube

import (
	"context"
	"fmt"
	"testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

const (
	cartAt = "GET /api/v1/namespaces/shop/pods/cart"
	shopAt = "GET /api/v1/namespaces/shop"
)

// ofAmbient selects the pods of namespaces with a label.
func ofAmbient(_, namespace map[string]string) bool { return namespace["mode"] == "ambient" }

// TestLookup_Selected: the namespace is fetched on the same connection, for a pod that ambient mode can serve only.
func TestLookup_Selected(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, mode string
		injected   bool
		selects    func(pod, namespace map[string]string) bool
		want       bool
		requests   []string
	}{
		{"selected", "ambient", false, ofAmbient, true, []string{cartAt, shopAt}},
		{"not selected", "none", false, ofAmbient, false, []string{cartAt, shopAt}},
		{"a sidecar", "ambient", true, ofAmbient, false, []string{cartAt}},
		{"ambient mode is off", "ambient", false, nil, false, []string{cartAt}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			server := kubetest.NewServer(t)
			server.Set(kubetest.Namespace("shop", map[string]string{"mode": test.mode}))
			pod := cartPod()
			if test.injected {
				pod.Annotations = map[string]string{sidecar.StatusKey: "{}"}
			}
			server.SetPod(pod)
			facts, err := newClient(t, server.Kubeconfig(t)).Lookup(t.Context(), cart(), test.selects, patient)
			check.OK(t, err)
			check.Equal(t, facts.Selected, test.want, "selected")
			check.Diff(t, "requests", test.requests, server.Requests())
			check.Equal(t, server.Connections(), 1, "connections")
		})
	}
}

// TestLookup_NamespaceFails: whether a pod is in ambient mode is never guessed.
func TestLookup_NamespaceFails(t *testing.T) {
	t.Parallel()
	for fault, class := range map[kubetest.Fault]Class{
		kubetest.ServerError: ServerError, kubetest.Forbidden: Forbidden, kubetest.WrongName: Undecodable, kubetest.NotFound: NotFound,
	} {
		t.Run(string(fault), func(t *testing.T) {
			t.Parallel()
			server := newServer(t)
			server.Set(kubetest.Namespace("shop", map[string]string{"mode": "ambient"}))
			client := newClient(t, server.Kubeconfig(t))
			server.FailOn(shopAt+"$", fault, 2)
			_, err := client.PodSelected(t.Context(), cart(), ofAmbient)
			if failed := wantError(t, err, class); failed.Object != "namespaces shop" {
				t.Errorf("%v", err)
			}
			facts, err := client.Lookup(t.Context(), cart(), ofAmbient, patient)
			if err != nil || !facts.Selected {
				t.Errorf("after a passing failure: %+v, %v", facts, err)
			}
		})
	}
}

func TestWatchNamespaces(t *testing.T) {
	t.Parallel()
	server := kubetest.NewServer(t)
	server.Set(kubetest.Namespace("shop", map[string]string{"mode": "ambient", "team": "a"}))
	api, h := connected(t, server, nil), &calls{t: t}
	agenttest.Go(t, func(ctx context.Context) {
		api.WatchNamespaces(ctx, []string{"mode", "absent"}, Listener[Namespace]{
			OnUpdate: func(n Namespace) { h.add(fmt.Sprintf("set %s %v", n.Name, n.Labels)) }, OnDelete: func(n Namespace) { h.add("gone " + n.Name) },
			OnSync: func() { h.add("listed") }, OnError: h.onError,
		})
	})
	h.wants("set shop map[mode:ambient]", "listed")
	watched(t, server)
	server.Set(kubetest.Namespace("other", map[string]string{"team": "b"}))
	server.Set(kubetest.Namespace("shop", map[string]string{"team": "a"}))
	server.Delete("/api/v1/namespaces/other")
	h.wants("set shop map[mode:ambient]", "listed", "set other map[]", "set shop map[]", "gone other")
}

// TestPatchRedirection: other annotations stay, and a pod recreated under its name is not patched.
func TestPatchRedirection(t *testing.T) {
	t.Parallel()
	server := kubetest.NewServer(t)
	ref := newPod(t, server)
	api := connected(t, server, nil).Client
	for _, value := range []string{ambient.RedirectionPending, ambient.RedirectionEnabled, "", ""} {
		check.OK(t, api.PatchRedirection(t.Context(), ref, value))
		got, has := storedPod(t, server).Annotations[ambient.RedirectionKey]
		if got != value || has != (value != "") || storedPod(t, server).Annotations[sidecar.StatusKey] == "" {
			t.Errorf("after %q the annotations are %v", value, storedPod(t, server).Annotations)
		}
	}
	ref.UID = "another"
	check.Equal(t, IsConflict(api.PatchRedirection(t.Context(), ref, ambient.RedirectionEnabled)), true, "a conflict with another pod of the same name")
	ref.UID, ref.Name = "u-gone", "gone"
	check.Equal(t, ClassOf(api.PatchRedirection(t.Context(), ref, "")), NotFound, "a pod that is gone")
	ref.UID = ""
	check.Equal(t, ClassOf(api.PatchRedirection(t.Context(), ref, "")), InvalidKey, "without a UID")
}
