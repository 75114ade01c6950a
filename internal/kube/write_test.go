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
	"github.com/meshcni/istio-cni/internal/test/check"
)

const podAt = "/api/v1/namespaces/shop/pods/web-1"

// podAction is a change of a pod and its request.
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
		{"redirection", "patch", "pods/status shop/web-1", "PATCH " + podAt + "/status", func(c *Client, ctx context.Context, ref PodRef) error {
			return c.PatchRedirection(ctx, ref, "enabled")
		}},
		{"condition", "patch", "pods/status shop/web-1", "PATCH " + podAt + "/status", func(c *Client, ctx context.Context, ref PodRef) error {
			return c.SetPodCondition(ctx, ref, Condition{}, Condition{Type: RedirectionVerified, Status: "True"}, day(1))
		}},
	}
}

// newPod stores a pod on the server, and returns its reference.
func newPod(t *testing.T, server *kubetest.Server) PodRef {
	t.Helper()
	server.Set(onNode(t, "web-1", "node-1", "Pending"))
	pod := storedPod(t, server)
	return PodRef{Namespace: pod.Namespace, Name: pod.Name, UID: string(pod.UID), Version: pod.ResourceVersion}
}

func storedPod(t *testing.T, server *kubetest.Server) (pod corev1.Pod) {
	t.Helper()
	check.OK(t, json.Unmarshal(server.Object(podAt), &pod))
	return pod
}

func TestPod_Actions(t *testing.T) {
	t.Parallel()
	for fault, class := range map[kubetest.Fault]Class{
		"": "", kubetest.Forbidden: Forbidden, kubetest.Unauthorized: Unauthorized, kubetest.BadRequest: Rejected,
		kubetest.TooMany: TooManyRequests, kubetest.ServerError: ServerError, kubetest.Unavailable: ServerError,
		kubetest.NotFoundPage: Undecodable, kubetest.ForbiddenPage: Undecodable, kubetest.UnknownPath: Rejected,
		kubetest.Redirect: Rejected, kubetest.Reset: ConnectionLost, kubetest.NotFound: NotFound, // in HTTP/2, Reset resets a stream
	} {
		for _, action := range podActions() {
			t.Run(action.name+"/"+string(fault), func(t *testing.T) {
				t.Parallel()
				server := kubetest.NewServer(t)
				ref := newPod(t, server)
				if fault != "" {
					server.Fail(fault, 1)
				}
				err := action.do(connected(t, server, nil).Client, t.Context(), ref)
				if got := server.Requests(); !slices.Equal(got, []string{action.request}) || ClassOf(err) != class {
					t.Fatalf("requests %q, %v, want %q and class %q", got, err, action.request, class)
				}
				pod, done := storedPod(t, server), fault == ""
				check.Equal(t, pod.DeletionTimestamp != nil, done && action.verb != "patch", "deleted")
				want := map[string]string{"app": "web"}
				if done && action.name == "label" {
					want["cni.istio.io/uninitialized"] = "true"
				}
				check.Diff(t, "labels", want, pod.Labels)
				if published := podOf(&pod).Verified.Type != ""; published != (done && action.name == "condition") {
					t.Errorf("conditions %v", pod.Status.Conditions)
				}
				if done {
					return
				}
				failed, _ := errors.AsType[*Error](err)
				if text := err.Error(); failed.Verb != action.verb || failed.Object != action.object || errors.Is(err, ErrDisruptionBudget) ||
					strings.Contains(text, server.Token()) || !strings.Contains(text, action.verb+" "+action.object) {
					t.Errorf("got %+v", failed)
				}
			})
		}
	}
}

func TestEvictPod_BudgetOrLoad(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		fault kubetest.Fault
		after int // seconds
	}{
		{"a budget", kubetest.Budget, 0}, {"a budget whose status is computed", kubetest.Budget, 10}, {"load", kubetest.TooMany, 3},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			server := kubetest.NewServer(t)
			ref := newPod(t, server)
			server.SetRetryAfter(tc.after)
			server.Fail(tc.fault, 1)
			err := connected(t, server, nil).EvictPod(t.Context(), ref)
			failed, ok := errors.AsType[*Error](err)
			if !ok || failed.Class != TooManyRequests || failed.Status != http.StatusTooManyRequests || failed.RetryAfter != time.Duration(tc.after)*time.Second {
				t.Fatalf("got %+v", err)
			}
			budget := tc.fault == kubetest.Budget
			if errors.Is(err, ErrDisruptionBudget) != budget || strings.Contains(err.Error(), "disruption budget") != budget {
				t.Errorf("a budget: %v, want %v (%v)", !budget, budget, err)
			}
			if IsConflict(err) || !failed.Transient() {
				t.Errorf("a conflict or a permanent error: %v", err)
			}
			check.Equal(t, storedPod(t, server).DeletionTimestamp, nil, "the deletion")
		})
	}
}

// TestSetPodCondition: conditions of other types stay, the transition time changes only with the status, and another pod of the
// same name stays unchanged.
func TestSetPodCondition(t *testing.T) {
	t.Parallel()
	server := kubetest.NewServer(t)
	ref := newPod(t, server)
	api := connected(t, server, nil).Client
	var has Condition
	for i, step := range []struct {
		want  Condition
		since time.Time
	}{
		{Condition{Type: RedirectionVerified, Status: "True", Reason: "Captured", Message: "m"}, day(1)},
		{Condition{Type: RedirectionVerified, Status: "False", Reason: "Bypassed", Message: "n"}, day(2)},
		{Condition{Type: RedirectionVerified, Status: "False", Reason: "Drifted"}, day(2)},
	} {
		check.OK(t, api.SetPodCondition(t.Context(), ref, has, step.want, day(i+1)))
		stored := storedPod(t, server)
		has = podOf(&stored).Verified
		if step.want.Since = step.since; has != step.want || len(stored.Status.Conditions) != 3 || !podOf(&stored).Ready {
			t.Fatalf("got %+v, want %+v among %v", has, step.want, stored.Status.Conditions)
		}
	}
	ref.UID = "another"
	if err := api.SetPodCondition(t.Context(), ref, has, Condition{Type: RedirectionVerified, Status: "True"}, day(9)); !IsConflict(err) {
		t.Errorf("another pod of the same name: %v", err)
	}
}
