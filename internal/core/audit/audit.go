// Package audit assesses whether a running pod of the mesh is redirected as wanted.
//
// It promises a state of a closed set for each pod: its most serious one; problems with texts of bounded length; and that
// settings by which the pod itself lets traffic bypass the proxy are exceptions, not problems.
//
// It never reads a namespace: the caller passes an observation.
//
// Start reading at Assess; exceptions.go has the exceptions of a Spec.
package audit

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// State is the state of a pod's redirection. It is a closed set: it is counted, printed and asserted.
type State string

// The states, the most serious first.
const (
	Bypassed        State = "bypassed"
	ForeignRule     State = "foreign-rule"
	Drifted         State = "drifted"
	ForeignListener State = "foreign-listener"
	NoListener      State = "no-listener"
	Pending         State = "pending"
	UIDCollision    State = "uid-collision"
	IPv6Open        State = "ipv6-open"
	Sandboxed       State = "sandboxed"
	NotInspected    State = "not-inspected"
	Captured        State = "captured"
)

// row is a state with its texts.
type row struct {
	state State
	// sentence is the end of "the pod …".
	sentence string
	// remedy is an instruction, "" for a captured pod.
	remedy string
}

// rows are in the order of severity.
var rows = []row{ //nolint:gochecknoglobals // a constant table
	{
		Bypassed, "has no rules of the mesh: all of its traffic bypasses the proxy",
		"restart the pod, or set audit.mode=repair to have the rules written now",
	},
	{
		ForeignRule, "has a foreign rule that takes, or can take, some of its traffic",
		"find the program that writes the rule (a container with NET_ADMIN, another agent), and restart the pod",
	},
	{
		Drifted, "has rules that differ from the wanted ones",
		"restart the pod, or set audit.mode=repair to have the rules restored now",
	},
	{
		ForeignListener, "redirects its traffic to a port of the proxy on which a process listens that the rules do not recognise as the proxy",
		"end the program that took the proxy's port; if it is the proxy, run it with the user or group in the rules, and restart the pod",
	},
	{
		NoListener, "redirects its traffic to a port of the proxy on which nothing listens",
		"see the state and the log of the container istio-proxy: it has not started, has not opened its listeners, or has ended; in ambient " +
			"mode, see the log of the ztunnel on this node, and delete its pod (kubectl get pods -A -l app=ztunnel -o wide)",
	},
	{
		Pending, "waits to be taken into the ambient mesh",
		"see the cause: the agent repeats the step until it succeeds; if it names ztunnel, a pod of ztunnel must be ready on this node " +
			"(kubectl get pods -A -l app=ztunnel -o wide)",
	},
	{
		UIDCollision, "has a container that runs with the user or group of the proxy, so that its traffic is not redirected",
		"run the container with another runAsUser and runAsGroup than the proxy's",
	},
	{
		IPv6Open, "has an IPv6 address whose traffic bypasses the proxy",
		"set cni.secondIPFamily to capture or reject, or ISTIO_DUAL_STACK for the proxy, and restart the pod; in ambient mode, set AMBIENT_IPV6",
	},
	{
		Sandboxed, "runs in a sandbox with a network stack of its own, so that the rules in its network namespace do not show where its traffic goes",
		"gVisor: set reproduce-nftables for runsc and delete the pod, unless its istio-validation has found the redirection; Kata Containers: " +
			"run the pod without that RuntimeClass",
	},
	{NotInspected, "could not be inspected", "see the cause; the pod is inspected again"},
	{Captured, "is redirected as wanted", ""},
}

// States lists all states, the most serious first.
func States() []State {
	all := make([]State, len(rows))
	for i, r := range rows {
		all[i] = r.state
	}
	return all
}

func (s State) row() row {
	if i := slices.IndexFunc(rows, func(r row) bool { return r.state == s }); i >= 0 {
		return rows[i]
	}
	return row{}
}

// Sentence explains the state, as the end of "the pod …".
func (s State) Sentence() string { return s.row().sentence }

// Remedy is an instruction that ends the state, "" for a captured pod. repairs reports whether audit.mode=repair is set.
func (s State) Remedy(repairs bool) string {
	remedy := s.row().remedy
	if rest, _, offered := strings.Cut(remedy, ", or set audit.mode=repair"); repairs && offered {
		return rest + "; its events or the log of the agent say why audit.mode=repair has not restored the rules"
	}
	return remedy
}

// beside are the remedies for pods of another plugin, where they differ.
var beside = map[State]string{ //nolint:gochecknoglobals // a constant table
	Bypassed: "restart the pod", Drifted: "restart the pod",
	Pending:  "see the cause, the log of Istio's agent on this node and its ztunnel (kubectl get pods -A -l app=ztunnel -o wide); restart the pod",
	IPv6Open: "set ISTIO_DUAL_STACK for the proxy, and restart the pod; in ambient mode, set AMBIENT_IPV6",
}

// RemedyBeside is Remedy for a pod of another plugin.
func (s State) RemedyBeside() string { return cmp.Or(beside[s], s.row().remedy) }

// Process is a process outside the proxy's container that runs with the proxy's user or group.
type Process struct {
	PID int `json:"pid"`
	// Thread is the thread with this user or group, 0 for the main thread.
	Thread    int    `json:"thread,omitempty"`
	Container string `json:"container"`
	UID       uint32 `json:"uid"`
	GID       uint32 `json:"gid"`
}

// String describes the process and its IDs.
func (p Process) String() string {
	what := fmt.Sprintf("process %d", p.PID)
	if p.Thread != 0 {
		what = fmt.Sprintf("thread %d of %s", p.Thread, what)
	}
	return fmt.Sprintf("%s of container %q runs with uid %d and gid %d", what, p.Container, p.UID, p.GID)
}

// Listener is a listening socket.
type Listener struct {
	UID uint32
	// GIDs are the groups of the pod's processes with that UID, empty if unknown.
	GIDs []uint32
}

// foreign reports whether the listening process is not the proxy by the rules. The kernel does not report a socket's group.
func (l Listener) foreign(spec redirect.Spec) bool {
	ofProxy := func(gid uint32) bool { return slices.Contains(spec.GIDs, gid) }
	return !slices.Contains(spec.UIDs, l.UID) && len(l.GIDs) > 0 && !slices.ContainsFunc(l.GIDs, ofProxy)
}

// Observation is the redirection found in a pod's network namespace.
type Observation struct {
	// Mesh is set if the namespace has rules of the mesh. Rules are the problems of the rules, Routing the differences from the
	// wanted addresses and routes.
	Mesh    bool
	Rules   []Problem
	Routing []string
	// Families has the families of the pod's addresses, and how each is treated.
	Families redirect.Families
	// Listeners lists the sockets that accept a connection to an address; nil, so that they are not checked, while the proxy may
	// still be starting.
	Listeners func(netip.AddrPort) []Listener
	// Unknown is why the listeners could not be read, nil otherwise.
	Unknown error
	// Pending is the first step of the enrolment in ambient mode that is not done, "" if all are or for a sidecar's pod.
	Pending string
	// Collisions are processes outside the proxy's container that the rules treat as the proxy.
	Collisions []Process
}

// Problem is one fault of a pod's redirection.
type Problem struct {
	// State is the state that the fault causes.
	State State `json:"state"`
	// Detail describes the fault.
	Detail string `json:"detail"`
}

// maxProblems bounds the listed problems of one kind.
const maxProblems = 5

// limited returns maxProblems texts at most, and the number of the others.
func limited(texts []string, others string) []string {
	if more := len(texts) - maxProblems; more > 0 {
		return append(slices.Clone(texts[:maxProblems]), fmt.Sprintf("and %d more %s", more, others))
	}
	return texts
}

// maxDetail bounds the text of a problem in bytes.
const maxDetail = 1 << 10

// Assess compares an observation with the wanted redirection. A captured pod has no problems.
func Assess(want redirect.Wanted, o Observation) []Problem {
	var all []Problem
	add := func(state State, detail string) {
		all = append(all, Problem{state, printable.Text(detail, maxDetail)})
	}
	all = append(all, o.Rules...)
	if o.Mesh {
		for _, text := range limited(o.Routing, "differences of addresses and routes") {
			add(Drifted, text)
		}
	}
	if o.Listeners != nil && o.Mesh {
		listeners(want, o, add)
	}
	if o.Pending != "" {
		add(Pending, o.Pending)
	}
	var collisions []string
	for _, p := range o.Collisions {
		collisions = append(collisions, p.String())
	}
	for _, text := range limited(collisions, "processes") {
		add(UIDCollision, text)
	}
	_, ofSidecar := want.(redirect.Spec)
	switch open := o.Families.HasIPv6 && o.Families.IPv6 == redirect.Bypassed; {
	case open && ofSidecar:
		add(IPv6Open, "the pod's first address is IPv4, and the plugin's setting second_ip_family is bypass")
	case open:
		add(IPv6Open, "the setting AMBIENT_IPV6 is false")
	}
	if o.Unknown != nil {
		add(NotInspected, o.Unknown.Error())
	}
	return all
}

// StateOf is the most serious state of the problems, Captured without any.
func StateOf(problems []Problem) State {
	state := Captured
	for _, p := range problems {
		if severity(p.State) < severity(state) {
			state = p.State
		}
	}
	return state
}

func severity(s State) int {
	return slices.IndexFunc(rows, func(r row) bool { return r.state == s })
}

// Rules returns the problems of the rules, the most serious first. mesh is set if there are rules of the mesh, diffs are their
// differences from the wanted ones, and ways are the packet paths that differ. A difference that changes no packet's path is a problem
// only if a wanted rule is missing.
func Rules(mesh bool, diffs []ruleset.Diff, ways []walk.Deviation) []Problem {
	var all []Problem
	add := func(state State, detail string) {
		all = append(all, Problem{state, printable.Text(detail, maxDetail)})
	}
	if !mesh && len(diffs) > 0 {
		add(Bypassed, "the network namespace has no rule of the mesh")
		return all
	}
	drifted := slices.ContainsFunc(diffs, func(d ruleset.Diff) bool { return slices.ContainsFunc(d.Chains, lacks) })
	for _, d := range diffs {
		if own := incomplete(d); drifted && !own.Empty() {
			add(Drifted, own.Summary(maxProblems))
		}
	}
	counts := map[State]int{}
	for _, way := range ways {
		state := Drifted
		switch {
		case way.Unknown:
			state = NotInspected
		case way.Foreign && !changed(diffs, way.Rule):
			state = ForeignRule
		case drifted:
			continue // explained by the missing rule
		}
		if counts[state]++; counts[state] <= maxProblems {
			add(state, way.String())
		}
	}
	slices.SortStableFunc(all, func(a, b Problem) int { return severity(a.State) - severity(b.State) })
	if more := counts[ForeignRule] - maxProblems; more > 0 {
		add(ForeignRule, fmt.Sprintf("and %d more", more))
	}
	return all
}

// incomplete returns the part of a difference with missing wanted rules, or with stale chains of the mesh.
func incomplete(d ruleset.Diff) ruleset.Diff {
	d.Chains = slices.DeleteFunc(slices.Clone(d.Chains), func(c ruleset.ChainDiff) bool { return !lacks(c) && !c.Stale })
	for i, c := range d.Chains {
		d.Chains[i].Lines = slices.DeleteFunc(slices.Clone(c.Lines), func(l ruleset.Line) bool { return l.Op == ruleset.Foreign })
	}
	return d
}

// lacks reports whether a chain lacks a wanted rule.
func lacks(c ruleset.ChainDiff) bool {
	return c.Absent || slices.ContainsFunc(c.Lines, func(l ruleset.Line) bool { return l.Op == ruleset.Missing })
}

// changed reports whether a rule is in a chain of the mesh that lacks wanted rules: it is from another configuration.
func changed(diffs []ruleset.Diff, h *walk.Hop) bool {
	return h != nil && slices.ContainsFunc(diffs, func(d ruleset.Diff) bool {
		return slices.ContainsFunc(d.Chains, func(c ruleset.ChainDiff) bool {
			own := slices.ContainsFunc(c.Lines, func(l ruleset.Line) bool { return l.Op == ruleset.Extra && l.Rule.String() == h.Rule })
			return own && lacks(c) && c.Table == h.Table && c.Chain == h.Chain
		})
	})
}

// listeners reports missing listeners of the proxy, and other processes' listeners on a sidecar's ports. The sockets in an ambient pod have
// the user of ztunnel, which is of the operator's choice.
func listeners(want redirect.Wanted, o Observation, add func(State, string)) {
	spec, ofSidecar := want.(redirect.Spec)
	for _, l := range wantedListeners(want, o.Families) {
		all := o.Listeners(l.address)
		if len(all) == 0 && !l.optional {
			add(NoListener, fmt.Sprintf("nothing listens on %s, to which %s", l.address, l.traffic))
		}
		if i := slices.IndexFunc(all, func(l Listener) bool { return ofSidecar && l.foreign(spec) }); i >= 0 {
			add(ForeignListener, fmt.Sprintf("uid %d listens on %s, to which %s; the rules are for a proxy with uid %s or gid %s",
				all[i].UID, l.address, l.traffic, ids(spec.UIDs), ids(spec.GIDs)))
		}
	}
}

func ids(all []uint32) string { return strings.Trim(fmt.Sprint(all), "[]") }

// listener is an address on which the proxy must listen, or may if optional.
type listener struct {
	address netip.AddrPort
	// traffic continues "to which …".
	traffic  string
	optional bool
}

// wantedListeners returns the addresses of the proxy: outbound connections go to the loopback address (REDIRECT in hook OUTPUT), inbound
// ones to the interface's address.
func wantedListeners(want redirect.Wanted, f redirect.Families) []listener {
	var all []listener
	add := func(to netip.Addr, port uint16, traffic string, optional bool) {
		if to.IsValid() {
			all = append(all, listener{netip.AddrPortFrom(to, port), traffic, optional})
		}
	}
	family := func(loopback, host netip.Addr) {
		outbound, inbound, captures, dns := uint16(redirect.OutboundPort), uint16(redirect.InboundPort), true, true
		switch s := want.(type) {
		case redirect.Spec:
			outbound, inbound, captures, dns = s.OutboundPort, s.InboundPort, !s.Inbound.Empty(), s.DNS != redirect.DNSOff
		case ambient.Spec:
			captures, dns = !s.Ingress, s.DNSCapture
			add(host, redirect.TunnelPort, "other ztunnels send tunnels (HBONE)", false)
		}
		add(loopback, outbound, "outbound traffic is redirected", false)
		if captures {
			add(host, inbound, "inbound traffic is redirected", false)
		}
		if dns {
			add(loopback, redirect.DNSPort, "DNS traffic is redirected", true)
		}
	}
	host4, host6 := f.Host, netip.Addr{}
	if f.Host.Is6() {
		host4, host6 = netip.Addr{}, f.Host
	}
	if f.HasIPv4 {
		family(netip.AddrFrom4([4]byte{127, 0, 0, 1}), host4)
	}
	if f.HasIPv6 && f.IPv6 == redirect.Captured {
		family(netip.IPv6Loopback(), host6)
	}
	return all
}
