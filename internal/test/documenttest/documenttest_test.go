package documenttest_test

import (
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/test/check"
	"github.com/meshcni/istio-cni/internal/test/documenttest"
)

const pods = `{"apiVersion":"cni.meshcni.io/v1","kind":"PodList","node":"n1","time":"2026-11-22T12:00:00Z","items":[
{"namespace":"shop","pod":"a","uid":"u","state":"captured","sentence":"is so","since":"2026-11-22T12:00:00Z"}]}`

// TestErr_Faults: a field that is renamed, missing or new, another value of an enumeration and another type are faults.
func TestErr_Faults(t *testing.T) {
	t.Parallel()
	check.OK(t, documenttest.Err("PodList", pods))
	for before, after := range map[string]string{
		`"state":`: `"status":`, `"since":`: `"from":`, `"captured"`: `"fine"`, `"items":[`: `"pods":[`, `"uid":"u",`: ``,
		`"node":"n1"`: `"node":1`, `T12:00:00Z","items"`: `","items"`, `cni.meshcni.io/v1`: `cni.meshcni.io/v2`, `"PodList"`: `"Version"`,
		`{"apiVersion":"cni.meshcni.io/v1",`: `{`, `"sentence"`: `"processes":1,"sentence"`,
	} {
		if !strings.Contains(pods, before) || documenttest.Err("PodList", strings.Replace(pods, before, after, 1)) == nil {
			t.Errorf("%s instead of %s passes", after, before)
		}
	}
}
