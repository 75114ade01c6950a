// Package agentapi is the protocol in which the plugin requests a pod from the node agent and reports its calls: the client,
// and the types that both use.
//
// It promises that an agent that is absent, of another implementation, hangs or sends invalid answers costs at most the
// time of the caller's context and never causes a wrong decision: an answer that the client does not fully understand is an
// error, after which the plugin queries the API server. The listener must be root, by the credentials of the socket. It needs
// no credential and starts no goroutine or process that outlives the call.
//
// Start reading at Dial. wire.go has the protocol with its rules about versions.
package agentapi

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// Agent is a connection to the node agent. It is used by one goroutine.
type Agent struct {
	socket string
	conn   net.Conn
	// limited bounds each answer, which is read by in.
	limited *io.LimitedReader
	in      *bufio.Reader
}

// Dial connects to the agent's socket. An error that is fs.ErrNotExist means that there is no agent, or one that serves
// no look-ups.
func Dial(ctx context.Context, socket string) (*Agent, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("connecting to the node agent: %w", err)
	}
	if err := servedByRoot(conn); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("connecting to the node agent at %q: %w", socket, err)
	}
	limited := &io.LimitedReader{R: conn}
	return &Agent{socket: socket, conn: conn, limited: limited, in: bufio.NewReader(limited)}, nil
}

// Close ends the connection.
func (a *Agent) Close() error { return a.conn.Close() }

// servedByRoot checks the listener: its answers decide which pods are left alone.
func servedByRoot(conn net.Conn) error {
	peer, err := Peer(conn)
	if err != nil {
		return err
	}
	if peer.Uid != 0 {
		return fmt.Errorf("it is served by user %d, not by root", peer.Uid)
	}
	return nil
}

// Peer returns the credentials of the process at the other end of a unix socket (SO_PEERCRED): of the client on an accepted
// connection, of the listener on a dialled one.
func Peer(conn net.Conn) (*unix.Ucred, error) {
	socket, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, errors.New("not a unix socket")
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return nil, err
	}
	var peer *unix.Ucred
	var inner error
	err = raw.Control(func(fd uintptr) {
		peer, inner = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	return peer, errors.Join(err, inner)
}

// Pod requests the facts of a pod. An error is a [Refusal] if the agent answers with an error.
func (a *Agent) Pod(ctx context.Context, key Key) (sidecar.Facts, error) {
	at := url.URL{Path: podPath + key.Namespace + "/" + key.Name, RawQuery: url.Values{"uid": {key.UID}}.Encode()}
	var facts sidecar.Facts
	body, err := a.call(ctx, http.MethodGet, at.String(), nil)
	if err == nil {
		facts, err = ReadPod(body, key)
	}
	return facts, asked(err, "pod %s/%s", key.Namespace, key.Name)
}

// asked adds to an error what was requested.
func asked(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("asking the node agent for %s: %w", fmt.Sprintf(format, args...), err)
}

// Report sends the result of a call of the runtime, as the last request on the connection. It returns when the kernel
// has the report: an agent that is busy reads it later, after Close and after the end of this process, too. The
// answer is not read.
func (a *Agent) Report(ctx context.Context, r Report) error {
	r.Trim()
	text, err := json.Marshal(r)
	if err == nil {
		_, err = a.send(ctx, http.MethodPost, reportPath, text)
	}
	if err != nil {
		return fmt.Errorf("reporting to the node agent: %w", err)
	}
	return nil
}

// Log sends lines of the plugin's log, as the reference's plugin does.
func (a *Agent) Log(ctx context.Context, lines []string) error {
	text, err := json.Marshal(lines)
	if err == nil {
		_, err = a.call(ctx, http.MethodPost, logPath, text)
	}
	if err != nil {
		return fmt.Errorf("posting to %q: %w", a.socket, err)
	}
	return nil
}

// send writes one request. There is no http.Client: its transport may outlive the call.
func (a *Agent) send(ctx context.Context, method, path string, body []byte) (*http.Request, error) {
	request, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if deadline, ok := ctx.Deadline(); ok {
		if err = a.conn.SetDeadline(deadline); err != nil {
			return nil, err
		}
	}
	return request, request.Write(a.conn)
}

// call sends one request on the connection and reads the whole answer.
func (a *Agent) call(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	return a.callUpTo(ctx, maxAnswer, method, path, body)
}

// callUpTo is call with another bound of the answer, in bytes.
func (a *Agent) callUpTo(ctx context.Context, most int64, method, path string, body []byte) ([]byte, error) {
	stop := context.AfterFunc(ctx, func() { _ = a.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	request, err := a.send(ctx, method, path, body)
	if err != nil {
		return nil, err
	}
	a.limited.N = most
	response, err := http.ReadResponse(a.in, request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close() //nolint:errcheck // only read from
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		return nil, refusal(response.StatusCode, text)
	}
	return text, nil
}

// Decisions returns the reports that the agent holds, the latest first. It requests them in pages, so that the bounds of an
// answer's size and time apply to each page, whatever the number and size of the reports; timeout is that of one page. The
// result has no report that arrives meanwhile.
func (a *Agent) Decisions(ctx context.Context, timeout time.Duration) ([]Report, error) {
	var all []Report
	for before := uint64(math.MaxUint64); before > 0; {
		page, err := a.page(ctx, before, timeout)
		if err != nil {
			return nil, asked(err, "decisions")
		}
		last := uint64(0) // the end, or an agent that has all on one page
		for _, r := range page {
			r.Trim()
			all = append(all, r)
			last = r.Number
		}
		if last >= before {
			return nil, fmt.Errorf("asking the node agent for decisions: it answers with number %d when asked for those below %d", last, before)
		}
		before = last
	}
	return all, nil
}

// page requests the decisions below a number.
func (a *Agent) page(ctx context.Context, before uint64, timeout time.Duration) (page []Report, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	query := url.Values{BeforeParam: {strconv.FormatUint(before, 10)}, LimitParam: {strconv.Itoa(decisionsPage)}}
	text, err := a.call(ctx, http.MethodGet, decisionsPath+"?"+query.Encode(), nil)
	if err == nil {
		err = json.Unmarshal(text, &page)
	}
	return page, err
}
