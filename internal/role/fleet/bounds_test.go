package fleet

import (
	"runtime"
	"strconv"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// allocated returns the number of bytes that a function allocates in total.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// TestDecode_Bounds: answers of the maximal size cost a small multiple of it, and answers with too many rows are refused.
func TestDecode_Bounds(t *testing.T) {
	fill := func(begin, text, end string) []byte {
		return []byte(begin + strings.Repeat(text, (maxList-len(begin)-len(end))/len(text)) + end)
	}
	const small = `{"pod":"a","state":"captured"}`
	for name, test := range map[string]struct {
		text []byte
		want string
		mib  uint64
	}{
		"small rows":       {fill("[", small+",", small+"]"), "more than 20000 rows", 40},
		"rows of no field": {fill("[", "[],", "[]]"), "cannot unmarshal array", 4},
		"one row":          {fill(`[{"pod":"a","state":"captured","problems":[`, "{},", `{}]}]`), "a row of more than 256 KiB", 40},
		"a deep row":       {[]byte(`[{"pod":"a","state":"captured","x":` + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + `}]`), "16 levels", 1},
		"a deep text":      {[]byte(`[{"pod":"a","state":"captured","x":"\"` + strings.Repeat("[", 5000) + `"}]`), "", 1},
		"nested rows":      {fill("[", "[", ""), "exceeded max depth", 40},
		"a document":       {fill(`{"apiVersion":"cni.meshcni.io/v1","items":[`, small+",", small+"]}"), "more than 20000 rows", 60},
		"many items":       {fill(`{"apiVersion":"cni.meshcni.io/v1"`, `,"items":[`+small+"]", "}"), "", 4},
		"rows of keys":     {fill("["+small, ","+`{"pod":"a","state":"captured"`+strings.Repeat(`,"x":0`, 30_000)+"}", "]"), "", 60},
	} {
		var rows []row[audit.Status]
		var err error
		cost := allocated(func() { rows, _, err = decode("n", test.text, fitPod) })
		if len(rows) > maxRows || test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%s: %d rows, %v", name, len(rows), err)
		}
		if cost>>20 > test.mib {
			t.Errorf("%s: %d MiB were allocated", name, cost>>20)
		}
	}
}

// TestAnswers_Bounds: the total of all nodes is bounded as well.
func TestAnswers_Bounds(t *testing.T) {
	t.Parallel()
	const one = `[{"pod":"a","state":"captured"}]`
	all := answers[audit.Status]{size: maxAll - len(one), rows: make([]row[audit.Status], maxAllRows-1)}
	check.OK(t, all.add("n", []byte(one), 0, fitPod))
	for _, full := range []answers[audit.Status]{{size: all.size}, {rows: all.rows}} {
		check.Fails(t, full.add("n", []byte(one), 0, fitPod), "no room: all nodes have more than 64 MiB or 200000 rows")
	}
}

// TestPolicies_Bounds: the cost of many policies does not grow with the square of their number.
func TestPolicies_Bounds(t *testing.T) {
	found := make([]networkingv1.NetworkPolicy, 3000)
	for i := range found {
		found[i].Spec.PodSelector.MatchLabels = map[string]string{"app": strconv.Itoa(i)}
	}
	var names []string
	cost := allocated(func() { names = keptOut(found, hbone) })
	check.Equal(t, len(names), len(found), "policies")
	if cost>>20 > 16 {
		t.Errorf("%d MiB were allocated", cost>>20)
	}
}
