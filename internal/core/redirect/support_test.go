package redirect_test

import (
	"fmt"
	"iter"
	"net/netip"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/spectest"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

var families = []ruleset.Family{ruleset.IPv4, ruleset.IPv6}

// written are fields as a person writes them.
type written map[redirect.Field]string

func (w written) values() redirect.Values {
	values := redirect.Values{}
	for field, text := range w {
		values[field] = redirect.Value{Source: "test", Text: text}
	}
	return values
}

// spec returns the default Spec with some fields written over it, in the strict dialect of annotations.
func (w written) spec(tb testing.TB) redirect.Spec {
	tb.Helper()
	s, err := redirect.Parse(redirect.Default(), w.values(), redirect.Dialect{Strict: true})
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

var servers = [][]netip.Addr{
	nil,
	{netip.MustParseAddr("10.0.0.53")},
	{netip.MustParseAddr("fd00::53")},
	{netip.MustParseAddr("10.0.0.53"), netip.MustParseAddr("fd00::53"), netip.MustParseAddr("10.0.0.54")},
}

// anySpecs are random Specs, the same ones in every run, and those that chance seldom makes. Each has a name for messages.
func anySpecs(times uint64) iter.Seq2[string, redirect.Spec] {
	return func(yield func(string, redirect.Spec) bool) {
		for name, spec := range spectest.Special() {
			if !yield(name, spec) {
				return
			}
		}
		for seed := range times {
			if !yield(fmt.Sprintf("seed %d", seed), spectest.Random(seed)) {
				return
			}
		}
	}
}

// TestField_Last keeps loops over all fields complete.
func TestField_Last(t *testing.T) {
	_, err := redirect.Parse(redirect.Default(), redirect.Values{redirect.FieldSecondFamily + 1: {Source: "test", Text: "1"}}, redirect.Dialect{})
	if err == nil {
		t.Error("there is a field behind FieldSecondFamily; the loops must reach it")
	}
}
