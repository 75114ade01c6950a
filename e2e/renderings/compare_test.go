package renderings

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// missing returns a line for each field that the server did not store as it was sent. Fields added by the server do
// not count, nor do items at the end of a list.
func missing(path string, sent, stored any) []string {
	switch sent := sent.(type) {
	case map[string]any:
		have, is := stored.(map[string]any)
		if !is && len(sent) > 0 {
			return []string{fmt.Sprintf("%s: sent %v, stored %v", path, sent, stored)}
		}
		var out []string
		for _, key := range slices.Sorted(maps.Keys(sent)) {
			out = append(out, missing(path+"."+key, sent[key], have[key])...)
		}
		return out
	case []any:
		have, is := stored.([]any)
		if (!is && stored != nil) || len(have) < len(sent) {
			return []string{fmt.Sprintf("%s: sent %v, stored %v", path, sent, stored)}
		}
		var out []string
		for i := range sent {
			out = append(out, missing(fmt.Sprintf("%s[%d]", path, i), sent[i], have[i])...)
		}
		return out
	}
	if !reflect.DeepEqual(sent, stored) && !sameQuantity(path, sent, stored) {
		return []string{fmt.Sprintf("%s: sent %v, stored %v", path, sent, stored)}
	}
	return nil
}

// sameQuantity compares quantities, which the server stores in canonical form: 1000m as "1".
func sameQuantity(path string, sent, stored any) bool {
	if !strings.Contains(path, ".limits.") && !strings.Contains(path, ".requests.") && !strings.Contains(path, ".hard.") {
		return false
	}
	a, errA := resource.ParseQuantity(fmt.Sprint(sent))
	b, errB := resource.ParseQuantity(fmt.Sprint(stored))
	return errA == nil && errB == nil && a.Cmp(b) == 0
}

// normalized returns an object without status and the metadata that differs between identical objects.
func normalized(o *object) map[string]any {
	out := o.DeepCopy().Object
	delete(out, "status")
	for _, field := range []string{"uid", "resourceVersion", "creationTimestamp", "generation", "managedFields"} {
		unstructured.RemoveNestedField(out, "metadata", field)
	}
	unstructured.RemoveNestedField(out, "metadata", "annotations", "deprecated.daemonset.template.generation")
	if notes, _, err := unstructured.NestedMap(out, "metadata", "annotations"); err == nil && len(notes) == 0 {
		unstructured.RemoveNestedField(out, "metadata", "annotations")
	}
	return out
}

// differences compares a stored object with the stored object of a fresh installation.
func differences(fresh, stored map[string]any) []string {
	return slices.Concat(missing("", fresh, stored), missing(" (more than)", stored, fresh))
}
