package agentapi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/core/printable"
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
)

// logPath is the reference's, for the socket log.sock.
const logPath = "/log"

// Patterns are the paths for a server's mux.
const (
	PodPattern       = "GET " + podPath + "{namespace}/{name}"
	ReportPattern    = "POST " + reportPath
	DecisionsPattern = "GET " + decisionsPath
	LogPattern       = "POST " + logPath
)

// The parameters of a request for decisions. The answer is a JSON array of reports, the latest first: at most LimitParam of
// those with a number below BeforeParam. Without parameters it has all reports that the agent holds.
const (
	BeforeParam = "before"
	LimitParam  = "limit"
)

// maxAnswer bounds an answer. The API server's store accepts objects of 1.5 MiB, and facts are far smaller; so is a page of
// decisions, whose reports are trimmed.
const maxAnswer = 4 << 20

// decisionsPage is the number of decisions of one request.
const decisionsPage = 64

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
	// Number is the agent's count of reports, by which they are paged.
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

// MaxReport bounds the bytes of a report that are read. A trimmed one is far smaller, one of an older plugin may not be.
const MaxReport = 2 << 20

// ReadReport reads a report and trims it. Of one that is too long, cut short or has a value of another type, the
// readable members are kept and its detail has a note; only a text that does not begin as a report is an error.
func ReadReport(text []byte) (Report, error) {
	var r Report
	err := json.Unmarshal(text, &r)
	if err != nil {
		var members int
		if r, members = readMembers(text); members == 0 && len(text) < MaxReport {
			return Report{}, fmt.Errorf("not a report: %w", err)
		}
		r.Detail = damaged + " " + r.Detail
	}
	r.Trim()
	return r, nil
}

// damaged is the note in the detail of a report of which some members could not be read.
const damaged = "[the report is too long or damaged: some of it is missing]"

// readMembers reads an object's members one by one, as far as they go and fit, and counts them.
func readMembers(text []byte) (r Report, members int) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	if open, err := decoder.Token(); err != nil || open != json.Delim('{') {
		return r, 0
	}
	for decoder.More() {
		key, err := decoder.Token()
		name, isName := key.(string)
		var value json.RawMessage
		if err != nil || !isName || decoder.Decode(&value) != nil {
			break
		}
		if one, err := json.Marshal(map[string]json.RawMessage{name: value}); err == nil && json.Unmarshal(one, &r) == nil {
			members++
		}
	}
	return r, members
}
