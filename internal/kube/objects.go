package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"

	"github.com/meshcni/istio-cni/internal/core/placement"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// Pod is what the program keeps of a pod.
type Pod struct {
	Facts sidecar.Facts
	// aliases are further UIDs by which a runtime knows the pod, see [Pod.Is].
	aliases []string
	// Version is the resourceVersion.
	Version string
	// NodeName is empty for a pod that is not scheduled.
	NodeName string
	// DaemonSet is the name of the one that made the pod, empty for another origin.
	DaemonSet string
	// Addresses are those of status.podIPs, or that of status.podIP where there are none. What is no address is left out.
	Addresses []netip.Addr
	// Phase and RestartPolicy are as the API has them: "Pending", "Running"; "Always", "Never".
	Phase, RestartPolicy string
	// Deleting says that the pod has a deletion timestamp, Ready that its condition Ready is true, ReadySince when that
	// condition became what it is.
	Deleting, Ready bool
	ReadySince      time.Time
	// Init has the statuses of the init containers, native sidecars among them, Containers those of the others.
	Init, Containers []repair.Container
}

// Is reports whether it is the pod that a runtime means: by its UID or, of a pod that the kubelet read from a file, by the
// kubelet's own one.
func (p *Pod) Is(uid string) bool { return uid == p.Facts.UID || slices.Contains(p.aliases, uid) }

// Key is the pod's name.
func (p *Pod) Key() types.NamespacedName {
	return types.NamespacedName{Namespace: p.Facts.Namespace, Name: p.Facts.Name}
}

// Ref names the pod as it was seen, for [Client.DeletePod] and its like.
func (p *Pod) Ref() PodRef {
	return PodRef{Namespace: p.Facts.Namespace, Name: p.Facts.Name, UID: p.Facts.UID, Version: p.Version}
}

// Annotations of a mirror pod, by which the API server shows a pod that the kubelet read from a file
// (k8s.io/kubernetes/pkg/kubelet/types). The runtime knows such a pod by the kubelet's own UID, which is the hash of
// the file; the API object has another.
const (
	configMirrorAnnotation = "kubernetes.io/config.mirror"
	configHashAnnotation   = "kubernetes.io/config.hash"
)

// podOf is the transform of pods, in one place for all callers.
func podOf(p *corev1.Pod) Pod {
	pod := Pod{
		Facts: factsOf(p), Version: p.ResourceVersion, NodeName: p.Spec.NodeName, RestartPolicy: string(p.Spec.RestartPolicy),
		Phase: string(p.Status.Phase), Deleting: p.DeletionTimestamp != nil, Addresses: addressesOf(&p.Status),
		Init: containersOf(p.Status.InitContainerStatuses), Containers: containersOf(p.Status.ContainerStatuses),
	}
	for _, key := range []string{configHashAnnotation, configMirrorAnnotation} {
		if uid := p.Annotations[key]; uid != "" {
			pod.aliases = append(pod.aliases, uid)
		}
	}
	if owner := metav1.GetControllerOfNoCopy(p); owner != nil && owner.Kind == "DaemonSet" {
		pod.DaemonSet = owner.Name
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			pod.Ready, pod.ReadySince = c.Status == corev1.ConditionTrue, c.LastTransitionTime.UTC()
		}
	}
	return pod
}

// factsOf reduces a pod to what a decision rests on. A variable with valueFrom keeps its place and has an empty value.
func factsOf(p *corev1.Pod) sidecar.Facts {
	facts := sidecar.Facts{
		Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), HostNetwork: p.Spec.HostNetwork,
		Labels: p.Labels, Annotations: p.Annotations,
		Containers: make([]sidecar.Container, 0, len(p.Spec.InitContainers)+len(p.Spec.Containers)),
	}
	if security := p.Spec.SecurityContext; security != nil {
		facts.RunAsUser, facts.RunAsGroup = security.RunAsUser, security.RunAsGroup
	}
	for i, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
		container := sidecar.Container{Name: c.Name, Args: c.Args, Init: i < len(p.Spec.InitContainers)}
		if security := c.SecurityContext; security != nil {
			container.RunAsUser, container.RunAsGroup = security.RunAsUser, security.RunAsGroup
		}
		for _, variable := range c.Env {
			container.Env = append(container.Env, sidecar.EnvVar{Name: variable.Name, Value: variable.Value})
		}
		facts.Containers = append(facts.Containers, container)
	}
	return facts
}

// addressesOf are those that are any. An IPv4 address that is spelled as an IPv6 one is the IPv4 address.
func addressesOf(s *corev1.PodStatus) []netip.Addr {
	from := s.PodIPs
	if len(from) == 0 {
		from = []corev1.PodIP{{IP: s.PodIP}}
	}
	var all []netip.Addr
	for _, one := range from {
		if address, err := netip.ParseAddr(one.IP); err == nil {
			all = append(all, address.Unmap())
		}
	}
	return all
}

func containersOf(from []corev1.ContainerStatus) []repair.Container {
	var all []repair.Container
	for _, c := range from {
		all = append(all, repair.Container{Name: c.Name, State: stateOf(c.State), Last: stateOf(c.LastTerminationState)})
	}
	return all
}

func stateOf(s corev1.ContainerState) repair.State {
	switch {
	case s.Waiting != nil:
		return repair.State{Reason: s.Waiting.Reason, Message: s.Waiting.Message}
	case s.Running != nil:
		return repair.State{Running: true, Began: s.Running.StartedAt.UTC()}
	case s.Terminated != nil:
		return repair.State{
			Terminated: true, Reason: s.Terminated.Reason, Message: s.Terminated.Message, ExitCode: int(s.Terminated.ExitCode),
			Began: s.Terminated.StartedAt.UTC(), Finished: s.Terminated.FinishedAt.UTC(),
		}
	}
	return repair.State{}
}

// NodeState is a node as far as a taint controller looks at it.
type NodeState struct {
	readiness.Node
	UID string
	// Condition is the one that was asked for, zero when the node has none of that type.
	Condition NodeCondition

	// version is the resourceVersion.
	version string
}

// NodeCondition is a condition of a node (k8s.io/api/core/v1.NodeCondition).
type NodeCondition struct {
	Type, Status, Reason, Message string
	// Since is when the status became what it is.
	Since time.Time
}

// SameBut reports whether only the heartbeat changed.
func (n NodeState) SameBut(other NodeState) bool {
	return n.UID == other.UID && slices.Equal(n.Taints, other.Taints) && n.Condition == other.Condition &&
		n.Ready == other.Ready && n.ReadySince.Equal(other.ReadySince) && n.BootID == other.BootID && n.Created.Equal(other.Created)
}

// Before reports whether this is an earlier state of the same node. Versions that cannot be compared are not.
func (n NodeState) Before(other NodeState) bool {
	order, err := resourceversion.CompareResourceVersion(n.version, other.version)
	return n.UID == other.UID && err == nil && order < 0
}

// nodeOf reduces a node; condition is the type of the condition that is kept, or empty.
func nodeOf(n *corev1.Node, condition string) NodeState {
	state := NodeState{
		Node: readiness.Node{Name: n.Name, Created: n.CreationTimestamp.UTC(), BootID: n.Status.NodeInfo.BootID},
		UID:  string(n.UID), version: n.ResourceVersion,
	}
	for _, taint := range n.Spec.Taints {
		state.Taints = append(state.Taints, readiness.Taint{Key: taint.Key, Value: taint.Value, Effect: string(taint.Effect)})
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			state.Ready, state.ReadySince = c.Status == corev1.ConditionTrue, c.LastTransitionTime.UTC()
			state.Heartbeat = c.LastHeartbeatTime.UTC()
		}
		if string(c.Type) == condition {
			state.Condition = NodeCondition{
				Type: condition, Status: string(c.Status), Reason: c.Reason, Message: c.Message, Since: c.LastTransitionTime.UTC(),
			}
		}
	}
	return state
}

// DaemonSet is what the agent wants to know about its own one.
type DaemonSet struct {
	Namespace, Name, UID string
	// Deleting says that it has a deletion timestamp: its removal was asked for and has not ended yet.
	Deleting bool
	// Template is where its template wants pods to be.
	Template placement.Template
}

// Node is a node as far as its agent looks at it.
type Node struct {
	placement.Node
	// Runtime is the container runtime with its version, such as "containerd://2.2.0".
	Runtime string
}

// DaemonSet fetches one: GET /apis/apps/v1/namespaces/NAMESPACE/daemonsets/NAME.
func (c *Client) DaemonSet(ctx context.Context, namespace, name string) (DaemonSet, error) {
	object, err := get[*appsv1.DaemonSet](ctx, c, daemonSets(), namespace, name)
	if err != nil {
		return DaemonSet{}, err
	}
	return DaemonSet{
		Namespace: object.Namespace, Name: object.Name, UID: string(object.UID), Deleting: object.DeletionTimestamp != nil,
		Template: convert[placement.Template](object.Spec.Template.Spec),
	}, nil
}

// convert copies by the names that both types have in JSON.
func convert[T any](from any) (to T) {
	data, err := json.Marshal(from)
	if err == nil {
		err = json.Unmarshal(data, &to)
	}
	utilruntime.Must(err) // both types are this program's
	return to
}

// Node fetches one: GET /api/v1/nodes/NAME.
func (c *Client) Node(ctx context.Context, name string) (Node, error) {
	object, err := get[*corev1.Node](ctx, c, nodes(), "", name)
	if err != nil {
		return Node{}, err
	}
	return Node{
		Node:    placement.Node{Name: object.Name, Labels: object.Labels, Taints: convert[[]placement.Taint](object.Spec.Taints)},
		Runtime: object.Status.NodeInfo.ContainerRuntimeVersion,
	}, nil
}

// PodKey says which pod is meant.
type PodKey struct {
	Namespace, Name string
	// UID is what the container runtime gave; empty accepts any pod of that name.
	UID string
}

// String is the namespace and name as kubectl users write them.
func (k PodKey) String() string { return clean(k.Namespace + "/" + k.Name) }

// Pod fetches one pod: GET /api/v1/namespaces/NAMESPACE/pods/NAME, once. Another pod of that name, by its UID, is a WrongPod.
func (c *Client) Pod(ctx context.Context, key PodKey) (Pod, error) {
	object, err := get[*corev1.Pod](ctx, c, pods(), key.Namespace, key.Name)
	if err != nil {
		return Pod{}, err
	}
	pod := podOf(object)
	if key.UID != "" && !pod.Is(key.UID) {
		x := &exchange{client: c, call: &call{verb: "get", resource: pods(), namespace: key.Namespace, name: key.Name}}
		return Pod{}, x.fail(WrongPod, fmt.Errorf("asked for %s with UID %q, got UID %q", key, key.UID, pod.Facts.UID))
	}
	return pod, nil
}
