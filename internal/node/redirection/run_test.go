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
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestApply_RulesKeepChanging: one bound applies to all attempts together, even if they fail for
// alternating reasons, and the last error names the cause.
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
			check.Equal(t, fmt.Sprint(modes), fmt.Sprint(want), "the modes of the attempts")
		}
	}
}

// TestApply_Sandboxed: a sandboxed pod never gets native rules, whoever selected them; other choices of the user apply.
func TestApply_Sandboxed(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		backend, auto redirect.Backend
		force         iptables.Variant
		want          string
	}{
		{redirect.Auto, "", "", "netlink"},
		{redirect.Auto, redirect.Native, "", "netlink"},
		{redirect.Native, "", "", "netlink"},
		{redirect.Netlink, redirect.Native, "", "netlink"},
		{redirect.Tools, redirect.Native, "", "iptables-nft"},
		{redirect.Auto, redirect.Native, iptables.Legacy, "iptables-legacy"},
		{redirect.Auto, redirect.Tools, "", "iptables-nft"},
	} {
		path := netnstest.New(t)
		netnstest.Run(t, path, "ip", "address", "add", "10.9.9.9/32", "dev", "lo")
		n := Namespace{
			NetNS: netnstest.At(path), Log: slog.New(slog.DiscardHandler), Backend: test.backend, Auto: test.auto,
			Tools: iptables.Host{Force: test.force}, Sandboxed: true,
		}
		report, err := n.Apply(t.Context(), redirect.Default(), Reconcile)
		if err != nil || len(report.Programs) == 0 || !strings.HasPrefix(report.Programs[0].By, test.want) {
			t.Errorf("%+v: %v, %+v", test, err, report.Programs)
		}
		if report, err = n.VerifyAny(t.Context(), redirect.Default()); err != nil || !report.Clean() {
			t.Errorf("%+v: verifying: %v, %+v", test, err, report.Diffs)
		}
		n.Sandboxed, n.Backend = false, redirect.Native
		check.OK(t, check.Err(n.Apply(t.Context(), redirect.Default(), Reconcile)))
		n.Sandboxed, n.Backend = true, test.backend
		if report, err = n.VerifyAny(t.Context(), redirect.Default()); err != nil || report.Clean() {
			t.Errorf("%+v: native rules count: %v", test, err)
		}
	}
}

// TestApply_SandboxedKernel: without nft_compat in the kernel, Apply tries the tools of the node, but no native rules.
func TestApply_SandboxedKernel(t *testing.T) {
	t.Parallel()
	n := Namespace{NetNS: netnstest.At(netnstest.New(t)), Log: slog.New(slog.DiscardHandler), Auto: redirect.Native, Sandboxed: true}
	var modes []mode
	err := n.retry(t.Context(), shared, func(_ Namespace, m mode) error {
		modes = append(modes, m)
		return nftables.ErrUnsupported
	})
	if !errors.Is(err, nftables.ErrUnsupported) || !slices.Equal(modes, []mode{{redirect.Netlink, false}, {redirect.Tools, true}}) {
		t.Errorf("%v after the modes %v", err, modes)
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
	_, live := n.Live(t.Context(), nil)
	for _, err := range []error{families, applied, live} {
		check.Is(t, err, errNoNamespace)
	}
}
