// Package selfcheck tests which backend of the redirection works on this node: it applies the rules to a scratch namespace
// and sends real packets.
//
// It promises to change only two namespaces that it creates and removes, to bound its time, and to distinguish a test that
// could not run from one that failed. It writes the verdict to a file for the plugin.
//
// It never decides about a pod.
//
// Start reading at Run; packet.go has the namespaces and the packets, verdict.go the file.
package selfcheck

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/route"
)

// timeout bounds the test of one backend in one mode.
const timeout = 10 * time.Second

// Run tests the backends. path is the search path for the iptables programs, like $PATH; with programs, Run tests them even if another
// backend works, so that it starts processes. An error means that no test could run, and names the missing requirement. Then there is no
// verdict.
func Run(ctx context.Context, path string, programs bool, log *slog.Logger) (Verdict, error) {
	v := Verdict{Version: version, Kernel: kernel()}
	err := v.tryAll(ctx, iptables.Host{Path: path}, log, redirect.Netlink, redirect.Native) // in order of preference
	if err != nil {
		return v, err
	}
	if works := slices.ContainsFunc(v.Results, func(r Result) bool { return len(r.Problems) == 0 }); works && !programs {
		v.Results = append(v.Results, Result{Backend: redirect.Tools, Untried: "another backend works"})
	} else if err = v.tryAll(ctx, iptables.Host{Path: path}, log, redirect.Tools); err != nil {
		return v, err
	}
	v.choose()
	return v, nil
}

// tryAll tests backends in all families of the kernel.
func (v *Verdict) tryAll(ctx context.Context, tools iptables.Host, log *slog.Logger, backends ...redirect.Backend) error {
	first := len(v.Results)
	for _, b := range backends {
		v.Results = append(v.Results, Result{Backend: b})
	}
	families := []ruleset.Family{ruleset.IPv4}
	if route.KernelHasIPv6() {
		families = append(families, ruleset.IPv6)
	}
	for _, f := range families {
		err := try(ctx, v.Results[first:], f, tools, log)
		if err != nil && (f == ruleset.IPv4 || errors.Is(err, ErrPrivilege)) {
			return err
		}
		if err != nil { // the family is disabled on this node
			log.WarnContext(ctx, "skipping the self-test of a family", slog.String("family", f.String()), slog.String("error", err.Error()))
		}
	}
	return nil
}

// ErrPrivilege means that this process lacks the privileges for a test.
var ErrPrivilege = errors.New("this process cannot create network namespaces (CAP_SYS_ADMIN) or program them (CAP_NET_ADMIN)")

// try tests the backends of the results, in all modes for a family, in one testbed. Each backend replaces the rules of the previous one.
func try(ctx context.Context, results []Result, f ruleset.Family, tools iptables.Host, log *slog.Logger) error {
	b, err := newTestbed(f)
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w: %w", ErrPrivilege, err)
	}
	if err != nil {
		return fmt.Errorf("setting up the self-test: %w", err)
	}
	defer b.close()
	for i := range results {
		for _, mode := range []redirect.Mode{redirect.Redirect, redirect.TPROXY} {
			err := b.test(ctx, redirection.Namespace{NetNS: b.pod, Backend: results[i].Backend, Tools: tools, Log: log}, mode)
			switch {
			case errors.Is(err, iptables.ErrMissing):
				results[i].Untried = err.Error()
			case err != nil:
				results[i].Problems = append(results[i].Problems, Problem{Family: f.String(), Mode: mode.String(), Text: strings.ToValidUTF8(err.Error(), "\ufffd")})
			}
		}
	}
	return nil
}

// test applies the rules of one mode to the pod and sends the packets.
func (b *testbed) test(ctx context.Context, pod redirection.Namespace, mode redirect.Mode) error {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("it took longer than %s", timeout))
	defer cancel()
	spec := redirect.Default()
	spec.Mode, spec.DNS = mode, redirect.DNSAll
	if _, err := pod.Apply(ctx, spec, redirection.Reconcile); err != nil {
		return err
	}
	return b.packets(ctx)
}
