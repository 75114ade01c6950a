package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// mostNamed bounds the differences that an error of CHECK lists one by one.
const mostNamed = 5

// check runs the command CHECK: it compares the namespace with the rules that ADD would write now.
func (p *plugin) check(ctx context.Context, args *skel.CmdArgs) error {
	conf, err := p.configure(args.StdinData)
	if err != nil {
		return err
	}
	pod, err := parseArgs(args.Args)
	if err != nil {
		return err
	}
	log := p.logger(pod, args)
	call := p.begin("CHECK", args.ContainerID)
	defer call.end()
	call.about(pod)
	decision, err := call.decide(ctx, conf)
	if err != nil {
		return p.unknown(ctx, conf, args.Netns, pod, log, err)
	}
	call.log(ctx, log, decision)
	switch decision.Outcome {
	case sidecar.Pass:
		return nil
	case sidecar.Refuse:
		return refusal(pod, decision)
	case sidecar.Capture:
	}
	at, err := p.open(args.Netns)
	if err != nil {
		return failure(types.ErrInvalidNetNS, fmt.Sprintf("istio-cni cannot check pod %s", pod), err)
	}
	defer at.Close()
	report, err := p.namespace(conf, verdict(conf), at, decision.Sandbox, log).VerifyAny(ctx, decision.Spec)
	if decision.Sandbox != "" && errors.Is(err, redirect.ErrNoAddress) {
		log.InfoContext(ctx, "not checking the pod: its sandbox has taken the addresses out of the network namespace")
		return nil
	}
	if err != nil {
		return programFailure(pod, err)
	}
	if report.Clean() {
		return nil
	}
	return failure(codeDifferent, fmt.Sprintf("the traffic of pod %s is not redirected as it should be", pod), differences(report))
}

// unknown handles a pod that neither agent nor API server could return. If its namespace has rules of the mesh, CHECK fails, so
// that the runtime retries; otherwise it passes.
func (p *plugin) unknown(ctx context.Context, conf cniconf.NetConf, path string, pod podArgs, log *slog.Logger, lookup error) error {
	if at, err := p.open(path); err == nil {
		defer at.Close()
		if ours, err := p.namespace(conf, verdict(conf), at, "", log).HasRules(ctx); err == nil && ours {
			return lookupFailure(pod, lookup)
		}
	}
	log.WarnContext(ctx, "not checking the pod", "cause", lookup.Error())
	return nil
}

func differences(r redirection.Report) error {
	var parts []string
	for _, d := range r.Diffs {
		parts = append(parts, d.Summary(mostNamed))
	}
	return fmt.Errorf("%s", strings.Join(append(parts, r.Routing...), "; "))
}
