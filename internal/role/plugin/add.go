package plugin

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// add runs the command ADD, and sends its report.
func (p *plugin) add(ctx context.Context, args *skel.CmdArgs) error {
	conf, err := p.configure(args.StdinData)
	if err != nil {
		return err
	}
	call := p.begin("ADD", args.ContainerID)
	err = errUnfinished
	defer func() { call.send(ctx, conf, err) }()
	err = p.admit(ctx, conf, args, call)
	return err
}

// admit redirects a pod of the mesh. It validates the input before any request or change, and prints the result for every pod
// that may start.
func (p *plugin) admit(ctx context.Context, conf cniconf.NetConf, args *skel.CmdArgs, call *call) error {
	before, err := parseResult(conf)
	if err != nil {
		return err
	}
	pod, err := parseArgs(args.Args)
	if err != nil {
		return err
	}
	call.about(pod)
	log := p.logger(pod, args)
	decision, err := call.decide(ctx, conf)
	if err != nil {
		return lookupFailure(pod, err)
	}
	call.log(ctx, log, decision)
	switch decision.Outcome {
	case sidecar.Refuse:
		return refusal(pod, decision)
	case sidecar.Capture:
		report, err := p.capture(ctx, conf, pod, args.Netns, decision.Spec, log)
		call.programmed(report)
		if err != nil {
			return err
		}
	case sidecar.Pass:
	}
	if err := before.PrintTo(&p.answer); err != nil {
		return failure(types.ErrInternal, "istio-cni cannot print the result", err)
	}
	return nil
}

// logger returns the log of a call about a pod.
func (p *plugin) logger(pod podArgs, args *skel.CmdArgs) *slog.Logger {
	return p.log.Logger().With("pod", pod.String(), "container", printable.Text(args.ContainerID, maxNamed), "if", args.IfName)
}

// refusal returns the error for a pod whose settings are invalid.
func refusal(pod podArgs, d sidecar.Decision) error {
	return failure(codeSettings, fmt.Sprintf("istio-cni refuses pod %s: %s", pod, d.Reason.Sentence()), d.Err)
}

// capture programs the pod's namespace. It replaces the rules of an earlier attempt, since runtimes retry in the same
// namespace.
func (p *plugin) capture(ctx context.Context, conf cniconf.NetConf, pod podArgs, path string, spec redirect.Spec, log *slog.Logger) (redirection.Report, error) {
	if conf.Problems != nil {
		return redirection.Report{}, failure(types.ErrInvalidNetworkConfig, "istio-cni cannot use its configuration for pod "+pod.String(), conf.Problems)
	}
	at, err := p.open(path)
	if err != nil {
		return redirection.Report{}, failure(types.ErrInvalidNetNS, notRedirected(pod), err)
	}
	defer at.Close()
	found := verdict(conf)
	if err = found.Err(); err != nil {
		return redirection.Report{}, programFailure(pod, err)
	}
	report, err := p.namespace(conf, found, at, log).Apply(ctx, spec, redirection.Reconcile)
	if err != nil {
		return report, programFailure(pod, err)
	}
	logApplied(log, report)
	return report, nil
}

// open opens the pod's namespace and rejects the node's own. It resolves the path once, so that the checked namespace is the
// programmed one.
func (p *plugin) open(path string) (*netns.Namespace, error) {
	if path == "" {
		return nil, fmt.Errorf("CNI_NETNS is empty")
	}
	at, err := netns.Open(path)
	if err != nil {
		return nil, fmt.Errorf("CNI_NETNS %q: %w", path, err)
	}
	host, err := at.IsHost()
	switch {
	case err != nil:
		err = fmt.Errorf("CNI_NETNS %q: %w", path, err)
	case host && !p.override:
		err = fmt.Errorf("CNI_NETNS %q is the node's own network namespace, which is never touched", path)
	default:
		return at, nil
	}
	at.Close()
	return nil, err
}

func logApplied(log *slog.Logger, r redirection.Report) {
	if r.Families.IPv6 == redirect.Bypassed {
		log.Warn("IPv6 traffic of the pod bypasses the mesh: its first address is IPv4; set ISTIO_DUAL_STACK on the proxy, " +
			"or second_ip_family to capture or reject in the plugin's configuration")
	}
	for _, note := range r.Notes {
		log.Info("found in the namespace", "note", note)
	}
	log.Info("redirected the pod", "tools", strings.Join(r.Tools, ","), "rules_changed", len(r.Programs) > 0)
	for _, program := range r.Programs {
		log.Debug("wrote rules", "family", program.Of, "by", program.By, "rules", program.Text)
	}
}
