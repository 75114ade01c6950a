package pluginlog

import (
	"bytes"
	"context"
	"errors"
	"io/fs"

	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// socketName is the name of the node agent's log socket, in the run directory.
const socketName = "log.sock"

// relay sends the records to the node agent in one request. A missing socket is no error: there is no agent.
//
// The reference's agent has no level "fatal" and drops such a record. relay sends a fatal record as an error, since it is
// the most important one.
func relay(ctx context.Context, socket string, records []record) error {
	agent, err := agentapi.Dial(ctx, socket)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = agent.Close() }()
	lines := make([]string, 0, len(records))
	for _, r := range records {
		if r.level >= LevelFatal {
			r.line = bytes.Replace(r.line, []byte(`"level":"fatal"`), []byte(`"level":"error"`), 1)
		}
		lines = append(lines, string(r.line))
	}
	return agent.Log(ctx, lines)
}
