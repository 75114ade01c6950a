// Package selfcheck tests which backend of the redirection works on this node: it applies the rules to a scratch namespace
// and sends real packets.
//
// It promises to change only two namespaces of its own, which end with it, to bound its time, and to distinguish a test that
// could not run from one that failed. It writes the verdict to a file for the plugin.
//
// It never decides about a pod.
//
// Start reading at Run; testbed.go has the namespaces, packet.go the packets, verdict.go the file.
package selfcheck

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/route"
)

// Options are the inputs of a test.
type Options struct {
	// Path is the search path for the iptables programs, as in $PATH.
	Path string
	Log  *slog.Logger
	Now  func() time.Time
}

// timeout bounds the test of one backend in one mode.
const timeout = 10 * time.Second

// Run tests every backend. An error means that no test could run, and names the missing requirement: then there is no
// verdict.
func Run(ctx context.Context, o Options) (Verdict, error) {
	v := Verdict{Version: version, Time: o.Now(), Kernel: kernel()}
	for _, b := range []redirect.Backend{redirect.Netlink, redirect.Native, redirect.Tools} { // the preferred one first
		v.Results = append(v.Results, Result{Backend: b})
	}
	families := []ruleset.Family{ruleset.IPv4}
	if route.KernelHasIPv6() {
		families = append(families, ruleset.IPv6)
	}
	for _, f := range families {
		err := v.try(ctx, o, f)
		if err != nil && (f == ruleset.IPv4 || errors.Is(err, ErrPrivilege)) {
			return v, err
		}
		if err != nil { // it is switched off on this node
			o.Log.WarnContext(ctx, "a family could not be tried", slog.String("family", f.String()), slog.String("error", err.Error()))
		}
	}
	v.choose()
	return v, nil
}

// ErrPrivilege says that this process lacks the privileges for a test.
var ErrPrivilege = errors.New("this process may not make network namespaces (CAP_SYS_ADMIN) or program them (CAP_NET_ADMIN)")

// try tests all backends and modes for a family in one testbed: each backend replaces the rules of the one before.
func (v *Verdict) try(ctx context.Context, o Options, f ruleset.Family) error {
	b, err := newTestbed(f)
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w: %w", ErrPrivilege, err)
	}
	if err != nil {
		return fmt.Errorf("making the place for a self-test: %w", err)
	}
	defer b.close()
	for i := range v.Results {
		began := o.Now()
		for _, mode := range []redirect.Mode{redirect.Redirect, redirect.TPROXY} {
			err := b.test(ctx, o, v.Results[i].Backend, mode)
			switch {
			case errors.Is(err, iptables.ErrMissing):
				v.Results[i].Untried = err.Error()
			case err != nil:
				v.Results[i].Problems = append(v.Results[i].Problems, Problem{Family: f.String(), Mode: mode.String(), Text: err.Error()})
			}
		}
		v.Results[i].Seconds += o.Now().Sub(began).Seconds()
	}
	return nil
}

// test applies rules by one backend in one mode and sends the packets.
func (b *testbed) test(ctx context.Context, o Options, with redirect.Backend, mode redirect.Mode) error {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("it took longer than %s", timeout))
	defer cancel()
	spec := redirect.Default()
	spec.Mode, spec.DNS = mode, redirect.DNSAll
	space := redirection.Namespace{NetNS: b.pod, Backend: with, Tools: iptables.Host{Path: o.Path}, Log: o.Log}
	if _, err := space.Apply(ctx, spec, redirection.Reconcile); err != nil {
		return err
	}
	return b.packets(ctx)
}
