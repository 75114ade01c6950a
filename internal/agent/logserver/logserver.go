// Package logserver logs the records that processes of the CNI plugin send to the node agent, each with its own time.
//
// It promises to parse the records of this program's plugin and of Istio's plugin, to keep the records of one invocation
// together, and that no batch harms the agent: its size and the volume of the log have limits. Records beyond the limits are
// counted. A record cannot imitate one or several of the agent's own; package applet escapes the characters that a terminal
// interprets, also in the agent's own records.
//
// It does not serve the socket; package unixsock does.
//
// Start reading at Handler. record.go parses a record.
package logserver

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// The limits. This program's plugin sends at most 512 KiB of records, well below all limits.
const (
	maxBody    = 1 << 20 // bytes
	maxRecords = 5000    // of a batch

	byteRate  = 1 << 20 // per second
	byteBurst = 16 << 20

	// logEach is the least time between two records about lost records.
	logEach = 30 * time.Second
)

// Options are the sinks of the records. All are required.
type Options struct {
	// Records receives the relayed records. Its Enabled is not called because its level is the agent's own.
	Records slog.Handler
	// Level is the lowest relayed level.
	Level slog.Leveler
	// Log is the agent's own log.
	Log     *slog.Logger
	Metrics *metrics.Metrics
}

type relay struct {
	Options

	limiter *rate.Limiter

	mu     sync.Mutex                 // keeps a batch together, and limits decoding to one batch at a time
	lost   map[metrics.LogOutcome]int // since the last report
	report rate.Sometimes
}

// Handler serves the path to which plugins post.
func Handler(o Options) http.Handler {
	o.Records = o.Records.WithAttrs([]slog.Attr{slog.String(scopeKey, "cni-plugin")})
	r := &relay{
		Options: o, limiter: rate.NewLimiter(byteRate, byteBurst),
		lost: map[metrics.LogOutcome]int{}, report: rate.Sometimes{Interval: logEach},
	}
	mux := http.NewServeMux()
	mux.HandleFunc(agentapi.LogPattern, r.post)
	return mux
}

// post relays a batch: a JSON array of strings, each the text of a record. A readable batch is answered with 200 even if a
// record is malformed, because the sender could not correct it. An unreadable batch is counted as one rejected record because its
// number of records is unknown.
func (r *relay) post(w http.ResponseWriter, request *http.Request) {
	ctx := context.WithoutCancel(request.Context()) // continue after the client closes the connection
	body, err := io.ReadAll(http.MaxBytesReader(w, request.Body, maxBody))
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		err = r.batch(ctx, body)
	}
	if err != nil {
		r.count(metrics.LogRejected, 1)
		code := http.StatusBadRequest
		if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
			code = http.StatusRequestEntityTooLarge
		}
		http.Error(w, http.StatusText(code), code)
	}
	if dropped, rejected := r.lost[metrics.LogDropped], r.lost[metrics.LogRejected]; dropped+rejected > 0 {
		r.report.Do(func() {
			r.Log.WarnContext(ctx, "plugin log records were not relayed", "dropped", dropped, "rejected", rejected)
			clear(r.lost)
		})
	}
}

// batch decodes the whole batch before it logs any record. An element that is not a string is a rejected record; null is an
// empty batch, as in Istio's agent.
func (r *relay) batch(ctx context.Context, body []byte) error {
	var lines []string
	err := json.Unmarshal(body, &lines)
	if otherType := (*json.UnmarshalTypeError)(nil); err != nil && (lines == nil || !errors.As(err, &otherType)) {
		return err
	}
	relayed := lines[:min(len(lines), maxRecords)]
	r.count(metrics.LogDropped, len(lines)-len(relayed))
	for _, line := range relayed {
		r.count(r.log(ctx, line), 1)
	}
	return nil
}

// log logs one record and returns its outcome, empty for a record below the level, which is not counted.
func (r *relay) log(ctx context.Context, line string) metrics.LogOutcome {
	record, err := parse(line)
	switch {
	case err != nil:
		return metrics.LogRejected
	case record.Level < r.Level.Level():
		return ""
	case !r.limiter.AllowN(time.Now(), len(line)) || r.Records.Handle(ctx, record) != nil: //nolint:forbidigo // as Allow does
		return metrics.LogDropped
	default:
		return metrics.LogRelayed
	}
}

func (r *relay) count(outcome metrics.LogOutcome, n int) {
	r.lost[outcome] += n
	r.Metrics.LogRecords(outcome, n)
}
