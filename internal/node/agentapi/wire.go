package agentapi

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// SocketName is the socket's, in the agent's run directory. It is for root alone.
const SocketName = "pods.sock"

// Paths of the first version of the protocol, which is HTTP/1.1 with JSON. A change that one of the two sides would
// misunderstand gets paths of its own: an agent that does not know them answers 404, and the plugin queries the API server.
const (
	podPath       = "/v1/pods/"
	reportPath    = "/v1/report"
	decisionsPath = "/v1/decisions"
	auditPath     = "/v1/audit"
	bundlePath    = "/v1/bundle/"
	logPath       = "/log" // the reference's, for the socket log.sock
)

// Patterns are the paths for a server's mux.
const (
	PodPattern    = "GET " + podPath + "{namespace}/{name}"
	ReportPattern = "POST " + reportPath
	LogPattern    = "POST " + logPath
	// DecisionsPattern answers with a JSON array of all reports that the agent holds, the latest first.
	DecisionsPattern = "GET " + decisionsPath
	// AuditPattern answers with the status of all pods of the node, a JSON array of audit.Status. With CheckParam every pod is
	// inspected before the answer, unless such requests have used up their budget: then the pods have their last results.
	AuditPattern = "GET " + auditPath
	// AuditPodPattern answers with one pod in detail, an inspect.Explanation. The parameters of inspect.Parse add the way of a packet.
	AuditPodPattern = AuditPattern + "/{namespace}/{name}"
	// TracePattern answers with a packet trace of a pod: a JSON object in each line, a follow.Record, until the trace ends or the
	// client closes the connection. The parameters are those of follow.Parse.
	TracePattern = AuditPodPattern + "/trace"
	// BundlePattern answers with a part of a bug report, with SinceParam where the part has a time.
	BundlePattern = "GET " + bundlePath + "{part}"
)

// Parameters: CheckParam is a boolean, SinceParam the time from which on records are wanted, in RFC 3339.
const (
	CheckParam = "check"
	SinceParam = "since"
)

// The bounds of answers, in bytes. The API server's store accepts objects of 1.5 MiB, and facts are far smaller. The agent holds 1024
// reports at most, which are trimmed. MaxPart is of a part of a bug report.
const (
	maxAnswer    = 4 << 20
	maxDecisions = 64 << 20
	MaxPart      = 8 << 20
)

// MaxReport bounds a report, in bytes. A trimmed one is smaller.
const MaxReport = 64 << 10

// BundlePart names what the agent knows for a bug report. It is a closed set.
type BundlePart string

// The parts. The agent takes credentials that it knows out of all of them.
const (
	BundleAgent     BundlePart = "agent"     // JSON of AgentInfo
	BundleLog       BundlePart = "log"       // the agent's log, as it is on stderr
	BundleMetrics   BundlePart = "metrics"   // the text of /metrics
	BundleReadiness BundlePart = "readiness" // the JSON of /readyz
)

// AgentInfo is the agent's version, place and configuration.
type AgentInfo struct {
	Version   string          `json:"version"`
	Node      string          `json:"node"`
	Namespace string          `json:"namespace"`
	Pod       string          `json:"pod"`
	Settings  []settings.Line `json:"settings"`
	// Plugin is the stanza that is in force.
	Plugin any `json:"plugin,omitempty"`
}

// Key names a pod. UID is that of the runtime, and is required: names are used again.
type Key struct{ Namespace, Name, UID string }

// podAnswer is the answer about a pod.
type podAnswer struct {
	// FactsVersion is the agent's [sidecar.FactsVersion]. A plugin accepts no answer of a lower version than its own: an older
	// agent does not deliver all facts.
	FactsVersion int           `json:"factsVersion"`
	Facts        sidecar.Facts `json:"facts"`
	// UID is that of the request: the pod's own UID may differ (of a pod that the kubelet read from a file).
	UID string `json:"uid"`
}

// PrintPod encodes the answer about a pod that was requested by a UID.
func PrintPod(facts sidecar.Facts, asked string) ([]byte, error) {
	return json.Marshal(podAnswer{FactsVersion: sidecar.FactsVersion(), Facts: facts, UID: asked})
}

// ReadPod decodes the answer to a request.
func ReadPod(text []byte, asked Key) (sidecar.Facts, error) {
	var answer podAnswer
	if err := json.Unmarshal(text, &answer); err != nil {
		return sidecar.Facts{}, fmt.Errorf("reading its answer: %w", err)
	}
	facts := answer.Facts
	switch {
	case answer.FactsVersion < sidecar.FactsVersion():
		return sidecar.Facts{}, fmt.Errorf("it knows facts of version %d, and %d is needed: it is older than the plugin",
			answer.FactsVersion, sidecar.FactsVersion())
	case facts.Namespace != asked.Namespace || facts.Name != asked.Name || answer.UID != asked.UID || asked.UID == "":
		return sidecar.Facts{}, fmt.Errorf("its answer is about pod %s/%s with UID %q", facts.Namespace, facts.Name, answer.UID)
	}
	return facts, nil
}

// Refusal is an answer of the agent with an error.
type Refusal struct {
	Status  int
	Message string
}

// Error is for the log.
func (r *Refusal) Error() string { return fmt.Sprintf("it answers %d: %s", r.Status, r.Message) }

func refusal(status int, text []byte) *Refusal {
	const most = 500
	return &Refusal{Status: status, Message: printable.Text(strings.TrimSpace(string(text)), most)}
}

// Phase is a part of a call's time.
type Phase string

// The phases, in their order: reading the input, deciding about the pod, writing its rules; and the whole call.
const (
	PhaseRead    Phase = "read"
	PhaseDecide  Phase = "decide"
	PhaseProgram Phase = "program"
	PhaseTotal   Phase = "total"
)

// Phases lists all of them.
func Phases() []Phase { return []Phase{PhaseRead, PhaseDecide, PhaseProgram, PhaseTotal} }

// Source is the input that a decision rests on. It is a closed set.
type Source string

// The sources, in the order in which they are queried.
const (
	SourceName        Source = "name"
	SourceAnnotations Source = "annotations"
	SourceAgent       Source = "agent"
	SourceAPI         Source = "api"
	SourceNone        Source = "none" // no source had the pod
	// SourceWatch marks an entry that the agent made from its own watch of the node's pods: the plugin reported no call.
	SourceWatch Source = "watch"
)

// Report is the result of one call of the runtime, or, with SourceWatch, a pod that the plugin leaves alone without a report.
type Report struct {
	// Number is the agent's count of reports.
	Number uint64 `json:"number,omitempty"`
	// Time is that of the call, or the pod's start with SourceWatch. Command is "" then.
	Time      time.Time `json:"time"`
	Command   string    `json:"command"`
	Namespace string    `json:"namespace"`
	Pod       string    `json:"pod"`
	UID       string    `json:"uid"`
	Container string    `json:"container"`
	// Reason, Detail and Source are the decision's.
	Reason string `json:"reason"`
	Detail string `json:"detail,omitempty"`
	Source Source `json:"source"`
	// Captured reports whether the pod is redirected, Changed that rules were written for that. Backend wrote or compared them.
	Captured bool   `json:"captured"`
	Changed  bool   `json:"changed"`
	Backend  string `json:"backend,omitempty"`
	// Error is why the call failed, "" if it did not.
	Error string `json:"error,omitempty"`
	// Seconds are the durations of the phases that there were.
	Seconds map[Phase]float64 `json:"seconds"`
	// Processes is how many were started, Requests how many the API server was sent.
	Processes int `json:"processes"`
	Requests  int `json:"requests"`
}

// The bounds of a report's texts, in bytes: names have the limit of Kubernetes, and a detail or an error can quote the whole
// text of an annotation. As JSON any trimmed report is below 48 KiB.
const (
	maxName   = 253
	maxWord   = 64
	maxDetail = 1 << 10
	maxError  = 4 << 10
)

// Trim makes the texts of the report printable and truncates them to their bounds, so that no report has to be dropped.
func (r *Report) Trim() {
	for text, most := range map[*string]int{
		&r.Command: maxWord, &r.Namespace: maxName, &r.Pod: maxName, &r.UID: maxName, &r.Container: maxName, &r.Reason: maxWord,
		&r.Detail: maxDetail, (*string)(&r.Source): maxWord, &r.Backend: maxName, &r.Error: maxError,
	} {
		*text = printable.Text(*text, most)
	}
	seconds := make(map[Phase]float64, len(Phases())) // a large map keeps its size when keys are deleted
	for _, phase := range Phases() {
		if s, has := r.Seconds[phase]; has {
			seconds[phase] = s
		}
	}
	r.Seconds = seconds
}
