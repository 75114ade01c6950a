package taint

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/readiness"
)

// maxForeign bounds a quotation of a ConfigMap in an error, in bytes.
const maxForeign = 256

// requirementsOf parses the ConfigMap of the legacy taint controller: each key holds a YAML list of {name, selector,
// namespace}, which [readiness.Entry] defines. No keys, and keys without content, require nothing. All errors are reported at
// once; an unknown key is an error, because a misspelt selector would match any pod.
func requirementsOf(data map[string]string) ([]readiness.Requirement, error) {
	var all []readiness.Requirement
	var wrong []error
	for _, key := range slices.Sorted(maps.Keys(data)) {
		at := printable.Quote(key, maxForeign)
		var entries []readiness.Entry
		if err := yaml.UnmarshalStrict([]byte(data[key]), &entries); err != nil {
			wrong = append(wrong, fmt.Errorf("key %s: decoding: %s", at, printable.Text(err.Error(), maxForeign)))
			continue
		}
		for i, entry := range entries {
			parts := entry.Requirements()
			if err := check(entry, parts); err != nil {
				wrong = append(wrong, fmt.Errorf("key %s[%d]: %w", at, i, err))
			}
			all = append(all, parts...)
		}
	}
	if err := errors.Join(wrong...); err != nil {
		return nil, err
	}
	return all, nil
}

func check(entry readiness.Entry, parts []readiness.Requirement) error {
	var wrong []error
	if entry.Namespace != "" {
		wrong = append(wrong, selector.CheckNamespace(entry.Namespace))
	}
	for _, part := range parts {
		wrong = append(wrong, selector.Check(part.Selector))
	}
	return errors.Join(wrong...)
}
