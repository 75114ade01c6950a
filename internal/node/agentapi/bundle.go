package agentapi

import (
	"context"
	"net/http"
	"net/url"
	"time"
)

// BundlePattern is the path of a part of a bug report, with SinceParam where the part has a time.
const BundlePattern = "GET " + bundlePath + "{part}"

const bundlePath = "/v1/bundle/"

// SinceParam is the time from which on records are wanted, in RFC 3339.
const SinceParam = "since"

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
	Version   string    `json:"version"`
	Node      string    `json:"node"`
	Namespace string    `json:"namespace"`
	Pod       string    `json:"pod"`
	Settings  []Setting `json:"settings"`
	// Plugin is the stanza that is in force.
	Plugin any `json:"plugin,omitempty"`
}

// Setting is a setting in force and where its value comes from. A secret is not shown.
type Setting struct {
	Name   string `json:"name"`
	Value  string `json:"value"`
	Origin string `json:"origin"`
}

// MaxPart bounds an answer of Bundle, in bytes.
const MaxPart = 8 << 20

// Bundle requests a part of a bug report, with records from a time on.
func (a *Agent) Bundle(ctx context.Context, part BundlePart, since time.Time) ([]byte, error) {
	path := bundlePath + string(part) + "?" + url.Values{SinceParam: {since.UTC().Format(time.RFC3339)}}.Encode()
	text, err := a.callUpTo(ctx, MaxPart, http.MethodGet, path, nil)
	return text, asked(err, "its %s", part)
}
