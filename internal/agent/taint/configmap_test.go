package taint

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/readiness"
)

func TestRequirements(t *testing.T) {
	got, err := requirementsOf(map[string]string{
		"b": "- {name: x, selector: 'a=1, b in (c)', namespace: ns}\n- {name: z, selector: d}\n",
		"a": "- name: istio-cni\n  selector: k8s-app=istio-cni-node\n  namespace: istio-system\n", "c": "",
	})
	want := []readiness.Requirement{
		{Name: "istio-cni", Namespaces: []string{"istio-system"}, Selector: "k8s-app=istio-cni-node"},
		{Name: "x", Namespaces: []string{"ns"}, Selector: "a=1"},
		{Name: "x", Namespaces: []string{"ns"}, Selector: "b in (c)"},
		{Name: "z", Namespaces: []string{""}, Selector: "d"},
	}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	got, err = requirementsOf(map[string]string{"a": "\t{", "b": "- {name: x, selektor: y}", "c": "- {selector: '-='}", "d": "- {selector: a, namespace: A/B}", "e": "- {name: z}"})
	if got != nil || err == nil {
		t.Fatal(got, err)
	}
	for _, want := range []string{`key "a": decoding`, "selektor", `key "c"[0]`, `"A/B" is not a namespace`, `key "e"[0]: the selector is empty`} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error lacks %q:\n%v", want, err)
		}
	}
}
