package kube_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestDaemonSet_Fits decodes templates and taints from the JSON of the API.
func TestDaemonSet_Fits(t *testing.T) {
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
		{"a label that it lacks", `{"nodeSelector": {"mesh": ""}}`, ``, "mesh="},
		{"no affinity that is required", `{"affinity": {"nodeAffinity": {}}}`, ``, keep},
		{"no terms", affinity(``), ``, "affinity"},
		{"an empty term", affinity(`{}`), ``, "affinity"},
		{"In", affinity(matching(expression("zone", "In", `"b", "a"`))), ``, keep},
		{"In, not there", affinity(matching(expression("zone", "In", `"b"`))), ``, "affinity"},
		{"an operator of the future", affinity(matching(expression("zone", "Near", `"b"`))), ``, keep},
		{"an operator of the future for a field", affinity(field("Near", `"b"`)), ``, keep},
		{"all of a term", affinity(matching(expression("zone", "Exists", ``), expression("mesh", "Exists", ``))), ``, "affinity"},
		{"one of the terms", affinity(matching(expression("mesh", "Exists", ``)) + "," + matching(expression("zone", "Exists", ``))), ``, keep},
		{"its name as a field", affinity(field("In", `"node-1"`)), ``, keep},
		{"another name as a field", affinity(field("In", `"node-2"`)), ``, "affinity"},
		{"not another name", affinity(field("NotIn", `"node-2"`)), ``, keep},
		{"not its name", affinity(field("NotIn", `"node-1"`)), ``, "affinity"},
		{"Gt", affinity(matching(expression("cores", "Gt", `"7"`))), ``, keep},
		{"Gt, not more", affinity(matching(expression("cores", "Gt", `"8"`))), ``, "affinity"},
		{"a number that the API server refuses", affinity(matching(expression("cores", "Gt", `"many"`))), ``, keep},
		{"both in one term", affinity(`{"matchExpressions": [` + expression("zone", "Exists", ``) + `], "matchFields": [` + expression("metadata.name", "In", `"node-2"`) + `]}`), ``, "affinity"},
		{"not ready", `{}`, `{"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}`, keep},
		{"unreachable", `{}`, `{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute", "value": "x"}`, keep},
		{"a taint with NoExecute", `{}`, `{"key": "k", "value": "v", "effect": "NoExecute"}`, "k=v:NoExecute"},
		{"a taint with NoSchedule", `{}`, `{"key": "k", "effect": "NoSchedule"}`, keep},
		{"tolerated by value", `{"tolerations": [{"key": "k", "value": "v"}]}`, `{"key": "k", "value": "v", "effect": "NoExecute"}`, keep},
		{"a toleration of the future", `{"tolerations": [{"key": "k", "operator": "Lt", "value": "5"}]}`, `{"key": "k", "value": "9", "effect": "NoExecute"}`, keep},
		{"one of two taints tolerated", `{"tolerations": [{"key": "k", "operator": "Exists"}]}`, `{"key": "k", "effect": "NoExecute"}, {"key": "j", "effect": "NoExecute"}`, "j="},
	} {
		t.Run(test.name, func(t *testing.T) {
			var set kube.DaemonSet
			node := kube.Node{Name: "node-1", Labels: map[string]string{"zone": "a", "cores": "8"}}
			check.OK(t, json.Unmarshal([]byte(test.spec), &set.Template))
			check.OK(t, json.Unmarshal([]byte("["+test.taints+"]"), &node.Taints))
			fits, why := set.Fits(node)
			if fits != (test.why == keep) || !strings.Contains(why, test.why) || (why == "") != fits {
				t.Errorf("got %v because %q, want %q", fits, why, test.why)
			}
		})
	}
}
