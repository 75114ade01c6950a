package output_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestList_Forms(t *testing.T) {
	t.Parallel()
	type row struct {
		A string `json:"a"`
		B []int  `json:"b"`
	}
	rows := []row{{"x\x1b", []int{1}}, {A: "y"}}
	head := map[string][]string{"nodes": {"n1"}}
	for _, form := range []output.Form{output.JSON, output.YAML} {
		for _, rows := range [][]row{rows, rows[:1], {}} {
			var list, object, want bytes.Buffer
			for _, err := range []error{
				output.List(&list, form, nil, "", rows), output.List(&object, form, head, "pods", rows), output.Print(&want, rows, form, nil),
			} {
				check.OK(t, err)
			}
			if got := strings.TrimSpace(list.String()); got != strings.TrimSpace(want.String()) {
				t.Errorf("a list in %s: got\n%s\nwant\n%s", form, got, &want)
			}
			want.Reset()
			// The fields are in the order of the alphabet in both.
			check.OK(t, output.Print(&want, map[string]any{"nodes": head["nodes"], "pods": rows}, form, nil))
			if got := strings.TrimSpace(object.String()); got != strings.TrimSpace(want.String()) {
				t.Errorf("an object in %s: got\n%s\nwant\n%s", form, got, &want)
			}
		}
	}
}

// probe is a row that looks at what was written when it is formatted.
type probe struct {
	out  *bytes.Buffer
	seen *[]int
}

func (p probe) MarshalJSON() ([]byte, error) {
	*p.seen = append(*p.seen, p.out.Len())
	return json.Marshal(strings.Repeat("x", 64<<10))
}

func TestList_RowByRow(t *testing.T) {
	t.Parallel()
	for _, form := range []output.Form{output.JSON, output.YAML} {
		var out bytes.Buffer
		var seen []int
		check.OK(t, output.List(&out, form, nil, "", []probe{{&out, &seen}, {&out, &seen}, {&out, &seen}}))
		if len(seen) != 3 || seen[1] < 60<<10 || seen[2] < 120<<10 {
			t.Errorf("%s: %d bytes were written before each row", form, seen)
		}
	}
}
