package kube

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	_, err := a.send(ctx, c)
	return err
}
