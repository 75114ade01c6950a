package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// NodePod is a pod as far as one looks at it who cares for those of a node.
type NodePod struct {
	Facts sidecar.Facts
	// aliases are further UIDs by which a runtime knows the pod, see [NodePod.Is].
	aliases []string
	// Version is the resourceVersion.
	Version string
	// NodeName is empty for a pod that is not scheduled.
	NodeName string
	// Addresses are those of status.podIPs, or that of status.podIP where there are none. What is no address is left out.
	Addresses []netip.Addr
	// Phase and RestartPolicy are as the API has them: "Pending", "Running"; "Always", "Never".
	Phase, RestartPolicy string
	// Deleting says that the pod was told to end, Ready that its condition Ready is true.
	Deleting, Ready bool
	// InitStatuses are of the init containers, native sidecars among them, Statuses of the others.
	InitStatuses, Statuses []ContainerStatus
}

// Is tells whether it is the pod that a runtime means: by its UID or, of a pod that the kubelet read from a file, by the
// kubelet's own one.
func (p *NodePod) Is(uid string) bool { return uid == p.Facts.UID || slices.Contains(p.aliases, uid) }

// Ref names the pod as it was seen, for [API.DeletePod] and its like.
func (p *NodePod) Ref() PodRef {
	return PodRef{Namespace: p.Facts.Namespace, Name: p.Facts.Name, UID: p.Facts.UID, Version: p.Version}
}

// ContainerStatus is how a container fares (k8s.io/api/core/v1.ContainerStatus).
type ContainerStatus struct {
	Name string
	// State is the one it is in, Last that of its run before this, [StateNone] when it was never started anew.
	State, Last ContainerState
	Ready       bool
	Restarts    int
}

// ContainerState is one state of a container. Fields that its kind does not have are zero.
type ContainerState struct {
	Kind StateKind
	// Reason and Message are of the kinds waiting and terminated, ExitCode and Finished of terminated alone.
	Reason, Message   string
	ExitCode          int
	Started, Finished time.Time
}

// StateKind is the kind of a [ContainerState]. It is a closed set.
type StateKind string

// The kinds. None is what there was no word of.
const (
	StateNone       StateKind = ""
	StateWaiting    StateKind = "waiting"
	StateRunning    StateKind = "running"
	StateTerminated StateKind = "terminated"
)

// PodScope says which pods are followed, of all namespaces. It is the API server that selects: no other pod is ever sent.
type PodScope struct {
	// Node is the node whose pods they are; empty means those of all nodes and those of none.
	Node string
	// LabelSelector and FieldSelector are as kubectl takes them, empty for no restriction; see [CheckSelector] and
	// [CheckFieldSelector].
	LabelSelector, FieldSelector string
	// Keep may drop what the caller does not need of a pod before it is remembered and told, unless nil.
	Keep func(*NodePod)
}

// selection is the query of a scope. "spec.nodeName=" without a name would pick the pods that no node has.
func (s PodScope) selection() url.Values {
	query := url.Values{}
	if s.LabelSelector != "" {
		query.Set("labelSelector", s.LabelSelector)
	}
	fields := s.FieldSelector
	if s.Node != "" {
		if fields != "" {
			fields += ","
		}
		fields += "spec.nodeName=" + s.Node
	}
	if fields != "" {
		query.Set("fieldSelector", fields)
	}
	return query
}

// FollowNodePods keeps the pods of a scope in sight until ctx ends. A node whose name cannot be one is told as a trouble
// at once.
func (a *API) FollowNodePods(ctx context.Context, scope PodScope, tell Listener[NodePod]) {
	if scope.Node != "" && !validSubdomain(scope.Node) {
		c := call{verb: "watch", resource: pods(), name: scope.Node}
		tell.Trouble(a.failed(&c, "", &failure{class: InvalidKey, err: errNoNode}))
		return
	}
	decode := func(object []byte) (NodePod, error) {
		pod, err := decodeNodePod(object)
		if err == nil && scope.Keep != nil {
			scope.Keep(&pod)
		}
		return pod, err
	}
	follow(ctx, a, collection{resource: pods(), selection: scope.selection()}, decode, tell.changes())
}

var errNoNode = errors.New("the name cannot be a node's")

// The rest of a pod's wire form, besides what is in facts.go. Names are those of k8s.io/api/core/v1.
type (
	wireNodePod struct {
		Metadata struct {
			wireMeta

			Version  string `json:"resourceVersion"`
			Deletion string `json:"deletionTimestamp"`
		} `json:"metadata"`
		Spec struct {
			wireSpec

			NodeName      string `json:"nodeName"`
			RestartPolicy string `json:"restartPolicy"`
		} `json:"spec"`
		Status wirePodStatus `json:"status"`
	}
	wirePodStatus struct {
		Phase string `json:"phase"`
		IP    string `json:"podIP"`
		IPs   []struct {
			IP string `json:"ip"`
		} `json:"podIPs"`
		Conditions   []wireNodeCondition   `json:"conditions"`
		InitStatuses []wireContainerStatus `json:"initContainerStatuses"`
		Statuses     []wireContainerStatus `json:"containerStatuses"`
	}
	wireContainerStatus struct {
		Name     string    `json:"name"`
		State    wireState `json:"state"`
		Last     wireState `json:"lastState"`
		Ready    bool      `json:"ready"`
		Restarts int       `json:"restartCount"`
	}
	wireState struct {
		Waiting    *wireStateDetail `json:"waiting"`
		Running    *wireStateDetail `json:"running"`
		Terminated *wireStateDetail `json:"terminated"`
	}
	wireStateDetail struct {
		Reason   string    `json:"reason"`
		Message  string    `json:"message"`
		ExitCode int       `json:"exitCode"`
		Started  time.Time `json:"startedAt,omitzero"`
		Finished time.Time `json:"finishedAt,omitzero"`
	}
)

func decodeNodePod(object []byte) (NodePod, error) {
	var wire wireNodePod
	if err := json.Unmarshal(object, &wire); err != nil {
		return NodePod{}, err
	}
	base := wirePod{Metadata: wire.Metadata.wireMeta, Spec: wire.Spec.wireSpec}
	pod := NodePod{
		Facts: base.facts(), Version: wire.Metadata.Version, Deleting: wire.Metadata.Deletion != "",
		NodeName: wire.Spec.NodeName, RestartPolicy: wire.Spec.RestartPolicy,
		Phase: wire.Status.Phase, Addresses: wire.Status.addresses(),
		InitStatuses: containerStatuses(wire.Status.InitStatuses), Statuses: containerStatuses(wire.Status.Statuses),
	}
	for _, key := range []string{configHashAnnotation, configMirrorAnnotation} {
		if uid := pod.Facts.Annotations[key]; uid != "" {
			pod.aliases = append(pod.aliases, uid)
		}
	}
	for _, c := range wire.Status.Conditions {
		if c.Type == readyCondition {
			pod.Ready = c.Status == conditionTrue
		}
	}
	return pod, nil
}

// addresses are those that are any. An IPv4 address that is spelled as an IPv6 one is the IPv4 address.
func (s *wirePodStatus) addresses() []netip.Addr {
	texts := make([]string, 0, len(s.IPs))
	for _, one := range s.IPs {
		texts = append(texts, one.IP)
	}
	if len(texts) == 0 {
		texts = append(texts, s.IP)
	}
	var all []netip.Addr
	for _, text := range texts {
		if address, err := netip.ParseAddr(text); err == nil {
			all = append(all, address.Unmap())
		}
	}
	return all
}

func containerStatuses(from []wireContainerStatus) []ContainerStatus {
	var all []ContainerStatus
	for _, one := range from {
		all = append(all, ContainerStatus{
			Name: one.Name, State: one.State.state(), Last: one.Last.state(), Ready: one.Ready, Restarts: one.Restarts,
		})
	}
	return all
}

func (s *wireState) state() ContainerState {
	for _, kind := range []struct {
		is     StateKind
		detail *wireStateDetail
	}{{StateWaiting, s.Waiting}, {StateRunning, s.Running}, {StateTerminated, s.Terminated}} {
		if d := kind.detail; d != nil {
			return ContainerState{
				Kind: kind.is, Reason: d.Reason, Message: d.Message, ExitCode: d.ExitCode, Started: d.Started, Finished: d.Finished,
			}
		}
	}
	return ContainerState{}
}

// CheckFieldSelector says what is wrong with a field selector in the form of kubectl's --field-selector
// (k8s.io/apimachinery/pkg/fields.ParseSelector): terms between commas, each "field=value", "field==value" or
// "field!=value", in values a backslash before each backslash, comma and equals sign that belongs to them. Empty text and empty
// terms restrict nothing. Which fields there are is the API server's to say; spaces around terms it does not forgive.
func CheckFieldSelector(text string) error {
	var wrong []error
	for _, term := range fieldTerms(text) {
		if err := checkFieldTerm(term); err != nil {
			wrong = append(wrong, fmt.Errorf("field selector %q: %w", clean(text), err))
		}
	}
	return errors.Join(wrong...)
}

// fieldTerms cuts at commas without a backslash before them, and leaves out what is empty.
func fieldTerms(text string) []string {
	var terms []string
	begin, escaped := 0, false
	for i := 0; i <= len(text); i++ {
		switch {
		case i == len(text) || text[i] == ',' && !escaped:
			if i > begin {
				terms = append(terms, text[begin:i])
			}
			begin = i + 1
		case text[i] == '\\' && !escaped:
			escaped = true
			continue
		}
		escaped = false
	}
	return terms
}

func checkFieldTerm(term string) error {
	at := strings.IndexAny(term, "!=")
	if at < 0 {
		return fmt.Errorf("term %q: wants field=value, field==value or field!=value", clean(term))
	}
	field, value := term[:at], term[at:]
	for _, operator := range []string{"!=", "==", "="} {
		rest, found := strings.CutPrefix(value, operator)
		if !found {
			continue
		}
		if !validField(field) {
			return fmt.Errorf("term %q: %q is not the path of a field", clean(term), clean(field))
		}
		return checkFieldValue(term, rest)
	}
	return fmt.Errorf("term %q: wants field=value, field==value or field!=value", clean(term))
}

// validField accepts letters and digits in parts between dots.
func validField(path string) bool {
	for part := range strings.SplitSeq(path, ".") {
		for i := range len(part) {
			if !alphanumeric(part[i]) {
				return false
			}
		}
		if part == "" {
			return false
		}
	}
	return true
}

func checkFieldValue(term, value string) error {
	escaped := false
	for _, c := range value {
		special := strings.ContainsRune(`\,=`, c)
		switch {
		case escaped && !special, !escaped && c == '=':
			return fmt.Errorf("term %q: wants a backslash before each backslash, comma and equals sign of the value, and before "+
				"nothing else", clean(term))
		}
		escaped = c == '\\' && !escaped
	}
	if escaped {
		return fmt.Errorf("term %q: ends with a backslash", clean(term))
	}
	return nil
}
