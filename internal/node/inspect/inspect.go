// Package inspect describes the redirection of one network namespace for people, and walks a packet through it.
//
// It promises to read everything at the time of the call and to change nothing. Where nothing is known about the pod, it infers
// the wanted redirection from the live rules. It never decides whether a pod is in the mesh.
//
// Start at Read, Alone and Walk; packet.go has the questions about packets and their answers.
package inspect

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sockdiag"
)

// Detail is the redirection of a namespace.
type Detail struct {
	Chains    List[walk.Chain] `json:"chains"`
	Unread    []string         `json:"unread,omitempty"`
	Listeners List[Listener]   `json:"listeners"`
	Ports     Ports            `json:"ports"`
}

// List is an array in JSON, also if it is nil.
type List[T any] []T

// MarshalJSON implements json.Marshaler.
func (l List[T]) MarshalJSON() ([]byte, error) {
	if l == nil {
		l = List[T]{}
	}
	return json.Marshal([]T(l))
}

// Explanation describes a pod from injection to kernel.
type Explanation struct {
	audit.Status

	// Injected reports whether the injector has marked the pod. Injection is what the injector added.
	Injected  bool      `json:"injected"`
	Injection Injection `json:"injection"`
	// Decision is the plugin's decision about the pod in its current state. Added is the decision that the plugin reported when
	// the pod was created, nil without a report.
	Decision Decision         `json:"decision"`
	Added    *agentapi.Report `json:"added,omitempty"`
	// Modes is what would put the pod into a mode of the mesh that it is not in, nil if no label does.
	Modes *Modes `json:"modes,omitempty"`
	Detail
	// ByRules is the state inferred from the live rules alone, where the wanted rules are not known.
	ByRules audit.State `json:"byRules,omitempty"`
	// InspectionError says why the namespace could not be read.
	InspectionError string `json:"inspectionError,omitempty"`
	// Answer is the way of the requested packet.
	Answer *Answer `json:"answer,omitempty"`
}

// Injection is what the injector added to the pod.
type Injection struct {
	// Revision is istiod's revision, from the annotation sidecar.istio.io/status; "" if the annotation has none.
	Revision string `json:"revision,omitempty"`
	// Proxy says how the proxy runs: "container", "native sidecar" or "" for none.
	Proxy string `json:"proxy,omitempty"`
	// Setup is the init container for the redirection: istio-validation leaves the work to the CNI plugin, istio-init does it itself.
	Setup string `json:"setup,omitempty"`
}

// Decision is the plugin's decision about a pod.
type Decision struct {
	// Captured: its traffic is redirected, to its sidecar or, with the reason sidecar.Ambient, to the node's ztunnel.
	Captured bool   `json:"captured"`
	Reason   string `json:"reason"`
	Sentence string `json:"sentence"`
	Detail   string `json:"detail,omitempty"`
	Remedy   string `json:"remedy,omitempty"`
}

// Modes are instructions that put a pod into a mode of the mesh, "" for its own mode.
type Modes struct {
	Ambient string `json:"ambient,omitempty"`
	Sidecar string `json:"sidecar,omitempty"`
}

// Listener is a listening TCP socket.
type Listener struct {
	Address netip.AddrPort `json:"address"`
	UID     uint32         `json:"uid"`
}

// Ports are the ports of the proxy.
type Ports struct {
	Outbound uint16 `json:"outbound"`
	Inbound  uint16 `json:"inbound"`
}

// Read describes a namespace. want may be nil if it is not known.
func Read(ctx context.Context, space redirection.Namespace, want redirect.Wanted) (d Detail, err error) {
	live, err := read(ctx, space, want)
	if err != nil {
		return d, err
	}
	return detail(space, live)
}

func detail(space redirection.Namespace, live walk.Namespace) (d Detail, err error) {
	d.Chains, d.Ports = live.Chains(), Ports{redirect.OutboundPort, redirect.InboundPort}
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		d.Unread = append(d.Unread, live.Unread[f]...)
	}
	if live.Wanted != nil && live.Wanted.Ambient == nil {
		d.Ports = Ports{live.Wanted.Spec.OutboundPort, live.Wanted.Spec.InboundPort}
	}
	all, err := netns.In(space.NetNS, sockdiag.Listening)
	for _, l := range all {
		d.Listeners = append(d.Listeners, Listener{l.Address, l.UID})
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
func Alone(ctx context.Context, space redirection.Namespace) (e Explanation, err error) {
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
	e.Exceptions = audit.ExceptionsOf(want)
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
