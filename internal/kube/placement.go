package kube

import (
	"fmt"
	"maps"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
)

// Placement is where a pod template wants its pods to be, cut down to what binds (k8s.io/api/core/v1.PodSpec).
type Placement struct {
	NodeName     string
	NodeSelector map[string]string
	// Required is the node affinity that is required, nil when there is none.
	Required    *NodeSelector
	Tolerations []Toleration
}

// NodeSelector holds for a node for which one of its terms holds.
type NodeSelector struct {
	Terms []NodeTerm `json:"nodeSelectorTerms"`
}

// NodeTerm holds for a node for which all its requirements hold; one without any holds for none.
type NodeTerm struct {
	Labels []Requirement `json:"matchExpressions"`
	// Fields knows one field, metadata.name.
	Fields []Requirement `json:"matchFields"`
}

// Requirement is about one label or field. Operators are In, NotIn, Exists, DoesNotExist, Gt and Lt.
type Requirement struct {
	Key      string   `json:"key"`
	Operator string   `json:"operator"`
	Values   []string `json:"values,omitempty"`
}

// Toleration lets a pod be on a node in spite of a taint.
type Toleration struct {
	Key      string `json:"key"`
	Operator string `json:"operator"`
	Value    string `json:"value"`
	Effect   string `json:"effect"`
}

// Taint keeps pods from a node.
type Taint struct {
	Key    string `json:"key"`
	Value  string `json:"value"`
	Effect string `json:"effect"`
}

func placementOf(p *corev1.PodSpec) Placement {
	placement := Placement{NodeName: p.NodeName, NodeSelector: p.NodeSelector}
	for _, t := range p.Tolerations {
		placement.Tolerations = append(placement.Tolerations, Toleration{
			Key: t.Key, Operator: string(t.Operator), Value: t.Value, Effect: string(t.Effect),
		})
	}
	if p.Affinity == nil || p.Affinity.NodeAffinity == nil || p.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return placement
	}
	placement.Required = &NodeSelector{}
	for _, term := range p.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		placement.Required.Terms = append(placement.Required.Terms, NodeTerm{
			Labels: requirementsOf(term.MatchExpressions), Fields: requirementsOf(term.MatchFields),
		})
	}
	return placement
}

func requirementsOf(from []corev1.NodeSelectorRequirement) []Requirement {
	var all []Requirement
	for _, r := range from {
		all = append(all, Requirement{Key: r.Key, Operator: string(r.Operator), Values: r.Values})
	}
	return all
}

// noExecute is the effect of a taint that drives running pods away. The others keep new ones out only.
const noExecute = "NoExecute"

// ownTolerations are those against NoExecute that the DaemonSet controller adds to each of its pods
// (k8s.io/kubernetes/pkg/controller/daemon/util.AddOrUpdateDaemonPodTolerations).
func ownTolerations() []Toleration {
	return []Toleration{
		{Key: "node.kubernetes.io/not-ready", Operator: "Exists", Effect: noExecute},
		{Key: "node.kubernetes.io/unreachable", Operator: "Exists", Effect: noExecute},
	}
}

// FitsNode tells whether the DaemonSet controller would keep a pod of this template on this node, and if not, why not.
// It looks at nodeName, nodeSelector, the required node affinity and at taints with the effect NoExecute. An operator
// that is not known here decides nothing: only a reason that is understood says no.
func FitsNode(set DaemonSet, node Node) (fits bool, why string) {
	wants := set.Placement
	if wants.NodeName != "" && wants.NodeName != node.Name {
		return false, fmt.Sprintf("its nodeName is %q", clean(wants.NodeName))
	}
	for _, key := range slices.Sorted(maps.Keys(wants.NodeSelector)) {
		if has, found := node.Labels[key]; !found || has != wants.NodeSelector[key] {
			return false, clean(fmt.Sprintf("its nodeSelector wants the label %s=%s", key, wants.NodeSelector[key]))
		}
	}
	if wants.Required != nil && !slices.ContainsFunc(wants.Required.Terms, func(t NodeTerm) bool { return t.holds(node) }) {
		return false, "no term of its required node affinity matches"
	}
	tolerations := append(ownTolerations(), wants.Tolerations...)
	for _, taint := range node.Taints {
		tolerated := slices.ContainsFunc(tolerations, func(t Toleration) bool { return t.tolerates(taint) })
		if taint.Effect == noExecute && !tolerated {
			return false, clean(fmt.Sprintf("it does not tolerate the taint %s=%s:%s", taint.Key, taint.Value, taint.Effect))
		}
	}
	return true, ""
}

func (t NodeTerm) holds(node Node) bool {
	if len(t.Labels) == 0 && len(t.Fields) == 0 {
		return false
	}
	for _, requirement := range t.Labels {
		if !requirement.holds(node.Labels) {
			return false
		}
	}
	fields := map[string]string{"metadata.name": node.Name}
	for _, requirement := range t.Fields {
		if !requirement.holdsForField(fields) {
			return false
		}
	}
	return true
}

// holds is what k8s.io/apimachinery/pkg/labels.Requirement decides; one that it refuses holds for no node.
func (r Requirement) holds(labels map[string]string) bool {
	value, found := labels[r.Key]
	notValue := func(text string) bool { return text != "" && !validLabelText(text) }
	switch r.Operator {
	case "In":
		return found && slices.Contains(r.Values, value) && !slices.ContainsFunc(r.Values, notValue)
	case "NotIn":
		return len(r.Values) > 0 && !slices.ContainsFunc(r.Values, notValue) && (!found || !slices.Contains(r.Values, value))
	case "Exists":
		return found && len(r.Values) == 0
	case "DoesNotExist":
		return !found && len(r.Values) == 0
	case "Gt", "Lt":
		return found && len(r.Values) == 1 && !notValue(r.Values[0]) && r.compares(value)
	}
	return true
}

// compares is Gt or Lt with a node's value.
func (r Requirement) compares(value string) bool {
	has, err := strconv.ParseInt(value, 10, 64)
	limit, limitErr := strconv.ParseInt(r.Values[0], 10, 64)
	if err != nil || limitErr != nil {
		return false
	}
	return r.Operator == "Gt" && has > limit || r.Operator == "Lt" && has < limit
}

// holdsForField is the same for a field, where only In and NotIn with one value are allowed.
func (r Requirement) holdsForField(fields map[string]string) bool {
	switch r.Operator {
	case "In":
		return len(r.Values) == 1 && fields[r.Key] == r.Values[0]
	case "NotIn":
		return len(r.Values) == 1 && fields[r.Key] != r.Values[0]
	case "Exists", "DoesNotExist", "Gt", "Lt":
		return false
	}
	return true
}

func (t Toleration) tolerates(taint Taint) bool {
	if t.Effect != "" && t.Effect != taint.Effect || t.Key != "" && t.Key != taint.Key {
		return false
	}
	switch t.Operator {
	case "", "Equal":
		return t.Value == taint.Value
	}
	// Exists does not look at the value, and what else there may be is not known here.
	return true
}
