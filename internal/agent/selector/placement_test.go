package selector

import (
	"encoding/json"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestFits decodes templates and taints from the JSON of the API.
func TestFits(t *testing.T) {
	affinity := func(terms string) string {
		return `{"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [` +
			terms + `]}}}}`
	}
	expression := func(key, operator, values string) string {
		return `{"key": "` + key + `", "operator": "` + operator + `", "values": [` + values + `]}`
	}
	matching := func(expressions ...string) string {
		return `{"matchExpressions": [` + strings.Join(expressions, ",") + `]}`
	}
	field := func(operator, values string) string {
		return `{"matchFields": [` + expression("metadata.name", operator, values) + `]}`
	}
	const keep = ""
	for _, test := range []struct {
		name, spec, taints string
		why                string // empty when it fits
	}{
		{"no constraint", `{}`, ``, keep},
		{"its nodeName", `{"nodeName": "node-1"}`, ``, keep},
		{"another nodeName", `{"nodeName": "node-2"}`, ``, "nodeName"},
		{"another label", `{"nodeSelector": {"zone": "b"}}`, ``, "zone=b"},
		{"a missing label", `{"nodeSelector": {"mesh": ""}}`, ``, "mesh="},
		{"no required affinity", `{"affinity": {"nodeAffinity": {}}}`, ``, keep},
		{"no terms", affinity(``), ``, "affinity"},
		{"an empty term", affinity(`{}`), ``, "affinity"},
		{"In", affinity(matching(expression("zone", "In", `"b", "a"`))), ``, keep},
		{"In, another value", affinity(matching(expression("zone", "In", `"b"`))), ``, "affinity"},
		{"an unknown operator", affinity(matching(expression("zone", "Near", `"b"`))), ``, keep},
		{"an unknown operator for a field", affinity(field("Near", `"b"`)), ``, keep},
		{"one requirement of a term", affinity(matching(expression("zone", "Exists", ``), expression("mesh", "Exists", ``))), ``, "affinity"},
		{"one of the terms", affinity(matching(expression("mesh", "Exists", ``)) + "," + matching(expression("zone", "Exists", ``))), ``, keep},
		{"its name as a field", affinity(field("In", `"node-1"`)), ``, keep},
		{"another name as a field", affinity(field("In", `"node-2"`)), ``, "affinity"},
		{"not another name", affinity(field("NotIn", `"node-2"`)), ``, keep},
		{"not its name", affinity(field("NotIn", `"node-1"`)), ``, "affinity"},
		{"Gt", affinity(matching(expression("cores", "Gt", `"7"`))), ``, keep},
		{"Gt, equal", affinity(matching(expression("cores", "Gt", `"8"`))), ``, "affinity"},
		{"a number that the API server refuses", affinity(matching(expression("cores", "Gt", `"many"`))), ``, keep},
		{"both in one term", affinity(`{"matchExpressions": [` + expression("zone", "Exists", ``) + `], "matchFields": [` + expression("metadata.name", "In", `"node-2"`) + `]}`), ``, "affinity"},
		{"not ready", `{}`, `{"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}`, keep},
		{"unreachable", `{}`, `{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute", "value": "x"}`, keep},
		{"a taint with NoExecute", `{}`, `{"key": "k", "value": "v", "effect": "NoExecute"}`, "k=v:NoExecute"},
		{"a taint with NoSchedule", `{}`, `{"key": "k", "effect": "NoSchedule"}`, keep},
		{"tolerated by value", `{"tolerations": [{"key": "k", "value": "v"}]}`, `{"key": "k", "value": "v", "effect": "NoExecute"}`, keep},
		{"an unknown toleration", `{"tolerations": [{"key": "k", "operator": "Lt", "value": "5"}]}`, `{"key": "k", "value": "9", "effect": "NoExecute"}`, keep},
		{"one of two taints tolerated", `{"tolerations": [{"key": "k", "operator": "Exists"}]}`, `{"key": "k", "effect": "NoExecute"}, {"key": "j", "effect": "NoExecute"}`, "j="},
	} {
		t.Run(test.name, func(t *testing.T) {
			var set appsv1.DaemonSet
			node := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", Labels: map[string]string{"zone": "a", "cores": "8"}}}
			check.OK(t, json.Unmarshal([]byte(test.spec), &set.Spec.Template.Spec))
			check.OK(t, json.Unmarshal([]byte("["+test.taints+"]"), &node.Spec.Taints))
			fits, why := Fits(&set, &node)
			if fits != (test.why == keep) || !strings.Contains(why, test.why) || (why == "") != fits {
				t.Errorf("got %v because %q, want %q", fits, why, test.why)
			}
		})
	}
}
