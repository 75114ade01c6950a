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

// Run tests every backend. path is the search path for the iptables programs, like $PATH. An error means that no test could
// run, and names the missing requirement. Then there is no verdict.
func Run(ctx context.Context, path string, log *slog.Logger) (Verdict, error) {
	v := Verdict{Version: version, Kernel: kernel()}
	for _, b := range []redirect.Backend{redirect.Netlink, redirect.Native, redirect.Tools} { // in order of preference
		v.Results = append(v.Results, Result{Backend: b})
	}
	families := []ruleset.Family{ruleset.IPv4}
	if route.KernelHasIPv6() {
		families = append(families, ruleset.IPv6)
	}
	for _, f := range families {
		err := v.try(ctx, f, iptables.Host{Path: path}, log)
		if err != nil && (f == ruleset.IPv4 || errors.Is(err, ErrPrivilege)) {
			return v, err
		}
		if err != nil { // the family is disabled on this node
			log.WarnContext(ctx, "skipping the self-test of a family", slog.String("family", f.String()), slog.String("error", err.Error()))
		}
	}
	v.choose()
	return v, nil
}

// ErrPrivilege means that this process lacks the privileges for a test.
var ErrPrivilege = errors.New("this process cannot create network namespaces (CAP_SYS_ADMIN) or program them (CAP_NET_ADMIN)")

// try tests all backends and modes for a family in one testbed. Each backend replaces the rules of the previous one.
func (v *Verdict) try(ctx context.Context, f ruleset.Family, tools iptables.Host, log *slog.Logger) error {
	b, err := newTestbed(f)
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w: %w", ErrPrivilege, err)
	}
	if err != nil {
		return fmt.Errorf("setting up the self-test: %w", err)
	}
	defer b.close()
	for i := range v.Results {
		for _, mode := range []redirect.Mode{redirect.Redirect, redirect.TPROXY} {
			err := b.test(ctx, redirection.Namespace{NetNS: b.pod, Backend: v.Results[i].Backend, Tools: tools, Log: log}, mode)
			switch {
			case errors.Is(err, iptables.ErrMissing):
				v.Results[i].Untried = err.Error()
			case err != nil:
				v.Results[i].Problems = append(v.Results[i].Problems, Problem{Family: f.String(), Mode: mode.String(), Text: strings.ToValidUTF8(err.Error(), "\ufffd")})
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
