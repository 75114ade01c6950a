// Package document has the documents that the commands print with -o json and yaml. They are a contract with scripts.
//
// It promises, within one APIVersion, that fields are added and never removed, renamed or given another meaning. The values of an
// enumeration may grow. The schemas in docs/schema and a section of docs/reference.md are written from these types and comments.
//
// Start at All; pod.go has the document of one pod, trace.go the packets of a trace.
package document

import (
	"encoding/json"
	"time"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
)

// APIVersion is the first field of each document. The second one, kind, is the name of the document's type.
const APIVersion = "cni.meshcni.io/v1"

// Printed is a document with the commands that print it.
type Printed struct {
	Document any
	By       string
}

// All lists the documents.
func All() []Printed {
	return []Printed{
		{PodList{}, "pods"},
		{Explanation{}, "why"},
		{TraceEvent{}, "trace"},
		{DecisionList{}, "decisions"},
		{DoctorReport{}, "doctor"},
		{SelfTestReport{}, "selftest"},
		{RuleReport{}, "iptables --verify, --dry-run, --explain"},
		{Version{}, "version"},
	}
}

// Head is the head of a list.
type Head struct {
	// Node is the node on which the command ran: NODE_NAME or KUBERNETES_NODE_NAME, else the host's name. It is absent in an answer
	// of several nodes and in a RuleReport.
	Node string `json:"node,omitempty"`
	// Time is the time of the answer.
	Time time.Time `json:"time"`
	// Omitted is the number of items that the command's flags have left out.
	Omitted int `json:"omitted,omitempty"`
	// Nodes are the nodes that were asked, and the nodes without an agent. Only kubectl istio-cni has them.
	Nodes []Node `json:"nodes,omitempty"`
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

// Node is a node that kubectl istio-cni asked, or a node that has no agent.
type Node struct {
	// Name is the name of the node. It is "" for an agent that is on no node yet.
	Name string `json:"name"`
	// Agent is the agent's pod as NAMESPACE/NAME.
	Agent string `json:"agent,omitempty"`
	// Error says why the node has not answered. Without it the node has answered.
	Error string `json:"error,omitempty"`
}

// PodList has the pods of the mesh and the state of their redirection, the most serious state first.
type PodList struct {
	Head

	// Items are the pods.
	Items List[audit.Status] `json:"items"`
}

// DecisionList has the last decisions of the plugin, the latest first.
type DecisionList struct {
	Head

	// Items are the decisions.
	Items List[Decision] `json:"items"`
}

// Decision is a decision of the plugin about a pod, in one call.
type Decision struct {
	// Node is the node of the pod. Only kubectl istio-cni sets it.
	Node string `json:"node,omitempty"`
	// Time is the time of the call or, with source watch, the start of the pod.
	Time time.Time `json:"time"`
	// Command is the CNI command of the call. It is absent with source watch.
	Command string `json:"command,omitempty"`
	// Namespace is the pod's namespace.
	Namespace string `json:"namespace"`
	// Pod is the pod's name.
	Pod string `json:"pod"`
	// UID is the pod's UID, as the container runtime gave it.
	UID string `json:"uid"`
	// Container is the container runtime's ID of the pod's sandbox.
	Container string `json:"container"`
	// Captured says whether the plugin has redirected the pod to its sidecar. The agent enrols pods with the reason ambient.
	Captured bool `json:"captured"`
	// Reason is one of the reasons of decisions in docs/errors.md. It is "" if the call failed before the decision.
	Reason string `json:"reason"`
	// Detail is what the reason is about, such as the value of an annotation.
	Detail string `json:"detail,omitempty"`
	// Source says where the decision's input came from. It is "" if the call failed before the decision.
	Source string `json:"source" jsonschema:"enum=,enum=name,enum=annotations,enum=agent,enum=api,enum=none,enum=watch"`
	// Backend is what wrote or compared the rules: one per family, separated by commas, if they differ.
	Backend string `json:"backend,omitempty"`
	// Error says why the call failed. Without it the call succeeded.
	Error string `json:"error,omitempty"`
	// DurationSeconds is how long the call took. It is absent with source watch.
	DurationSeconds float64 `json:"durationSeconds,omitempty"`
}

// Result is the outcome of a check.
type Result string

// The results.
const (
	OK   Result = "ok"
	Warn Result = "warn"
	Fail Result = "fail"
)

// DoctorReport has the checks of what redirection on a node depends on.
type DoctorReport struct {
	Head

	// Items are the checks.
	Items List[Check] `json:"items"`
}

// Check is the result of the doctor about one subject.
type Check struct {
	// Node is the node of the check. Only kubectl istio-cni sets it, and not for checks of the cluster.
	Node string `json:"node,omitempty"`
	// Name is the subject.
	Name string `json:"name"`
	// Result is warn also for a check that could not run.
	Result Result `json:"result" jsonschema:"enum=ok,enum=warn,enum=fail"`
	// Text is what the check has found.
	Text string `json:"text"`
	// Remedy is an instruction. It is absent with the result ok.
	Remedy string `json:"remedy,omitempty"`
}

// SelfTestReport has the backends, and whether they redirect real packets on the node.
type SelfTestReport struct {
	Head

	// Kernel is the release of the running kernel.
	Kernel string `json:"kernel"`
	// Auto is the backend that "auto" selects. It is "" if none can redirect pods.
	Auto string `json:"auto"`
	// Items are the backends.
	Items List[BackendReport] `json:"items"`
}

// BackendReport is the result of one backend.
type BackendReport struct {
	// Backend is the backend.
	Backend string `json:"backend" jsonschema:"enum=netlink,enum=native,enum=iptables"`
	// Works says whether everything works. It is false also for a backend that was not tried.
	Works bool `json:"works"`
	// NotTried says why there is no result.
	NotTried string `json:"notTried,omitempty"`
	// Problems are what does not work.
	Problems []BackendProblem `json:"problems,omitempty"`
}

// BackendProblem is a family and mode that a backend cannot redirect.
type BackendProblem struct {
	// Family is the address family.
	Family string `json:"family" jsonschema:"enum=IPv4,enum=IPv6"`
	// Mode is the mode of inbound redirection.
	Mode string `json:"mode" jsonschema:"enum=REDIRECT,enum=TPROXY"`
	// Text names the missing feature or what happened to the packets.
	Text string `json:"text"`
}

// RuleReport has the wanted rules of a network namespace or, with --verify, the chains that differ from them.
type RuleReport struct {
	Head

	// UpToDate is whether the namespace has the wanted rules, addresses and routes. Only --verify sets it.
	UpToDate *bool `json:"upToDate,omitempty"`
	// Items are the wanted chains or, with --verify, the chains that differ.
	Items List[walk.Chain] `json:"items"`
	// Routing are the wanted addresses, routes and policy rules as commands or, with --verify, their differences as sentences.
	Routing []string `json:"routing,omitempty"`
	// Programs are what --dry-run would run.
	Programs []RuleProgram `json:"programs,omitempty"`
	// Notes are foreign rules behind those of the mesh, and other facts that are no differences.
	Notes []string `json:"notes,omitempty"`
}

// RuleProgram is a change of rules as text.
type RuleProgram struct {
	// Family is the address family, inet for both.
	Family string `json:"family" jsonschema:"enum=IPv4,enum=IPv6,enum=inet"`
	// By is what would take the text.
	By string `json:"by"`
	// Text is the input for that program.
	Text string `json:"text"`
}

// Version is the version of the program.
type Version struct {
	// Version is the version of the release, or of the Go module.
	Version string `json:"version"`
	// Revision is the commit. It is absent in a build outside of version control.
	Revision string `json:"revision,omitempty"`
	// Modified says whether the build had changes that were not committed.
	Modified bool `json:"modified,omitempty"`
	// GoVersion is the version of the Go toolchain.
	GoVersion string `json:"goVersion"`
	// Platform is the operating system and the architecture.
	Platform string `json:"platform"`
}
