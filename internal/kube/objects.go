package kube

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/utils/ptr"

	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// Pod has the fields of a pod that the program reads.
type Pod struct {
	Facts sidecar.Facts
	// aliases are other UIDs that a container runtime can have for the pod, see [Pod.Is].
	aliases []string
	// Version is the resourceVersion.
	Version string
	// NodeName is empty for a pod that is not scheduled.
	NodeName string
	// DaemonSet is the name of the DaemonSet that controls the pod, or empty.
	DaemonSet string
	// Addresses are the valid addresses of status.podIPs, or of status.podIP if podIPs is empty.
	Addresses []netip.Addr
	// Phase and RestartPolicy have the API's values: "Pending", "Running"; "Always", "Never".
	Phase, RestartPolicy string
	// SchedulerName and ServiceAccount are for field selectors.
	SchedulerName, ServiceAccount string
	// Deleting reports a deletion timestamp, Ready the condition Ready with status True. ReadySince is the condition's last
	// transition time.
	Deleting, Ready bool
	ReadySince      time.Time
	// Verified is the condition of type [RedirectionVerified], or zero.
	Verified Condition
	// Started is the time when the kubelet accepted the pod (status.startTime), or zero.
	Started time.Time
	// Init has the statuses of the init containers, including native sidecars, Ephemeral the statuses of ephemeral containers
	// (kubectl debug), Containers all others.
	Init, Containers, Ephemeral []repair.Container
}

// Fields returns the values of the fields by which the API server selects pods (k8s.io/kubernetes/pkg/registry/core/pod.ToSelectableFields),
// except status.nominatedNodeName, which is irrelevant for a pod on a node.
func (p *Pod) Fields() fields.Set {
	var address string
	if len(p.Addresses) > 0 {
		address = p.Addresses[0].String()
	}
	return fields.Set{
		"metadata.name": p.Facts.Name, "metadata.namespace": p.Facts.Namespace, "spec.nodeName": p.NodeName, "spec.restartPolicy": p.RestartPolicy,
		"spec.schedulerName": p.SchedulerName, "spec.serviceAccountName": p.ServiceAccount,
		"spec.hostNetwork": strconv.FormatBool(p.Facts.HostNetwork), "status.phase": p.Phase, "status.podIP": address,
	}
}

// RedirectionVerified is the type of the pod condition that the audit publishes.
const RedirectionVerified = "cni.istio.io/RedirectionVerified"

// Is reports whether a runtime's UID identifies this pod: it is the object's UID or, for a static pod, the kubelet's own UID.
func (p *Pod) Is(uid string) bool { return uid == p.Facts.UID || slices.Contains(p.aliases, uid) }

// Key returns the pod's namespace and name.
func (p *Pod) Key() types.NamespacedName {
	return types.NamespacedName{Namespace: p.Facts.Namespace, Name: p.Facts.Name}
}

// Ref returns a reference to the pod at its version, for [Client.DeletePod] and similar methods.
func (p *Pod) Ref() PodRef {
	return PodRef{Namespace: p.Facts.Namespace, Name: p.Facts.Name, UID: p.Facts.UID, Version: p.Version}
}

// Annotations of a mirror pod (k8s.io/kubernetes/pkg/kubelet/types). A mirror pod is the API object of a static pod, which the
// kubelet reads from a file. The runtime has the kubelet's own UID for the pod, a hash of the file; the API object has another
// UID.
const (
	configMirrorAnnotation = "kubernetes.io/config.mirror"
	configHashAnnotation   = "kubernetes.io/config.hash"
)

// podOf reduces a pod, for all callers.
func podOf(p *corev1.Pod) Pod {
	pod := Pod{
		Facts: factsOf(p), Version: p.ResourceVersion, NodeName: p.Spec.NodeName, RestartPolicy: string(p.Spec.RestartPolicy),
		SchedulerName: p.Spec.SchedulerName, ServiceAccount: p.Spec.ServiceAccountName,
		Phase: string(p.Status.Phase), Deleting: p.DeletionTimestamp != nil, Addresses: addressesOf(&p.Status),
		Init: containersOf(p.Status.InitContainerStatuses), Containers: containersOf(p.Status.ContainerStatuses),
		Ephemeral: containersOf(p.Status.EphemeralContainerStatuses), Started: ptr.Deref(p.Status.StartTime, metav1.Time{}).UTC(),
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
		if c.Type == RedirectionVerified {
			pod.Verified = Condition{RedirectionVerified, string(c.Status), c.Reason, c.Message, c.LastTransitionTime.UTC()}
		}
	}
	return pod
}

// factsOf reduces a pod to the fields for decisions. A variable with valueFrom keeps its place and has an empty value.
func factsOf(p *corev1.Pod) sidecar.Facts {
	security := ptr.Deref(p.Spec.SecurityContext, corev1.PodSecurityContext{})
	facts := sidecar.Facts{
		Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), HostNetwork: p.Spec.HostNetwork, RuntimeClass: ptr.Deref(p.Spec.RuntimeClassName, ""),
		Labels: p.Labels, Annotations: p.Annotations, RunAsUser: security.RunAsUser, RunAsGroup: security.RunAsGroup,
		Containers: make([]sidecar.Container, 0, len(p.Spec.InitContainers)+len(p.Spec.Containers)),
	}
	for i, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
		security := ptr.Deref(c.SecurityContext, corev1.SecurityContext{})
		container := sidecar.Container{
			Name: c.Name, Args: c.Args, Init: i < len(p.Spec.InitContainers), RunAsUser: security.RunAsUser, RunAsGroup: security.RunAsGroup,
		}
		for _, variable := range c.Env {
			container.Env = append(container.Env, sidecar.EnvVar{Name: variable.Name, Value: variable.Value})
		}
		facts.Containers = append(facts.Containers, container)
	}
	return facts
}

// addressesOf returns the valid addresses. An IPv4-mapped IPv6 address becomes the IPv4 address.
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
		_, id, _ := strings.Cut(c.ContainerID, "://")
		all = append(all, repair.Container{Name: c.Name, ID: id, State: stateOf(c.State), Last: stateOf(c.LastTerminationState)})
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

// NodeState has the fields of a node that a taint controller reads.
type NodeState struct {
	readiness.Node
	UID string
	// Condition is the requested condition, or zero.
	Condition Condition

	// version is the resourceVersion.
	version string
}

// Condition is a condition of a node or of a pod (k8s.io/api/core/v1.NodeCondition, PodCondition).
type Condition struct {
	Type, Status, Reason, Message string
	// Since is the last transition time of the status.
	Since time.Time
}

// Says reports whether two conditions are equal but for their times.
func (c Condition) Says(other Condition) bool {
	c.Since = other.Since
	return c == other
}

// transition returns the last transition time of a condition that replaces c at the time now.
func (c Condition) transition(want Condition, now time.Time) time.Time {
	if c.Type == want.Type && c.Status == want.Status {
		return c.Since
	}
	return now
}

// SameBut reports whether the states are equal but for the heartbeat.
func (n NodeState) SameBut(other NodeState) bool {
	return n.UID == other.UID && slices.Equal(n.Taints, other.Taints) && n.Condition == other.Condition &&
		n.Ready == other.Ready && n.ReadySince.Equal(other.ReadySince) && n.BootID == other.BootID && n.Created.Equal(other.Created)
}

// Before reports whether n is an earlier state of the same node. It returns false for incomparable versions.
func (n NodeState) Before(other NodeState) bool {
	order, err := resourceversion.CompareResourceVersion(n.version, other.version)
	return n.UID == other.UID && err == nil && order < 0
}

// nodeOf reduces a node. condition is the type of the condition to keep, or empty.
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
			state.Condition = Condition{
				Type: condition, Status: string(c.Status), Reason: c.Reason, Message: c.Message, Since: c.LastTransitionTime.UTC(),
			}
		}
	}
	return state
}

// DaemonSet is a whole object, because an agent only fetches its own, and seldom.
type DaemonSet = appsv1.DaemonSet

// Node is a whole object, like [DaemonSet].
type Node = corev1.Node

// DaemonSet fetches a DaemonSet: GET /apis/apps/v1/namespaces/NAMESPACE/daemonsets/NAME.
func (c *Client) DaemonSet(ctx context.Context, namespace, name string) (*DaemonSet, error) {
	return get[*DaemonSet](ctx, c, daemonSets(), namespace, name)
}

// Node fetches a node: GET /api/v1/nodes/NAME.
func (c *Client) Node(ctx context.Context, name string) (*Node, error) {
	return get[*Node](ctx, c, nodes(), "", name)
}

// Namespace has the fields of a namespace that a watch keeps.
type Namespace struct {
	Name   string
	Labels map[string]string
}

// PodSelected is [Client.Pod] with [sidecar.Facts.Selected] by selects, the enablement selectors of ambient mode. A second request fetches
// the labels of the namespace, unless the pod is not eligible or selects is nil.
func (c *Client) PodSelected(ctx context.Context, ref PodRef, selects func(pod, namespace map[string]string) bool) (Pod, error) {
	pod, err := c.Pod(ctx, ref)
	if err != nil || selects == nil || !pod.Facts.Eligible() {
		return pod, err
	}
	namespace, err := get[*corev1.Namespace](ctx, c, namespaces(), "", ref.Namespace)
	if err != nil {
		return Pod{}, err
	}
	pod.Facts.Selected = selects(pod.Facts.Labels, namespace.Labels)
	return pod, nil
}

// Pod fetches one pod: GET /api/v1/namespaces/NAMESPACE/pods/NAME, once. The UID may be a container runtime's. A pod of the same name
// with another UID is an error of class WrongPod. An empty UID accepts any pod of the name. Pod ignores ref's version.
func (c *Client) Pod(ctx context.Context, ref PodRef) (Pod, error) {
	object, err := get[*corev1.Pod](ctx, c, pods(), ref.Namespace, ref.Name)
	if err != nil {
		return Pod{}, err
	}
	pod := podOf(object)
	if ref.UID != "" && !pod.Is(ref.UID) {
		x := &exchange{client: c, call: &call{verb: "get", resource: pods(), namespace: ref.Namespace, name: ref.Name}}
		return Pod{}, x.fail(WrongPod, fmt.Errorf("requested %s with UID %q, got UID %q", pod.Key(), ref.UID, pod.Facts.UID))
	}
	return pod, nil
}
