package kube

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
)

const podAt = "/api/v1/namespaces/shop/pods/web-1"

// podAction is one of the three, with a pod and the server that has it.
type podAction struct {
	name, verb, object, request string
	do                          func(*Client, context.Context, PodRef) error
}

func podActions() []podAction {
	return []podAction{
		{"delete", "delete", "pods shop/web-1", "DELETE " + podAt, (*Client).DeletePod},
		{"evict", "create", "pods/eviction shop/web-1", "POST " + podAt + "/eviction", (*Client).EvictPod},
		{"label", "patch", "pods/status shop/web-1", "PATCH " + podAt + "/status", func(c *Client, ctx context.Context, ref PodRef) error {
			return c.LabelPod(ctx, ref, "cni.istio.io/uninitialized", "true")
		}},
	}
}

// seenPod puts a pod on the server and gives how it is seen.
func seenPod(t *testing.T, server *kubetest.Server) PodRef {
	t.Helper()
	server.Set(onNode(t, "web-1", "node-1", "Pending"))
	return storedPod(t, server).ref
}

type stored struct {
	corev1.Pod
	ref PodRef
}

func storedPod(t *testing.T, server *kubetest.Server) stored {
	t.Helper()
	var s stored
	if err := json.Unmarshal(server.Object(podAt), &s.Pod); err != nil {
		t.Fatal(err)
	}
	s.ref = PodRef{Namespace: s.Namespace, Name: s.Name, UID: string(s.UID), Version: s.ResourceVersion}
	return s
}

func TestPodActions(t *testing.T) {
	t.Parallel()
	for _, action := range podActions() {
		t.Run(action.name, func(t *testing.T) {
			t.Parallel()
			server := kubetest.NewServer(t)
			ref := seenPod(t, server)
			server.Set(kubetest.Pod{Namespace: "shop", Name: "web-2", UID: "other"}.JSON(t))
			api := connected(t, server, nil)
			if err := action.do(api.Client, t.Context(), ref); err != nil {
				t.Fatal(err)
			}
			if got := server.Requests(); !slices.Equal(got, []string{action.request}) {
				t.Errorf("requests: %q, want %q", got, action.request)
			}
			pod := storedPod(t, server)
			if deleted := pod.DeletionTimestamp != nil; deleted != (action.name != "label") {
				t.Errorf("it was told to end: %v", deleted)
			}
			if label, is := pod.Labels["cni.istio.io/uninitialized"]; is != (action.name == "label") || is && label != "true" {
				t.Errorf("its labels are %v", pod.Labels)
			}
			if pod.Labels["app"] != "web" {
				t.Errorf("its labels were %v", pod.Labels)
			}
		})
	}
}

func TestEvictPodTellsABudgetFromALoad(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		set    func(*kubetest.Server)
		budget bool
		after  time.Duration
	}{
		{"a budget", func(s *kubetest.Server) { s.Protect(podAt, "web", 0) }, true, 0},
		{"a budget that is reckoned", func(s *kubetest.Server) { s.Protect(podAt, "web", 10) }, true, 10 * time.Second},
		{"load", func(s *kubetest.Server) {
			s.SetRetryAfter(3)
			s.Fail(kubetest.TooMany, 1)
		}, false, 3 * time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			server := kubetest.NewServer(t)
			ref := seenPod(t, server)
			tc.set(server)
			err := connected(t, server, nil).EvictPod(t.Context(), ref)
			failed, ok := errors.AsType[*Error](err)
			if !ok || failed.Class != TooManyRequests || failed.Status != http.StatusTooManyRequests || failed.RetryAfter != tc.after {
				t.Fatalf("got %+v", err)
			}
			if errors.Is(err, ErrDisruptionBudget) != tc.budget || IsConflict(err) || !failed.Transient() {
				t.Errorf("a budget: %v, want %v (%v)", !tc.budget, tc.budget, err)
			}
			if tc.budget && !strings.Contains(err.Error(), "disruption budget") {
				t.Errorf("the error does not say so: %v", err)
			}
			if pod := storedPod(t, server); pod.DeletionTimestamp != nil {
				t.Error("it was told to end")
			}
		})
	}
}

func TestPodActionsFail(t *testing.T) {
	t.Parallel()
	for fault, class := range map[kubetest.Fault]Class{
		kubetest.Forbidden: Forbidden, kubetest.Unauthorized: Unauthorized, kubetest.BadRequest: Rejected,
		kubetest.TooMany: TooManyRequests, kubetest.ServerError: ServerError, kubetest.Unavailable: ServerError,
		kubetest.NotFoundPage: Undecodable, kubetest.ForbiddenPage: Undecodable, kubetest.UnknownPath: Rejected,
		kubetest.Redirect: Rejected, kubetest.Reset: ConnectionLost, kubetest.NotFound: NotFound, // over HTTP/2 a stream is reset
	} {
		for _, action := range podActions() {
			server := kubetest.NewServer(t)
			ref := seenPod(t, server)
			api := connected(t, server, nil)
			server.Fail(fault, 1)
			err := action.do(api.Client, t.Context(), ref)
			failed, ok := errors.AsType[*Error](err)
			if !ok || failed.Class != class || failed.Verb != action.verb || failed.Object != action.object {
				t.Errorf("%s, %s: got %+v, want %s", action.name, fault, err, class)
				continue
			}
			if text := err.Error(); strings.Contains(text, server.Token()) || !strings.Contains(text, action.verb+" "+action.object) {
				t.Errorf("%s, %s: got %q", action.name, fault, text)
			}
			if errors.Is(err, ErrDisruptionBudget) {
				t.Errorf("%s, %s: it is taken for a budget", action.name, fault)
			}
			if pod := storedPod(t, server); pod.DeletionTimestamp != nil || len(pod.Labels) != 1 {
				t.Errorf("%s, %s: it was done nevertheless", action.name, fault)
			}
		}
	}
}

// Some answers of the API server say that the deletion goes on.
func TestDeletePodAccepted(t *testing.T) {
	t.Parallel()
	api := clientOf(func(r *http.Request) (*http.Response, error) {
		if r.Method != http.MethodDelete {
			t.Errorf("it is a %s", r.Method)
		}
		return &http.Response{StatusCode: http.StatusAccepted, Body: http.NoBody, Header: http.Header{}, Request: r}, nil
	}, Config{Kubeconfig: "/none"})
	if err := api.DeletePod(t.Context(), PodRef{Namespace: "shop", Name: "web-1", UID: "u", Version: "1"}); err != nil {
		t.Error(err)
	}
}
