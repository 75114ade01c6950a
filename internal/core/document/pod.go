package document

import (
	"net/netip"
	"time"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
)

// Explanation describes a pod from injection to kernel. With --pid and --netns it has only what the network namespace shows; the
// pod's names are "" then.
type Explanation struct {
	audit.Status

	// Time is the time of the answer.
	Time time.Time `json:"time"`
	// Injected says whether the injector has marked the pod.
	Injected bool `json:"injected"`
	// Injection is what the injector has added.
	Injection Injection `json:"injection"`
	// Decision is the plugin's decision about the pod in its current state. It is absent with --pid and --netns.
	Decision CurrentDecision `json:"decision,omitzero"`
	// Added is the decision that the plugin reported when the pod was created. It is absent without a report.
	Added *Decision `json:"added,omitempty"`
	// Modes is what would put the pod into a mode of the mesh that it is not in. It is absent if no label does.
	Modes *Modes `json:"modes,omitempty"`
	Detail
	// ByRules is the state inferred from the live rules alone, where the wanted rules are not known.
	ByRules audit.State `json:"byRules,omitempty"`
	// InspectionError says why the namespace could not be read.
	InspectionError string `json:"inspectionError,omitempty"`
	// Answer is the way of the packet that --to or --from describes.
	Answer *Answer `json:"answer,omitempty"`
}

// Injection is what the injector added to the pod.
type Injection struct {
	// Revision is istiod's revision, from the annotation sidecar.istio.io/status. It is absent if the annotation has none.
	Revision string `json:"revision,omitempty"`
	// Proxy says how the proxy runs. It is absent if there is none.
	Proxy string `json:"proxy,omitempty" jsonschema:"enum=container,enum=native sidecar"`
	// Setup is the init container for the redirection: istio-validation leaves the work to the CNI plugin, istio-init does it itself.
	Setup string `json:"setup,omitempty"`
}

// CurrentDecision is what the plugin would decide about the pod now.
type CurrentDecision struct {
	// Captured says whether the pod's traffic is redirected, to its sidecar or, with the reason ambient, to the node's ztunnel.
	Captured bool `json:"captured"`
	// Reason is one of the reasons of decisions in docs/errors.md.
	Reason string `json:"reason"`
	// Sentence explains the reason.
	Sentence string `json:"sentence"`
	// Detail is what the reason is about.
	Detail string `json:"detail,omitempty"`
	// Remedy is an instruction that has the pod captured.
	Remedy string `json:"remedy,omitempty"`
}

// Modes are instructions that put a pod into a mode of the mesh. The mode in which the pod is has none.
type Modes struct {
	// Ambient puts the pod into ambient mode.
	Ambient string `json:"ambient,omitempty"`
	// Sidecar gives the pod a sidecar.
	Sidecar string `json:"sidecar,omitempty"`
}

// Detail is the redirection of a network namespace.
type Detail struct {
	// Chains are the live chains and rules, and the missing rules.
	Chains List[walk.Chain] `json:"chains"`
	// Unread are tables that could not be read, with the reason.
	Unread []string `json:"unread,omitempty"`
	// Listeners are the listening TCP sockets.
	Listeners List[Listener] `json:"listeners"`
	// Ports are the ports of the proxy.
	Ports Ports `json:"ports"`
}

// Listener is a listening TCP socket.
type Listener struct {
	// Address is address and port.
	Address netip.AddrPort `json:"address"`
	// UID is the user of the socket.
	UID uint32 `json:"uid"`
}

// Ports are the ports of the proxy.
type Ports struct {
	// Outbound gets the pod's outgoing traffic.
	Outbound uint16 `json:"outbound"`
	// Inbound gets the traffic that arrives.
	Inbound uint16 `json:"inbound"`
}

// Answer is the way of the requested packet and its end.
type Answer struct {
	// Packet describes the packet.
	Packet string `json:"packet"`
	Way
}

// Way is the way of a packet and its end.
type Way struct {
	// Verdict is the end of the packet's way.
	Verdict string `json:"verdict" jsonschema:"enum=passed,enum=redirected,enum=handed-over,enum=dropped,enum=rejected,enum=not-sent,enum=cannot-tell"`
	// Sentence describes the result and continues "the packet …".
	Sentence string `json:"sentence"`
	// Wanted says whether the mesh wants that. It is "" if rules of legacy tables, which are not traced, decide.
	Wanted Wanted `json:"wanted" jsonschema:"enum=as-wanted,enum=past-the-mesh,enum=unknown,enum="`
	// Settings are the pod's settings that keep the packet away from the proxy.
	Settings []string `json:"settings,omitempty"`
	// To is the destination after a redirection.
	To string `json:"to,omitempty"`
	// NoListener says that nothing listens at that destination.
	NoListener bool `json:"noListener,omitempty"`
	// Hops are the rules that the packet meets, in order.
	Hops List[Hop] `json:"hops"`
	// Omitted is the number of rules that do not match and are left out.
	Omitted int `json:"omitted,omitempty"`
	// OmittedHops is the number of hops that are left out in the middle of a long list.
	OmittedHops int `json:"omittedHops,omitempty"`
}

// Wanted says whether the way of a packet is as the mesh wants it.
type Wanted string

// The packet goes as the mesh wants; or past the mesh, or another way than the mesh wants, such as to a port without a listener; or its
// way is not known.
const (
	AsWanted Wanted = "as-wanted"
	Past     Wanted = "past-the-mesh"
	Unknown  Wanted = "unknown"
)

// Hop is a rule that the packet meets.
type Hop struct {
	// Hook is the hook of the base chain through which the packet came to the rule.
	Hook string `json:"hook"`
	// Table is the rule's table.
	Table string `json:"table"`
	// Chain is the rule's chain.
	Chain string `json:"chain"`
	// Number is the rule's number in the chain, from 1. It is 0 for the policy, and if the number is not known.
	Number int `json:"number"`
	// Rule is the rule as its tool prints it.
	Rule string `json:"rule"`
	// Answer says whether the rule matches.
	Answer string `json:"answer" jsonschema:"enum=matched,enum=not-matched,enum=unknown"`
	// Why is the reason of a rule of the mesh. It is absent for a foreign rule.
	Why string `json:"why,omitempty"`
}
