package agentapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path"
	"syscall"
	"time"
)

// The reference's protocol between plugin and agent for pods of the ambient mesh: a POST of an Event to EventPath, on a socket of
// its own in the agent's run directory. Status 200 alone means that the pod is enrolled.
const (
	EventSocketName = "pluginevent.sock"
	EventPath       = "/cmdadd" // with any method, as in the reference
)

// EventTimeout is the time in which a pod is enrolled. The reference's plugin waits 5 s.
const EventTimeout = 8 * time.Second

// MaxEvent bounds an event, in bytes: the longest path and names, and some 400 addresses.
const MaxEvent = 64 << 10

// maxRefused bounds an answer to an event, in bytes, as in the reference.
const maxRefused = 1 << 20

// Event is the request to enrol a new pod. The names of the fields are the wire format; an unknown key is ignored.
type Event struct {
	// Netns is the path of the pod's network namespace on the node (CNI_NETNS).
	Netns                 string
	PodName, PodNamespace string
	// IPs are the addresses of the previous plugin's result, in its order; nil without a result.
	IPs []EventIP
	// PodUID is the UID that the API server has for the pod. Only this program's plugin sends it.
	PodUID string `json:",omitempty"`
}

// EventIP is an address of a CNI result.
type EventIP struct {
	Interface *int
	Address   net.IPNet
	Gateway   net.IP
}

// ParseEvent decodes an event.
func ParseEvent(text []byte) (e Event, err error) {
	if err = json.Unmarshal(text, &e); err != nil {
		err = fmt.Errorf("reading the plugin's event: %w", err)
	}
	return e, err
}

// Addresses returns the pod's addresses, without IPv4-mapped ones of IPv6.
func (e Event) Addresses() (all []netip.Addr) {
	for _, ip := range e.IPs {
		if address, valid := netip.AddrFromSlice(ip.Address.IP); valid {
			all = append(all, address.Unmap())
		}
	}
	return all
}

// PostEvent requests that the node agent enrols a pod, and returns nil once it has. It takes EventTimeout at most. The texts of the
// reference's plugin are in the error, for those who search for them.
func PostEvent(ctx context.Context, runDir string, e Event) error {
	ctx, cancel := context.WithTimeout(ctx, EventTimeout)
	defer cancel()
	text, err := json.Marshal(e)
	if err == nil {
		err = post(ctx, path.Join(runDir, EventSocketName), text)
	}
	refused, answered := errors.AsType[*Refusal](err)
	switch {
	case err == nil:
		return nil
	case answered:
		return fmt.Errorf("unable to push CNI event (status code %d): %s", refused.Status, refused.Message)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		err = fmt.Errorf("%w (is the node agent running on this node, with ambient mode enabled?)", err)
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = fmt.Errorf("no answer in time: %w (the node agent's log says what it waits for)", err)
	}
	return fmt.Errorf("failed to send event request: %w", err)
}

func post(ctx context.Context, socket string, event []byte) error {
	agent, err := Dial(ctx, socket)
	if err != nil {
		return err
	}
	defer agent.Close() //nolint:errcheck // the only request
	return agent.call(ctx, maxRefused, http.MethodPost, EventPath, event, func(io.Reader) error { return nil })
}
