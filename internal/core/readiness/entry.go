package readiness

import "strings"

// Entry is one of the requirements in the ConfigMap of the legacy taint controller.
type Entry struct {
	Name      string `json:"name"`
	Selector  string `json:"selector"`
	Namespace string `json:"namespace"`
}

// Requirements are what an entry requires: its selector is cut at its commas, and each part is a requirement of its own, which
// another pod may meet. "a=1, b=2" does not want one pod with both labels. An empty namespace is all of them.
func (e Entry) Requirements() []Requirement {
	var all []Requirement
	for part := range strings.SplitSeq(e.Selector, ",") {
		all = append(all, Requirement{Name: e.Name, Namespaces: []string{e.Namespace}, Selector: strings.TrimSpace(part)})
	}
	return all
}
