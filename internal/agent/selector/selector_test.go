package selector

import (
	"testing"

	"k8s.io/apimachinery/pkg/fields"

	"github.com/meshcni/istio-cni/internal/test/check"
)

// ofChart is the default of Istio's chart.
const ofChart = `- podSelector:
    matchLabels: {istio.io/dataplane-mode: ambient}
- podSelector:
    matchExpressions:
    - key: istio.io/dataplane-mode
      operator: NotIn
      values: [none]
  namespaceSelector:
    matchLabels:
      istio.io/dataplane-mode: ambient
`

func TestEnablement(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"nothing", "", `[]`},
		{"an empty list", "[]", `[]`},
		{"null", "null", `[]`},
		{"both absent", "- {}", `[{"podSelector":{},"namespaceSelector":{}}]`},
		{"one absent, one null", "- namespaceSelector: null", `[{"podSelector":{},"namespaceSelector":{}}]`},
		{
			"the chart's selectors", ofChart,
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

// TestAmbient_Select: the plugin and the agent select the pods that the reference selects.
func TestAmbient_Select(t *testing.T) {
	mode := func(value string) map[string]string {
		if value == "" {
			return map[string]string{"app": "web"}
		}
		return map[string]string{"app": "web", "istio.io/dataplane-mode": value}
	}
	for _, test := range []struct {
		name           string
		selectors      string
		pod, namespace string // values of the label
		want           bool
	}{
		{"label of the namespace", ofChart, "", "ambient", true},
		{"label of the pod", ofChart, "ambient", "", true},
		{"both labels", ofChart, "ambient", "ambient", true},
		{"no label", ofChart, "", "", false},
		{"a pod that opts out", ofChart, "none", "ambient", false},
		{"a pod that opts in", ofChart, "ambient", "none", true},
		{"other values", ofChart, "sidecar", "none", false},
		{"another value of the pod", ofChart, "sidecar", "ambient", true},
		{"no selectors", "", "ambient", "ambient", false},
		{"an empty list", "[]", "ambient", "ambient", false},
		{"an empty selector", "- {}", "", "", true},
	} {
		stanza, err := Enablement(test.selectors)
		check.OK(t, err)
		selectors, err := ParseAmbient(stanza)
		check.OK(t, err)
		check.Equal(t, selectors.Select(mode(test.pod), mode(test.namespace)), test.want, test.name)
	}
}

func TestParseAmbient(t *testing.T) {
	for _, nothing := range []string{"", "null", "[]"} {
		if selectors, err := ParseAmbient([]byte(nothing)); err != nil || selectors.Select(nil, nil) {
			t.Errorf("%q: %v", nothing, err)
		}
	}
	for _, text := range []string{`{}`, `[{"podSelector":{"matchExpressions":[{"key":"a","operator":"Near"}]}}]`, `[{"pods":{}}]`} {
		if selectors, err := ParseAmbient([]byte(text)); err == nil || selectors != nil {
			t.Errorf("%s is accepted", text)
		}
	}
	selectors, err := ParseAmbient([]byte(`[{"podSelector":{"matchLabels":{"a":"1"}}},{"podSelector":{"matchLabels":{"b":"1"}},
		"namespaceSelector":{"matchExpressions":[{"key":"c","operator":"DoesNotExist"}]}}]`))
	check.OK(t, err)
	pods, namespaces := selectors.Keys()
	check.Diff(t, "keys of pods", []string{"a", "b"}, pods)
	check.Diff(t, "keys of namespaces", []string{"c"}, namespaces)
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
			check.Contains(t, err.Error(), test.want...)
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
		check.Fails(t, check.Err(ForPods("", bad, known)), "field")
	}
}

func TestEnablement_SelectorOfAll(t *testing.T) {
	for _, empty := range []string{"", " "} {
		if Check(empty) == nil {
			t.Errorf("%q picks everything", empty)
		}
	}
	check.Fails(t, Check("a in b"), `selector "a in b"`)
}
