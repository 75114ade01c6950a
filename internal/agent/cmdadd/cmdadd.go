// Package cmdadd serves the event with which a plugin, this program's or the reference's, has the agent enrol a new pod in the
// ambient mesh.
//
// It promises the answers of the reference's agent: 200 and no body for an enrolled pod, 400 for an event that cannot be read, 500 with
// the error's text for a pod that is not enrolled. The memory and the time of an event are bounded, and its work ends when the plugin
// hangs up. It does not enrol pods.
//
// Start reading at Handler. Package unixsock serves the socket, with the options of Socket.
package cmdadd

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"

	"github.com/meshcni/istio-cni/internal/agent/unixsock"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// maxText bounds the text of an error, in bytes: it becomes a part of a pod's event.
const maxText = 4 << 10

// Options are the sinks of the events. Both are required.
type Options struct {
	// Add enrols the pod of an event and returns once it is in the mesh. Its context ends when the plugin hangs up, or has waited for
	// [agentapi.EventTimeout]. Pods are added concurrently.
	Add func(ctx context.Context, e agentapi.Event) error
	// Count counts the answer to an event that no report of the plugin follows, by its status: the reference's plugin sends none.
	Count func(status int)
}

// Handler serves [agentapi.EventPath], with any method, and no other path.
func Handler(o Options) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc(agentapi.EventPath, o.serve)
	return mux
}

// Socket returns the options of the server's socket at the path. More connections than it serves at a time wait.
func Socket(path string, dirMode fs.FileMode, log *slog.Logger) unixsock.Options {
	return unixsock.Options{
		Path: path, DirMode: dirMode, Mode: 0o600, Connections: 256, Log: log,
		Timeout: agentapi.EventTimeout * 5 / 4, // also ends the context of a request
	}
}

func (o Options) serve(w http.ResponseWriter, r *http.Request) {
	status := http.StatusBadRequest
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, agentapi.MaxEvent)) // to its end: only then the server sees a hang-up
	var event agentapi.Event
	if err == nil {
		event, err = agentapi.ParseEvent(text)
	}
	if err == nil {
		status = http.StatusInternalServerError
		err = o.add(r.Context(), event)
	}
	if err == nil {
		status = http.StatusOK
	}
	if event.PodUID == "" {
		o.Count(status)
	}
	if err != nil {
		http.Error(w, printable.Text(err.Error(), maxText), status)
	}
}

func (o Options) add(ctx context.Context, e agentapi.Event) error {
	ctx, cancel := context.WithTimeoutCause(ctx, agentapi.EventTimeout, fmt.Errorf("not done in %s", agentapi.EventTimeout))
	defer cancel()
	return o.Add(ctx, e)
}
