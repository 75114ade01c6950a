package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
)

// PodRef names one pod as it was seen, so that nothing befalls another one of its name.
type PodRef struct {
	Namespace, Name, UID string
	// Version is the resourceVersion.
	Version string
}

// ErrDisruptionBudget is the cause of a [CallError] of [API.EvictPod] that a PodDisruptionBudget is the reason of. Its
// class is TooManyRequests, as that of an API server that sheds load.
var ErrDisruptionBudget = errors.New("a PodDisruptionBudget does not allow it")

// DeletePod deletes a pod, with the time to end that it has by its own settings, if it is still as it was seen: another
// UID or resourceVersion is an error of [IsConflict]. A pod that is no more is NotFound. That it was asked for, and not that the
// pod is gone, is success.
func (a *API) DeletePod(ctx context.Context, ref PodRef) error {
	c := podCall("delete", ref, "")
	c.body = wireDeleteOptions{Kind: "DeleteOptions", APIVersion: "v1", Preconditions: ref.preconditions()}
	if err := ref.check(ref.Version); err != nil {
		return a.failed(&c, "", &failure{class: InvalidKey, err: err})
	}
	return a.act(ctx, &c)
}

// EvictPod does as [API.DeletePod] if no PodDisruptionBudget stands against it, which is an error of
// [ErrDisruptionBudget] with the time in RetryAfter for which it will not change, if the server says so.
func (a *API) EvictPod(ctx context.Context, ref PodRef) error {
	c := podCall("create", ref, "eviction")
	body := wireEviction{Kind: "Eviction", APIVersion: "policy/v1"}
	body.Metadata.Namespace, body.Metadata.Name = ref.Namespace, ref.Name
	body.Options.Preconditions = ref.preconditions()
	c.body = body
	if err := ref.check(ref.Version); err != nil {
		return a.failed(&c, "", &failure{class: InvalidKey, err: err})
	}
	return a.act(ctx, &c)
}

// LabelPod gives a pod a label or another value of it, by way of its status: who may change that need not be allowed to
// change the pod. The version does not matter; another UID is an error of [IsConflict]. A label that cannot be one is not
// sent.
func (a *API) LabelPod(ctx context.Context, ref PodRef, key, value string) error {
	c := podCall("patch", ref, "status")
	c.body = map[string]any{"metadata": map[string]any{"uid": ref.UID, "labels": map[string]string{key: value}}}
	if err := errors.Join(ref.check(), checkLabelKey(key, "label"), checkLabelValue(value, "label")); err != nil {
		return a.failed(&c, "", &failure{class: InvalidKey, err: err})
	}
	return a.act(ctx, &c)
}

func podCall(verb string, ref PodRef, part string) call {
	return call{verb: verb, resource: pods(), namespace: ref.Namespace, name: ref.Name, part: part}
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

func (r PodRef) preconditions() *wirePreconditions {
	return &wirePreconditions{UID: r.UID, Version: r.Version}
}

// Names are those of k8s.io/apimachinery/pkg/apis/meta/v1.DeleteOptions and k8s.io/api/policy/v1.Eviction.
type (
	wirePreconditions struct {
		UID     string `json:"uid"`
		Version string `json:"resourceVersion"`
	}
	wireDeleteOptions struct {
		Kind          string             `json:"kind,omitempty"`
		APIVersion    string             `json:"apiVersion,omitempty"`
		Preconditions *wirePreconditions `json:"preconditions"`
	}
	wireEviction struct {
		Kind       string `json:"kind"`
		APIVersion string `json:"apiVersion"`
		Metadata   struct {
			Namespace string `json:"namespace"`
			Name      string `json:"name"`
		} `json:"metadata"`
		Options wireDeleteOptions `json:"deleteOptions"`
	}
)

// act sends a change whose answer is of no interest: that it was accepted is all there is to know.
func (a *API) act(ctx context.Context, c *call) error {
	limited, cancel := context.WithTimeout(ctx, a.access.Attempt)
	defer cancel()
	to, err := a.endpoint()
	if err != nil {
		return a.refused(c, "", &failure{class: NoCredentials, err: err})
	}
	request, err := c.request(limited, to)
	if err != nil {
		return a.refused(c, "", &failure{class: InvalidKey, err: err})
	}
	if c.verb == "delete" {
		request.Method = http.MethodDelete
		request.Header.Set("Content-Type", "application/json")
	}
	said := &hearing{next: to.http.Transport}
	listened := *to
	listened.http.Transport = said
	response, reached, failed := listened.open(request)
	switch {
	case failed == nil:
		defer response.Body.Close() //nolint:errcheck // only read from
		_, failed = readBody(response, reached, maxAnswer, "answer")
	case failed.status == http.StatusAccepted:
		return nil
	default:
		c.doubt(failed)
		if failed.status == http.StatusTooManyRequests && said.blames("DisruptionBudget") {
			failed.err = ErrDisruptionBudget
		}
	}
	if failed != nil {
		return a.refused(c, to.proxy(request), failed)
	}
	return nil
}

// refused is [API.failed] with the part of the object that it is about.
func (a *API) refused(c *call, proxy string, f *failure) *CallError {
	failed := a.failed(c, proxy, f)
	if c.part != "" {
		failed.Object = strings.Replace(failed.Object, c.resource.plural, c.resource.plural+"/"+c.part, 1)
	}
	return failed
}

// hearing keeps what a refusal says besides what a [failure] has of it: the causes in its details. It hears one request.
type hearing struct {
	next http.RoundTripper
	said strings.Builder
}

// RoundTrip listens in when the body of a refusal is read, which bounds it.
func (h *hearing) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := h.next.RoundTrip(request)
	if err == nil && response.StatusCode == http.StatusTooManyRequests {
		response.Body = struct {
			io.Reader
			io.Closer
		}{io.TeeReader(response.Body, &h.said), response.Body}
	}
	return response, err
}

// blames tells whether a Status was heard that has a cause for this reason (k8s.io/api/policy/v1.DisruptionBudgetCause).
func (h *hearing) blames(reason string) bool {
	var verdict struct {
		Kind    string `json:"kind"`
		Details struct {
			Causes []struct {
				Reason string `json:"reason"`
			} `json:"causes"`
		} `json:"details"`
	}
	if json.Unmarshal([]byte(h.said.String()), &verdict) != nil || verdict.Kind != "Status" {
		return false
	}
	for _, cause := range verdict.Details.Causes {
		if cause.Reason == reason {
			return true
		}
	}
	return false
}
