package kube

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/internal/core/readiness"
)

// Requirements reads the ConfigMap of the legacy taint controller: each key holds a YAML list of {name, selector,
// namespace}. A selector is cut at its commas, and each part is a requirement of its own, which another pod may meet:
// "a=1, b=2" does not want one pod with both labels. An empty namespace is all of them. No keys, and keys without content,
// require nothing. All that is wrong is reported at once; a key that is not known is wrong, because a misspelt selector
// would be met by any pod.
func Requirements(data map[string]string) ([]readiness.Requirement, error) {
	var all []readiness.Requirement
	var wrong []error
	for _, key := range slices.Sorted(maps.Keys(data)) {
		var list []wireRequirement
		if err := yaml.UnmarshalStrict([]byte(data[key]), &list); err != nil {
			wrong = append(wrong, fmt.Errorf("key %q: decoding: %s", clean(key), clean(err.Error())))
			continue
		}
		for i, one := range list {
			parts, err := one.parts()
			if err != nil {
				wrong = append(wrong, fmt.Errorf("key %q[%d]: %w", clean(key), i, err))
			}
			all = append(all, parts...)
		}
	}
	if err := errors.Join(wrong...); err != nil {
		return nil, err
	}
	return all, nil
}

type wireRequirement struct {
	Name      string `json:"name"`
	Selector  string `json:"selector"`
	Namespace string `json:"namespace"`
}

// parts are the requirements that one item is.
func (w wireRequirement) parts() ([]readiness.Requirement, error) {
	var all []readiness.Requirement
	var wrong []error
	if w.Namespace != "" && (!validSubdomain(w.Namespace) || strings.Contains(w.Namespace, ".")) {
		wrong = append(wrong, fmt.Errorf("%q is not a namespace", clean(w.Namespace)))
	}
	for part := range strings.SplitSeq(w.Selector, ",") {
		part = strings.TrimSpace(part)
		wrong = append(wrong, CheckSelector(part))
		all = append(all, readiness.Requirement{Name: w.Name, Namespaces: []string{w.Namespace}, Selector: part})
	}
	return all, errors.Join(wrong...)
}

// CheckSelector says what is wrong with a label selector in the form of kubectl's --selector
// (k8s.io/apimachinery/pkg/labels.Parse): terms between commas, each "key", "!key", "key=value", "key==value",
// "key!=value", "key in (a,b)", "key notin (a,b)", "key>1" or "key<1". One without terms is refused, as it picks all.
func CheckSelector(text string) error {
	terms, err := selectorTerms(text)
	if err != nil {
		return err
	}
	var wrong []error
	for _, term := range terms {
		if err := checkTerm(term); err != nil {
			wrong = append(wrong, fmt.Errorf("selector %q: %w", clean(text), err))
		}
	}
	return errors.Join(wrong...)
}

// selectorTerms cuts at commas outside of parentheses.
func selectorTerms(text string) ([]string, error) {
	if strings.TrimSpace(text) == "" {
		return nil, errors.New("the selector is empty and would pick all pods")
	}
	var terms []string
	begin, inside := 0, false
	for i, c := range text {
		switch {
		case c == '(' && !inside:
			inside = true
		case c == ')' && inside:
			inside = false
		case c == '(' || c == ')':
			return nil, fmt.Errorf("selector %q: a parenthesis too many", clean(text))
		case c == ',' && !inside:
			terms = append(terms, strings.TrimSpace(text[begin:i]))
			begin = i + 1
		}
	}
	if inside {
		return nil, fmt.Errorf("selector %q: a parenthesis is not closed", clean(text))
	}
	return append(terms, strings.TrimSpace(text[begin:])), nil
}

func checkTerm(term string) error {
	key, values, err := splitTerm(term)
	if err != nil {
		return err
	}
	wrong := []error{checkLabelKey(key, "term "+term)}
	for _, value := range values {
		wrong = append(wrong, checkLabelValue(value, "term "+term))
	}
	return errors.Join(wrong...)
}

var errNoTerm = errors.New("not a term of a label selector")

// splitTerm gives the key of a term and its values.
func splitTerm(term string) (key string, values []string, err error) {
	if bare, negated := strings.CutPrefix(term, "!"); negated {
		return strings.TrimSpace(bare), nil, nil
	}
	if head, list, found := strings.Cut(term, "("); found {
		return splitSet(term, head, list)
	}
	for _, operator := range []string{"!=", "==", "=", ">", "<"} {
		before, after, found := strings.Cut(term, operator)
		if !found {
			continue
		}
		key, after = strings.TrimSpace(before), strings.TrimSpace(after)
		if (operator == ">" || operator == "<") && (after == "" || strings.Trim(after, "0123456789") != "") {
			return "", nil, fmt.Errorf("%q: wants a number: %w", clean(term), errNoTerm)
		}
		return key, []string{after}, nil
	}
	return term, nil, nil
}

// splitSet does it for a term with a list, of which head is what is before the parenthesis and list what is behind it.
func splitSet(term, head, list string) (key string, values []string, err error) {
	words := strings.Fields(head)
	rest, closed := strings.CutSuffix(list, ")")
	if len(words) != 2 || words[1] != "in" && words[1] != "notin" || !closed {
		return "", nil, fmt.Errorf("%q: %w", clean(term), errNoTerm)
	}
	for value := range strings.SplitSeq(rest, ",") {
		values = append(values, strings.TrimSpace(value))
	}
	return words[0], values, nil
}

// CheckTaint says what is wrong with the key and value of a taint, which are as those of a label. The type of a node
// condition is a key as well.
func CheckTaint(key, value string) error {
	return errors.Join(checkLabelKey(key, "taint"), checkLabelValue(value, "taint"))
}
