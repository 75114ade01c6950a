package kube

import (
	"context"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// DaemonSet is what the agent wants to know about its own one.
type DaemonSet struct {
	Namespace, Name, UID string
	// Deleting says that somebody asked for its removal, which has not ended yet.
	Deleting bool
	// Placement is where its template wants pods to be.
	Placement Placement
}

// Node is what decides whether a DaemonSet keeps a pod there.
type Node struct {
	Name   string
	Labels map[string]string
	Taints []Taint
	// Runtime is the container runtime with its version, such as "containerd://2.2.0".
	Runtime string
}

// PodState is what the agent wants to know about its own pod.
type PodState struct {
	Namespace, Name, UID, NodeName string
	// Deleting says that the pod was told to end.
	Deleting bool
	// DaemonSet is the name of the one that made the pod, "" for another origin.
	DaemonSet string
}

// DaemonSet fetches one: GET /apis/apps/v1/namespaces/NAMESPACE/daemonsets/NAME.
func (a *API) DaemonSet(ctx context.Context, namespace, name string) (DaemonSet, error) {
	type wire struct {
		Metadata wireObjectMeta `json:"metadata"`
		Spec     struct {
			Template struct {
				Spec wirePlacement `json:"spec"`
			} `json:"template"`
		} `json:"spec"`
	}
	object, err := get[wire](ctx, a, daemonSets(), namespace, name)
	if err != nil {
		return DaemonSet{}, err
	}
	return DaemonSet{
		Namespace: object.Metadata.Namespace, Name: object.Metadata.Name, UID: object.Metadata.UID,
		Deleting:  object.Metadata.DeletionTimestamp != "",
		Placement: object.Spec.Template.Spec.placement(),
	}, nil
}

// Node fetches one: GET /api/v1/nodes/NAME.
func (a *API) Node(ctx context.Context, name string) (Node, error) {
	type wire struct {
		Metadata struct {
			Name   string            `json:"name"`
			Labels map[string]string `json:"labels"`
		} `json:"metadata"`
		Spec struct {
			Taints []Taint `json:"taints"`
		} `json:"spec"`
		Status struct {
			Info struct {
				Runtime string `json:"containerRuntimeVersion"`
			} `json:"nodeInfo"`
		} `json:"status"`
	}
	object, err := get[wire](ctx, a, nodes(), "", name)
	if err != nil {
		return Node{}, err
	}
	return Node{
		Name: object.Metadata.Name, Labels: object.Metadata.Labels, Taints: object.Spec.Taints, Runtime: object.Status.Info.Runtime,
	}, nil
}

// PodOf fetches one: GET /api/v1/namespaces/NAMESPACE/pods/NAME. It is for the agent's own pod; the facts on which a
// pod's redirection rests come from [Client.Pod].
func (a *API) PodOf(ctx context.Context, namespace, name string) (PodState, error) {
	type wire struct {
		Metadata struct {
			wireObjectMeta

			Owners []struct {
				Kind       string `json:"kind"`
				Name       string `json:"name"`
				Controller bool   `json:"controller"`
			} `json:"ownerReferences"`
		} `json:"metadata"`
		Spec struct {
			NodeName string `json:"nodeName"`
		} `json:"spec"`
	}
	object, err := get[wire](ctx, a, pods(), namespace, name)
	if err != nil {
		return PodState{}, err
	}
	state := PodState{
		Namespace: object.Metadata.Namespace, Name: object.Metadata.Name, UID: object.Metadata.UID,
		NodeName: object.Spec.NodeName, Deleting: object.Metadata.DeletionTimestamp != "",
	}
	for _, owner := range object.Metadata.Owners {
		if owner.Kind == "DaemonSet" && owner.Controller {
			state.DaemonSet = owner.Name
		}
	}
	return state, nil
}

// Pod fetches the facts of one pod: GET /api/v1/namespaces/NAMESPACE/pods/NAME, once. Another pod of that name, by its
// UID, is a WrongPod.
func (a *API) Pod(ctx context.Context, key PodKey) (sidecar.Facts, error) {
	c := call{verb: "get", resource: pods(), namespace: key.Namespace, name: key.Name}
	if !key.valid() {
		return sidecar.Facts{}, a.failed(&c, "", &failure{class: InvalidKey, err: errNoSegment})
	}
	body, err := a.send(ctx, &c)
	if err != nil {
		return sidecar.Facts{}, err
	}
	facts, failed := key.decode(body)
	if failed != nil {
		return sidecar.Facts{}, a.failed(&c, "", failed)
	}
	return facts, nil
}
