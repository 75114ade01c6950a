package readiness

import "strings"

// Entry is one of the requirements in the ConfigMap of the legacy taint controller.
type Entry struct {
	Name      string `json:"name"`
	Selector  string `json:"selector"`
	Namespace string `json:"namespace"`
}

// Requirements returns one requirement for each comma-separated part of the entry's selector. Different pods may meet them:
// "a=1, b=2" does not require one pod with both labels. An empty namespace means all namespaces.
func (e Entry) Requirements() []Requirement {
	var all []Requirement
	for part := range strings.SplitSeq(e.Selector, ",") {
		all = append(all, Requirement{Name: e.Name, Namespaces: []string{e.Namespace}, Selector: strings.TrimSpace(part)})
	}
	return all
}
