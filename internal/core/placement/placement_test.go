package placement

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
)

// TestRequirementsAgreeWithTheLibrary tries all combinations of what a requirement is made of.
func TestRequirementsAgreeWithTheLibrary(t *testing.T) {
	operators := map[string]selection.Operator{
		"In": selection.In, "NotIn": selection.NotIn, "Exists": selection.Exists, "DoesNotExist": selection.DoesNotExist,
		"Gt": selection.GreaterThan, "Lt": selection.LessThan,
	}
	lists := [][]string{nil, {""}, {"a"}, {"7"}, {"9"}, {"-1"}, {"a", "8"}, {"x", "9223372036854775808"}, {"9223372036854775808"}}
	nodes := []map[string]string{nil, {"k": ""}, {"k": "a"}, {"k": "8"}, {"k": "08"}, {"k": "-2"}, {"other": "a"}}
	tried := 0
	for operator, theirs := range operators {
		for _, values := range lists {
			requirement, err := labels.NewRequirement("k", theirs, values)
			for _, node := range nodes {
				if err != nil {
					continue // no object has it
				}
				tried++
				want := requirement.Matches(labels.Set(node))
				if got := (Requirement{Key: "k", Operator: operator, Values: values}).holds(node); got != want {
					t.Errorf("%s %q for %v: got %v, want %v", operator, values, node, got, want)
				}
			}
		}
	}
	if tried != 20*7 {
		t.Errorf("tried %d combinations", tried)
	}
}

// TestTolerationsAgreeWithTheLibrary does the same, for the operators that decide something here.
func TestTolerationsAgreeWithTheLibrary(t *testing.T) {
	for _, key := range []string{"", "k", "j"} {
		for _, operator := range []string{"", "Equal", "Exists"} {
			for _, value := range []string{"", "v", "w"} {
				for _, effect := range []string{"", "NoExecute", "NoSchedule"} {
					for _, taint := range []Taint{{"k", "v", "NoExecute"}, {"k", "", "NoSchedule"}} {
						library := corev1.Toleration{
							Key: key, Operator: corev1.TolerationOperator(operator), Value: value, Effect: corev1.TaintEffect(effect),
						}
						want := judge(library.ToleratesTaint, corev1.Taint{Key: taint.Key, Value: taint.Value, Effect: corev1.TaintEffect(taint.Effect)})
						if got := (Toleration{key, operator, value, effect}).tolerates(taint); got != want {
							t.Errorf("%v for %v: got %v, want %v", library, taint, got, want)
						}
					}
				}
			}
		}
	}
}

// judge asks the library, whose logger is of a type that nothing else here needs.
func judge[L any](tolerates func(L, *corev1.Taint, bool) bool, taint corev1.Taint) bool {
	var silent L
	return tolerates(silent, &taint, true)
}
