package agentapi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/settings"
)

// SocketSetting is the flag --socket of a command that queries the node agent.
func SocketSetting(socket *string) settings.Setting {
	return settings.Setting{
		Name: "socket", Arg: "FILE", Env: []string{"ISTIO_CNI_POD_SOCKET"}, Default: path.Join(cniconf.DefaultRunDir, SocketName),
		Use: "the node agent's socket, in its run directory", Value: settings.Text(socket, nil),
	}
}

// Connect is Dial for a command: its error says what may be wrong if there is no agent. The hint is more of that, and may be "".
func Connect(ctx context.Context, socket, hint string) (*Agent, error) {
	agent, err := Dial(ctx, socket)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w (is the node agent running, and does it know the name of its node? KUBERNETES_NODE_NAME%s)", err, hint)
	}
	return agent, err
}
