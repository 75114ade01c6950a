package redirection

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/nftables"
)

// TestApply_RulesKeepChanging: all attempts together are bounded once, also if they fail for different
// reasons in turns, and the last error names the cause.
func TestApply_RulesKeepChanging(t *testing.T) {
	t.Parallel()
	n := Namespace{NetNS: netnstest.At(netnstest.New(t)), Log: slog.New(slog.DiscardHandler)}
	for _, a := range []access{shared, exclusive} {
		for _, cause := range []error{nftables.ErrChanged, iptables.ErrChanged} {
			var modes []mode
			err := n.retry(t.Context(), a, func(_ Namespace, m mode) error {
				modes = append(modes, m)
				switch len(modes) {
				case 3:
					return errNeedsTools
				case 6, 8:
					return nftables.ErrUnsupported
				}
				return fmt.Errorf("writing rules: %w", cause)
			})
			if !errors.Is(err, cause) || !strings.HasPrefix(err.Error(), "retries exhausted: the rules of the namespace keep changing") {
				t.Errorf("got error %v", err)
			}
			want := slices.Concat(slices.Repeat([]mode{{redirect.Netlink, false}}, 3), slices.Repeat([]mode{{redirect.Netlink, true}}, 3),
				slices.Repeat([]mode{{redirect.Native, true}}, 2), slices.Repeat([]mode{{redirect.Tools, true}}, attempts-8))
			if !slices.Equal(modes, want) {
				t.Errorf("the modes of the attempts are %v, want %v", modes, want)
			}
		}
	}
}

func TestApply_EndsAttempts(t *testing.T) {
	t.Parallel()
	n := Namespace{NetNS: netnstest.At(netnstest.New(t)), Log: slog.New(slog.DiscardHandler)}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for _, tc := range []struct {
		name  string
		fails func(calls int) error
		calls int
	}{
		{"done", func(int) error { return nil }, 1},
		{"another error", func(int) error { return errors.New("no") }, 1},
		{"one change", func(calls int) error { return map[int]error{1: nftables.ErrChanged}[calls] }, 2},
		{"a feature that no other mode has", func(int) error { return nftables.ErrUnsupported }, 3},
		{"the context's end", func(calls int) error {
			if calls == 2 {
				cancel()
			}
			return nftables.ErrChanged
		}, 2},
	} {
		calls := 0
		err := n.retry(ctx, shared, func(Namespace, mode) error {
			calls++
			return tc.fails(calls)
		})
		if want := tc.fails(tc.calls); calls != tc.calls || fmt.Sprint(err) != fmt.Sprint(want) {
			t.Errorf("%s: %v after %d attempts, want %v after %d", tc.name, err, calls, want, tc.calls)
		}
	}
}

func TestApply_LostNamespace(t *testing.T) {
	t.Parallel()
	n := Namespace{Log: slog.New(slog.DiscardHandler)}
	spec := redirect.Default()
	_, families := n.Families(spec)
	_, applied := n.Apply(t.Context(), spec, Reconcile)
	for _, err := range []error{families, applied} {
		if !errors.Is(err, errNoNamespace) {
			t.Errorf("got %v", err)
		}
	}
}
