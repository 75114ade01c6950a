package agentapi

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"time"
)

// TracePattern is the path of a packet trace of a pod: a JSON object in each line, a follow.Record, until the trace ends or the
// client closes the connection. The parameters are those of follow.Parse.
const TracePattern = AuditPodPattern + "/trace"

// Trace requests a packet trace of a pod, and calls each with every line.
func (a *Agent) Trace(ctx context.Context, namespace, name string, query url.Values, each func(line []byte) error) (err error) {
	defer func() { err = asked(err, "a trace of pod %s/%s", namespace, name) }()
	defer context.AfterFunc(ctx, func() { _ = a.conn.SetDeadline(time.Unix(1, 0)) })()
	path := url.URL{Path: auditPath + "/" + namespace + "/" + name + "/trace", RawQuery: query.Encode()}
	request, err := a.send(ctx, http.MethodGet, path.String(), nil)
	if err != nil {
		return err
	}
	a.limited.N = maxAnswer
	response, err := http.ReadResponse(a.in, request)
	if err != nil {
		return err
	}
	defer response.Body.Close() //nolint:errcheck // only read from
	if response.StatusCode != http.StatusOK {
		text, err := io.ReadAll(response.Body)
		return errors.Join(err, refusal(response.StatusCode, text))
	}
	lines := bufio.NewReader(response.Body)
	for {
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
}
