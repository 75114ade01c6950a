package selector

import (
	"fmt"
	"maps"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/klog/v2"
)

// Fits reports whether the DaemonSet controller would keep a pod of the DaemonSet on a node, and if not, why. It evaluates
// nodeName, nodeSelector, the required node affinity and taints with the effect NoExecute. It treats a requirement or a
// toleration that it cannot evaluate, for example because of an unknown operator, as met.
func Fits(d *appsv1.DaemonSet, node *corev1.Node) (fits bool, why string) {
	wants := d.Spec.Template.Spec
	if wants.NodeName != "" && wants.NodeName != node.Name {
		return false, clean(fmt.Sprintf("its nodeName is %q", wants.NodeName))
	}
	for _, key := range slices.Sorted(maps.Keys(wants.NodeSelector)) {
		if has, found := node.Labels[key]; !found || has != wants.NodeSelector[key] {
			return false, clean(fmt.Sprintf("its nodeSelector wants the label %s=%s", key, wants.NodeSelector[key]))
		}
	}
	if wants.Affinity != nil && wants.Affinity.NodeAffinity != nil {
		required := wants.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
		met := func(term corev1.NodeSelectorTerm) bool { return matches(node, term) }
		if required != nil && !slices.ContainsFunc(required.NodeSelectorTerms, met) {
			return false, "no term of its required node affinity matches"
		}
	}
	// The DaemonSet controller adds the first two tolerations to its pods
	// (k8s.io/kubernetes/pkg/controller/daemon/util.AddOrUpdateDaemonPodTolerations).
	tolerations := append([]corev1.Toleration{
		{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
		{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
	}, wants.Tolerations...)
	for _, taint := range node.Spec.Taints {
		tolerated := slices.ContainsFunc(tolerations, func(t corev1.Toleration) bool { return tolerates(t, taint) })
		if taint.Effect == corev1.TaintEffectNoExecute && !tolerated {
			return false, clean(fmt.Sprintf("it does not tolerate the taint %s=%s:%s", taint.Key, taint.Value, taint.Effect))
		}
	}
	return true, ""
}

// matches reports whether a node meets all requirements of a term. A term without requirements matches no node.
func matches(n *corev1.Node, term corev1.NodeSelectorTerm) bool {
	for _, field := range term.MatchFields { // the API knows metadata.name, In and NotIn only
		in := field.Operator == corev1.NodeSelectorOpIn
		if (in || field.Operator == corev1.NodeSelectorOpNotIn) && slices.Contains(field.Values, n.Name) != in {
			return false
		}
	}
	for _, label := range term.MatchExpressions {
		operator := map[corev1.NodeSelectorOperator]selection.Operator{
			corev1.NodeSelectorOpIn: selection.In, corev1.NodeSelectorOpNotIn: selection.NotIn,
			corev1.NodeSelectorOpExists: selection.Exists, corev1.NodeSelectorOpDoesNotExist: selection.DoesNotExist,
			corev1.NodeSelectorOpGt: selection.GreaterThan, corev1.NodeSelectorOpLt: selection.LessThan,
		}[label.Operator]
		requirement, err := labels.NewRequirement(label.Key, operator, label.Values)
		if err == nil && !requirement.Matches(labels.Set(n.Labels)) {
			return false
		}
	}
	return len(term.MatchFields)+len(term.MatchExpressions) > 0
}

func tolerates(toleration corev1.Toleration, taint corev1.Taint) bool {
	if toleration.Operator != "" && toleration.Operator != corev1.TolerationOpEqual {
		toleration.Operator = corev1.TolerationOpExists
	}
	return toleration.ToleratesTaint(klog.Logger{}, &taint, false)
}
