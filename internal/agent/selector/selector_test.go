package selector

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/fields"

	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestEnablement(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"nothing", "", `[]`},
		{"an empty list", "[]", `[]`},
		{"null", "null", `[]`},
		{"both absent", "- {}", `[{"podSelector":{},"namespaceSelector":{}}]`},
		{"one absent, one null", "- namespaceSelector: null", `[{"podSelector":{},"namespaceSelector":{}}]`},
		{
			"the chart's selectors",
			`- podSelector:
    matchLabels: {istio.io/dataplane-mode: ambient}
- podSelector:
    matchExpressions:
    - key: istio.io/dataplane-mode
      operator: NotIn
      values: [none]
  namespaceSelector:
    matchLabels:
      istio.io/dataplane-mode: ambient
`,
			`[{"podSelector":{"matchLabels":{"istio.io/dataplane-mode":"ambient"}},"namespaceSelector":{}},` +
				`{"podSelector":{"matchExpressions":[{"key":"istio.io/dataplane-mode","operator":"NotIn","values":["none"]}]},` +
				`"namespaceSelector":{"matchLabels":{"istio.io/dataplane-mode":"ambient"}}}]`,
		},
		{
			"a number for a label", "- podSelector: {matchLabels: {a: 1}}",
			`[{"podSelector":{"matchLabels":{"a":"1"}},"namespaceSelector":{}}]`,
		},
		{
			"without values", "- podSelector: {matchExpressions: [{key: a, operator: Exists}]}",
			`[{"podSelector":{"matchExpressions":[{"key":"a","operator":"Exists"}]},"namespaceSelector":{}}]`,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := Enablement(test.text)
			check.OK(t, err)
			check.Diff(t, "result", test.want, string(got))
		})
	}
}

func TestEnablement_Refusals(t *testing.T) {
	for _, test := range []struct {
		name, text string
		want       []string
	}{
		{"not YAML", "\t:", []string{"decoding enablement selectors"}},
		{"not a list", "podSelector: {}", []string{"decoding enablement selectors"}},
		{"a misspelt key", "- podSelektor: {}", []string{"podSelektor"}},
		{"a misspelt key further down", "- podSelector: {matchLabel: {a: b}}", []string{"matchLabel"}},
		{"a key twice", "- podSelector: {}\n  podSelector: {}", []string{"podSelector"}},
		{"a list for a label", "- podSelector: {matchLabels: {a: [1]}}", []string{"decoding enablement selectors"}},
		{
			"all errors, with their places",
			"- podSelector: {matchExpressions: [{key: a, operator: Gt, values: ['1']}, {key: b, operator: In}]}\n" +
				"- namespaceSelector: {matchLabels: {'a b': c}}",
			[]string{
				`[0].podSelector: "Gt" is not a valid label selector operator`,
				`[1].namespaceSelector: key: Invalid value: "a b"`,
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := Enablement(test.text)
			if err == nil || got != nil {
				t.Fatalf("got %s, %v, want an error", got, err)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the error %q lacks %q", err, want)
				}
			}
		})
	}
}

func TestForPods_Fields(t *testing.T) {
	t.Parallel()
	known := fields.Set{"status.phase": "", "spec.nodeName": "", "a": ""}
	for _, good := range []string{"", "status.phase=Running", "status.phase!=Failed,spec.nodeName==node-1", `a=b\,c`, ",,a=b"} {
		check.OK(t, check.Err(ForPods("", good, known)), good)
	}
	for _, bad := range []string{"a", "a=b=c", `a=b\`, "a!b=c", "=b", ".a=b", "a.=b", "a..c=b", " a=b", "a =b", "a=b, c=d", "a/b=c", "é=b"} {
		if _, err := ForPods("", bad, known); err == nil || !strings.Contains(err.Error(), "field") {
			t.Errorf("%q: got %v", bad, err)
		}
	}
}

func TestEnablement_SelectorOfAll(t *testing.T) {
	for _, empty := range []string{"", " "} {
		if Check(empty) == nil {
			t.Errorf("%q picks everything", empty)
		}
	}
	if err := Check("a in b"); err == nil || !strings.Contains(err.Error(), `selector "a in b"`) {
		t.Errorf("got %v", err)
	}
}
