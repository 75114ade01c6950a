// Package selector checks selectors, labels, taints and names that a user sets, by the rules of the API server.
//
// It promises to accept only text that the API server accepts, and that an error quotes a bounded, printable part of the text.
// It never sends a request.
//
// Start reading at Check, and at Enablement and Ambient for ambient mode. placement.go has the nodes of a DaemonSet.
package selector

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Enablement converts AMBIENT_ENABLEMENT_SELECTOR, a YAML list of {podSelector, namespaceSelector}, to the compact JSON list of
// the plugin's configuration (enablement_selectors), in which both keys are always present. Both are label selectors
// (k8s.io/apimachinery/pkg/apis/meta/v1.LabelSelector); an absent or empty selector selects everything. Empty text is an empty
// list. An unknown key is an error: misspelt, it would select everything. Each invalid selector is reported.
func Enablement(yamlText string) (json.RawMessage, error) {
	list, _, err := enablement([]byte(yamlText))
	switch {
	case err != nil:
		return nil, err
	case len(list) == 0:
		return json.RawMessage("[]"), nil
	}
	return json.Marshal(list)
}

// enabling is one selector of AMBIENT_ENABLEMENT_SELECTOR.
type enabling struct {
	Pod       metav1.LabelSelector `json:"podSelector"`
	Namespace metav1.LabelSelector `json:"namespaceSelector"`
}

// enablement parses and compiles the selectors.
func enablement(text []byte) (list []enabling, compiled *Ambient, err error) {
	if err = yaml.UnmarshalStrict(text, &list); err != nil {
		return nil, nil, fmt.Errorf("decoding enablement selectors: %s", clean(err.Error()))
	}
	compiled = &Ambient{}
	var wrong []error
	compile := func(s *metav1.LabelSelector, i int, key string) labels.Selector {
		selector, bad := metav1.LabelSelectorAsSelector(s)
		if bad != nil {
			wrong = append(wrong, fmt.Errorf("[%d].%s: %s", i, key, clean(bad.Error())))
		}
		return selector
	}
	for i := range list {
		compiled.pods = append(compiled.pods, compile(&list[i].Pod, i, "podSelector"))
		compiled.namespaces = append(compiled.namespaces, compile(&list[i].Namespace, i, "namespaceSelector"))
	}
	if err = errors.Join(wrong...); err != nil {
		return nil, nil, fmt.Errorf("checking enablement selectors: %w", err)
	}
	return list, compiled, nil
}

// Ambient has the compiled enablement selectors of ambient mode. It is never changed.
type Ambient struct {
	pods, namespaces []labels.Selector // in pairs
}

// ParseAmbient compiles the result of [Enablement]. A stanza of a user's own may have an error; nothing is the empty list.
func ParseAmbient(selectors json.RawMessage) (*Ambient, error) {
	_, compiled, err := enablement(selectors)
	return compiled, err
}

// Select reports whether some selector matches a pod's labels and those of its namespace. An empty list selects no pod.
func (a *Ambient) Select(pod, namespace map[string]string) bool {
	for i := range a.pods {
		if a.pods[i].Matches(labels.Set(pod)) && a.namespaces[i].Matches(labels.Set(namespace)) {
			return true
		}
	}
	return false
}

// Keys returns the label keys of pods and of namespaces that the selectors read.
func (a *Ambient) Keys() (pods, namespaces []string) {
	return keysOf(a.pods...), keysOf(a.namespaces...)
}

// keysOf returns the label keys that selectors read.
func keysOf(selectors ...labels.Selector) (keys []string) {
	for _, s := range selectors {
		required, _ := s.Requirements()
		for _, r := range required {
			keys = append(keys, r.Key())
		}
	}
	return keys
}

// Check parses a label selector in the form of kubectl's --selector ([labels.Parse]). A selector without terms is an error
// because it selects all pods.
func Check(text string) error {
	selector, err := parse(text)
	if err == nil && selector.Empty() {
		err = errors.New("the selector is empty and would pick all pods")
	}
	return err
}

// Labels returns a function that reports whether a label selector in the form of kubectl's --selector matches labels. "" matches all.
func Labels(text string) (func(map[string]string) bool, error) {
	selector, err := parse(text)
	return func(has map[string]string) bool { return selector.Matches(labels.Set(has)) }, err
}

func parse(text string) (labels.Selector, error) {
	selector, err := labels.Parse(text)
	if err != nil {
		err = fmt.Errorf("selector %q: %s", clean(text), clean(err.Error()))
	}
	return selector, err
}

// Pods selects pods by labels and fields, as the API server does.
type Pods struct {
	labels labels.Selector
	fields fields.Selector
}

// ForPods returns the selector of two texts in the form of kubectl's --selector and --field-selector ([fields.ParseSelector]); empty
// texts, and empty terms of the second text, select all pods. A field that is not in known is an error.
func ForPods(labelText, fieldText string, known fields.Set) (p Pods, err error) {
	if p.labels, err = parse(labelText); err != nil {
		return p, err
	}
	if p.fields, err = fields.ParseSelector(fieldText); err != nil {
		return p, fmt.Errorf("field selector %q: %s", clean(fieldText), clean(err.Error()))
	}
	for _, r := range p.fields.Requirements() {
		if !known.Has(r.Field) {
			return p, fmt.Errorf("pods are not selected by the field %q, but by %s", clean(r.Field), strings.Join(slices.Sorted(maps.Keys(known)), ", "))
		}
	}
	return p, nil
}

// Matches reports whether the labels and fields of a pod match.
func (p Pods) Matches(l map[string]string, f fields.Set) bool {
	return p.labels.Matches(labels.Set(l)) && p.fields.Matches(f)
}

// Keys returns the label keys that the selector reads.
func (p Pods) Keys() []string { return keysOf(p.labels) }

// CheckLabel validates the key and value of a label.
func CheckLabel(key, value string) error { return checkLabel("label", key, value) }

// CheckTaint validates the key and value of a taint, which have the syntax of a label. The type of a node condition has the
// syntax of a key as well.
func CheckTaint(key, value string) error { return checkLabel("taint", key, value) }

func checkLabel(of, key, value string) error {
	var wrong []error
	if problems := validation.IsQualifiedName(key); len(problems) > 0 {
		wrong = append(wrong, fmt.Errorf("%s: %q is not a label's key: %s", of, clean(key), problems[0]))
	}
	if problems := validation.IsValidLabelValue(value); len(problems) > 0 {
		wrong = append(wrong, fmt.Errorf("%s: %q is not a label's value: %s", of, clean(value), problems[0]))
	}
	return errors.Join(wrong...)
}

// CheckName validates the name of an object (RFC 1123 subdomain).
func CheckName(name string) error {
	if len(validation.IsDNS1123Subdomain(name)) > 0 {
		return errors.New("want lower case letters, digits, inner dashes and dots, at most 253 of them")
	}
	return nil
}

// CheckNamespace validates the name of a namespace (RFC 1123 label).
func CheckNamespace(name string) error {
	if len(validation.IsDNS1123Label(name)) > 0 {
		return fmt.Errorf("%q is not a namespace", clean(name))
	}
	return nil
}

// clean bounds text and formats it as one printable line.
func clean(text string) string {
	const most = 256
	return printable.Text(strings.Join(strings.Fields(text), " "), most)
}
