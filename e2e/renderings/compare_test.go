package renderings

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

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

func TestMissing(t *testing.T) {
	t.Parallel()
	stored := map[string]any{
		"a": map[string]any{"b": "c", "limits": map[string]any{"cpu": "1"}}, "list": []any{"x", int64(1)}, "more": true,
	}
	for _, c := range []struct {
		sent map[string]any
		want int
	}{
		{map[string]any{}, 0},
		{map[string]any{"a": map[string]any{"b": "c"}, "list": []any{"x", int64(1)}}, 0},
		{map[string]any{"a": map[string]any{"limits": map[string]any{"cpu": int64(1)}}}, 0},
		{map[string]any{"a": map[string]any{"limits": map[string]any{"cpu": "1000m"}}}, 0},
		{map[string]any{"gone": map[string]any{}, "null": nil}, 0},
		{map[string]any{"a": map[string]any{"limits": map[string]any{"cpu": "2"}}}, 1},
		{map[string]any{"a": map[string]any{"b": "d", "e": "f"}}, 2},
		{map[string]any{"a": "b"}, 1},
		{map[string]any{"gone": map[string]any{"a": "b"}}, 1},
		{map[string]any{"list": []any{"x"}}, 0},
		{map[string]any{"list": []any{"x", int64(1), "y"}}, 1},
		{map[string]any{"list": []any{int64(1), "x"}}, 2},
		{map[string]any{"more": nil}, 1},
		{map[string]any{"more": "true"}, 1},
	} {
		if got := missing("", c.sent, stored); len(got) != c.want {
			t.Errorf("%v: %q, want %d", c.sent, got, c.want)
		}
	}
	if got := differences(map[string]any{"list": []any{"x"}, "a": stored["a"]}, stored); len(got) != 2 {
		t.Errorf("differences %q", got)
	}
}
