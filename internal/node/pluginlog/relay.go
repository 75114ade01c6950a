package pluginlog

import (
	"context"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// socketName is the name of the node agent's log socket, in the run directory.
const socketName = "log.sock"

// relay sends lines to the node agent in one request. An error that is fs.ErrNotExist means that there is no agent.
func relay(ctx context.Context, socket string, lines []byte) error {
	agent, err := agentapi.Dial(ctx, socket)
	if err != nil {
		return err
	}
	defer func() { _ = agent.Close() }()
	return agent.Log(ctx, slices.Collect(strings.Lines(string(lines))))
}
