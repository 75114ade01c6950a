// Package placement decides on which nodes the DaemonSet controller runs the pods of a template.
//
// It promises that Fits refuses a node only for a reason that it understands: an unknown operator counts as met. It never
// sends a request; package kube reads templates and nodes.
//
// Start reading at Fits.
package placement

import (
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Template is where a pod template wants its pods to be: the part of a pod's specification that binds, by its names in JSON
// (k8s.io/api/core/v1.PodSpec).
type Template struct {
	NodeName     string            `json:"nodeName"`
	NodeSelector map[string]string `json:"nodeSelector"`
	Tolerations  []Toleration      `json:"tolerations"`
	Affinity     struct {
		NodeAffinity struct {
			// Required is nil when no node affinity is required.
			Required *NodeSelector `json:"requiredDuringSchedulingIgnoredDuringExecution"`
		} `json:"nodeAffinity"`
	} `json:"affinity"`
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
	Key      string
	Operator string
	Values   []string
}

// Toleration lets a pod be on a node in spite of a taint.
type Toleration struct {
	Key      string
	Operator string
	Value    string
	Effect   string
}

// Node holds the fields of a node that decide whether a pod may run there.
type Node struct {
	Name   string
	Labels map[string]string
	Taints []Taint
}

// Taint keeps pods from a node.
type Taint struct {
	Key    string
	Value  string
	Effect string
}

// maxReason is for one line of a log.
const maxReason = 256

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

// Fits reports whether the DaemonSet controller would keep a pod of this template on this node, and if not, why not.
// It evaluates nodeName, nodeSelector, the required node affinity and taints with the effect NoExecute. An unknown operator
// counts as met.
func Fits(wants Template, node Node) (fits bool, why string) {
	if wants.NodeName != "" && wants.NodeName != node.Name {
		return false, printable.Text(fmt.Sprintf("its nodeName is %q", wants.NodeName), maxReason)
	}
	for _, key := range slices.Sorted(maps.Keys(wants.NodeSelector)) {
		if has, found := node.Labels[key]; !found || has != wants.NodeSelector[key] {
			return false, printable.Text(fmt.Sprintf("its nodeSelector wants the label %s=%s", key, wants.NodeSelector[key]), maxReason)
		}
	}
	required := wants.Affinity.NodeAffinity.Required
	if required != nil && !slices.ContainsFunc(required.Terms, func(t NodeTerm) bool { return t.holds(node) }) {
		return false, "no term of its required node affinity matches"
	}
	tolerations := append(ownTolerations(), wants.Tolerations...)
	for _, taint := range node.Taints {
		tolerated := slices.ContainsFunc(tolerations, func(t Toleration) bool { return t.tolerates(taint) })
		if taint.Effect == noExecute && !tolerated {
			return false, printable.Text(fmt.Sprintf("it does not tolerate the taint %s=%s:%s", taint.Key, taint.Value, taint.Effect), maxReason)
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

// holds evaluates a requirement as k8s.io/apimachinery/pkg/labels.Requirement does, for values that the API server accepts.
func (r Requirement) holds(labels map[string]string) bool {
	value, found := labels[r.Key]
	switch r.Operator {
	case "In":
		return found && slices.Contains(r.Values, value)
	case "NotIn":
		return !found || !slices.Contains(r.Values, value)
	case "Exists":
		return found
	case "DoesNotExist":
		return !found
	case "Gt", "Lt":
		return found && len(r.Values) == 1 && r.compares(value)
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
	// Exists ignores the value; an unknown operator counts as met.
	return true
}
