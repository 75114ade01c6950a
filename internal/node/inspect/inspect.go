// Package inspect describes the redirection of one network namespace for people, and walks a packet through it.
//
// It promises to read everything at the time of the call and to change nothing. Where nothing is known about the pod, it infers
// the wanted redirection from the live rules. It never decides whether a pod is in the mesh.
//
// Start at Read, Alone and Walk; packet.go has the questions about packets and their answers.
package inspect

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sockdiag"
)

// Read describes a namespace. want may be nil if it is not known.
func Read(ctx context.Context, space redirection.Namespace, want redirect.Wanted) (d document.Detail, err error) {
	live, err := read(ctx, space, want)
	if err != nil {
		return d, err
	}
	return detail(space, live)
}

func detail(space redirection.Namespace, live walk.Namespace) (d document.Detail, err error) {
	d.Chains, d.Ports = live.Chains(), document.Ports{Outbound: redirect.OutboundPort, Inbound: redirect.InboundPort}
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		d.Unread = append(d.Unread, live.Unread[f]...)
	}
	if live.Wanted != nil && live.Wanted.Ambient == nil {
		d.Ports = document.Ports{Outbound: live.Wanted.Spec.OutboundPort, Inbound: live.Wanted.Spec.InboundPort}
	}
	all, err := netns.In(space.NetNS, sockdiag.Listening)
	for _, l := range all {
		d.Listeners = append(d.Listeners, document.Listener{Address: l.Address, UID: l.UID})
	}
	return d, err
}

// read reads the live rules. If want is nil, it infers the wanted redirection.
func read(ctx context.Context, space redirection.Namespace, want redirect.Wanted) (walk.Namespace, error) {
	live, err := space.Live(ctx, want)
	if err != nil || want != nil {
		return live, err
	}
	if inferred, native, found := live.InferAmbient(); found { // read again, as the rules of their owner
		if err = backend(&space, native); err != nil {
			return live, err
		}
		return space.Live(ctx, inferred)
	}
	inferred, native, found := live.Infer()
	if !found {
		return live, nil
	}
	families, err := space.Families(inferred)
	if errors.Is(err, redirect.ErrNoAddress) {
		families, err = redirect.Families{HasIPv4: true, IPv6: redirect.Unused}, nil
		if inferred.DualStack {
			families.IPv6 = redirect.Captured
		}
	}
	live.Wanted = &walk.Wanted{Spec: inferred, Families: families, Native: native}
	return live, err
}

// Inferred returns the configuration that most likely made the rules of a namespace, and sets the namespace's backend to the one that made
// them. It is nil if the namespace has no rule of the mesh.
func Inferred(ctx context.Context, space *redirection.Namespace) (redirect.Wanted, error) {
	live, err := read(ctx, *space, nil)
	if err != nil || live.Wanted == nil {
		return nil, err
	}
	return live.Wanted.Mode(), backend(space, live.Wanted.Native)
}

// unknownPod is the remedy for a namespace without rules, which is correct for a pod outside of the mesh.
const unknownPod = "none if the pod should not be in the mesh (istio-cni why NAMESPACE/NAME has the reason); otherwise restart the pod"

// Alone judges a namespace by its live rules alone: whether they match some configuration of the mesh.
func Alone(ctx context.Context, space redirection.Namespace) (e document.Explanation, err error) {
	live, err := read(ctx, space, nil)
	if err != nil {
		return e, err
	}
	if e.Detail, err = detail(space, live); err != nil {
		return e, err
	}
	if live.Wanted == nil {
		e.Status = status([]audit.Problem{{State: audit.Bypassed, Detail: "the network namespace has no rule of the mesh"}})
		e.Remedy = unknownPod
		return e, nil
	}
	if err = backend(&space, live.Wanted.Native); err != nil {
		return e, err
	}
	want := live.Wanted.Mode()
	report, err := space.Audit(ctx, want)
	if errors.Is(err, redirect.ErrNoAddress) {
		e.Status = status([]audit.Problem{{State: audit.Sandboxed, Detail: withoutAddress(space.Backend)}})
		e.Remedy = sidecar.GVisor.Remedy()
		return e, nil
	}
	if err != nil {
		return e, err
	}
	e.Status = status(audit.Assess(want, audit.Observation{
		Mesh: report.Mesh, Rules: audit.Rules(report.Mesh, report.Diffs, report.Ways), Routing: report.Routing, Families: report.Families,
	}))
	e.Backend = strings.Join(slices.Compact(report.Tools), ",")
	e.Exceptions = audit.Exceptions(want)
	return e, nil
}

// withoutAddress explains a namespace that has rules of the mesh, made by a backend, but no address.
func withoutAddress(by redirect.Backend) string {
	copied := "such rules are copied with reproduce-nftables of runsc"
	switch by {
	case redirect.Native:
		copied = "rules of backend native are never copied (add its RuntimeClass to sandboxedRuntimes)"
	case redirect.Tools:
		copied = "legacy rules are copied with reproduce-nftables or reproduce-nat of runsc"
	case redirect.Auto, redirect.Netlink:
	}
	return "the network namespace has rules of the mesh and no address: the sandbox of a gVisor pod has taken the addresses, and " + copied +
		"; or the plugin that assigns addresses has not run"
}

// backend selects the backend whose rules are in the namespace.
func backend(space *redirection.Namespace, native bool) error {
	if native {
		space.Backend = redirect.Native
		return nil
	}
	legacy, err := space.HasLegacy(redirect.Sidecar())
	if legacy {
		space.Backend, space.Tools.Force = redirect.Tools, iptables.Legacy
	}
	return err
}

func status(problems []audit.Problem) audit.Status {
	state := audit.StateOf(problems)
	return audit.Status{State: state, Sentence: state.Sentence(), Remedy: state.Remedy(false), Problems: problems}
}

// Picture is what the agent's page draws of a namespace.
type Picture struct {
	// Ways are where packets go.
	Ways []walk.Way `json:"ways"`
	// IPv6 is what happens to IPv6: captured, rejected or bypassed; "" if the pod has no address of this family.
	IPv6 string `json:"ipv6,omitempty"`
	// DNS is the proxy's port for DNS, 0 if DNS is not captured. Tunnel is ztunnel's port for other ztunnels, 0 without ztunnel.
	DNS    uint16 `json:"dns,omitempty"`
	Tunnel uint16 `json:"tunnel,omitempty"`
	// Direct are the inbound ports of the proxy itself, which are not redirected.
	Direct []string `json:"direct,omitempty"`
}

// Draw returns the picture of a namespace, nil if the wanted redirection is not known. want may be nil as in Read.
func Draw(ctx context.Context, space redirection.Namespace, want redirect.Wanted) (*Picture, error) {
	live, err := read(ctx, space, want)
	if err != nil || live.Wanted == nil {
		return nil, err
	}
	p, w := &Picture{Ways: live.Ways()}, live.Wanted
	if w.Families.HasIPv6 {
		p.IPv6 = w.Families.IPv6.String()
	}
	if w.Spec.DNS != redirect.DNSOff {
		p.DNS = redirect.DNSPort
	}
	if w.Ambient != nil {
		p.Tunnel = w.Spec.TunnelPort
	}
	for _, port := range w.Spec.InboundExclude {
		if w.Spec.Inbound.All && slices.Contains(redirect.AlwaysExcluded(), port) {
			p.Direct = append(p.Direct, port.String())
		}
	}
	return p, nil
}
