// Package agentapi is the protocol by which the plugin asks the node agent about a pod, has it enrol a pod of the ambient mesh, and
// reports its calls: the client, and the types that both sides use.
//
// It promises that an agent that is absent, is another implementation, hangs or sends invalid answers costs at most the time
// of the caller's context and never causes a wrong decision: an answer that the client does not fully understand is an error,
// after which the plugin queries the API server. The listener must run as root (SO_PEERCRED). The client needs no credential
// and starts no goroutine or process that outlives the call.
//
// Start reading at Dial. wire.go has the protocol and its rules about versions, event.go the reference's protocol for ambient pods.
package agentapi

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// Agent is a connection to the node agent, for one goroutine.
type Agent struct {
	socket string
	conn   net.Conn
	// limited bounds each answer. in reads from it.
	limited *io.LimitedReader
	in      *bufio.Reader
}

// Dial connects to the agent's socket. The error is fs.ErrNotExist if there is no agent, or if the agent serves no
// look-ups.
func Dial(ctx context.Context, socket string) (*Agent, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("connecting to the node agent: %w", err)
	}
	peer, err := Peer(conn)
	if err == nil && peer.Uid != 0 { // its answers decide which pods are left alone
		err = fmt.Errorf("it is served by user %d, not by root", peer.Uid)
	}
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("connecting to the node agent at %q: %w", socket, err)
	}
	limited := &io.LimitedReader{R: conn}
	return &Agent{socket: socket, conn: conn, limited: limited, in: bufio.NewReader(limited)}, nil
}

// Close ends the connection.
func (a *Agent) Close() error { return a.conn.Close() }

// Ask sends a command's request on its own connection. The error for a missing agent names likely causes; hint adds to them and may be
// "".
func Ask[T any](ctx context.Context, socket, hint string, request func(*Agent) (T, error)) (answer T, err error) {
	agent, err := Dial(ctx, socket)
	if errors.Is(err, fs.ErrNotExist) {
		return answer, fmt.Errorf("%w (is the node agent running, and does it know the name of its node? KUBERNETES_NODE_NAME%s)", err, hint)
	}
	if err != nil {
		return answer, err
	}
	defer agent.Close() //nolint:errcheck // the last request
	return request(agent)
}

// Peer returns the credentials of the process at the other end of a unix socket (SO_PEERCRED): the client on an accepted
// connection, the listener on a dialled one.
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

// send writes one request. It uses no http.Client, whose transport may outlive the call.
func (a *Agent) send(ctx context.Context, method, path string, body []byte) (*http.Request, error) {
	request, err := http.NewRequestWithContext(ctx, method, "http://unix"+path, bytes.NewReader(body)) // the reference's host
	if err != nil {
		return nil, err
	}
	if len(body) > 0 {
		request.Header.Set("Content-Type", "application/json")
	}
	if deadline, ok := ctx.Deadline(); ok {
		if err = a.conn.SetDeadline(deadline); err != nil {
			return nil, err
		}
	}
	return request, request.Write(a.conn)
}

// call sends one request on the connection. It passes at most `most` bytes of the response body to read.
func (a *Agent) call(ctx context.Context, most int64, method, path string, body []byte, read func(io.Reader) error) error {
	defer context.AfterFunc(ctx, func() { _ = a.conn.SetDeadline(time.Unix(1, 0)) })()
	request, err := a.send(ctx, method, path, body)
	if err != nil {
		return err
	}
	a.limited.N = most
	response, err := http.ReadResponse(a.in, request)
	if err != nil {
		return err
	}
	defer response.Body.Close() //nolint:errcheck // only read from
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(response.Body) // an answer that is cut off is a refusal as well
		return refusal(response.StatusCode, text)
	}
	return read(response.Body)
}

// get requests a path and returns at most `most` bytes.
func (a *Agent) get(ctx context.Context, most int64, path string, query url.Values) (text []byte, err error) {
	at := url.URL{Path: path, RawQuery: query.Encode()}
	err = a.call(ctx, most, http.MethodGet, at.String(), nil, func(body io.Reader) (err error) {
		text, err = io.ReadAll(body)
		return err
	})
	return text, err
}

// requestError adds to an error what was requested.
func requestError(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("asking the node agent for %s: %w", fmt.Sprintf(format, args...), err)
}

// Pod requests the facts of a pod, with [sidecar.Facts.Selected] if ambient is set. An error is a [Refusal] if the agent answers with an
// error.
func (a *Agent) Pod(ctx context.Context, key Key, ambient bool) (facts sidecar.Facts, err error) {
	query := url.Values{"uid": {key.UID}}
	if ambient {
		query.Set(AmbientParam, "true")
	}
	text, err := a.get(ctx, maxAnswer, podPath+key.Namespace+"/"+key.Name, query)
	if err == nil {
		facts, err = ReadPod(text, key)
	}
	return facts, requestError(err, "pod %s/%s", key.Namespace, key.Name)
}

// Report sends the result of one plugin call as the last request on the connection. It returns when the kernel has
// the report: a busy agent can read it after Close and even after this process has ended. Report does not read the
// answer.
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

// Log sends lines of the plugin's log in the format of the reference's plugin.
func (a *Agent) Log(ctx context.Context, lines []string) error {
	text, err := json.Marshal(lines)
	if err == nil {
		err = a.call(ctx, maxAnswer, http.MethodPost, logPath, text, func(body io.Reader) error {
			_, bad := io.Copy(io.Discard, body)
			return bad
		})
	}
	if err != nil {
		return fmt.Errorf("posting to %q: %w", a.socket, err)
	}
	return nil
}

// Decisions returns the reports that the agent holds, latest first.
func (a *Agent) Decisions(ctx context.Context) (all []Report, err error) {
	text, err := a.get(ctx, maxDecisions, decisionsPath, nil)
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	for i := range all {
		all[i].Trim()
	}
	return all, requestError(err, "decisions")
}

// Audit requests the status of all pods of the node, or of those with a label selector unless it is "". With check, the agent inspects each
// pod first.
func (a *Agent) Audit(ctx context.Context, check bool, selector string) (all []audit.Status, err error) {
	query := url.Values{}
	if selector != "" {
		query.Set(SelectorParam, selector)
	}
	if check {
		query.Set(CheckParam, "true")
	}
	text, err := a.get(ctx, maxStatuses, auditPath, query)
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	return all, requestError(err, "the state of its pods")
}

// AuditPod requests the details of one pod. The answer is JSON.
func (a *Agent) AuditPod(ctx context.Context, namespace, name string, query url.Values) ([]byte, error) {
	text, err := a.get(ctx, maxAnswer, auditPath+"/"+namespace+"/"+name, query)
	return text, requestError(err, "pod %s/%s", namespace, name)
}

// Trace requests a packet trace of a pod and calls each with every line.
func (a *Agent) Trace(ctx context.Context, namespace, name string, query url.Values, each func(line []byte) error) error {
	at := url.URL{Path: auditPath + "/" + namespace + "/" + name + "/trace", RawQuery: query.Encode()}
	err := a.call(ctx, maxAnswer, http.MethodGet, at.String(), nil, func(body io.Reader) error {
		for lines := bufio.NewReader(body); ; {
			a.limited.N = maxAnswer // of each line
			line, err := lines.ReadBytes('\n')
			if errors.Is(err, io.EOF) && len(line) == 0 {
				return nil
			}
			if err == nil {
				err = each(line)
			}
			if err != nil {
				return err
			}
		}
	})
	return requestError(err, "a trace of pod %s/%s", namespace, name)
}

// Bundle requests a part of a bug report, with records from the time since on.
func (a *Agent) Bundle(ctx context.Context, part BundlePart, since time.Time) ([]byte, error) {
	text, err := a.get(ctx, MaxPart, bundlePath+string(part), url.Values{SinceParam: {since.UTC().Format(time.RFC3339)}})
	return text, requestError(err, "its %s", part)
}
