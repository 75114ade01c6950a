// Package subject reaches what a command is about: a pod by the node agent, or a network namespace by its path or name.
//
// It promises the same texts in every such command. It never looks up a pod itself: it asks the node agent.
//
// Start at Open.
package subject

import (
	"context"
	"log/slog"

	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// Open opens the network namespace with a path, or a name of ip netns, which the caller closes. searchPath is $PATH, for iptables.
func Open(path, searchPath string) (redirection.Namespace, error) {
	n, err := netns.OpenNamed(path)
	return redirection.Namespace{NetNS: n, Tools: iptables.Host{Path: searchPath}, Log: slog.New(slog.DiscardHandler)}, err
}

// Ask sends a request about a pod to the node agent at a socket.
func Ask[T any](ctx context.Context, socket string, request func(agent *agentapi.Agent) (T, error)) (T, error) {
	return agentapi.Ask(ctx, socket, "; --pid and --netns need none", request)
}
