package ruleset_test

import (
	"net/netip"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

func TestAddress_PrintedAsByTheTools(t *testing.T) {
	t.Parallel()
	for given, want := range map[string]string{
		"10.0.0.1": "10.0.0.1", "0.0.0.0": "0.0.0.0", "fd00:0:0:1::5": "fd00:0:0:1::5", "::": "::", "::1": "::1", "::6": "::6",
		"::ffff":        "::ffff",
		"::1:0":         "::0.1.0.0",
		"::a00:1":       "::10.0.0.1",
		"::ffff:a00:1":  "::ffff:10.0.0.1",
		"0:1::a00:1":    "0:1::a00:1",
		"::1:0:a00:1":   "::1:0:a00:1",
		"64:ff9b::a0:1": "64:ff9b::a0:1",
	} {
		if got := ruleset.Address(netip.MustParseAddr(given)); got != want {
			t.Errorf("%s is printed %s, want %s", given, got, want)
		}
	}
}
