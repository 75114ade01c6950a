package agentapi

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// SocketName is the name of the socket in the agent's run directory. Only root may use it.
const SocketName = cniconf.PodSocketName

// Paths of the first version of the protocol, which is HTTP/1.1 with JSON. A change that one side would misunderstand gets
// new paths: an agent that does not know them answers 404, and the plugin queries the API server.
const (
	podPath       = "/v1/pods/"
	reportPath    = "/v1/report"
	decisionsPath = "/v1/decisions"
	auditPath     = "/v1/audit"
	bundlePath    = "/v1/bundle/"
	logPath       = "/log" // the path of the reference, for the socket log.sock
)

// Patterns are the paths for a server's mux.
const (
	PodPattern    = "GET " + podPath + "{namespace}/{name}"
	ReportPattern = "POST " + reportPath
	LogPattern    = "POST " + logPath
	// DecisionsPattern answers with a JSON array of all reports that the agent holds, latest first.
	DecisionsPattern = "GET " + decisionsPath
	// AuditPattern answers with the status of all pods of the node, a JSON array of audit.Status. With CheckParam the agent
	// inspects every pod before it answers, as far as time and budget of such requests allow. SelectorParam selects pods by labels.
	AuditPattern = "GET " + auditPath
	// AuditPodPattern answers with the details of one pod, an inspect.Explanation. The parameters of inspect.Parse add the way of a packet.
	AuditPodPattern = AuditPattern + "/{namespace}/{name}"
	// TracePattern answers with a packet trace of a pod: one JSON object per line, a follow.Record, until the trace ends or the
	// client closes the connection. It takes the parameters of follow.Parse.
	TracePattern = AuditPodPattern + "/trace"
	// BundlePattern answers with a part of a bug report. SinceParam limits the parts whose records have a time.
	BundlePattern = "GET " + bundlePath + "{part}"
)

// Parameters: CheckParam is a boolean, SelectorParam a label selector in the form of kubectl's, SinceParam the time of the oldest wanted record, in RFC 3339. AmbientParam is a boolean: the facts
// need [sidecar.Facts.Selected], and an agent that cannot tell answers with an error.
const (
	AmbientParam  = "ambient"
	CheckParam    = "check"
	SelectorParam = "labelSelector"
	SinceParam    = "since"
)

// Bounds of answers, in bytes. The API server's store accepts objects of 1.5 MiB, and facts are far smaller. The agent holds at most
// 1024 reports, each trimmed. A status has one problem of some hundred bytes, as a rule. MaxPart bounds a part of a bug report.
const (
	maxAnswer    = 4 << 20
	maxStatuses  = 16 << 20
	maxDecisions = 64 << 20
	MaxPart      = 8 << 20
)

// MaxReport bounds a report, in bytes. A trimmed report is smaller.
const MaxReport = 64 << 10

// BundlePart names what the agent knows for a bug report. It is a closed set.
type BundlePart string

// The parts. The agent removes the credentials that it knows from all of them.
const (
	BundleAgent     BundlePart = "agent"     // AgentInfo as JSON
	BundleLog       BundlePart = "log"       // the agent's log as written to stderr
	BundleMetrics   BundlePart = "metrics"   // the text of /metrics
	BundleReadiness BundlePart = "readiness" // /readyz as JSON
)

// AgentInfo is the agent's version, node and configuration.
type AgentInfo struct {
	Version   string          `json:"version"`
	Node      string          `json:"node"`
	Namespace string          `json:"namespace"`
	Pod       string          `json:"pod"`
	Settings  []settings.Line `json:"settings"`
	// Plugin is the plugin's configuration in force.
	Plugin any `json:"plugin,omitempty"`
}

// Key names a pod. UID is the runtime's UID of the pod. It is required because names are reused.
type Key struct{ Namespace, Name, UID string }

// podAnswer is the answer about a pod.
type podAnswer struct {
	// FactsVersion is the agent's [sidecar.FactsVersion]. A plugin refuses an answer with a lower version than its own because
	// an older agent does not deliver all facts.
	FactsVersion int           `json:"factsVersion"`
	Facts        sidecar.Facts `json:"facts"`
	// UID is the UID of the request. The pod's own UID may differ (static pods).
	UID string `json:"uid"`
}

// PrintPod encodes the answer to a request for the pod with the UID asked.
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
		return sidecar.Facts{}, fmt.Errorf("its facts have version %d, need %d: the agent is older than the plugin",
			answer.FactsVersion, sidecar.FactsVersion())
	case facts.Namespace != asked.Namespace || facts.Name != asked.Name || answer.UID != asked.UID || asked.UID == "":
		return sidecar.Facts{}, fmt.Errorf("its answer is about pod %s/%s with UID %q", facts.Namespace, facts.Name, answer.UID)
	}
	return facts, nil
}

// Refusal is an error answer of the agent.
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

// The phases in their order: reading the input, deciding about the pod, writing its rules or waiting for the agent to enrol it. PhaseTotal is the whole call.
const (
	PhaseRead    Phase = "read"
	PhaseDecide  Phase = "decide"
	PhaseProgram Phase = "program"
	PhaseTotal   Phase = "total"
)

// Phases lists all phases.
func Phases() []Phase { return []Phase{PhaseRead, PhaseDecide, PhaseProgram, PhaseTotal} }

// Source is the origin of a decision's input. It is a closed set.
type Source string

// The sources in the order in which the plugin queries them.
const (
	SourceName        Source = "name"
	SourceAnnotations Source = "annotations"
	SourceAgent       Source = "agent"
	SourceAPI         Source = "api"
	SourceNone        Source = "none" // no source had the pod
	// SourceWatch marks an entry that the agent made from its own watch of the node's pods because the plugin reported no call.
	SourceWatch Source = "watch"
)

// Report is the result of one plugin call or, with SourceWatch, a pod that the plugin leaves alone without a report.
type Report struct {
	// Number is the agent's serial number of the report.
	Number uint64 `json:"number,omitempty"`
	// Time is the time of the call or, with SourceWatch, the start of the pod. Command is "" then.
	Time      time.Time `json:"time"`
	Command   string    `json:"command"`
	Namespace string    `json:"namespace"`
	Pod       string    `json:"pod"`
	UID       string    `json:"uid"`
	Container string    `json:"container"`
	// Reason, Detail and Source describe the decision.
	Reason string `json:"reason"`
	Detail string `json:"detail,omitempty"`
	Source Source `json:"source"`
	// Captured reports whether the pod is redirected to its sidecar, Changed whether the call wrote rules for it. Backend wrote or
	// compared them. The agent writes those of a pod with the reason ambient: all three are empty.
	Captured bool   `json:"captured"`
	Changed  bool   `json:"changed"`
	Backend  string `json:"backend,omitempty"`
	// Error is why the call failed, "" on success.
	Error string `json:"error,omitempty"`
	// Seconds holds the duration of each phase that ran.
	Seconds map[Phase]float64 `json:"seconds"`
	// Processes counts the started processes, Requests the requests to the API server.
	Processes int `json:"processes"`
	Requests  int `json:"requests"`
}

// Decision is the report for users.
func (r *Report) Decision() document.Decision {
	backends := slices.Compact(strings.Split(r.Backend, ","))
	return document.Decision{
		Time: r.Time, Command: r.Command, Namespace: r.Namespace, Pod: r.Pod, UID: r.UID, Container: r.Container, Captured: r.Captured,
		Reason: r.Reason, Detail: r.Detail, Source: string(r.Source), Backend: strings.Join(backends, ","), Error: r.Error,
		DurationSeconds: r.Seconds[PhaseTotal],
	}
}

// Bounds of a report's texts, in bytes. Names have the limit of Kubernetes; a detail or an error can quote the whole text of
// an annotation. Any trimmed report is below 48 KiB as JSON.
const (
	maxName   = 253
	maxWord   = 64
	maxDetail = 1 << 10
	maxError  = 4 << 10
)

// Trim makes the texts of the report printable and truncates them to their bounds, so that the agent can store every report.
func (r *Report) Trim() {
	for text, most := range map[*string]int{
		&r.Command: maxWord, &r.Namespace: maxName, &r.Pod: maxName, &r.UID: maxName, &r.Container: maxName, &r.Reason: maxWord,
		&r.Detail: maxDetail, (*string)(&r.Source): maxWord, &r.Backend: maxName, &r.Error: maxError,
	} {
		*text = printable.Text(*text, most)
	}
	seconds := make(map[Phase]float64, len(Phases())) // a large map keeps its size after deletions
	for _, phase := range Phases() {
		if s, has := r.Seconds[phase]; has {
			seconds[phase] = s
		}
	}
	r.Seconds = seconds
}
