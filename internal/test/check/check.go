// Package check has the checks that tests of all packages make: no error, the same value, the parts of a text, no difference.
package check

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// OK ends the test if err is not nil. The subject, if any, precedes the error in the message.
func OK(tb testing.TB, err error, subject ...any) {
	tb.Helper()
	if err != nil {
		tb.Fatal(words(subject), err)
	}
}

// Err returns the error of a call and drops its other result.
func Err[T any](_ T, err error) error { return err }

// Equal fails the test if got and want differ. The subject names the value.
func Equal[T comparable](tb testing.TB, got, want T, subject ...any) {
	tb.Helper()
	if got != want {
		tb.Errorf("%s got %s, want %s", words(subject), value(got), value(want))
	}
}

// Contains fails the test for each part that a text lacks.
func Contains(tb testing.TB, text string, parts ...string) {
	tb.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			tb.Errorf("no %q in\n%.10000s", part, text)
		}
	}
}

// Fails fails the test unless err is an error that has all parts in its text.
func Fails(tb testing.TB, err error, parts ...string) {
	tb.Helper()
	if err == nil {
		tb.Error("no error")
		return
	}
	Contains(tb, err.Error(), parts...)
}

// Diff fails the test with the difference between want and got, if any.
func Diff(tb testing.TB, subject string, want, got any, options ...cmp.Option) {
	tb.Helper()
	if diff := cmp.Diff(want, got, options...); diff != "" {
		tb.Errorf("%s (-want +got):\n%s", subject, diff)
	}
}

func value(v any) string {
	if text, ok := v.(string); ok {
		return strconv.Quote(text)
	}
	return fmt.Sprint(v)
}

func words(subject []any) string {
	if len(subject) == 0 {
		return ""
	}
	return strings.TrimSpace(fmt.Sprintln(subject...)) + ":"
}
