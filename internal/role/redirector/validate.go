package redirector

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/probe"
)

// probe checks every captured family.
func (r run) probe(ctx context.Context) error {
	families, err := r.namespace().Families(r.spec)
	if err != nil {
		return r.notRedirected(err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, r.probeTimeout, fmt.Errorf("no redirected connection within %s", r.probeTimeout))
	defer cancel()
	p := probe.Redirection{
		Namespace: r.at, Listeners: []uint16{r.spec.OutboundPort, r.spec.InboundPort}, Port: r.probePort,
	}
	all := probed(families)
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, f := range all {
		wg.Go(func() { errs[i] = p.Run(ctx, f) })
	}
	wg.Wait()
	for i, f := range all {
		if errs[i] == nil {
			printf(r.stderr, "validation: %s traffic is redirected\n", f)
		} else {
			errs[i] = fmt.Errorf("%s: %w", f, errs[i])
		}
	}
	if err := errors.Join(errs...); err != nil {
		return r.notRedirected(err)
	}
	return nil
}

// probed lists the captured families of which the pod has an address.
func probed(f redirect.Families) []ruleset.Family {
	var out []ruleset.Family
	if f.HasIPv4 {
		out = append(out, ruleset.IPv4)
	}
	if f.HasIPv6 && f.IPv6 == redirect.Captured {
		out = append(out, ruleset.IPv6)
	}
	return out
}

// notRedirected explains the failure and its remedies to the reader of the pod's events.
func (r run) notRedirected(cause error) error {
	return fmt.Errorf(`traffic of this pod is not redirected to the sidecar: %w

If redirection is set up by the istio-cni plugin, the pod most likely started before the plugin was in this node's
CNI configuration (a new node, or a restart of the node agent). The pod must be created again, or repaired:
  - the node agent does either by itself when cni.repair is enabled (cni.repair.repairPods or cni.repair.deletePods);
  - by hand: kubectl delete pod.
The probe only works as the proxy's user: it ran as uid %d gid %d, the rules exempt uids %v gids %v`,
		cause, os.Getuid(), os.Getgid(), r.spec.UIDs, r.spec.GIDs)
}
