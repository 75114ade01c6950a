package taint

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/readiness"
)

// maxForeign bounds a quotation of a ConfigMap in an error, in bytes.
const maxForeign = 256

// entry is one entry in the ConfigMap of the legacy taint controller. Each comma-separated part of the selector is
// a requirement, and different pods may meet them: "a=1, b=2" does not require one pod with both labels. An empty namespace
// means all namespaces.
type entry struct {
	Name      string `json:"name"`
	Selector  string `json:"selector"`
	Namespace string `json:"namespace"`
}

// requirementsOf parses the ConfigMap of the legacy taint controller: each key holds a YAML list of entries. No keys, and keys
// without content, require nothing. All errors are reported at once; an unknown key is an error, because a misspelt selector
// would match any pod.
func requirementsOf(data map[string]string) ([]readiness.Requirement, error) {
	var all []readiness.Requirement
	var wrong []error
	for _, key := range slices.Sorted(maps.Keys(data)) {
		at := printable.Quote(key, maxForeign)
		var entries []entry
		if err := yaml.UnmarshalStrict([]byte(data[key]), &entries); err != nil {
			wrong = append(wrong, fmt.Errorf("key %s: decoding: %s", at, printable.Text(err.Error(), maxForeign)))
			continue
		}
		for i, e := range entries {
			var problems error
			if e.Namespace != "" {
				problems = selector.CheckNamespace(e.Namespace)
			}
			for part := range strings.SplitSeq(e.Selector, ",") {
				part = strings.TrimSpace(part)
				problems = errors.Join(problems, selector.Check(part))
				all = append(all, readiness.Requirement{Name: e.Name, Namespaces: []string{e.Namespace}, Selector: part})
			}
			if problems != nil {
				wrong = append(wrong, fmt.Errorf("key %s[%d]: %w", at, i, problems))
			}
		}
	}
	if err := errors.Join(wrong...); err != nil {
		return nil, err
	}
	return all, nil
}
