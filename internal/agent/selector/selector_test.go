package selector

import (
	"testing"

	"k8s.io/apimachinery/pkg/fields"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
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

// TestAmbient_Enrolled: the plugin and the agent enrol the pods that the reference enrols.
func TestAmbient_Enrolled(t *testing.T) {
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
		change         func(*sidecar.Facts)
		want           bool
	}{
		{"label of the namespace", ofChart, "", "ambient", nil, true},
		{"label of the pod", ofChart, "ambient", "", nil, true},
		{"both labels", ofChart, "ambient", "ambient", nil, true},
		{"no label", ofChart, "", "", nil, false},
		{"a pod that opts out", ofChart, "none", "ambient", nil, false},
		{"a pod that opts in", ofChart, "ambient", "none", nil, true},
		{"other values", ofChart, "sidecar", "none", nil, false},
		{"another value of the pod", ofChart, "sidecar", "ambient", nil, true},
		{"no selectors", "", "ambient", "ambient", nil, false},
		{"an empty list", "[]", "ambient", "ambient", nil, false},
		{"an empty selector", "- {}", "", "", nil, true},
		{"a sidecar", ofChart, "ambient", "ambient", func(f *sidecar.Facts) { f.Annotations = map[string]string{sidecar.StatusKey: ""} }, false},
		{"a proxy without a sidecar's status", ofChart, "ambient", "", func(f *sidecar.Facts) {
			f.Containers = []sidecar.Container{{Name: sidecar.ProxyContainer}}
		}, true},
		{"network of the node", ofChart, "ambient", "ambient", func(f *sidecar.Facts) { f.HostNetwork = true }, false},
		{"an excluded namespace", ofChart, "ambient", "ambient", func(f *sidecar.Facts) { f.Namespace = "kube-system" }, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			stanza, err := Enablement(test.selectors)
			check.OK(t, err)
			selectors, err := ParseAmbient(stanza)
			check.OK(t, err)
			f := sidecar.Facts{Namespace: "shop", Name: "web", Labels: mode(test.pod), Selected: selectors.Select(mode(test.pod), mode(test.namespace))}
			if test.change != nil {
				test.change(&f)
			}
			d := sidecar.Decide(f, sidecar.Policy{AmbientEnabled: true, ExcludeNamespaces: []string{"kube-system"}})
			check.Equal(t, d.Outcome == sidecar.Enrol, test.want, "enrolled by", d.Reason)
		})
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
