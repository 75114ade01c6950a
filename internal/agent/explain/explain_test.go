package explain

import (
	"errors"
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/types"
)

// TestReserveTrace_TooMany: concurrent traces are bounded, whatever the number of pods.
func TestReserveTrace_TooMany(t *testing.T) {
	t.Parallel()
	x := New(Options{Present: func(types.NamespacedName, string) bool { return true }})
	for i := range maxTraces + 1 {
		_, err := x.reserveTrace(types.NamespacedName{Name: fmt.Sprint(i)}, &tracing{ended: make(chan struct{})})
		if want := i == maxTraces; errors.Is(err, errTraces) != want {
			t.Errorf("trace %d: %v", i, err)
		}
	}
}
