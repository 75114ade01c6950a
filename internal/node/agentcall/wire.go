package agentcall

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// SocketName is the socket's, in the agent's run directory. It is for root alone.
const SocketName = "pods.sock"

// Paths of the first version of the protocol, which is HTTP/1.1 with JSON. A change that one of the two sides would
// misunderstand gets paths of its own: an agent that does not know them answers 404, and the plugin asks the API server.
const (
	podPath    = "/v1/pods/"
	reportPath = "/v1/report"
	// DecisionsPath gives the last reports, the latest first.
	DecisionsPath = "/v1/decisions"
)

// Patterns are the paths for a server's mux.
const (
	PodPattern       = "GET " + podPath + "{namespace}/{name}"
	ReportPattern    = "POST " + reportPath
	DecisionsPattern = "GET " + DecisionsPath
)

// FactsVersion counts the facts that decisions rest on. It grows when [sidecar.Facts] gets one more: an agent of before
// does not deliver it, so a plugin takes no answer of a lower version. More than it knows does not matter to it.
const FactsVersion = 1

// maxAnswer bounds all answers of a connection. The API server's store takes objects of 1.5 MiB, and facts are far smaller.
const maxAnswer = 4 << 20

// Key names the pod that is meant. UID is what the runtime knows it by, and is required: names are used again.
type Key struct{ Namespace, Name, UID string }

// podAnswer is the answer about a pod.
type podAnswer struct {
	FactsVersion int           `json:"factsVersion"`
	Facts        sidecar.Facts `json:"facts"`
	// UID is the one of the question: the pod's own may be another (of a pod that the kubelet read from a file).
	UID string `json:"uid"`
}

// PrintPod is the answer about a pod that was asked for by a UID.
func PrintPod(facts sidecar.Facts, asked string) ([]byte, error) {
	return json.Marshal(podAnswer{FactsVersion: FactsVersion, Facts: facts, UID: asked})
}

// ReadPod reads the answer to a question.
func ReadPod(text []byte, asked Key) (sidecar.Facts, error) {
	var answer podAnswer
	if err := json.Unmarshal(text, &answer); err != nil {
		return sidecar.Facts{}, fmt.Errorf("reading its answer: %w", err)
	}
	facts := answer.Facts
	switch {
	case answer.FactsVersion < FactsVersion:
		return sidecar.Facts{}, fmt.Errorf("it knows facts of version %d, and %d is needed: it is older than the plugin",
			answer.FactsVersion, FactsVersion)
	case facts.Namespace != asked.Namespace || facts.Name != asked.Name || answer.UID != asked.UID || asked.UID == "":
		return sidecar.Facts{}, fmt.Errorf("its answer is about pod %s/%s with UID %q", facts.Namespace, facts.Name, answer.UID)
	}
	return facts, nil
}

// Refusal is the agent's word that it cannot tell.
type Refusal struct {
	Status  int
	Message string
}

// Error is for the log.
func (r *Refusal) Error() string { return fmt.Sprintf("it answers %d: %s", r.Status, r.Message) }

func refusal(status int, text []byte) *Refusal {
	const most = 500
	message := strings.TrimSpace(string(text))
	if len(message) > most {
		message = message[:most] + "…"
	}
	return &Refusal{Status: status, Message: message}
}

// Phase is a part of a call's time.
type Phase string

// The phases, in their order: reading what came in, finding out about the pod, writing its rules; and all of it.
const (
	PhaseRead    Phase = "read"
	PhaseDecide  Phase = "decide"
	PhaseProgram Phase = "program"
	PhaseTotal   Phase = "total"
)

// Phases lists all of them.
func Phases() []Phase { return []Phase{PhaseRead, PhaseDecide, PhaseProgram, PhaseTotal} }

// Source is what decided about a pod. It is a closed set.
type Source string

// The sources, in the order in which they are asked.
const (
	SourceName        Source = "name"
	SourceAnnotations Source = "annotations"
	SourceAgent       Source = "agent"
	SourceAPI         Source = "api"
	SourceNone        Source = "none" // nobody could tell
)

// Report is what a plugin did in one call of the runtime.
type Report struct {
	Time      time.Time `json:"time"`
	Command   string    `json:"command"`
	Namespace string    `json:"namespace"`
	Pod       string    `json:"pod"`
	UID       string    `json:"uid"`
	Container string    `json:"container"`
	// Reason and Detail are the decision's, Source is what it rests on.
	Reason string `json:"reason"`
	Detail string `json:"detail,omitempty"`
	Source Source `json:"source"`
	// Captured says that the pod is redirected, Changed that rules were written for that. Backend wrote or compared them.
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
