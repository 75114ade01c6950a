package plugin

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/selfcheck"
)

// add runs the command ADD, and sends its report.
func (p *plugin) add(ctx context.Context, args *skel.CmdArgs) error {
	c, err := p.begin("ADD", args)
	if err != nil {
		return err
	}
	err = errUnfinished
	defer func() { c.send(ctx, err) }()
	err = c.admit(ctx)
	return err
}

// admit redirects or enrols a pod of the mesh. It validates the input before any request or change, and prints the result for every pod
// that may start.
func (c *call) admit(ctx context.Context) error {
	before, err := parseResult(c.conf)
	if err != nil {
		return err
	}
	if err = c.identify(); err != nil {
		return err
	}
	decision, err := c.decide(ctx)
	if err != nil {
		return lookupFailure(c.pod, err)
	}
	c.logDecision(ctx, decision)
	switch decision.Outcome {
	case sidecar.Refuse:
		return refusal(c.pod, decision)
	case sidecar.Capture:
		report, err := c.capture(ctx, decision)
		c.programmed(report)
		if err != nil {
			return err
		}
	case sidecar.Enrol:
		if err := c.enrol(ctx, before); err != nil {
			return err
		}
	case sidecar.Pass:
	}
	if err := before.PrintTo(&c.plugin.answer); err != nil {
		return failure(types.ErrInternal, "istio-cni cannot print the result", err)
	}
	return nil
}

// refusal returns the error for a pod whose settings are invalid.
func refusal(pod podArgs, d sidecar.Decision) error {
	return failure(codeSettings, fmt.Sprintf("istio-cni refuses pod %s: %s", pod, d.Reason.Sentence()), d.Err)
}

// capture programs the pod's namespace. It replaces the rules of an earlier attempt because runtimes retry in the same
// namespace.
func (c *call) capture(ctx context.Context, d sidecar.Decision) (redirection.Report, error) {
	at, err := c.enter(notRedirected(c.pod))
	if err != nil {
		return redirection.Report{}, err
	}
	defer at.Close()
	found := c.verdict()
	if err = found.Err(); err != nil {
		return redirection.Report{}, programFailure(c.pod, err)
	}
	report, err := c.namespace(at, found, d.Sandbox).Apply(ctx, d.Spec, redirection.Reconcile)
	if err != nil {
		return report, programFailure(c.pod, err)
	}
	logApplied(c.log, report)
	return report, nil
}

// enter opens the namespace of a pod of the mesh, if the configuration is usable. The action is for the error.
func (c *call) enter(action string) (*netns.Namespace, error) {
	if c.conf.Problems != nil {
		return nil, failure(types.ErrInvalidNetworkConfig, "istio-cni cannot use its configuration for pod "+c.pod.String(), c.conf.Problems)
	}
	at, err := c.open()
	if err != nil {
		return nil, failure(types.ErrInvalidNetNS, action, err)
	}
	return at, nil
}

// open opens the pod's namespace and rejects the node's own. It resolves the path once, so that the checked and the programmed
// namespace are the same.
func (c *call) open() (*netns.Namespace, error) {
	path := c.args.Netns
	if path == "" {
		return nil, fmt.Errorf("CNI_NETNS is empty")
	}
	at, err := netns.Open(path)
	if err != nil {
		return nil, fmt.Errorf("CNI_NETNS %q: %w", path, err)
	}
	host, err := at.IsHost()
	override := c.plugin.getenv("CNI_NETNS_OVERRIDE") // for a plugin in the pod's namespace; the CNI library accepts the same values
	switch {
	case err != nil:
		err = fmt.Errorf("CNI_NETNS %q: %w", path, err)
	case host && override != "1" && !strings.EqualFold(override, "true"):
		err = fmt.Errorf("CNI_NETNS %q is the node's own network namespace, which is never touched", path)
	default:
		return at, nil
	}
	at.Close()
	return nil, err
}

// namespace returns the pod's network namespace, with the tools of the node and the self-test's choice.
func (c *call) namespace(at *netns.Namespace, found selfcheck.Verdict, of sidecar.Sandbox) redirection.Namespace {
	return redirection.Namespace{
		NetNS: at, Log: c.log, Backend: c.conf.Backend, Auto: found.Choice, Sandboxed: of != "",
		Tools: iptables.Host{Path: c.plugin.getenv("PATH"), Force: iptables.Variant(c.conf.ForceIptables)},
	}
}

// verdict returns the result of the node agent's self-test, for backend auto. It reads a file.
func (c *call) verdict() selfcheck.Verdict {
	if c.conf.Backend != redirect.Auto || c.conf.RunDir == "" {
		return selfcheck.Verdict{}
	}
	return selfcheck.Recorded(c.conf.RunDir)
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
