package kube

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// EnablementSelectors turns AMBIENT_ENABLEMENT_SELECTOR, a YAML list of {podSelector, namespaceSelector}, into the
// compact JSON list of the plugin's configuration (enablement_selectors), in which both keys are always there. Both are
// label selectors (k8s.io/apimachinery/pkg/apis/meta/v1.LabelSelector); one that is absent or empty selects everything.
// Empty text is an empty list. A key that is not known is an error: misspelt, it would select everything as well.
// All that is wrong is reported at once.
func EnablementSelectors(yamlText string) (json.RawMessage, error) {
	var list []struct {
		Pod       labelSelector `json:"podSelector"`
		Namespace labelSelector `json:"namespaceSelector"`
	}
	if err := yaml.UnmarshalStrict([]byte(yamlText), &list); err != nil {
		return nil, fmt.Errorf("decoding enablement selectors: %s", clean(err.Error()))
	}
	if len(list) == 0 {
		return json.RawMessage("[]"), nil
	}
	var wrong []error
	for i := range list {
		wrong = append(wrong, list[i].Pod.validate(fmt.Sprintf("[%d].podSelector", i)),
			list[i].Namespace.validate(fmt.Sprintf("[%d].namespaceSelector", i)))
	}
	if err := errors.Join(wrong...); err != nil {
		return nil, fmt.Errorf("checking enablement selectors: %w", err)
	}
	return json.Marshal(list)
}

type labelSelector struct {
	Labels       map[string]string `json:"matchLabels,omitempty"`
	Requirements []Requirement     `json:"matchExpressions,omitempty"`
}

// validate says what the API server's own check would refuse; at is the place in the list.
func (s *labelSelector) validate(at string) error {
	var wrong []error
	for _, key := range slices.Sorted(maps.Keys(s.Labels)) {
		wrong = append(wrong, checkLabelKey(key, at+".matchLabels"), checkLabelValue(s.Labels[key], at+".matchLabels"))
	}
	for i, requirement := range s.Requirements {
		place := fmt.Sprintf("%s.matchExpressions[%d]", at, i)
		wrong = append(wrong, checkLabelKey(requirement.Key, place))
		for _, value := range requirement.Values {
			wrong = append(wrong, checkLabelValue(value, place))
		}
		switch requirement.Operator {
		case "In", "NotIn":
			if len(requirement.Values) == 0 {
				wrong = append(wrong, fmt.Errorf("%s: operator %s needs values", place, requirement.Operator))
			}
		case "Exists", "DoesNotExist":
			if len(requirement.Values) > 0 {
				wrong = append(wrong, fmt.Errorf("%s: operator %s takes no values", place, requirement.Operator))
			}
		default:
			wrong = append(wrong, fmt.Errorf("%s: operator %q is not In, NotIn, Exists or DoesNotExist", place,
				clean(requirement.Operator)))
		}
	}
	return errors.Join(wrong...)
}

// maxLabel is the longest name or value of a label; a prefix is a DNS subdomain of up to 253 characters.
const maxLabel = 63

func checkLabelKey(key, at string) error {
	prefix, name, prefixed := strings.Cut(key, "/")
	if !prefixed {
		prefix, name = "", key
	}
	if prefixed && !validSubdomain(prefix) || name == "" || !validLabelText(name) {
		return fmt.Errorf("%s: %q is not a label's key", at, clean(key))
	}
	return nil
}

func checkLabelValue(value, at string) error {
	if value != "" && !validLabelText(value) {
		return fmt.Errorf("%s: %q is not a label's value", at, clean(value))
	}
	return nil
}

// validLabelText accepts letters, digits, '-', '_' and '.', the last three not at the ends.
func validLabelText(text string) bool {
	return len(text) <= maxLabel && validSegment(text) && alphanumeric(text[0]) && alphanumeric(text[len(text)-1])
}

// validSubdomain accepts what RFC 1123 allows, in lower case.
func validSubdomain(text string) bool {
	if !validSegment(text) || strings.ToLower(text) != text || strings.Contains(text, "_") {
		return false
	}
	for part := range strings.SplitSeq(text, ".") {
		if part == "" || !alphanumeric(part[0]) || !alphanumeric(part[len(part)-1]) {
			return false
		}
	}
	return true
}

func alphanumeric(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

// CheckLabel says what is wrong with the key and value of a label.
func CheckLabel(key, value string) error {
	return errors.Join(checkLabelKey(key, "label"), checkLabelValue(value, "label"))
}

// CheckName says what is wrong with the name of an object (RFC 1123 subdomain).
func CheckName(name string) error {
	if !validSubdomain(name) {
		return errors.New("want lower case letters, digits, inner dashes and dots, at most 253 of them")
	}
	return nil
}

// CheckFieldSelector says what is wrong with a field selector in the form of kubectl's --field-selector
// (k8s.io/apimachinery/pkg/fields.ParseSelector): terms between commas, each "field=value", "field==value" or
// "field!=value", in values a backslash before each backslash, comma and equals sign that belongs to them. Empty text and empty
// terms restrict nothing. Which fields there are is the API server's to say; spaces around terms it does not forgive.
func CheckFieldSelector(text string) error {
	var wrong []error
	for _, term := range fieldTerms(text) {
		if err := checkFieldTerm(term); err != nil {
			wrong = append(wrong, fmt.Errorf("field selector %q: %w", clean(text), err))
		}
	}
	return errors.Join(wrong...)
}

// fieldTerms cuts at commas without a backslash before them, and leaves out what is empty.
func fieldTerms(text string) []string {
	var terms []string
	begin, escaped := 0, false
	for i := 0; i <= len(text); i++ {
		switch {
		case i == len(text) || text[i] == ',' && !escaped:
			if i > begin {
				terms = append(terms, text[begin:i])
			}
			begin = i + 1
		case text[i] == '\\' && !escaped:
			escaped = true
			continue
		}
		escaped = false
	}
	return terms
}

func checkFieldTerm(term string) error {
	at := strings.IndexAny(term, "!=")
	if at < 0 {
		return fmt.Errorf("term %q: wants field=value, field==value or field!=value", clean(term))
	}
	field, value := term[:at], term[at:]
	for _, operator := range []string{"!=", "==", "="} {
		rest, found := strings.CutPrefix(value, operator)
		if !found {
			continue
		}
		if !validField(field) {
			return fmt.Errorf("term %q: %q is not the path of a field", clean(term), clean(field))
		}
		return checkFieldValue(term, rest)
	}
	return fmt.Errorf("term %q: wants field=value, field==value or field!=value", clean(term))
}

// validField accepts letters and digits in parts between dots.
func validField(path string) bool {
	for part := range strings.SplitSeq(path, ".") {
		for i := range len(part) {
			if !alphanumeric(part[i]) {
				return false
			}
		}
		if part == "" {
			return false
		}
	}
	return true
}

func checkFieldValue(term, value string) error {
	escaped := false
	for _, c := range value {
		special := strings.ContainsRune(`\,=`, c)
		switch {
		case escaped && !special, !escaped && c == '=':
			return fmt.Errorf("term %q: wants a backslash before each backslash, comma and equals sign of the value, and before "+
				"nothing else", clean(term))
		}
		escaped = c == '\\' && !escaped
	}
	if escaped {
		return fmt.Errorf("term %q: ends with a backslash", clean(term))
	}
	return nil
}
