package documenttest_test

import (
	"bytes"
	"cmp"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
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

// TestSchemas_EveryField: the committed schemas have each field of the documents' types.
func TestSchemas_EveryField(t *testing.T) {
	t.Parallel()
	for _, d := range document.All() {
		full := reflect.New(reflect.TypeOf(d.Document)).Elem()
		fill(full, "")
		for _, form := range []output.Form{output.JSON, output.YAML} {
			var text bytes.Buffer
			check.OK(t, output.Print(&text, full.Interface(), form, nil))
			documenttest.Valid(t, full.Type().Name(), text.String())
		}
	}
}

// fill sets all fields of a value; tag is the tag of its field.
func fill(v reflect.Value, tag reflect.StructTag) {
	switch value := v.Addr().Interface().(type) {
	case *audit.State:
		*value = audit.Captured
		return
	case *time.Time:
		*value = time.Unix(1, 0)
		return
	case *netip.AddrPort:
		*value = netip.MustParseAddrPort("[::1]:80")
		return
	}
	switch v.Kind() { //nolint:exhaustive // those of the documents
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), v.Type().Field(i).Tag)
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), tag)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0), tag)
	case reflect.String:
		_, first, _ := strings.Cut(strings.ReplaceAll(tag.Get("jsonschema"), "enum=,", ""), "enum=")
		first, _, _ = strings.Cut(first, ",")
		v.SetString(cmp.Or(first, "x"))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Float64:
		v.SetFloat(1)
	default:
		v.Set(reflect.ValueOf(1).Convert(v.Type()))
	}
}
