package nfnetlink

import (
	"errors"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

// TestList_Changes: a list during which objects changed is requested again, at most five times.
func TestList_Changes(t *testing.T) {
	t.Parallel()
	changed := fmt.Errorf("listing: %w", ErrChanged)
	for _, tt := range []struct {
		fails []error // the errors of the first calls
		calls int
		want  error
	}{
		{nil, 1, nil},
		{[]error{changed, changed, changed, changed}, 5, nil},
		{[]error{changed, unix.EPERM}, 2, unix.EPERM},
		{[]error{changed, changed, changed, changed, changed}, 5, errUnsettled},
	} {
		calls := 0
		err := complete(func() error {
			if calls++; calls <= len(tt.fails) {
				return tt.fails[calls-1]
			}
			return nil
		})
		if calls != tt.calls || !errors.Is(err, tt.want) {
			t.Errorf("%v: %v in %d calls, want %v in %d", tt.fails, err, calls, tt.want, tt.calls)
		}
	}
}
