package plugin

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// mostNamed bounds the differences that an error of CHECK lists one by one.
const mostNamed = 5

// check runs the command CHECK: it compares the namespace with the rules that ADD would write now.
func (p *plugin) check(ctx context.Context, args *skel.CmdArgs) error {
	c, err := p.begin("CHECK", args)
	if err != nil {
		return err
	}
	defer c.end()
	if err = c.identify(); err != nil {
		return err
	}
	decision, err := c.decide(ctx)
	if err != nil {
		return c.undecided(ctx, err)
	}
	c.logDecision(ctx, decision)
	switch decision.Outcome {
	case sidecar.Pass, sidecar.Enrol: // the agent verifies pods of the ambient mesh all the time
		return nil
	case sidecar.Refuse:
		return refusal(c.pod, decision)
	case sidecar.Capture:
	}
	at, err := c.open()
	if err != nil {
		return failure(types.ErrInvalidNetNS, fmt.Sprintf("istio-cni cannot check pod %s", c.pod), err)
	}
	defer at.Close()
	report, err := c.namespace(at, c.verdict(), decision.Sandbox).VerifyAny(ctx, decision.Spec)
	if decision.Sandbox != "" && errors.Is(err, redirect.ErrNoAddress) {
		c.log.InfoContext(ctx, "not checking the pod: its sandbox has taken the addresses out of the network namespace")
		return nil
	}
	if err != nil {
		return programFailure(c.pod, err)
	}
	if report.Clean() {
		return nil
	}
	return failure(codeDifferent, fmt.Sprintf("the traffic of pod %s is not redirected as it should be", c.pod), differences(report))
}

// undecided handles a pod that neither agent nor API server could return. CHECK fails if its namespace has rules of the mesh, so
// that the runtime retries; otherwise it passes.
func (c *call) undecided(ctx context.Context, lookup error) error {
	if at, err := c.open(); err == nil {
		defer at.Close()
		if ours, err := c.namespace(at, c.verdict(), "").HasRules(ctx); err == nil && ours {
			return lookupFailure(c.pod, lookup)
		}
	}
	c.log.WarnContext(ctx, "not checking the pod", "cause", lookup.Error())
	return nil
}

func differences(r redirection.Report) error {
	var parts []string
	for _, d := range r.Diffs {
		parts = append(parts, d.Summary(mostNamed))
	}
	return fmt.Errorf("%s", strings.Join(append(parts, r.Routing...), "; "))
}
