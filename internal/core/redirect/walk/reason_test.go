package walk

import (
	"reflect"
	"slices"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
)

// TestSettings_EveryField: a new field of the Spec is a row of settings, or no setting lets packets pass by it.
func TestSettings_EveryField(t *testing.T) {
	others := []string{
		"OutboundPort", "InboundPort", "TunnelPort", "UIDs", "GIDs", "Mode", "Mark", "Table", "OutboundPorts", "Loopback", "DNS", "DNSServers",
		"DropInvalid", "DualStack", "SecondFamily", "Annotations",
	}
	var w Wanted
	for _, f := range reflect.ValueOf(&w.Spec).Elem().Fields() {
		switch f.Kind() { //nolint:exhaustive // the zero value of the others is not the default
		case reflect.Slice:
			f.Set(reflect.MakeSlice(f.Type(), 1, 1))
		case reflect.Bool:
			f.SetBool(true)
		case reflect.Uint8, reflect.Uint16, reflect.Uint32:
			f.SetUint(1)
		}
	}
	standard, plain := reflect.ValueOf(redirect.Default()), reflect.ValueOf(w.plain().Spec)
	for _, f := range reflect.VisibleFields(plain.Type()) {
		same := reflect.DeepEqual(plain.FieldByIndex(f.Index).Interface(), standard.FieldByIndex(f.Index).Interface())
		if !same && !slices.Contains(others, f.Name) {
			t.Errorf("settings has no row for the field %s of the Spec: a rule by it would pass for a rule of every pod", f.Name)
		}
	}
}
