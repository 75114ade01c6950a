package pluginlog

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
)

// socketName is where the node agent listens, in the run directory.
const socketName = "log.sock"

// maxAnswer bounds what is read of the agent's answer, of which only the status counts.
const maxAnswer = 16 << 10

// relay sends the records to the node agent in one request. A socket that is not there is no error: there is no agent.
// Whether it is there is asked here and not earlier, as asking may hang as well, and an agent that has come up meanwhile
// may have them.
//
// The request is written to the connection without an http.Client, whose transport may outlive the call and writes to
// the process's stderr on its own account. The deadline of ctx ends every step.
func relay(ctx context.Context, socket string, records []record) error {
	body, err := relayBody(records)
	if err != nil {
		return fmt.Errorf("encoding log records: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://unix/log", bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("making request to %q: %w", socket, err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Close = true

	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", socket)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("connecting to the agent: %w", err)
	}
	defer func() { _ = conn.Close() }()
	deadline, _ := ctx.Deadline()
	if err = conn.SetDeadline(deadline); err != nil {
		return fmt.Errorf("limiting the time for %q: %w", socket, err)
	}
	if err = req.Write(conn); err != nil {
		return fmt.Errorf("posting to %q: %w", socket, err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(io.LimitReader(conn, maxAnswer)), req)
	if err != nil {
		return fmt.Errorf("reading answer of %q: %w", socket, err)
	}
	// The body stays unread and unclosed: closing it would read it to its end.
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("posting to %q: answer is %q", socket, resp.Status)
	}
	return nil
}

// relayBody is the reference's form: an array of strings, each of them the text of one record with its newline. The
// reference's agent knows no level "fatal" and drops such a record; it is sent as an error, as it is the last one that
// may be lost.
func relayBody(records []record) ([]byte, error) {
	lines := make([]string, 0, len(records))
	for _, r := range records {
		if r.level >= LevelFatal {
			r.line = bytes.Replace(r.line, []byte(`"level":"fatal"`), []byte(`"level":"error"`), 1)
		}
		lines = append(lines, string(r.line))
	}
	return marshal(lines)
}
