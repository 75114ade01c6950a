// Package subject identifies what a command is about: a pod by its name, or a network namespace by a process, a name or a path.
//
// It promises the same flags, checks and texts in every such command. It never looks up a pod itself: it asks the node agent.
//
// Start at Subject.
package subject

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// Subject has exactly one of Pod (NAMESPACE/NAME), PID and NetNS (a name of ip netns, or a path).
type Subject struct {
	Pod   string
	PID   int
	NetNS string
	// Socket is the node agent's socket, used for a pod.
	Socket string
}

const maxPID = 1 << 22 // PID_MAX_LIMIT

// Rows returns the flags. The pod is the command's operand.
func (s *Subject) Rows() []settings.Setting {
	return []settings.Setting{
		{Name: "pid", Arg: "N", Default: "0", Use: "a process in the network namespace", Value: settings.Number(&s.PID, maxPID)},
		{Name: "netns", Arg: "NAME|PATH", Use: "the network namespace: a name as in ip netns, or a path", Value: settings.Text(&s.NetNS, nil)},
		agentapi.SocketSetting(&s.Socket),
	}
}

// Check returns an error unless exactly one is set, and for an invalid pod name.
func (s *Subject) Check() error {
	var given int
	for _, one := range []bool{s.Pod != "", s.PID != 0, s.NetNS != ""} {
		if one {
			given++
		}
	}
	if given != 1 {
		return errors.New("name one of NAMESPACE/NAME, --pid and --netns")
	}
	if s.Pod == "" {
		return nil
	}
	_, _, err := SplitPod(s.Pod)
	return err
}

// SplitPod splits NAMESPACE/NAME. Both parts are used in the path of a request.
func SplitPod(text string) (namespace, name string, err error) {
	namespace, name, ok := strings.Cut(text, "/")
	if !ok || namespace == "" || name == "" || strings.ContainsAny(namespace+name, "/?#%") {
		return "", "", fmt.Errorf("pod %q: want NAMESPACE/NAME", text)
	}
	return namespace, name, nil
}

// Path returns the path of the network namespace, or its name.
func (s *Subject) Path() string {
	if s.PID != 0 {
		return fmt.Sprintf("/proc/%d/ns/net", s.PID)
	}
	return s.NetNS
}

// Open opens the network namespace, which the caller closes. searchPath is $PATH, for iptables.
func (s *Subject) Open(searchPath string) (redirection.Namespace, error) {
	n, err := netns.OpenNamed(s.Path())
	return redirection.Namespace{NetNS: n, Tools: iptables.Host{Path: searchPath}, Log: slog.New(slog.DiscardHandler)}, err
}

// Ask sends a request about the pod to the node agent. Check must have accepted the pod's name.
func (s *Subject) Ask(ctx context.Context, request func(agent *agentapi.Agent, namespace, name string) error) error {
	namespace, name, _ := strings.Cut(s.Pod, "/")
	return agentapi.Ask(ctx, s.Socket, "; --pid and --netns need none", func(agent *agentapi.Agent) error {
		return request(agent, namespace, name)
	})
}
